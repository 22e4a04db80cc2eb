"""Commands in the process of a test."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nanoserve.commands.main import main
from nanoserve.lab.benchmarks.policies import variants
from nanoserve.lab.benchmarks.roofline import BandwidthProbe
from triton_ops.cpu import cpu_operators

Run = Callable[..., tuple[int, str, str]]
"""Exit code, stdout and stderr of a command with these arguments."""


@pytest.fixture
def run_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Run:
    """Runs ``nanoserve ARGUMENTS`` here."""
    # those of this process: looked for where the user keeps them, not in the folder of a test
    cpu_operators()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(*arguments: object) -> tuple[int, str, str]:
        code = main(list(map(str, arguments)))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


class SteadyProbe(BandwidthProbe):
    """Always tells the same."""

    def __init__(self) -> None:
        super().__init__(2**20)

    def read(self) -> float:
        return 1e10


@pytest.fixture
def run_undisturbed(run_command: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs ``nanoserve bench ARGUMENTS`` here, as on a machine that does nothing else."""
    # What else runs on the machine would tell rounds apart.
    monkeypatch.setattr("nanoserve.lab.benchmarks.machine.ForeignLoad.read", lambda self: 0.0)
    monkeypatch.setattr("nanoserve.lab.benchmarks.roofline.BandwidthProbe", SteadyProbe)
    return partial(run_command, "bench")


def interrupt(monkeypatch: pytest.MonkeyPatch, *, at: int) -> None:
    """Somebody presses Ctrl-C when that run of requests begins."""
    run_requests, runs = variants.run_requests, 0

    def interrupted(*arguments: Any, **settings: Any) -> Any:
        nonlocal runs
        runs += 1
        if runs == at:
            raise KeyboardInterrupt
        return run_requests(*arguments, **settings)

    monkeypatch.setattr(variants, "run_requests", interrupted)
