"""What the products with packed matrices are compiled for: the same on every generation of GPUs."""

from typing import NamedTuple

MOST_PARTS = 32
ELEMENTS_PER_PROGRAM = 1024
REDUCTION_WARPS = 4
_ROWS = 16
_PROGRAMS_PER_MULTIPROCESSOR = 4
_FEWEST_STEPS = 4
"""A part has no fewer, so that loads of the next steps hide behind a product."""
_SUPER_SPAN = 256
SCALE_NAMES = ("fp16", "bf16", "fp32", "i8")
"""Triton's names for the types of a PackedFormat's scales."""
_SCALE_BYTES = (2, 2, 4, 1)


class Tile(NamedTuple):
    """Rows of the input and rows of weights that one program multiplies."""

    rows: int
    outputs: int
    num_warps: int
    num_stages: int


TILES = (Tile(16, 64, 4, 4), Tile(64, 128, 8, 3), Tile(128, 128, 8, 2))


def tile_of(num_rows: int) -> Tile:
    """The smallest tile that takes all rows, else the largest one."""
    return next((tile for tile in TILES if num_rows <= tile.rows), TILES[-1])


def product_constants(form: tuple[int, int, int, int, int], tile: Tile) -> dict[str, int]:
    """What `multiply_packed` is compiled for, besides HAS_BIAS. `form`: the numbers of a PackedFormat."""
    bits, group, scale, offset, zero = form
    is_super = scale == 3
    span = _SUPER_SPAN if is_super else group
    step = next((size for size in (128, 64, 32) if group % size == 0), 32)
    offsets_at = _ROWS * (2 * is_super + span // group * _SCALE_BYTES[scale])
    codes_at = offsets_at + _ROWS * (0, span // group, 2 * (span // group), 2 + span // group)[offset]
    return {
        "BITS": bits,
        "GROUP": group,
        "ZERO": zero,
        "OFFSET": offset,
        "SUPER": is_super,
        "SCALE_BYTES": _SCALE_BYTES[scale],
        "CELL_BYTES": codes_at + _ROWS * span * bits // 8,
        "OFFSETS_AT": offsets_at,
        "CODES_AT": codes_at,
        "STEPS_PER_CELL": span // step,
        "STEP": step,
        "TILE_ROWS": tile.rows,
        "TILE_OUTPUTS": tile.outputs,
    }


def num_parts(steps: int, tiles: int, multiprocessors: int) -> int:
    """Into how many programs the columns of a product are split, so that a GPU is busy: by shapes alone."""
    wanted = multiprocessors * _PROGRAMS_PER_MULTIPROCESSOR // tiles
    return max(1, min(wanted, steps // _FEWEST_STEPS, MOST_PARTS))
