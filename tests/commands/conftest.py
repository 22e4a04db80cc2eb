"""Commands run in this process with the fake LLM, or as a process of their own."""

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nanoserve.commands.engine_options import EngineOptions
from nanoserve.commands.main import main
from tests.commands import fake_llm

ROOT = Path(__file__).parents[2]


class Stdin(io.TextIOWrapper):
    """A pipe with these bytes."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content), encoding="utf-8")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> list[fake_llm.FakeLLM]:
    """Puts the fake in the place of nanoserve.llm; the list fills with the LLMs that were
    opened."""
    opened: list[fake_llm.FakeLLM] = []
    stand_in = fake_llm.module()

    class Remembered(fake_llm.FakeLLM):
        def __init__(self, *arguments: object, **settings: object) -> None:
            super().__init__(*arguments, **settings)
            opened.append(self)

    stand_in.LLM = Remembered
    monkeypatch.setitem(sys.modules, "nanoserve.llm", stand_in)
    monkeypatch.setattr(EngineOptions, "find_model", fake_llm.find_model)
    for name in [name for name in os.environ if name.startswith("NANOSERVE_")]:
        monkeypatch.delenv(name)
    return opened


@pytest.fixture
def command(
    fake: list[fake_llm.FakeLLM], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs ``nanoserve ARGUMENTS`` here; returns exit code, stdout and stderr."""

    def run(*arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", Stdin(stdin))
        code = main(arguments)
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return run


def start(*arguments: str, **settings: object) -> subprocess.Popen[bytes]:
    """``nanoserve ARGUMENTS`` with the fake, as a process."""
    piped = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    words = [sys.executable, "-m", "tests.commands.fake_llm", *arguments]
    return subprocess.Popen(words, cwd=ROOT, **(piped | settings))
