"""The table of configurations holds together; what the programs compute with it is seen in
tests/interpreter."""

import pytest

from scripts.kernel_variants import attention_variants, packed_experts_variants, packed_variants
from triton_ops.gpu.configurations import (
    ATTENTION,
    BLOCK_SIZES,
    HEAD_DIMS,
    LARGEST_GROUP,
    MOST_SPLITS,
    VALUE_DIMS,
    DecodeConfiguration,
    ProgramShape,
    UnsupportedByGpu,
    attention_configuration,
    busy_programs,
    helpers_of_groups,
    most_shared,
    most_splits,
    program_shape,
    programs_per_row,
)
from triton_ops.gpu.devices import INTERPRETED, Gpu
from triton_ops.gpu.kernels import attention, decode_attention, packed, packed_experts
from triton_ops.gpu.packed_constants import num_parts

GENERATIONS = (8, 9, 10)
USUAL = ProgramShape(head_dim=128, block_size=16, group=4)


def test_every_generation_has_every_shape_in_whole_blocks() -> None:
    """Heads of more than 256 only in 16 bits."""
    shapes = {(width, dim) for width in (2, 4) for dim in HEAD_DIMS if width == 2 or dim <= 256}
    assert set(ATTENTION) == {(line, *shape) for line in GENERATIONS for shape in shapes}
    for configuration in ATTENTION.values():
        decode, prefill = configuration.decode, configuration.prefill
        assert decode.keys_per_split % decode.keys_per_tile == 0
        for block_size in BLOCK_SIZES:
            assert decode.keys_per_tile % block_size == 0
            assert prefill.keys_per_tile % block_size == 0


def test_a_tile_of_longer_rows_holds_every_group_that_is_taken() -> None:
    assert all(entry.prefill.rows_per_tile >= LARGEST_GROUP for entry in ATTENTION.values())


def test_16_bit_tiles_of_longer_rows_fill_the_matrix_units_of_a_warp_group() -> None:
    """But for the widest heads, whose sums would not fit into registers."""
    assert all(
        entry.prefill.rows_per_tile >= 64
        for (_, width, d), entry in ATTENTION.items()
        if width == 2 and d <= 256
    )


@pytest.mark.parametrize(
    ("heads", "group", "groups"),
    [(1, 1, 1), (16, 16, 1), (20, 10, 2), (24, 12, 2), (17, 1, 17), (128, 16, 8)],
)
def test_heads_of_one_key_value_head_are_few_equal_groups(
    heads: int, group: int, groups: int
) -> None:
    shape = program_shape(head_dim=576, value_dim=512, block_size=16, heads_per_kv_head=heads)
    assert shape == ProgramShape(512, 16, group, groups, 64)


@pytest.mark.parametrize(
    ("generation", "line"), [(8, 8), (9, 9), (10, 10), (11, 10), (12, 8), (13, 8)]
)
def test_a_generation_without_a_line_takes_one_that_it_can_run(generation: int, line: int) -> None:
    assert attention_configuration(generation, 2, USUAL) is ATTENTION[line, 2, 128]


def test_a_gpu_that_is_too_old_is_refused() -> None:
    with pytest.raises(
        UnsupportedByGpu, match=r"compute capability 8\.0 or newer, this one has 7\.x"
    ):
        attention_configuration(7, 2, USUAL)


@pytest.mark.parametrize("generation", [9, 10, 12])
def test_a_program_waits_for_the_grid_before_it_where_it_may_begin_earlier(generation: int) -> None:
    """One without the other would either read what is not written yet or gain nothing."""
    gpu = Gpu(generation, multiprocessors=2)
    assert gpu.dependent_launch == {"DEPENDENT": True, "launch_pdl": True}


@pytest.mark.parametrize("gpu", [Gpu(8, 108), INTERPRETED], ids=["older", "interpreted"])
def test_other_gpus_and_the_interpreter_get_no_option_that_they_do_not_know(gpu: Gpu) -> None:
    assert gpu.dependent_launch == {"DEPENDENT": False}


def test_splits_of_16_bit_rows_begin_at_64_keys_but_for_the_widest_heads() -> None:
    """A split of 64 keys leaves a result of up to 16 heads in float32: for heads of 512 that is as
    many bytes as their keys."""
    for (_, width, head_dim), entry in ATTENTION.items():
        if width == 2:
            assert entry.decode.keys_per_split == (64 if head_dim <= 256 else 128)


@pytest.mark.parametrize(
    ("num_groups", "splits"),
    [
        pytest.param(8, 25, id="one row keeps the GPU busy"),
        pytest.param(7, 29, id="rounded up"),
        pytest.param(1, MOST_SPLITS, id="no more than are added up at once"),
        pytest.param(300, 1, id="at least one"),
    ],
)
def test_splits_of_a_row_keep_the_gpu_busy_with_it_alone(num_groups: int, splits: int) -> None:
    assert most_splits(200, num_groups) == splits


DECODE = DecodeConfiguration(
    keys_per_tile=64, num_warps=4, num_stages=3, keys_per_split=64, programs_per_multiprocessor=2
)


@pytest.mark.parametrize(
    ("num_rows", "most_keys", "programs"),
    [
        pytest.param(25, 4096, 1, id="rows enough to keep every multiprocessor busy"),
        pytest.param(24, 4096, 25, id="too few"),
        pytest.param(1, 1 << 20, 25, id="no more than a row has splits"),
        pytest.param(1, 1000, 16, id="no more than the longest row has"),
        pytest.param(1, 16, 1, id="at least one"),
        pytest.param(1, 0, 1, id="one for a row without keys"),
    ],
)
def test_rows_have_programs_for_their_splits_while_the_gpu_is_not_busy(
    num_rows: int, most_keys: int, programs: int
) -> None:
    busy = busy_programs(DECODE, multiprocessors=100)
    found = programs_per_row(
        DECODE, busy=busy, num_rows=num_rows, num_groups=8, most_keys=most_keys
    )
    assert (busy, found) == (200, programs)


@pytest.mark.parametrize(
    ("num_rows", "num_groups", "most_keys", "helpers"),
    [
        pytest.param(25, 8, 4097, 25, id="as many as keep the GPU busy with one row"),
        pytest.param(60_000, 8, 1 << 20, 25, id="no more for more rows"),
        pytest.param(200, 1, 1 << 20, 64, id="no more than a row has splits"),
        pytest.param(25, 8, 4096, 0, id="none where no row is long"),
        pytest.param(24, 8, 1 << 20, 0, id="none where splits have programs of their own"),
        pytest.param(300, 300, 1 << 20, 0, id="none where a row is not split"),
    ],
)
def test_rows_have_helpers_if_they_may_be_far_longer_than_others(
    num_rows: int, num_groups: int, most_keys: int, helpers: int
) -> None:
    sizes = {"num_rows": num_rows, "num_groups": num_groups, "most_keys": most_keys}
    assert helpers_of_groups(busy=200, **sizes) == helpers
    # rows have either a program for each split or helpers
    assert not helpers or programs_per_row(DECODE, busy=200, **sizes) == 1


@pytest.mark.parametrize("num_groups", [1, 2, 7, 8, 64, 199, 200, 300])
def test_there_are_counters_for_all_rows_that_may_have_several_programs(num_groups: int) -> None:
    counters = most_shared(200, num_groups)
    for num_rows in (1, 2, 24, 25, 199, 200, 5000):
        sizes = {"num_rows": num_rows, "num_groups": num_groups, "most_keys": 1 << 20}
        several = num_groups * helpers_of_groups(busy=200, **sizes)
        if programs_per_row(DECODE, busy=200, **sizes) > 1:
            several = num_groups * num_rows
        assert several <= counters


@pytest.mark.parametrize("generation", GENERATIONS)
def test_variants_name_every_parameter_of_their_program_once(generation: int) -> None:
    variants = list(attention_variants(generation))
    assert {variant.constants["HEAD_DIM"] for variant in variants} == {
        VALUE_DIMS.get(dim, dim) for dim in HEAD_DIMS
    }
    for variant in variants:
        module = {"attention": attention, "decode_attention": decode_attention}[variant.module]
        parameters = getattr(module, variant.program).arg_names
        assert sorted(parameters) == sorted([*variant.types, *variant.constants])
        assert variant.divisible <= variant.types.keys()


def test_variants_of_packed_products_name_every_parameter_of_their_program_once() -> None:
    modules = {"packed": packed, "packed_experts": packed_experts}
    for variant in (*packed_variants(), *packed_experts_variants()):
        parameters = getattr(modules[variant.module], variant.program).arg_names
        assert sorted(parameters) == sorted([*variant.types, *variant.constants])
        assert variant.divisible <= variant.types.keys()


@pytest.mark.parametrize(
    ("steps", "tiles", "parts"),
    [
        pytest.param(32, 1000, 1, id="tiles enough to keep every multiprocessor busy"),
        pytest.param(32, 100, 8, id="too few"),
        pytest.param(32, 8, 8, id="no part with fewer steps than are worth it"),
        pytest.param(1000, 1, 32, id="no more than are added up at once"),
        pytest.param(3, 1, 1, id="at least one"),
    ],
)
def test_parts_of_a_product_keep_the_gpu_busy(steps: int, tiles: int, parts: int) -> None:
    assert num_parts(steps, tiles, multiprocessors=100) == parts
