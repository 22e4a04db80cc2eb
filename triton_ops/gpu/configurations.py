"""How the GPU's programs are cut for each generation of GPUs: a table that is only read at run
time.

A generation is the major number of CUDA's compute capability. The table holds a line for 8 (Ampere,
Ada), 9 (Hopper) and 10 (data-centre Blackwell); 11 takes 10's line, and newer ones take 8's, whose
tiles fit into the least shared memory and need no instruction that came later.
"""

from dataclasses import dataclass
from functools import cache

OLDEST_GENERATION = 8
OLDEST_WITH_DEPENDENT_LAUNCHES = 9
LATEST_WITH_LARGE_SHARED_MEMORY = 11
"""Generation 12 (Blackwell's consumer GPUs) is back at the 99 KiB a program that generation 8
guarantees."""

HEAD_DIMS = (32, 64, 80, 96, 128, 256, 512, 576)
VALUE_DIMS = {576: 512}
"""Where values are not as wide as keys: in multi-head latent attention."""
BLOCK_SIZES = (16, 32)
LARGEST_GROUP = 16
"""Query heads of one key-value head that one program takes. The matrix units take at least 16 rows:
every group up to this fits into a tile of a single token. Larger tiles have values that do not fit
into registers with the configurations below, so more heads are several groups."""
MOST_SPLITS = 64
"""The last program of a row to arrive adds up this many results at most."""


KEYS_PER_PROGRAM = 4096
"""Keys of a row that one program reads alone in a batch that keeps the GPU busy: only longer rows
get helpers."""


class UnsupportedByGpu(ValueError):
    """No program for the GPU does this; the message says what would have to be different."""


@dataclass(frozen=True, slots=True)
class DecodeConfiguration:
    """Rows of a single token.

    A row's keys are cut into as many splits as it takes for `programs_per_multiprocessor` to keep
    the GPU busy with this row alone; but no split has fewer than `keys_per_split`, a multiple of
    `keys_per_tile`. Splits have programs of their own in batches too small to keep the GPU busy.
    """

    keys_per_tile: int
    num_warps: int
    num_stages: int
    keys_per_split: int = 64
    programs_per_multiprocessor: int = 2


@dataclass(frozen=True, slots=True)
class PrefillConfiguration:
    """Rows of more tokens: `rows_per_tile` counts queries times the heads of a group, LARGEST_GROUP
    or more."""

    rows_per_tile: int
    keys_per_tile: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class AttentionConfiguration:
    """Both programs of paged attention, for one generation, width of a number in bytes, and
    head_dim."""

    decode: DecodeConfiguration
    prefill: PrefillConfiguration


@dataclass(frozen=True, slots=True)
class ProgramShape:
    """Shapes and types that the programs are compiled for, besides their configuration. `head_dim`:
    width of values; keys have `tail_dim` columns more. `group`: query heads that a program takes;
    `groups`: how many of them share a key-value head."""

    head_dim: int
    block_size: int
    group: int
    groups: int = 1
    tail_dim: int = 0


def program_shape(
    *, head_dim: int, value_dim: int, block_size: int, heads_per_kv_head: int
) -> ProgramShape:
    """The query heads of a key-value head become as few groups of equal size as programs can
    take."""
    enough = range(-(-heads_per_kv_head // LARGEST_GROUP), heads_per_kv_head + 1)
    groups = next(number for number in enough if heads_per_kv_head % number == 0)
    return ProgramShape(
        value_dim, block_size, heads_per_kv_head // groups, groups, head_dim - value_dim
    )


_FLOAT32 = {
    32: AttentionConfiguration(DecodeConfiguration(32, 8, 1), PrefillConfiguration(16, 32, 16, 2)),
    64: AttentionConfiguration(DecodeConfiguration(32, 8, 1), PrefillConfiguration(16, 32, 16, 2)),
    80: AttentionConfiguration(DecodeConfiguration(32, 8, 2), PrefillConfiguration(32, 32, 16, 2)),
    96: AttentionConfiguration(DecodeConfiguration(32, 8, 2), PrefillConfiguration(32, 32, 16, 2)),
    128: AttentionConfiguration(DecodeConfiguration(32, 8, 2), PrefillConfiguration(32, 32, 16, 2)),
    256: AttentionConfiguration(DecodeConfiguration(32, 8, 2), PrefillConfiguration(16, 32, 16, 2)),
}
"""Exact products leave the matrix units idle: these serve to check the others, and only have to
hold in registers."""

ATTENTION: dict[tuple[int, int, int], AttentionConfiguration] = {
    **{
        (generation, 4, head_dim): entry
        for generation in (8, 9, 10)
        for head_dim, entry in _FLOAT32.items()
    },
    (8, 4, 80): AttentionConfiguration(
        DecodeConfiguration(32, 16, 2), PrefillConfiguration(32, 32, 16, 2)
    ),
    (8, 4, 96): AttentionConfiguration(
        DecodeConfiguration(32, 16, 2), PrefillConfiguration(32, 32, 16, 2)
    ),
    (8, 4, 128): AttentionConfiguration(
        DecodeConfiguration(32, 16, 2), PrefillConfiguration(32, 32, 16, 2)
    ),
    (9, 4, 64): AttentionConfiguration(
        DecodeConfiguration(64, 8, 1), PrefillConfiguration(16, 32, 16, 2)
    ),
    (9, 4, 128): AttentionConfiguration(
        DecodeConfiguration(64, 8, 2), PrefillConfiguration(32, 32, 16, 2)
    ),
    (10, 4, 32): AttentionConfiguration(
        DecodeConfiguration(32, 8, 1), PrefillConfiguration(16, 32, 8, 2)
    ),
    (10, 4, 64): AttentionConfiguration(
        DecodeConfiguration(64, 8, 1), PrefillConfiguration(16, 32, 16, 2)
    ),
    (10, 4, 80): AttentionConfiguration(
        DecodeConfiguration(64, 8, 2), PrefillConfiguration(32, 32, 16, 2)
    ),
    (10, 4, 96): AttentionConfiguration(
        DecodeConfiguration(64, 8, 2), PrefillConfiguration(32, 32, 16, 2)
    ),
    (10, 4, 128): AttentionConfiguration(
        DecodeConfiguration(64, 8, 2), PrefillConfiguration(32, 32, 16, 2)
    ),
    (8, 2, 32): AttentionConfiguration(
        DecodeConfiguration(64, 4, 3), PrefillConfiguration(128, 64, 8, 3)
    ),
    (8, 2, 64): AttentionConfiguration(
        DecodeConfiguration(64, 4, 3), PrefillConfiguration(128, 64, 8, 3)
    ),
    (8, 2, 80): AttentionConfiguration(
        DecodeConfiguration(64, 4, 3), PrefillConfiguration(128, 32, 8, 3)
    ),
    (8, 2, 96): AttentionConfiguration(
        DecodeConfiguration(64, 4, 3), PrefillConfiguration(128, 32, 8, 3)
    ),
    (8, 2, 128): AttentionConfiguration(
        DecodeConfiguration(64, 4, 3), PrefillConfiguration(128, 32, 8, 3)
    ),
    (8, 2, 256): AttentionConfiguration(
        DecodeConfiguration(32, 4, 3), PrefillConfiguration(64, 32, 8, 2)
    ),
    (8, 2, 512): AttentionConfiguration(
        DecodeConfiguration(32, 8, 1, 128, 1), PrefillConfiguration(16, 32, 8, 1)
    ),
    (8, 2, 576): AttentionConfiguration(
        DecodeConfiguration(32, 8, 2, 128, 1), PrefillConfiguration(16, 32, 8, 1)
    ),
    (9, 2, 32): AttentionConfiguration(
        DecodeConfiguration(64, 4, 3), PrefillConfiguration(128, 128, 8, 3)
    ),
    (9, 2, 64): AttentionConfiguration(
        DecodeConfiguration(64, 4, 3), PrefillConfiguration(128, 64, 8, 3)
    ),
    (9, 2, 80): AttentionConfiguration(
        DecodeConfiguration(64, 4, 3), PrefillConfiguration(128, 64, 8, 3)
    ),
    (9, 2, 96): AttentionConfiguration(
        DecodeConfiguration(64, 4, 3), PrefillConfiguration(128, 64, 8, 3)
    ),
    (9, 2, 128): AttentionConfiguration(
        DecodeConfiguration(64, 4, 2), PrefillConfiguration(128, 64, 8, 3)
    ),
    (9, 2, 256): AttentionConfiguration(
        DecodeConfiguration(32, 4, 3), PrefillConfiguration(128, 32, 8, 3)
    ),
    (9, 2, 512): AttentionConfiguration(
        DecodeConfiguration(64, 8, 2, 128, 1), PrefillConfiguration(32, 32, 8, 2)
    ),
    (9, 2, 576): AttentionConfiguration(
        DecodeConfiguration(32, 8, 3, 128, 1), PrefillConfiguration(32, 32, 8, 2)
    ),
    (10, 2, 32): AttentionConfiguration(
        DecodeConfiguration(64, 4, 3), PrefillConfiguration(128, 128, 8, 3)
    ),
    (10, 2, 64): AttentionConfiguration(
        DecodeConfiguration(64, 4, 3), PrefillConfiguration(128, 128, 8, 3)
    ),
    (10, 2, 80): AttentionConfiguration(
        DecodeConfiguration(64, 4, 3), PrefillConfiguration(128, 64, 8, 3)
    ),
    (10, 2, 96): AttentionConfiguration(
        DecodeConfiguration(64, 4, 3), PrefillConfiguration(128, 64, 8, 3)
    ),
    (10, 2, 128): AttentionConfiguration(
        DecodeConfiguration(64, 4, 3), PrefillConfiguration(128, 64, 8, 3)
    ),
    (10, 2, 256): AttentionConfiguration(
        DecodeConfiguration(32, 4, 3), PrefillConfiguration(128, 32, 8, 3)
    ),
    (10, 2, 512): AttentionConfiguration(
        DecodeConfiguration(32, 8, 3, 128, 1), PrefillConfiguration(32, 32, 8, 2)
    ),
    (10, 2, 576): AttentionConfiguration(
        DecodeConfiguration(32, 8, 3, 128, 1), PrefillConfiguration(32, 32, 8, 2)
    ),
}
"""By generation, bytes of a number (float32: 4, bfloat16 and float16: 2) and head_dim."""


def line_of(generation: int) -> int:
    """Return the generation whose configurations serve another one: 8, 9 or 10."""
    if generation > LATEST_WITH_LARGE_SHARED_MEMORY:
        return OLDEST_GENERATION
    return min(generation, 10)


@cache
def attention_configuration(
    generation: int, width: int, shape: ProgramShape
) -> AttentionConfiguration:
    """Choose the configuration of paged attention; `width` of a number in bytes. Raises
    UnsupportedByGpu."""
    if generation < OLDEST_GENERATION:
        raise UnsupportedByGpu(
            f"attention needs a GPU of compute capability {OLDEST_GENERATION}.0 or newer, this one "
            f"has {generation}.x; "
            "use another device"
        )
    head_dim = shape.head_dim + shape.tail_dim
    known = (
        ("head_dim", head_dim, HEAD_DIMS),
        (
            f"width of values for head_dim {head_dim} but",
            shape.head_dim,
            (VALUE_DIMS.get(head_dim, head_dim),),
        ),
        ("block_size", shape.block_size, BLOCK_SIZES),
    )
    for name, value, supported in known:
        if value not in supported:
            choices = ", ".join(map(str, supported))
            raise UnsupportedByGpu(
                f"attention on a GPU knows no {name} {value}, only {choices}; use another or the "
                "CPU"
            )
    line = line_of(generation)
    if (line, width, head_dim) not in ATTENTION:
        raise UnsupportedByGpu(
            f"attention on a GPU takes heads of {head_dim} in 16 bits only; use --dtype bfloat16"
        )
    return ATTENTION[line, width, head_dim]


def busy_programs(configuration: DecodeConfiguration, multiprocessors: int) -> int:
    """How many programs of `decode_attention` keep the GPU busy."""
    return multiprocessors * configuration.programs_per_multiprocessor


def most_splits(busy: int, num_groups: int) -> int:
    """Into how many splits the keys of a row are cut at most: enough that this row alone has
    `busy` programs.

    It depends on the GPU and the model alone, so that a row's numbers depend on no other row.
    """
    return min(-(-busy // num_groups), MOST_SPLITS)


def programs_per_row(
    configuration: DecodeConfiguration, *, busy: int, num_rows: int, num_groups: int, most_keys: int
) -> int:
    """How many programs each group of heads of a row has: as many as it can have splits, or a
    single one where rows and groups alone are `busy` programs.

    It depends on shapes alone (`most_keys` is what a block table has room for): a captured graph
    keeps it.
    """
    if num_rows * num_groups >= busy:
        return 1
    splits_of_the_longest = -(-most_keys // configuration.keys_per_split)
    return max(1, min(splits_of_the_longest, most_splits(busy, num_groups)))


def helpers_of_groups(*, busy: int, num_rows: int, num_groups: int, most_keys: int) -> int:
    """How many programs each group of heads has beside one for each row, to help with rows far
    longer than the others: none where rows have a program for each split, or cannot be long.

    They are as many as the splits of a row, with which that row alone keeps the GPU busy. Their
    number depends on shapes alone. The programs look up which rows the helpers help.
    """
    splits = most_splits(busy, num_groups)
    if num_rows * num_groups < busy or most_keys <= KEYS_PER_PROGRAM or splits == 1:
        return 0
    return splits


def most_shared(busy: int, num_groups: int) -> int:
    """How many groups of rows have several programs at most: those of fewer rows than keep the GPU
    busy, or of a row for each helper."""
    return -(-busy // num_groups) * num_groups


def decode_constants(
    configuration: DecodeConfiguration, shape: ProgramShape, **features: bool
) -> dict[str, int]:
    """Return the constants that `decode_attention` is compiled with."""
    return {
        **_shape_constants(shape),
        "TILE_ROWS": LARGEST_GROUP,
        "KEYS_PER_TILE": configuration.keys_per_tile,
        "KEYS_PER_SPLIT": configuration.keys_per_split,
        **_features(**features),
    }


def prefill_constants(
    configuration: PrefillConfiguration, shape: ProgramShape, **features: bool
) -> dict[str, int]:
    """Return the constants that `prefill_attention` is compiled with."""
    return {
        **_shape_constants(shape),
        "TILE_ROWS": configuration.rows_per_tile,
        "KEYS_PER_TILE": configuration.keys_per_tile,
        **_features(**features),
    }


def _features(*, slides: bool, capped: bool = False, has_sinks: bool = False) -> dict[str, int]:
    return {"SLIDES": slides, "CAPPED": capped, "HAS_SINKS": has_sinks}


def _shape_constants(shape: ProgramShape) -> dict[str, int]:
    return {
        "BLOCK_SIZE": shape.block_size,
        "HEAD_DIM": shape.head_dim,
        "PADDED_HEAD_DIM": power_of_two(shape.head_dim),
        "TAIL_DIM": shape.tail_dim,
        "GROUP": shape.group,
        "GROUPS": shape.groups,
    }


def power_of_two(number: int) -> int:
    """The least that is no smaller: tensors in Triton have no other sizes."""
    return 1 << (number - 1).bit_length()
