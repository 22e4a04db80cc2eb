"""The CPU's own operators, in C++: built on first use, kept in the user's cache folder, loaded from there."""

from triton_ops.cpu.loading import CpuOperators, cpu_operators

__all__ = ["CpuOperators", "cpu_operators"]
