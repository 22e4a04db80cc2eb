"""Constants of the products with packed matrices: equal on every generation of GPUs."""

from typing import NamedTuple

REDUCTION_WARPS = 4
ELEMENTS_PER_PROGRAM = 1024
SCALE_NAMES = ("fp16", "bf16", "fp32", "i8")
"""Triton's names for the types of a PackedFormat's scales."""
_SCALE_BYTES = (2, 2, 4, 1)
_PROGRAMS_PER_MULTIPROCESSOR = 8
_FEWEST_STEPS = 4  # of a part, so that the loads of later steps hide behind a product
_MOST_PARTS = 32


class Tile(NamedTuple):
    """Tile of one program: rows of the input, rows of weights, and columns of them at a time."""

    rows: int
    outputs: int
    step: int
    num_warps: int
    num_stages: int


ONE_ROW = Tile(1, 16, 256, 4, 3)
TILES = (Tile(16, 128, 128, 4, 3), Tile(32, 64, 128, 4, 3))
EXPERT_TILES = (Tile(16, 64, 128, 4, 2), TILES[-1])
"""Tiles of rows of an expert. Its matrix is found at run time, which takes registers as well: with
the tile of 16 rows in TILES, some formats spill."""
UNPACKING = Tile(0, 16, 128, 2, 1)
"""More rows are multiplied by the unpacked matrix."""


def tile_of(num_rows: int) -> Tile | None:
    """The tile of a product with this number of rows; None if the matrix is unpacked for them."""
    if num_rows == 1:
        return ONE_ROW
    return next((tile for tile in TILES if num_rows <= tile.rows), None)


def packed_constants(form: tuple[int, ...], tile: Tile) -> dict[str, int]:
    """Return the constants that a program is compiled with. `form`: the numbers of a
    PackedFormat."""
    bits, group, scale, offset, zero = form
    constants = {
        "BITS": bits,
        "GROUP": group,
        "ZERO": zero,
        "OFFSET": offset,
        "SCALE_BYTES": _SCALE_BYTES[scale],
        "STEP": tile.step,
        "TILE_OUTPUTS": tile.outputs,
    }
    return constants | ({"TILE_ROWS": tile.rows} if tile.rows > 1 else {})


def tile_of_experts(num_tokens: int, experts_per_token: int, num_experts: int) -> Tile | None:
    """The tile of products with experts' matrices; None if the matrices are unpacked.

    A token's experts all differ. As long as there are at most half as many pairs (token, expert)
    as experts, an expert that is chosen has fewer than 1.3 of them if all are equally likely: then
    each pair is multiplied by itself. Else rows of an expert are multiplied together, in tiles for
    as many as an expert has on average.
    """
    pairs = num_tokens * experts_per_token
    if num_tokens == 1 or 2 * pairs <= num_experts:
        return ONE_ROW
    average = -(-pairs // num_experts)
    return next((tile for tile in EXPERT_TILES if average <= tile.rows), None)


def most_tokens_of_experts(num_experts: int, experts_per_token: int) -> int:
    """The most tokens for which there is a tile: with more, experts have more rows on average than
    the largest tile."""
    return EXPERT_TILES[-1].rows * num_experts // experts_per_token


def num_parts(steps: int, tiles: int, multiprocessors: int) -> int:
    """Into how many programs the columns of a product are split to keep a GPU busy: it depends on
    shapes alone."""
    wanted = multiprocessors * _PROGRAMS_PER_MULTIPROCESSOR // tiles
    return max(1, min(wanted, steps // _FEWEST_STEPS, _MOST_PARTS))


def columns_in_parts(columns: int, tile: Tile, tiles: int, multiprocessors: int) -> tuple[int, int]:
    """Return `num_parts` of a product of so many tiles, and how many steps each part makes."""
    steps = -(-columns // tile.step)
    steps_per_part = -(-steps // num_parts(steps, tiles, multiprocessors))
    return -(-steps // steps_per_part), steps_per_part
