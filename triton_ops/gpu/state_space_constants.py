"""Constants of the programs for state-space layers. Only a scan's warps differ between generations
of GPUs."""

from triton_ops.gpu.configurations import line_of, power_of_two
from triton_ops.gpu.recurrent_constants import CHUNK, Launch

_LEAST_PRODUCT = 16  # rows and columns of the smallest matrix product
_STEPPED_ELEMENTS = 4096  # of a state in one program, which keeps them in registers
_MOST_STEPPED_COLUMNS = 16
_SCANNED_ELEMENTS = 4096  # of a state in one program: more would spill from the registers
_MOST_SCANNED_COLUMNS = 32
_MOST_ATTENDED_COLUMNS = 64
_NUMBERS = 64  # of queries and keys that one matrix product takes
LARGEST_SCANNED_STATE = 256
"""Rows with longer keys are computed token by token."""
_SELECTIVE_ELEMENTS = 256  # of a state in one program, which has one warp
_MOST_CHANNELS = 16
"""With fewer channels than threads, Triton has every thread load what it needs, and no barrier
parts the tokens."""
_TOKENS = 8  # whose inputs are loaded together, in rows with more than one token

DUAL_STEP = Launch(4, 1)
DUAL_ATTENTION = Launch(8, 1)
SELECTIVE = Launch(1, 1)
_DUAL_SCAN = {8: Launch(8, 1), 9: Launch(8, 1), 10: Launch(4, 1)}
"""By generation: with the other number, values would spill from the registers on some."""
_LONG_DUAL_SCAN = Launch(8, 1)
_LONG_STATE = 128  # states of more numbers take _LONG_DUAL_SCAN


def dual_step_constants(
    shared: int, state_size: int, head_dim: int, *, only_single: bool
) -> dict[str, int]:
    """Return the constants that `step_dual` is compiled with. `shared`: heads of a group."""
    columns = max(1, _STEPPED_ELEMENTS // power_of_two(state_size))
    return {
        **_dual_constants(shared, state_size, head_dim),
        "COLUMNS": min(columns, _MOST_STEPPED_COLUMNS, power_of_two(head_dim)),
        "ONLY_SINGLE": only_single,
    }


def dual_attention_constants(shared: int, state_size: int, head_dim: int) -> dict[str, int]:
    """Return the constants that `attend_in_chunks` is compiled with. `shared`: heads of a group."""
    constants = _dual_constants(shared, state_size, head_dim)
    return {
        **constants,
        "NUMBERS": min(_NUMBERS, constants["PADDED_STATE_SIZE"]),
        "COLUMNS": max(_LEAST_PRODUCT, min(_MOST_ATTENDED_COLUMNS, power_of_two(head_dim))),
        "CHUNK": CHUNK,
    }


def dual_scan_constants(shared: int, state_size: int, head_dim: int) -> dict[str, int]:
    """Return the constants that `scan_dual` is compiled with. `shared`: heads of a group."""
    constants = _dual_constants(shared, state_size, head_dim)
    columns = _SCANNED_ELEMENTS // constants["PADDED_STATE_SIZE"]
    columns = min(columns, _MOST_SCANNED_COLUMNS, power_of_two(head_dim))
    return {**constants, "COLUMNS": max(_LEAST_PRODUCT, columns), "CHUNK": CHUNK}


def dual_scan_launch(generation: int, state_size: int) -> Launch:
    """How `scan_dual` is computed on a generation of GPUs, the major number of CUDA's compute
    capability."""
    return _LONG_DUAL_SCAN if state_size > _LONG_STATE else _DUAL_SCAN[line_of(generation)]


def selective_constants(state_size: int, *, single_tokens: bool) -> dict[str, int]:
    """Return the constants that `scan_selectively` is compiled with."""
    padded = power_of_two(state_size)
    return {
        "STATE_SIZE": state_size,
        "PADDED_STATE_SIZE": padded,
        "CHANNELS": max(1, min(_MOST_CHANNELS, _SELECTIVE_ELEMENTS // padded)),
        "TOKENS": 1 if single_tokens else _TOKENS,
    }


def _dual_constants(shared: int, state_size: int, head_dim: int) -> dict[str, int]:
    return {
        "SHARED": shared,
        "STATE_SIZE": state_size,
        "PADDED_STATE_SIZE": max(_LEAST_PRODUCT, power_of_two(state_size)),
        "HEAD_DIM": head_dim,
    }
