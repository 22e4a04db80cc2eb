"""Timings begin when it is settled what runs: the C++ operators, or plain torch where they cannot be had."""

from collections.abc import Callable

from triton_ops.cpu import cpu_operators


def settle_operators(announce: Callable[[str], None]) -> str:
    """Wait for the operators if they are being built, after saying so; which implementation the CPU runs from here on.

    "C++", or "plain torch" with the reason in brackets.
    """
    operators = cpu_operators()
    if operators.expected and not operators.loaded:
        announce("building the C++ operators, once on this machine ...")
    return "C++" if operators.wait() else f"plain torch ({operators.problem})"
