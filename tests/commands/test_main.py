"""The door itself: help, version, exit codes, one line for every failure."""

import ast
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from nanoserve.commands.main import BENCHMARKS, COMMANDS
from nanoserve.commands.terminal import say
from tests.commands.conftest import ROOT, start
from tests.commands.fake_llm import FakeLLM

Run = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version_import_no_heavy_library(flag: str) -> None:
    check = (
        "import sys; from nanoserve.commands.main import main; code = main([sys.argv[1]]);"
        "print([name for name in ('torch', 'tokenizers', 'prompt_toolkit', 'numpy') if name in "
        "sys.modules], code)"
    )
    result = subprocess.run(
        [sys.executable, "-c", check, flag], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert result.stdout.endswith("[] 0\n")


def test_the_doors_are_one(command: Run) -> None:
    expected = command("--version")[1]
    for door in (["cli.py"], ["-m", "nanoserve"]):
        result = subprocess.run(
            [sys.executable, *door, "--version"], capture_output=True, text=True, cwd=ROOT
        )
        assert (result.stdout, result.stderr, result.returncode) == (expected, "", 0)


def test_no_command_shows_the_help(command: Run) -> None:
    assert command() == command("--help")
    code, out, _ = command("--help")
    assert code == 0
    assert out.index("Examples") < out.index("Options")


EVERY_COMMAND = [[], *([name] for name in COMMANDS), *(["bench", name] for name in BENCHMARKS)]


@pytest.mark.parametrize("words", EVERY_COMMAND, ids=" ".join)
def test_help_fits_into_80_columns(
    command: Run, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = command(*words, "--help")
    assert code == 0
    assert "…" not in out, "a flag is cut off"
    text, _, _ = out.partition("╭")
    examples = [
        line.rstrip() for line in text.partition("Examples")[2].splitlines() if line.strip()
    ]
    for line, following in pairwise(examples):
        goes_on = line.startswith("   ") and not following.startswith("   ")
        assert not goes_on or following.split()[0].istitle() or not words, (
            f"an example is broken: {line}"
        )
    for line, following in pairwise(text.partition("Example")[0].splitlines()):
        first_word = (following.split() or [" " * 80])[0]
        assert not line.strip() or len(line.rstrip()) + 1 + len(first_word) > 79, (
            f"broken before it is full: {line}"
        )


def test_policies_lists_each_with_its_paper_and_parameters(command: Run) -> None:
    code, out, _ = command("policies")
    assert code == 0
    lines = [line.split("│") for line in out.splitlines() if line.startswith("│")]
    begin = next(number for number, cells in enumerate(lines) if "throttling" in cells[1])
    row = lines[begin : begin + 3]
    assert " ".join(cells[2].strip() for cells in row).startswith("gLLM, sections 3.1, 3.2")
    assert " ".join(cells[4].strip() for cells in row).startswith(
        "iterations=8, min_prefill=32, threshold=0.05"
    )


@pytest.mark.parametrize("name", ["chat", "generate"])
def test_help_shows_panels_and_variables(command: Run, name: str) -> None:
    code, out, _ = command(name, "--help")
    assert code == 0
    assert (
        out.index("Examples")
        < out.index("─ Model ─")
        < out.index("─ Engine ─")
        < out.index("─ Sampling ")
    )
    assert "NANOSERVE_MAX_NUM_BATCHED_TOKENS" in out
    assert "prefill-first" in out


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--bogus"], 2, "--bogus"),
        (["sing"], 2, "sing"),
        (["chat", "hi", "--bogus"], 2, "--bogus (nanoserve chat --help lists what there is)"),
        (
            ["chat", "hi", "--policy", "magic"],
            2,
            "unknown policy 'magic'; choose one of prefill-first, decode-first",
        ),
        (["chat", "hi", "--dtype", "int3"], 2, "int3"),
        (
            ["chat", "hi", "--temperature", "nan"],
            2,
            "temperature must be a number from 0 to 100, not nan",
        ),
        (["chat", "hi", "--temperature", "-1"], 2, "temperature"),
        (["chat", "hi", "--top-p", "0"], 2, "top_p"),
        (["chat", "hi", "--max-tokens", "0"], 2, "max_tokens must be a whole number from 1"),
        (["chat", "hi", "--max-tokens", "-5"], 2, "max_tokens"),
        (["chat", "hi", "--max-tokens", "many"], 2, "'--max-tokens'"),
        (["chat", "hi", "--seed", "-1"], 2, "seed"),
        (["chat", "hi", "--kv-cache-memory", "lots"], 2, "'lots' is not a size"),
        (["chat", ""], 2, "the message is empty"),
        (["chat", "\udcff"], 2, "the message is not valid UTF-8"),
        (["chat"], 2, "the message is empty"),
        (["generate", ""], 2, "the prompt is empty"),
        (["generate", "-"], 2, "the prompt is empty"),
        (["generate"], 2, "give a prompt"),
        (["generate", "a", "--file", "b"], 2, "not both"),
        (["generate", "--file", "b"], 2, "--output"),
        (["generate", "a", "--output", "b"], 2, "--file"),
        (
            ["generate", "--file", "/nowhere", "--output", "b"],
            2,
            "cannot read /nowhere: No such file",
        ),
        (["generate", "hi " * 300], 2, "the prompt has 300 tokens"),
        (["chat", "hi " * 300], 2, "the message makes 302 tokens, the context holds 200"),
        (["chat", "hi", "--model", "missing"], 3, "no model at missing"),
        (["chat", "hi", "--model", "interrupted"], 130, "interrupted"),
        (
            ["chat", "hi", "--model", "broken"],
            1,
            "unexpected ZeroDivisionError: a bug of two lines (set NANOSERVE_D",
        ),
        (["generate", "fail"], 1, "the executor died"),
        (["chat", "fail"], 1, "the executor died"),
    ],
)
def test_a_failure_is_one_line_and_its_exit_code(
    command: Run, arguments: list[str], code: int, says: str
) -> None:
    actual, out, err = command(*arguments)
    assert (actual, out) == (code, "")
    assert err.startswith("nanoserve: ")
    assert err.count("\n") == 1
    assert says in err


def test_what_a_file_holds_cannot_steer_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    say("tensor \x1b[2J\nevil\x00 \u202e\ud800 é")
    assert capfd.readouterr().err == "nanoserve: tensor \ufffd[2J evil\ufffd \ufffd\ufffd é\n"


@pytest.mark.parametrize("arguments", [["chat"], ["generate", "-"]])
def test_stdin_that_is_no_text(command: Run, arguments: list[str]) -> None:
    code, _, err = command(*arguments, stdin=b"abc\xff")
    assert (code, err) == (2, "nanoserve: stdin is not valid UTF-8 (byte 3)\n")


def test_debug_shows_the_traceback(command: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOSERVE_DEBUG", "1")
    assert "Traceback" in command("chat", "hi", "--model", "broken")[2]


def test_stop_texts_are_whole_and_come_from_flags_alone(
    command: Run, fake: list[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANOSERVE_STOP", "The End")  # the parser would make two of it
    assert (
        command("generate", "hi")[0]
        == command("generate", "hi", "--stop", "The End", "--stop", "!")[0]
        == 0
    )
    assert [llm.params[0].stop for llm in fake] == [(), ("The End", "!")]


def test_flags_win_over_variables(
    command: Run, fake: list[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANOSERVE_TEMPERATURE", "0.5")
    monkeypatch.setenv("NANOSERVE_TOP_K", "7")
    monkeypatch.setenv("NANOSERVE_POLICY", "prefill-first")
    monkeypatch.setenv("NANOSERVE_NO_PREFIX_CACHING", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert (
        command(
            "generate", "hi", "--temperature", "0.1", "--kv-cache-memory", "2MiB", "--seed", "3"
        )[0]
        == 0
    )
    params, settings = fake[0].params[0], fake[0].settings
    assert (params.temperature, params.top_k, params.top_p) == (0.1, 7, 0.95)
    assert settings["policy"] == "prefill-first"
    assert settings["enable_prefix_caching"] is False
    assert settings["offline"] is True
    assert settings["kv_cache_memory"] == 2 * 1024**2
    assert settings["seed"] == 3
    assert callable(settings["progress"])  # long loads are told of where nobody watches, too
    assert fake[0].closed


def test_a_bad_variable_is_named(command: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOSERVE_BLOCK_SIZE", "big")
    code, _, err = command("chat", "hi")
    assert code == 2
    assert "NANOSERVE_BLOCK_SIZE" in err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", "from nanoserve.commands.main import run; run()"],
        env={"_NANOSERVE_COMPLETE": f"source_{shell}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert "_NANOSERVE_COMPLETE" in result.stdout
    assert result.returncode == 0


def test_the_shell_completes_models(tmp_path: Path) -> None:
    (tmp_path / "stories.gguf").touch()
    result = subprocess.run(
        [sys.executable, "-c", "from nanoserve.commands.main import run; run()"],
        env={
            "_NANOSERVE_COMPLETE": "complete_bash",
            "COMP_WORDS": "nanoserve chat -m sto",
            "COMP_CWORD": "3",
        }
        | {"PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    expected = ["storyteller", "storyteller-diffusion", "stories.gguf"]
    assert result.stdout.split() == expected, result.stderr


@pytest.mark.parametrize(
    "arguments", [["chat", "slowly"], ["generate", "slowly"], ["generate", "a b c d e f g h"]]
)
def test_a_reader_that_leaves_is_no_failure(arguments: list[str]) -> None:
    process = start(*arguments, "--max-model-len", "1000", stdin=subprocess.DEVNULL)
    assert process.stdout is not None
    if "slowly" in arguments:
        process.stdout.read(5)
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert process.wait(240) == 0


def test_a_reader_that_leaves_the_help_is_no_failure() -> None:
    process = start("generate", "--help", stdin=subprocess.DEVNULL)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert (process.stderr.read(), process.wait(240)) == (b"", 0)


def test_no_streams_at_all() -> None:
    words = f"{sys.executable} -m tests.commands.fake_llm generate hello <&- >&- 2>&-"
    assert subprocess.run(["bash", "-c", words], cwd=ROOT).returncode == 0


HALF_IMPORTED = """
import importlib.util, os, signal, sys
from nanoserve.commands.main import run

class Finder:
    def find_spec(self, name, path, target=None):
        return importlib.util.spec_from_loader(name, self) if name == "nanoserve.llm" else None
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            module.LLM = None
        except KeyboardInterrupt:
            pass  # as libraries do that try one import and then another

sys.meta_path.insert(0, Finder())
sys.argv = ["nanoserve", "generate", "hello"]
run()
"""


def test_interrupt_while_a_library_is_imported_is_one_line() -> None:
    result = subprocess.run([sys.executable, "-c", HALF_IMPORTED], capture_output=True, cwd=ROOT)
    assert (result.stderr, result.returncode) == (b"nanoserve: interrupted\n", 130)


FIRST_MOMENT = """
import os, runpy, signal, sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "nanoserve.commands.main":
            print(sorted(found for found in sys.modules if found not in before), flush=True)
            os.kill(os.getpid(), signal.SIGINT)
        return None
sys.meta_path.insert(0, Interrupting())
before = {*sys.modules, "__main__"}
door = sys.argv[1]
if door == "console script":
    from nanoserve.commands.entry import run
    run()
elif door == "-m":
    runpy.run_module("nanoserve", run_name="__main__")
else:
    exec(open(door).read(), {"__name__": "__main__"})
"""


@pytest.mark.parametrize("door", ["console script", "-m", "cli.py", "bench.py"])
def test_an_interrupt_before_anything_is_imported_is_one_line(door: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", FIRST_MOMENT, door], capture_output=True, text=True, cwd=ROOT
    )
    imported = ["nanoserve", "nanoserve.commands", "nanoserve.commands.entry"]
    assert ast.literal_eval(result.stdout) == imported, "Python's own start has the rest"
    assert (result.stderr, result.returncode) == ("nanoserve: interrupted\n", 130)


def test_an_interrupt_that_is_ignored_stays_so() -> None:
    """An ignored interrupt stays ignored, as behind nohup."""
    program = (
        "import signal; signal.signal(2, signal.SIG_IGN); import nanoserve.commands.entry; "
        "print(signal.getsignal(2).name)"
    )
    assert (
        subprocess.check_output([sys.executable, "-c", program], text=True, cwd=ROOT) == "SIG_IGN\n"
    )


LAST_MOMENT = """
import sys
from nanoserve.commands import main
guarded = main.guarded
def interrupted(action):
    guarded(action)
    raise KeyboardInterrupt
main.guarded = interrupted
sys.argv = ["nanoserve", "--version"]
main.run()
"""


def test_an_interrupt_when_all_is_said_adds_nothing() -> None:
    result = subprocess.run([sys.executable, "-c", LAST_MOMENT], capture_output=True, cwd=ROOT)
    assert (result.stderr, result.returncode) == (b"", 130)


def test_the_end_does_not_go_through_all_that_is_loaded() -> None:
    """Python looks for garbage once more when it ends, in everything that is not frozen."""
    program = (
        "import atexit, gc, sys\nfrom nanoserve.commands import main\n"
        "atexit.register(lambda: print(len(gc.get_objects())))\n"
        "sys.argv = ['nanoserve', '--version']\nmain.run()"
    )
    *_, left = subprocess.check_output(
        [sys.executable, "-c", program], text=True, cwd=ROOT
    ).splitlines()
    assert int(left) < 1000


@pytest.mark.parametrize(
    "arguments", [["generate", "slowly"], ["chat", "slowly"], ["chat", "hi", "--model", "slow"]]
)
def test_interrupt_is_one_line(arguments: list[str]) -> None:
    process = start(*arguments, "--max-model-len", "100000", stdin=subprocess.DEVNULL)
    assert process.stdout is not None
    process.stdout.read(5)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=240)
    assert err == b"nanoserve: interrupted\n"
    assert process.returncode == 130


def test_help_imports_none_of_what_commands_do() -> None:
    """Every import is time before the first word: those of a command come when it is asked for."""
    program = (
        "import sys\nfrom nanoserve.commands.main import main\n"
        "assert main(['--help']) == 0\nprint(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True
    )
    imported = set(done.stderr.split())
    rooms = (
        "scheduler",
        "costs",
        "request",
        "server",
        "models",
        "executor",
        "engine",
        "lab",
        "llm",
    )
    assert not imported & {f"nanoserve.{room}" for room in rooms}
    assert not imported & {
        "torch",
        "numpy",
        "asyncio",
        "http.client",
        "ssl",
        "tomllib",
        "importlib.metadata",
    }
