"""Constants of the program that multiplies few rows; imports nothing of torch or Triton."""

NUM_WARPS = 4
_TILE = 4096
"""Weights that a program loads at a time, per matrix: 8 KiB in 16 bits. A few programs on each
multiprocessor then have enough bytes on their way."""
_LONGEST_STEP = 2048
_ACTIVATIONS = {"": 0, "silu": 1, "gelu": 2}


def product_constants(columns: int, activation: str, *, norm_adds_one: bool) -> dict[str, int]:
    """Constants of `multiply_each_row` for rows of so many columns."""
    step = min(_LONGEST_STEP, 1 << (columns - 1).bit_length())
    return {
        "COLUMNS": columns,
        "OUTPUTS": _TILE // step,
        "STEP": step,
        "NORM_ADDS_ONE": norm_adds_one,
        "ACTIVATION": _ACTIVATIONS[activation],
    }
