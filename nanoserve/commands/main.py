"""The command ``nanoserve``: its sub-commands, and how a failure becomes a line on stderr and an
exit code.

Each sub-command is a module with a ``run(options)``, imported when it is asked for. Exit codes: 0
is success, 1 a failure while running, 2 a request that makes no sense, 3 a model that cannot be
used, 130 Ctrl-C. A reader that closes the pipe early (``| head``) got what it wanted: exit 0.
"""

import atexit
import gc
import inspect
import io
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from nanoserve import __version__
from nanoserve.commands.completion import names_with_colons
from nanoserve.commands.options import prepared
from nanoserve.commands.terminal import say, silence_stdout
from nanoserve.errors import NanoserveError
from nanoserve.utils.interrupts import deferred_interrupts

EXIT_OK, EXIT_FAILURE, EXIT_INTERRUPTED = 0, 1, 130
DEBUG_VARIABLE = "NANOSERVE_DEBUG"
HELP = """A compact LLM inference engine.

[bold]Examples[/bold]

  nanoserve chat                                  talk with the bundled model
  nanoserve run qwen3:0.6b                        with a model by its name
  nanoserve chat "a story about a fox"            one answer
  nanoserve generate "Once upon a time" -n 60     raw completion
  nanoserve generate --file prompts.jsonl --output out.jsonl
  nanoserve serve --port 8000                     an OpenAI-compatible server
  nanoserve bench compare -m dummy:qwen3-0.6b     beside other engines
  nanoserve quantize MODEL --calibrate text.txt --output DIR   in 4 bits
  nanoserve prune --ffn-size 384 --calibrate text.txt --output DIR   smaller
  nanoserve analyze -m qwen3-8b --hardware h100   where the time goes
  nanoserve profile --json here.json              the same on this machine
  nanoserve explain "Once upon a time"            a run, step by step
  nanoserve simulate --policy sarathi,throttling  policies on any hardware
  nanoserve plan -m qwen3-32b --hardware l4 --gpus 8   parallel layouts

A flag can also be set by the environment variable that its help names. These
variables are for commands: LLM() in Python takes arguments instead.
"""
BENCH_HELP = """Measure: alone, beside other engines, before and after a change. Without a \
benchmark's name: latency.

[bold]Examples[/bold]

  nanoserve bench latency --batch-sizes 1,4,16 --json latency.json
  nanoserve bench throughput --lengths cpu -m dummy:qwen3-0.6b
  nanoserve bench serve --url http://127.0.0.1:8000 --rate 1,2,4
  nanoserve bench pipeline --pp 2 --rate 2
  nanoserve bench reshard --prefill-parallel p2 --decode-parallel t2
  nanoserve bench hybrid --threads 1 --host-threads 1
  nanoserve bench compare -m dummy:qwen3-0.6b --rounds 5
  nanoserve bench gpu --out results
  nanoserve bench paper gllm --plot figures
  nanoserve bench diff before.json after.json --threshold 0.05

What each figure means is written in docs/benchmarks.md.
"""
COMMANDS = {
    "run": "Talk with a model by its name, which is downloaded if it is not on this machine.",
    "chat": "Talk with a model: on a terminal a conversation, else one answer to what is piped in.",
    "generate": "Go on with a text exactly as given, without a chat template.",
    "serve": "Serve a model over HTTP, as OpenAI does.",
    "quantize": (
        "Write a model's weights in 3, 4 or 8 bits, as a checkpoint that nanoserve and vLLM load."
    ),
    "prune": (
        "Write a model without its least important parts, as a smaller checkpoint that nanoserve "
        "and transformers load."
    ),
    "analyze": (
        "Count a model's operations and bytes, and say what each takes on hardware that need not "
        "be here."
    ),
    "profile": (
        "Time a model's layers, attention, head and the work around them on this machine, over "
        "their sizes."
    ),
    "models": "List the models on this machine and those that can be downloaded by name.",
    "pull": "Download a model, or what has changed of it, without running it.",
    "policies": (
        "List the scheduling policies: where each comes from, what it is good for, its parameters."
    ),
    "explain": (
        "Go through a run step by step: what the policy saw and decided, the rows, the blocks, the "
        "tokens."
    ),
    "simulate": (
        "Run the scheduler in virtual time: the engine's own classes, over a model of hardware and "
        "links."
    ),
    "plan": (
        "Rank all ways to spread a model over devices, with data, tensor and pipeline parallelism "
        "(D2T2P2)."
    ),
    "bench": BENCH_HELP.partition("\n")[0],
}
LABORATORY = ("analyze", "profile", "explain", "simulate", "plan")
"""Commands, beside `bench`, that belong to the laboratory."""
BENCHMARKS = {
    "latency": (
        "Time batches of equal requests: first token, each token after it, tokens per second."
    ),
    "throughput": "Give the engine all requests at once and see how fast it gets through them.",
    "serve": (
        "Send requests to a server, ours or any that speaks OpenAI's API, and see how long its "
        "clients wait."
    ),
    "pipeline": (
        "Run the same requests under several policies on the same workers, in interleaved rounds."
    ),
    "reshard": (
        "Run the same requests in two layouts in turn, as three policies have it, and in each "
        "layout alone."
    ),
    "hybrid": (
        "Run the same requests on the device alone and with attention on the CPU, by several "
        "policies."
    ),
    "compare": (
        "Run the same batches on every engine in turn and print the ratios with their spread."
    ),
    "operators": (
        "Time attention, attention in host memory and linear layers beside stock torch doing the "
        "same."
    ),
    "gpu": (
        "Check every kernel and model family on this GPU, time the kernels beside their peers, "
        "time the engine."
    ),
    "startup": (
        "Time each stage from the start of a process: imports, loading, first token, and the two "
        "after it."
    ),
    "scheduler": (
        "Time the scheduler alone: planning a step of decoding sequences, and taking its result "
        "back."
    ),
    "quality": (
        "Compare perplexity and exact-match accuracy with transformers on the same checkpoint, in "
        "one run."
    ),
    "paper": "Simulate a paper's figures and put what it claims beside what comes out.",
    "diff": "Compare two reports of the same benchmark, with bootstrap confidence intervals.",
}
_SETTINGS: dict[str, Any] = {
    "rich_markup_mode": "rich",
    "context_settings": {"help_option_names": ["-h", "--help"]},
    "pretty_exceptions_enable": False,
}
_INDENTED = re.compile(r"^ |^\[bold\]", re.MULTILINE)
InterruptHandler = Callable[[int, object], None]


class _LazyGroup(TyperGroup):
    """Commands with only a summary each, until one of them is asked for."""

    summaries = COMMANDS

    @staticmethod
    def module_of(name: str) -> str:
        """The module of a command. The laboratory's are named here, and imported only when they are
        asked for."""
        folder = "nanoserve.lab.commands" if name in LABORATORY else "nanoserve.commands"
        return f"{folder}.{name}"

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {
            name: TyperCommand(name=name, help=summary) for name, summary in self.summaries.items()
        }

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if command is None:
            return name, None, rest
        return name, self.load(str(name)), rest

    def load(self, name: str) -> Any:
        if name == "bench":
            return _group(_bench, name=name, cls=_Benchmarks, help=BENCH_HELP, add_completion=False)
        # libraries go on half imported, and fail later in their own words
        with deferred_interrupts():
            run = import_module(self.module_of(name)).run
        # Paragraphs of help break where the terminal ends, not where the source does; examples stay
        # as they are.
        paragraphs = [self.summaries[name]]
        for written in inspect.cleandoc(run.__doc__).split("\n\n"):
            paragraphs.append(written if _INDENTED.search(written) else " ".join(written.split()))
        typed = typer.Typer(add_completion=False, **_SETTINGS)
        typed.command(name, help="\n\n".join(paragraphs))(prepared(run))
        return typer.main.get_command(typed)


class _Benchmarks(_LazyGroup):
    summaries = BENCHMARKS

    @staticmethod
    def module_of(name: str) -> str:
        return f"nanoserve.lab.commands.bench_{name}"


def run(*first: str, early_handler: InterruptHandler | None = None) -> NoReturn:
    """Entry point of the console script; ``first`` are words put before the process's arguments.
    Ctrl-C has called ``early_handler`` until now."""
    gc.set_threshold(100_000)  # imports make many objects and little garbage
    code = EXIT_INTERRUPTED
    try:
        code = main([*first, *sys.argv[1:]], early_handler)
        _ignore_signals()
    except KeyboardInterrupt:  # one that comes when the last line is written already
        _ignore_signals()
    # Python would go through all that is loaded once more: with torch this takes a third of a
    # second
    gc.freeze()
    if any(thread.daemon for thread in threading.enumerate()):
        # A model is being loaded. Python's end would come in the midst of an import, which crashes.
        atexit._run_exitfuncs()
        os._exit(code)
    sys.exit(code)


def _ignore_signals() -> None:
    """Nothing is left to interrupt but the interpreter's own end, and the exit code is known."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def main(
    arguments: Sequence[str] | None = None, early_handler: InterruptHandler | None = None
) -> int:
    """Parse ``arguments`` (default: the process's), run the command, return the exit code."""
    # A shell's ``>&-`` leaves None where a stream should be; and no character of an answer may fail
    # to print.
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  (open until the process ends)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if arguments is None:
        arguments = sys.argv[1:]
    return guarded(partial(_parse_and_act, list(arguments), early_handler))


def application() -> Any:
    """All commands as the parser takes them; parsing yields an Action (see options.prepared)."""
    return _group(_top_level, name="nanoserve", cls=_LazyGroup, help=HELP)


def _group(callback: Callable[..., Any], **settings: Any) -> Any:
    typed = typer.Typer(**settings, **_SETTINGS)
    typed.callback(invoke_without_command=True)(callback)
    return typer.main.get_command(typed)


def _top_level(
    context: typer.Context,
    *,
    version: Annotated[
        bool, typer.Option("--version", "-V", help="Show the version and exit.", is_eager=True)
    ] = False,
) -> None:
    if version:
        print(f"nanoserve {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit


def _bench(context: typer.Context) -> Any:
    """Without the name of a benchmark, the one of everyday use."""
    if context.invoked_subcommand is not None:
        return None
    command: Any = context.command.load("latency")  # type: ignore[attr-defined]  # it is _Benchmarks
    with command.make_context("latency", [], parent=context) as own:
        return command.invoke(own)


def _parse_and_act(words: list[str], early_handler: InterruptHandler | None) -> int:
    if early_handler is not None and signal.getsignal(signal.SIGINT) is early_handler:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # from now on `guarded` says it
    try:
        with names_with_colons(os.environ):
            parsed: Any = application().main(
                args=words, prog_name="nanoserve", standalone_mode=False
            )
    except SystemExit as error:
        # the parser's answer to ``--help | head``; ours is another
        if isinstance(error.__context__, BrokenPipeError):
            raise error.__context__ from None
        raise
    if callable(parsed):
        parsed = parsed()
    elif parsed == EXIT_INTERRUPTED:  # the parser swallows Ctrl-C
        raise KeyboardInterrupt
    if not isinstance(parsed, int):  # --help and --version end in the parser
        return EXIT_OK
    return parsed


def guarded(action: Callable[[], int | None]) -> int:
    """Run ``action`` and return the exit code: its own, 0 where it names none, or that of the
    error."""
    try:
        code = action()
        sys.stdout.flush()
        if code is None:
            return EXIT_OK
        return code
    except BrokenPipeError:
        silence_stdout()
        return EXIT_OK
    # everything ends here, in a line and a code; nothing goes on
    except (Exception, KeyboardInterrupt) as error:
        with deferred_interrupts():  # a second Ctrl-C does not take the line away
            if os.environ.get(DEBUG_VARIABLE):
                traceback.print_exc()
            message, code = describe(error)
            say(message)
        return code


def describe(error: BaseException) -> tuple[str, int]:
    """One line for the user, and the exit code."""
    if _came_from_interrupt(error):
        if isinstance(error, KeyboardInterrupt) and error.args:
            return f"interrupted: {error}", EXIT_INTERRUPTED
        return "interrupted", EXIT_INTERRUPTED
    if isinstance(error, NanoserveError):
        return str(error), error.exit_code
    if hasattr(error, "format_message"):  # a usage error of typer, whichever click it stands on
        command = getattr(getattr(error, "ctx", None), "command_path", "nanoserve")
        return f"{error.format_message()} ({command} --help lists what there is)", getattr(
            error, "exit_code", 2
        )
    if isinstance(error, MemoryError):
        return (
            "out of memory: choose a smaller --max-model-len, --max-num-seqs or --kv-cache-memory",
            EXIT_FAILURE,
        )
    if isinstance(error, OSError) and error.strerror:
        if error.filename:
            return f"{error.strerror}: {error.filename}", EXIT_FAILURE
        return error.strerror, EXIT_FAILURE
    return (
        f"unexpected {type(error).__name__}: {error} (set {DEBUG_VARIABLE}=1 to see where)",
        EXIT_FAILURE,
    )


def _came_from_interrupt(error: BaseException | None) -> bool:
    """Whether Ctrl-C lies behind it: libraries turn a KeyboardInterrupt in the midst of an import
    into ImportError."""
    if error is None:
        return False
    if isinstance(error, KeyboardInterrupt):
        return True
    return _came_from_interrupt(error.__cause__ or error.__context__)
