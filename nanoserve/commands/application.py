"""Which commands there are: each is a module with a ``run(options)``, imported when the command is asked for."""

import re
import textwrap
from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

from nanoserve import __version__
from nanoserve.commands.options import prepared
from nanoserve.processes.interrupts import deferred_interrupts

HELP = """A compact LLM inference engine.

[bold]Examples[/bold]

  nanoserve chat                                  talk with the bundled model
  nanoserve chat "a story about a fox"            one answer
  nanoserve generate "Once upon a time" -n 60     raw completion
  nanoserve generate --file prompts.jsonl --output out.jsonl
  nanoserve serve --port 8000                     an OpenAI-compatible server
  nanoserve bench compare -m dummy:qwen3-0.6b     beside other engines
  nanoserve analyze -m qwen3-8b --hardware h100   where the time goes
  nanoserve profile --json here.json              the same on this machine
  nanoserve simulate --policy sarathi,throttling  policies on any hardware
  nanoserve plan -m qwen3-32b --hardware l4 --gpus 8   parallel layouts

A flag can also be set by the environment variable that its help names.
"""
BENCH_HELP = """Measure: alone, beside other engines, before and after a change. Without a benchmark's name: latency.

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
    "chat": "Talk with a model: on a terminal a conversation, else one answer to what is piped in.",
    "generate": "Go on with a text exactly as given, without a chat template.",
    "serve": "Serve a model over HTTP, as OpenAI does.",
    "analyze": "Count a model's operations and bytes, and say what each takes on hardware that need not be here.",
    "profile": "Time a model's layers, attention, head and the work around them on this machine, over their sizes.",
    "policies": "List the scheduling policies: where each comes from, what it is good for, its parameters.",
    "simulate": "Run the scheduler in virtual time: the engine's own classes, over a model of hardware and links.",
    "plan": "Rank all ways to spread a model over devices, with data, tensor and pipeline parallelism (D2T2P2).",
    "bench": BENCH_HELP.partition("\n")[0],
}
BENCHMARKS = {
    "latency": "Time batches of equal requests: first token, each token after it, tokens per second.",
    "throughput": "Give the engine all requests at once and see how fast it gets through them.",
    "serve": "Send requests to a server, ours or any that speaks OpenAI's API, and see how long its clients wait.",
    "pipeline": "Run the same requests under several policies on the same workers, in interleaved rounds.",
    "reshard": "Run the same requests in two layouts in turn, as three policies have it, and in each layout alone.",
    "hybrid": "Run the same requests on the device alone and with attention on the CPU, by several policies.",
    "compare": "Run the same batches on every engine in turn and print the ratios with their spread.",
    "operators": "Time attention, attention in host memory and linear layers beside stock torch doing the same.",
    "gpu": "Check every kernel and model family on this GPU, time the kernels beside their peers, time the engine.",
    "startup": "Time each stage from the start of a process: imports, loading, first token, and the two after it.",
    "scheduler": "Time the scheduler alone: planning a step of decoding sequences, and taking its result back.",
    "quality": "Compare perplexity and exact-match accuracy with transformers on the same checkpoint, in one run.",
    "paper": "Simulate a paper's figures and put what it claims beside what comes out.",
    "diff": "Compare two reports of the same benchmark, with bootstrap confidence intervals.",
}
_SETTINGS: dict[str, Any] = {
    "rich_markup_mode": "rich",
    "context_settings": {"help_option_names": ["-h", "--help"]},
    "pretty_exceptions_enable": False,
}
_INDENTED = re.compile(r"^ |^\[bold\]", re.MULTILINE)


class _LazyGroup(TyperGroup):
    """Commands of which only a summary is known, until one of them is asked for."""

    module: ClassVar[str]  # their modules are this and the command's name
    summaries: ClassVar[dict[str, str]]

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {name: TyperCommand(name=name, help=summary) for name, summary in self.summaries.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and self.load(str(name)), rest

    def load(self, name: str) -> Any:
        """The command as the parser takes it."""
        if name == "bench":
            return _group(_bench, name=name, cls=_Benchmarks, help=BENCH_HELP, add_completion=False)
        with deferred_interrupts():  # libraries go on half imported, and fail later in their own words
            run = import_module(f"{self.module}{name}").run
        typed = typer.Typer(add_completion=False, **_SETTINGS)
        typed.command(name, help=f"{self.summaries[name]}\n\n{_flowing(run.__doc__)}")(prepared(run))
        return typer.main.get_command(typed)


class _Benchmarks(_LazyGroup):
    module, summaries = "nanoserve.commands.bench_", BENCHMARKS


class _Commands(_LazyGroup):
    module, summaries = "nanoserve.commands.", COMMANDS


def application() -> Any:
    """All commands as the parser takes them; parsing yields an Action (see options.prepared)."""
    return _group(_top_level, name="nanoserve", cls=_Commands, help=HELP)


def _group(callback: Callable[..., Any], **settings: Any) -> Any:
    typed = typer.Typer(**settings, **_SETTINGS)
    typed.callback(invoke_without_command=True)(callback)
    return typer.main.get_command(typed)


def _top_level(
    context: typer.Context,
    *,
    version: Annotated[bool, typer.Option("--version", "-V", help="Show the version and exit.", is_eager=True)] = False,
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


def _flowing(text: str) -> str:
    """Help whose paragraphs break where the terminal ends, not where the source does; examples stay as they are."""
    paragraphs = textwrap.dedent(f"    {text}").split("\n\n")
    return "\n\n".join(one if _INDENTED.search(one) else " ".join(one.split()) for one in paragraphs)
