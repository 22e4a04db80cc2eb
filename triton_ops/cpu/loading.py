"""Loading the CPU operators, now or when they are built; until then plain torch does their work."""

import os
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch

from triton_ops.cpu import building
from triton_ops.cpu.background import BackgroundLibrary
from triton_ops.cpu.building import CannotBuild, Job
from triton_ops.cpu.toolchain import make_job


class CpuOperators(BackgroundLibrary):
    """The C++ operators of this process, loaded or being built once it is created."""

    without = "plain torch is used, which is slower"

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        super().__init__()
        try:
            self._job = make_job(os.environ if environment is None else environment)
        except CannotBuild as reason:
            self.give_up(str(reason))
        else:
            self.start()

    @property
    def shelf(self) -> Job:
        return self._job

    def command(self) -> list[str]:
        return [sys.executable, "-I", building.__file__, self._job.to_json()]

    def open(self, library: Path) -> None:
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]  # torch left it untyped


@cache
def cpu_operators() -> CpuOperators:
    """The operators of this process: torch knows one set of them, so there is one."""
    return CpuOperators()
