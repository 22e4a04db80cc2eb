"""Operation counts against numbers worked out by hand on a model that fits on a page."""

import math

import pytest

from nanoserve.config.model_parts import LayerDifferences
from nanoserve.config.published_shapes import load_shape
from nanoserve.costs.counts import ModelCounts, Operator, Precision, chunk_keys, chunk_pairs
from nanoserve.errors import UsageError
from nanoserve.layout import ParallelLayout, tensor_degrees
from nanoserve.models.weights import tensor_parts
from nanoserve.scheduler.windows import most_blocks
from nanoserve.scheduler.work import StepWork
from tests.costs.conftest import tiny_experts, tiny_model

# Two decode rows that read 3 and 5 keys, and positions 2, 3, 4 of a prompt: five tokens.
WORK = StepWork.of([3, 5], [(2, 3)], sampled=2)


def by_name(operators: list[Operator]) -> dict[str, Operator]:
    return {f"{operator.name}/{operator.kind}": operator for operator in operators}


def test_every_operator_of_a_mixed_step_by_hand() -> None:
    found = by_name(ModelCounts(tiny_model()).operators(WORK, 0))
    # name: (operations, bytes of weights, of keys and values, of activations), both layers, 2 bytes
    # a number
    expected = {
        "embedding/look-up": (0, 5 * 8 * 2, 0, 5 * 8 * 2),
        # 8 -> (2 + 2 * 1) heads of 4
        "qkv/matrix": (2 * 2 * 5 * 8 * 16, 2 * 2 * 8 * 16, 0, 2 * 2 * 5 * (8 + 16)),
        "output/matrix": (2 * 2 * 5 * 8 * 8, 2 * 2 * 8 * 8, 0, 2 * 2 * 5 * (8 + 8)),
        "gate_up/matrix": (2 * 2 * 5 * 8 * 32, 2 * 2 * 8 * 32, 0, 2 * 2 * 5 * (8 + 32)),
        "down/matrix": (2 * 2 * 5 * 16 * 8, 2 * 2 * 16 * 8, 0, 2 * 2 * 5 * (16 + 8)),
        # positions 2, 3, 4 see 3 + 4 + 5 = 12 keys; the chunk reads 5 of them; 2 heads of 4; K and
        # V of 1 head of 4
        "attention/prefill attention": (2 * 4 * 8 * 12, 0, 2 * 2 * 2 * 4 * 5, 2 * 2 * 3 * 8 * 2),
        "attention/decode attention": (2 * 4 * 8 * 8, 0, 2 * 2 * 2 * 4 * 8, 2 * 2 * 2 * 8 * 2),
        "head/matrix": (2 * 2 * 8 * 32, 2 * 8 * 32, 0, 2 * 2 * (8 + 32)),  # two rows are sampled
    }
    assert {
        name: (one.flops, one.weight_bytes, one.kv_bytes, one.activation_bytes)
        for name, one in found.items()
    } == expected
    assert found["head/matrix"].intensity == 2 * 2 * 8 * 32 / (2 * 8 * 32 + 2 * 2 * 40)


def test_tensor_parallelism_divides_heads_inner_size_and_vocabulary() -> None:
    whole = by_name(ModelCounts(tiny_model()).operators(WORK, 0))
    half = by_name(ModelCounts(tiny_model(), ParallelLayout(tensor_parallel=2)).operators(WORK, 0))
    for name in (
        "output/matrix",
        "gate_up/matrix",
        "down/matrix",
        "head/matrix",
        "attention/decode attention",
    ):
        assert half[name].flops == whole[name].flops / 2
        assert half[name].weight_bytes == whole[name].weight_bytes / 2
    # one KV head for two devices: each keeps all of it
    assert (
        half["attention/decode attention"].kv_bytes == whole["attention/decode attention"].kv_bytes
    )
    assert half["qkv/matrix"].weight_bytes == 2 * 2 * 8 * (1 + 2) * 4


def test_pipeline_stages_share_the_layers_and_split_the_ends() -> None:
    counts = ModelCounts(tiny_model(num_layers=5), ParallelLayout(pipeline_parallel=2))
    assert [counts.layers(stage) for stage in range(2)] == [3, 2]
    first, last = (by_name(counts.operators(WORK, stage)) for stage in range(2))
    assert "embedding/look-up" in first and "embedding/look-up" not in last
    assert "head/matrix" in last and "head/matrix" not in first
    assert first["qkv/matrix"].flops == last["qkv/matrix"].flops * 3 / 2
    layer = 2 * (8 * 16 + 8 * 8 + 8 * 32 + 16 * 8)
    assert [counts.stage_weight_bytes(stage) for stage in range(2)] == [
        3 * layer + 2 * 256,
        2 * layer + 2 * 256,
    ]
    assert counts.kv_bytes_per_token(0) == 3 * 2 * 4 * 2


@pytest.mark.parametrize(("stages", "tables"), [(1, 1), (2, 2)])
def test_tied_embeddings_are_kept_once_unless_the_ends_are_apart(stages: int, tables: int) -> None:
    counts = ModelCounts(
        tiny_model(tie_word_embeddings=True), ParallelLayout(pipeline_parallel=stages)
    )
    layers = 2 * 2 * (8 * 16 + 8 * 8 + 8 * 32 + 16 * 8)
    assert sum(map(counts.stage_weight_bytes, range(stages))) == layers + tables * 2 * 8 * 32


def test_experts_are_read_as_far_as_tokens_reach_them() -> None:
    found = by_name(ModelCounts(tiny_experts()).operators(StepWork.of([1, 1, 1]), 0))
    one = 3 * 8 * 6
    assert found["experts/matrix"].flops == 2 * 3 * 2 * one  # three tokens, two experts each
    assert found["experts/matrix"].weight_bytes == pytest.approx(2 * one * 4 * (1 - 0.5**3))
    assert found["router/matrix"].weight_bytes == 2 * 8 * 4
    assert found["gate_up/matrix"].weight_bytes == 2 * 8 * 32  # the first layer is dense


def test_bits_scale_the_bytes_they_are_about() -> None:
    half = by_name(
        ModelCounts(tiny_model(), None, Precision(weight_bits=8, kv_bits=8)).operators(WORK, 0)
    )
    four = by_name(ModelCounts(tiny_model(), None, Precision(weight_bits=4)).operators(WORK, 0))
    assert half["qkv/matrix"].weight_bytes == 2 * 8 * 16
    assert half["attention/decode attention"].kv_bytes == 2 * 2 * 4 * 8
    assert half["head/matrix"].weight_bytes == 2 * 8 * 32
    assert four["qkv/matrix"].weight_bytes == 2 * 8 * 16 * (4 + 16 / 128) / 8


def test_a_sliding_window_bounds_what_a_row_sees() -> None:
    model = tiny_model(layers=LayerDifferences(sliding_windows=(0, 4)))
    counts = ModelCounts(model)
    work = StepWork.of([3, 9], [(0, 6)], windows=counts.windows)
    assert work.windowed_decode_context == (3 + 4,)
    kv = [one.kv_bytes for one in counts.operators(work, 0) if one.kind == "decode attention"]
    assert kv == [2 * 2 * 4 * 12, 2 * 2 * 4 * 7]
    with pytest.raises(UsageError, match="sliding windows"):
        counts.operators(StepWork.of([3, 9]), 0)


def in_windows(window: int) -> int:
    """Blocks of 16 that W positions take, wherever they begin, while a block's worth is
    computed."""
    return math.ceil((window + 30) / 16)


@pytest.mark.parametrize(
    ("model", "layer_bytes", "group_sizes", "windows"),
    [  # bytes of a token in one layer, layers with a place in each group, the windows of the groups
        ("llama-3.1-8b", 2 * 8 * 128 * 2, [32], [0]),
        ("gemma-3-1b", 2 * 1 * 256 * 2, [4, 4, 4, 4, 4, 3, 3], [0, *[512] * 6]),
        ("gemma-3-27b", 2 * 16 * 128 * 2, [10, 9, 9, 9, 9, 8, 8], [0, *[1024] * 6]),
        ("gpt-oss-20b", 2 * 8 * 64 * 2, [12, 12], [0, 128]),
        ("olmo-3-7b", 2 * 32 * 128 * 2, [8, 8, 8, 8], [0, 4096, 4096, 4096]),
        ("deepseek-v2-lite", 576 * 2, [27], [0]),
        ("deepseek-v3", 576 * 2, [61], [0]),
    ],
)
@pytest.mark.parametrize("tokens", [100, 1280, 8000, 32768])
def test_kv_of_a_sequence_by_hand(
    model: str, layer_bytes: int, group_sizes: list[int], windows: list[int], tokens: int
) -> None:
    counts, columns = ModelCounts(load_shape(model)), math.ceil(tokens / 16)
    assert counts.block_bytes(16, 0) == 16 * max(group_sizes) * layer_bytes
    assert counts.kv_bytes_per_token(0) == sum(group_sizes) * layer_bytes
    assert sorted(counts.groups.windows) == windows
    assert most_blocks(counts.groups.windows, tokens, 16) == sum(
        min(columns, in_windows(window)) if window else columns for window in windows
    )


def test_windows_of_real_models_save_what_is_known_of_them() -> None:
    """GiB at 32k of Gemma 3 27B and gpt-oss-20b, all layers full, and with their windows. Groups of
    Gemma's leave 8 of 60 places empty, which takes 2 % more."""
    known = [("gemma-3-27b", 15.5, 2.98), ("gpt-oss-20b", 1.5, 0.75), ("llama-3.1-8b", 4.0, 4.0)]
    # 10 whole layers of 4,096 numbers and 50 of 8,192; 4 of 2,048 and 20 of 1,024, and 18 that
    # share theirs.
    for model, full, windows in (*known, ("gemma-4-31b", 27.5, 3.29), ("gemma-4-e4b", 1.75, 0.52)):
        counts = ModelCounts(load_shape(model))
        assert 32768 * counts.kv_bytes_per_token(0) / 2**30 == pytest.approx(full)
        held = most_blocks(counts.groups.windows, 32768, 16) * counts.block_bytes(16, 0)
        assert held / 2**30 == pytest.approx(windows, abs=0.02)


def test_a_stage_has_its_part_of_every_group() -> None:
    """Gemma 3 1B in two stages of 13 layers: two of the four full ones in each, and two of each
    group of windows."""
    model = load_shape("gemma-3-1b")
    counts = ModelCounts(model, ParallelLayout(pipeline_parallel=2), pipeline_split=[13, 13])
    assert [counts.kv_bytes_per_token(stage) for stage in (0, 1)] == [13 * 1024] * 2
    assert [counts.block_bytes(16, stage) for stage in (0, 1)] == [16 * 2 * 1024] * 2


def test_a_decode_reads_windows_and_latents() -> None:
    """Gemma 3 1B at 8,000: 4 layers read all keys, 22 read 512. DeepSeek-V3 reads 61 latents of 576
    once, for all 128 heads: two products of 576 and 512 numbers."""
    for name, kv_bytes, flops in (
        ("gemma-3-1b", 1024 * (4 * 8000 + 22 * 512), 4 * 4 * 256 * (4 * 8000 + 22 * 512)),
        ("deepseek-v3", 1152 * 61 * 8000, 2 * 128 * (576 + 512) * 61 * 8000),
    ):
        counts = ModelCounts(load_shape(name))
        found = counts.attention(StepWork.of([8000], windows=counts.windows), 0)
        assert sum(one.kv_bytes for one in found) == kv_bytes
        assert sum(one.flops for one in found) == flops


@pytest.mark.parametrize("model", ["gemma-4-e2b", "gemma-4-e4b", "gemma-4-31b"])
def test_layers_of_several_shapes_have_the_matrices_of_their_checkpoint(model: str) -> None:
    config = load_shape(model)
    matrices = sum(math.prod(part.shape) for part in tensor_parts(config) if len(part.shape) == 2)
    assert ModelCounts(config).stage_weight_bytes(0) == 2 * matrices


@pytest.mark.parametrize("start", range(6))
@pytest.mark.parametrize("length", range(1, 7))
@pytest.mark.parametrize("window", [0, 1, 3, 5, 100])
def test_keys_and_pairs_of_a_chunk_by_counting(start: int, length: int, window: int) -> None:
    seen = [
        range(max(0, position + 1 - window) if window else 0, position + 1)
        for position in range(start, start + length)
    ]
    assert chunk_pairs(start, length, window) == sum(map(len, seen))
    assert chunk_keys(start, length, window) == len(set().union(*seen))


def test_latents_are_cached_once_on_every_rank() -> None:
    """576 numbers of 2 bytes a layer; tensor parallelism divides the heads that share them."""
    for model, layers in ("deepseek-v3", 61), ("deepseek-v2-lite", 27):
        whole = ModelCounts(load_shape(model))
        half = ModelCounts(load_shape(model), ParallelLayout(tensor_parallel=2))
        assert whole.kv_bytes_per_token(0) == half.kv_bytes_per_token(0) == layers * 1152
        assert (
            whole.layer_flops_per_pair
            == 2 * half.layer_flops_per_pair
            == 2 * load_shape(model).num_heads * 1088
        )


def test_the_weights_of_real_models_have_the_published_size() -> None:
    sizes = {
        "llama-3.1-8b": 8.03e9,
        "qwen2.5-32b": 32.76e9,
        "qwen3-30b-a3b": 30.5e9,
        "llama-2-70b": 68.98e9,
    }
    sizes |= {
        "codellama-34b": 33.74e9,
        "llama-3-15b": 15.0e9,
        "llama-3.1-100b": 100e9,
        "llama-3.1-405b": 405.9e9,
    }
    sizes |= {"deepseek-v3": 671e9, "deepseek-v2-lite": 15.7e9}
    for name, parameters in sizes.items():
        assert ModelCounts(load_shape(name)).stage_weight_bytes(0) / 2 == pytest.approx(
            parameters, rel=0.005
        ), name


def test_what_does_not_divide_is_refused() -> None:
    model = load_shape("qwen2.5-14b")
    assert tensor_degrees(model) == [1, 2, 4, 8, 40]
    with pytest.raises(UsageError, match=r"of 3 does not divide 40 .*use one of 1, 2, 4, 8, 40"):
        ModelCounts(model, ParallelLayout(tensor_parallel=3))
    with pytest.raises(UsageError, match="at most 48"):
        ModelCounts(model, ParallelLayout(pipeline_parallel=49))
    with pytest.raises(UsageError, match="weight_bits must be one of 4, 8, 16, 32, not 5"):
        Precision(weight_bits=5)
    with pytest.raises(UsageError, match="tensor_parallel must be at least 1"):
        ParallelLayout(tensor_parallel=0)
    with pytest.raises(UsageError, match="its own key"):
        StepWork.of([0])
    with pytest.raises(UsageError, match="holds a token"):
        StepWork.of([], [(3, 0)])


def test_names_of_layouts_are_the_papers() -> None:
    layout = ParallelLayout(tensor_parallel=2, pipeline_parallel=4, data_parallel=3)
    assert (layout.name, layout.devices, ParallelLayout().name) == ("D3T2P4", 24, "T1")
