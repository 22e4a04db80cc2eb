"""Constants of the programs for layers with a recurrent state. Only the scan's warps differ between
generations of GPUs."""

from typing import NamedTuple

from triton_ops.gpu.configurations import line_of, power_of_two

CHUNK = 64
"""As `triton_ops.recurrent.CHUNK`, which takes torch to be read."""
_CHANNELS = 128
_TOKENS = 8  # of a tile of rows with more than one token
_LEAST_PRODUCT = 16  # rows and columns of the smallest matrix product
_STEPPED_ELEMENTS = 4096  # of a state in one program, which keeps them in registers
_MOST_STEPPED_COLUMNS = 16
_SCANNED_COLUMNS = 16  # of the values in one program: more would spill from the registers
LARGEST_SCANNED_KEY_DIM = 128
"""Rows with longer keys are computed token by token."""


class Launch(NamedTuple):
    """How one program is computed."""

    num_warps: int
    num_stages: int


CONVOLUTION = Launch(4, 1)
STEP = Launch(4, 1)
PREPARATION = Launch(8, 1)
_SCAN = {8: Launch(8, 1), 9: Launch(4, 1), 10: Launch(4, 1)}
"""By generation: with the other number, values would spill from the registers on some."""


def convolution_constants(
    kernel_size: int, *, single_tokens: bool, has_bias: bool, silu: bool
) -> dict[str, int]:
    """Return the constants that `convolve` is compiled with."""
    return {
        "KERNEL_SIZE": kernel_size,
        "COLUMNS": power_of_two(max(1, kernel_size - 1)),
        "TOKENS": 1 if single_tokens else _TOKENS,
        "CHANNELS": _CHANNELS,
        "HAS_BIAS": has_bias,
        "SILU": silu,
    }


def step_constants(
    shared: int, key_dim: int, value_dim: int, *, only_single: bool
) -> dict[str, int]:
    """Return the constants that `step_delta_rule` is compiled with. `shared`: value heads of a key
    head."""
    columns = max(1, _STEPPED_ELEMENTS // power_of_two(key_dim))
    return {
        **_key_constants(shared, key_dim),
        "VALUE_DIM": value_dim,
        "COLUMNS": min(columns, _MOST_STEPPED_COLUMNS, power_of_two(value_dim)),
        "ONLY_SINGLE": only_single,
    }


def preparation_constants(shared: int, key_dim: int) -> dict[str, int]:
    """Return the constants that `prepare_chunks` is compiled with."""
    return {**_key_constants(shared, key_dim), "CHUNK": CHUNK}


def scan_constants(shared: int, key_dim: int, value_dim: int) -> dict[str, int]:
    """Return the constants that `scan_delta_rule` is compiled with."""
    return {
        **_key_constants(shared, key_dim),
        "VALUE_DIM": value_dim,
        "COLUMNS": _SCANNED_COLUMNS,
        "CHUNK": CHUNK,
    }


def scan_launch(generation: int) -> Launch:
    """How `scan_delta_rule` is computed on a generation of GPUs, the major number of CUDA's compute
    capability."""
    return _SCAN[line_of(generation)]


def _key_constants(shared: int, key_dim: int) -> dict[str, int]:
    padded = max(_LEAST_PRODUCT, power_of_two(key_dim))
    return {"SHARED": shared, "KEY_DIM": key_dim, "PADDED_KEY_DIM": padded}
