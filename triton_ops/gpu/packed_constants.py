"""What the products with packed matrices are compiled for: the same on every generation of GPUs."""

from typing import NamedTuple

REDUCTION_WARPS = 4
ELEMENTS_PER_PROGRAM = 1024
SCALE_NAMES = ("fp16", "bf16", "fp32", "i8")
"""Triton's names for the types of a PackedFormat's scales."""
_SCALE_BYTES = (2, 2, 4, 1)
_PROGRAMS_PER_MULTIPROCESSOR = 4
_FEWEST_STEPS = 4  # of a part, so that the loads of later steps hide behind a product
_MOST_PARTS = 32


class Tile(NamedTuple):
    """Rows of the input and of weights that one program multiplies."""

    rows: int
    outputs: int
    num_warps: int
    num_stages: int


TILES = (Tile(16, 64, 4, 4), Tile(64, 64, 4, 3), Tile(128, 128, 8, 2))


def tile_of(num_rows: int) -> Tile:
    return next((tile for tile in TILES if num_rows <= tile.rows), TILES[-1])


def product_constants(form: tuple[int, ...], tile: Tile) -> dict[str, int]:
    """What `multiply_packed` is compiled for besides HAS_BIAS. `form`: the numbers of a PackedFormat."""
    bits, group, scale, offset, zero = form
    return {
        "BITS": bits,
        "GROUP": group,
        "ZERO": zero,
        "OFFSET": offset,
        "SCALE_BYTES": _SCALE_BYTES[scale],
        "STEP": next((step for step in (128, 64) if group % step == 0), 32),
        "TILE_ROWS": tile.rows,
        "TILE_OUTPUTS": tile.outputs,
    }


def num_parts(steps: int, tiles: int, multiprocessors: int) -> int:
    """Into how many programs the columns of a product are split to keep a GPU busy: it depends on shapes alone."""
    wanted = multiprocessors * _PROGRAMS_PER_MULTIPROCESSOR // tiles
    return max(1, min(wanted, steps // _FEWEST_STEPS, _MOST_PARTS))
