"""The CPU's own operators, in C++: built on first use, kept in the user's cache folder, loaded from
there."""

from triton_ops.cpu.background import BackgroundLibrary
from triton_ops.cpu.building import CannotBuild, Shelf
from triton_ops.cpu.loading import CpuOperators, cpu_operators
from triton_ops.cpu.toolchain import cache_directory

__all__ = [
    "BackgroundLibrary",
    "CannotBuild",
    "CpuOperators",
    "Shelf",
    "cache_directory",
    "cpu_operators",
]
