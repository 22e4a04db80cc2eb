"""Programmatic dependent launch: a program's grid may begin while the grid before it still ends.

What a program reads of the grid before it, and all that it writes, comes after the wait. Weights do
not change between launches, so they may be loaded ahead of it. Every program that is launched this
way waits, so once a grid has ended, all before it have.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_previous_grid(DEPENDENT: tl.constexpr):
    """Wait until the grid before this one has ended, and let the one after it begin. All programs
    that are not DEPENDENT begin after that end in any case."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
