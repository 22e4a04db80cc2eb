"""The floor of a step against counts of the real decoder's parameters."""

import pytest
from msgspec.structs import replace

from nanoserve.lab.benchmarks.floors import Limits, ModelCost, step_kind, step_work
from nanoserve.lab.workloads import PRESETS
from nanoserve.models.hub import dummy_config
from nanoserve.request import RequestShape
from nanoserve.scheduler.plan import Row, StepPlan
from nanoserve.scheduler.work import StepWork


def test_the_work_of_a_plan() -> None:
    rows = (
        Row(sequence=0, start=9, tokens=(1,), sample=True),
        Row(sequence=1, start=4, tokens=(1, 2, 3), sample=False),
    )
    work = step_work(StepPlan(step=0, rows=rows))
    assert work == StepWork(decodes=1, decode_context=10, chunks=((4, 3),), sampled=1)
    assert step_kind(work) == "mixed"
    assert step_kind(step_work(StepPlan(step=0, rows=rows[:1]))) == "decode"
    assert step_kind(step_work(StepPlan(step=0, rows=rows[1:]))) == "prefill"
    config = dummy_config("smollm2-135m")
    cost, without_keys = ModelCost(config, 2), StepWork(decodes=4, sampled=1)
    layers = config.num_layers * config.head_dim
    read = cost.step_bytes(work) - cost.step_bytes(without_keys)
    assert read == 2 * 2 * layers * config.num_kv_heads * (10 + 7)
    computed = cost.step_operations(work) - cost.step_operations(without_keys)
    assert computed == 4 * layers * config.num_heads * (10 + (5 + 6 + 7))


@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-7b"])
def test_a_decode_reads_every_matrix_once(name: str) -> None:
    import torch

    from nanoserve.models.decoder import Decoder

    config = dummy_config(name)
    with torch.device("meta"):
        decoder = Decoder(config)
    matrices = sum(p.numel() for p in decoder.layers.parameters() if p.dim() == 2)
    head = config.vocab_size * config.hidden_size
    keys_and_values = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 100
    step = StepWork.of([100])
    assert ModelCost(config, 2).step_bytes(step) == 2 * (
        matrices + head + keys_and_values + config.hidden_size
    )
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * 100
    assert ModelCost(config, 2).step_operations(step) == 2 * (matrices + head) + attention


def test_windows_bound_what_a_step_reads_and_computes() -> None:
    """Gemma 3 1B: 4 layers see all, 22 the last 512. A decode at 1000, and a chunk of 3 tokens that
    begins at 700."""
    rows = (
        Row(sequence=0, start=999, tokens=(1,), sample=True),
        Row(sequence=1, start=700, tokens=(1, 2, 3), sample=False),
    )
    cost = ModelCost(dummy_config("gemma-3-1b"), 2)
    work, nothing_seen = (
        step_work(StepPlan(step=0, rows=rows), cost.windows),
        StepWork(decodes=4, sampled=1),
    )
    nothing_seen = replace(nothing_seen, windowed_decode_context=(0,))
    read = cost.step_bytes(work) - cost.step_bytes(nothing_seen)
    assert read == 2 * 2 * 256 * (4 * (1000 + 703) + 22 * (512 + 511 + 3))
    computed = cost.step_operations(work) - cost.step_operations(nothing_seen)
    assert computed == 4 * 4 * 256 * (4 * (1000 + 701 + 702 + 703) + 22 * 4 * 512)


def test_experts_are_read_as_far_as_tokens_reach_them() -> None:
    cost = ModelCost(dummy_config("mixtral-8x7b"), 1)
    one, many = (cost.step_bytes(StepWork(decodes=tokens)) for tokens in (1, 1000))
    assert 3.0 < many / one < 4.0  # two of eight experts, against all of them


def test_the_floor_is_the_longer_of_reading_and_computing() -> None:
    cost = ModelCost(dummy_config("smollm2-135m"), 4)
    decode, prefill = StepWork.of([10]), StepWork.of(chunks=[(0, 1000)])
    limits = Limits(bytes_per_second=1e9, operations_per_second=1e11)
    assert cost.floor_seconds(decode, limits) == cost.step_bytes(decode) / 1e9
    assert cost.floor_seconds(prefill, limits) == cost.step_operations(prefill) / 1e11


def test_a_reading_above_the_limit_is_the_limit() -> None:
    assert Limits(5.0, 7.0).at_least(4.0, 6.0) == Limits(6.0, 7.0)
    assert Limits(5.0, 7.0).at_least(4.0, 3.0) == Limits(5.0, 7.0)


H200 = Limits(bytes_per_second=4.28e12, operations_per_second=804e12)
H100 = Limits(bytes_per_second=3.0e12, operations_per_second=700e12)


def test_requests_need_their_prompts_and_then_a_step_for_each_token() -> None:
    """Qwen3-0.6B by hand: 28 layers of 16 query and 8 key-value heads of 128, 1024 columns and an
    inner size of 3072; a head of 151,936 tokens."""
    layer = 1024 * (16 + 2 * 8) * 128 + 16 * 128 * 1024 + 3 * 1024 * 3072
    matrices, head = 28 * layer, 151_936 * 1024
    kept = 28 * 2 * 8 * 128 * 2  # bytes of a token's keys and values
    shapes = [RequestShape(1000, 3), RequestShape(500, 2), RequestShape(20, 1)]
    seen = 1000 * 1001 / 2 + 500 * 501 / 2 + 20 * 21 / 2
    prompts = 2 * 1520 * matrices + 2 * 3 * head + 4 * 28 * 16 * 128 * seen
    first, second = (1001 + 501) * kept + 2 * 2 * 1024, 1002 * kept + 2 * 1024
    decodes = 2 * 2 * (matrices + head) + first + second
    cost = ModelCost(dummy_config("qwen3-0.6b"), 2)
    seconds = prompts / H200.operations_per_second + decodes / H200.bytes_per_second
    assert cost.requests_floor_seconds(shapes, H200) == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize(
    ("model", "limits", "rate"),
    [
        ("qwen3-0.6b", H200, 35_500),
        ("qwen3-0.6b", H100, 25_400),
        ("qwen3-8b", H200, 12_900),
        ("qwen3-8b", H100, 9_900),
    ],
)
def test_the_floor_of_the_preset(model: str, limits: Limits, rate: float) -> None:
    """Rates that were worked out apart, from mean lengths, as the time for keys and values, for
    weights and for prompts."""
    shapes = PRESETS["nano-vllm"].draw(seed=0)
    tokens = sum(shape.output_tokens for shape in shapes)
    seconds = ModelCost(dummy_config(model), 2).requests_floor_seconds(shapes, limits)
    assert tokens / seconds == pytest.approx(rate, rel=0.03)


def test_windows_bound_what_the_decode_steps_of_requests_read() -> None:
    """Gemma 3 1B: 4 layers see all, 22 the last 512, one key-value head of 256."""
    cost = ModelCost(dummy_config("gemma-3-1b"), 2)
    bytes_only = Limits(bytes_per_second=1.0, operations_per_second=1e30)
    longer, shorter = (
        cost.requests_floor_seconds([RequestShape(1000, 2)], bytes_only),
        cost.requests_floor_seconds([RequestShape(1000, 1)], bytes_only),
    )
    decode = cost.step_bytes(StepWork.of([1001], windows=cost.windows))
    assert longer - shorter == pytest.approx(decode)
    empty = StepWork(decodes=1, sampled=1, windowed_decode_context=(0,))
    read = longer - shorter - cost.step_bytes(empty)
    assert read == pytest.approx(2 * 2 * 256 * (4 * 1001 + 22 * 512))
