"""Times: by hand on a round machine, monotonic on real ones, and in the papers' limits equal to
their formulas."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.config.model_config import ModelConfig
from nanoserve.config.model_parts import LayerDifferences
from nanoserve.config.published_shapes import load_shape
from nanoserve.costs.closed_forms import attention_intensity, decode_seconds, mlp_intensity
from nanoserve.costs.counts import ModelCounts, Precision
from nanoserve.costs.hardware import Efficiency, Machine, load_machine
from nanoserve.costs.step_costs import DoesNotFit, StepCosts
from nanoserve.errors import UsageError
from nanoserve.layout import ParallelLayout
from nanoserve.scheduler.work import StepWork
from tests.costs.appendix_a import AppendixA
from tests.costs.conftest import round_machine, tiny_experts, tiny_model

IDEAL = Efficiency.ideal()
REAL = {
    "dense": (
        load_shape("qwen2.5-14b"),
        load_machine("gllm-l20"),
        ParallelLayout(tensor_parallel=2),
    ),
    "experts": (
        load_shape("qwen3-30b-a3b"),
        load_machine("h100"),
        ParallelLayout(pipeline_parallel=2),
    ),
    "windows": (
        replace(load_shape("qwen3-0.6b"), layers=LayerDifferences(sliding_windows=(512, 0) * 14)),
        load_machine("xeon-2-cores"),
        ParallelLayout(),
    ),
}


def test_a_step_by_hand(machine: Machine) -> None:
    costs = StepCosts(
        tiny_model(),
        machine,
        efficiency=msgspec.structs.replace(IDEAL, kernel_seconds=0.5, kernels_per_layer=3),
    )
    work = costs.work([3, 5])
    # bytes of both layers over 100, operations over 1000: bytes take longer everywhere
    moved = {
        "embedding": 2 * 8 * 2 * 2,
        "qkv": 2 * (2 * 8 * 16 + 2 * 2 * 24),
        "attention": 2 * (2 * 2 * 4 * 8 + 2 * 2 * 8 * 2),
        "output": 2 * (2 * 8 * 8 + 2 * 2 * 16),
        "gate_up": 2 * (2 * 8 * 32 + 2 * 2 * 40),
        "down": 2 * (2 * 8 * 16 + 2 * 2 * 24),
        "head": 2 * 8 * 32 + 2 * 2 * 40,
    }
    kernels = 0.5 * (2 * 3 + 1 + 3)
    assert costs.stage_seconds(work, 0) == pytest.approx(sum(moved.values()) / 100 + kernels)


def test_the_longer_of_moving_and_computing(machine: Machine) -> None:
    slow = replace(machine, device=msgspec.structs.replace(machine.device, flops=10.0))
    costs = StepCosts(tiny_model(), slow, efficiency=IDEAL)
    for operator in costs.counts.operators(costs.work([], [(0, 50)]), 0):
        if operator.flops:
            assert costs.is_compute_bound(operator)
            assert costs.operator_seconds(operator) == operator.flops / 10


def test_where_reading_and_computing_do_not_overlap_both_count(machine: Machine) -> None:
    costs = StepCosts(
        tiny_model(),
        replace(machine, device=msgspec.structs.replace(machine.device, overlaps=False)),
        efficiency=IDEAL,
    )
    for operator in costs.counts.operators(costs.work([3, 5]), 0):
        assert costs.operator_seconds(operator) == pytest.approx(
            operator.bytes / 100 + operator.flops / 1000
        )


def test_an_all_reduce_sends_both_ways_and_its_messages_wait_for_each_other(
    machine: Machine,
) -> None:
    costs = StepCosts(
        tiny_model(num_heads=4, num_kv_heads=4), machine, ParallelLayout(tensor_parallel=4)
    )
    hidden = 2 * 8 * 2  # two tokens
    # two levels of a tree, there and back; bus bandwidth of 10
    each = 2 * 2 * 1.0 + 2 * 3 / 4 * hidden / 10
    logits = 1.0 + 2 * (32 / 4) * 2 * 3 / 10
    assert costs.all_reduces(0) == 5
    assert costs.all_reduce_seconds(costs.work([3, 5]), 0) == pytest.approx(5 * each + logits)


def test_what_crosses_links_by_hand(machine: Machine) -> None:
    costs = StepCosts(tiny_model(), machine, ParallelLayout(pipeline_parallel=2))
    work = costs.work([3, 5])
    assert costs.send_seconds(work, 0) == 1 + 2 * 8 * 2 / 10
    assert costs.send_seconds(work, 1) == 0
    # one layer: K and V of one head of 4
    assert costs.swap_seconds(10, 0) == 1 + 10 * (2 * 4 * 2) / 5
    assert costs.reload_seconds(0) == 1 + costs.counts.stage_weight_bytes(0) / 5
    assert costs.host_attention_seconds(50) == 50 * 2 * 4 * 2 / 20
    assert costs.host_exchange_seconds(3) == pytest.approx(2 + 3 * 2 * (2 + 2 + 2) * 4 / 5)
    assert costs.host_attention_seconds(0) == costs.host_exchange_seconds(0) == 0


def test_nodes_are_joined_by_the_network(machine: Machine) -> None:
    four = ParallelLayout(pipeline_parallel=2)
    with pytest.raises(UsageError, match="round has 1 devices and no network"):
        StepCosts(tiny_model(), replace(machine, devices_per_node=1), four)
    network = replace(machine.link, bandwidth=2.0)
    spread = StepCosts(tiny_model(), replace(machine, devices_per_node=1, network=network), four)
    assert spread.send_seconds(spread.work([1]), 0) == 1 + 8 * 2 / 2


def test_a_link_of_a_data_sheet_is_not_reached(machine: Machine) -> None:
    printed = replace(machine, link=replace(machine.link, measured=False).scaled(2.0))
    costs = StepCosts(
        tiny_model(), printed, ParallelLayout(pipeline_parallel=2), efficiency=Efficiency(link=0.5)
    )
    assert costs.send_seconds(costs.work([1]), 0) == 1 + 8 * 2 / (10 * 2 * 0.5)


def test_a_machine_without_processor_has_no_host_attention() -> None:
    costs = StepCosts(tiny_model(), round_machine(processor=None))
    with pytest.raises(UsageError, match="names no processor"):
        costs.host_attention_seconds(1)


@pytest.mark.parametrize("factors", [{"matrix": 1.5}, {"memory": 0.0}, {"kernel_seconds": -1.0}])
def test_factors_out_of_range_are_refused(factors: dict[str, float]) -> None:
    with pytest.raises(msgspec.ValidationError, match=next(iter(factors))):
        msgspec.convert(factors, Efficiency)


# -------------------------------------------------------------------------------------------------
# properties

contexts = st.lists(st.integers(1, 5000), max_size=6)
chunks = st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 3000)), max_size=3)


def stage_times(costs: StepCosts, work: StepWork) -> list[float]:
    return [costs.stage_seconds(work, stage) for stage in range(costs.num_stages)]


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(REAL)), contexts, chunks, st.integers(1, 4000), st.integers(0, 3000))
def test_more_work_never_takes_less_time(
    name: str, decodes: list[int], parts: list[tuple[int, int]], more: int, later: int
) -> None:
    costs = StepCosts(*REAL[name])
    before = stage_times(costs, costs.work(decodes, parts))
    larger = [costs.work([*decodes, more], parts), costs.work(decodes, [*parts, (later, more)])]
    if decodes:
        larger.append(costs.work([decodes[0] + more, *decodes[1:]], parts))
    if parts:
        (start, length), *rest = parts
        larger += [costs.work(decodes, [(start + later, length), *rest])]
        larger += [costs.work(decodes, [(start, length + more), *rest])]
    for work in larger:
        assert all(
            now >= then * (1 - 1e-12)
            for then, now in zip(before, stage_times(costs, work), strict=True)
        )
        assert costs.host_seconds(work) >= costs.efficiency.step_seconds


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(REAL)), contexts, chunks)
def test_the_quick_sum_is_the_sum_over_operators(
    name: str, decodes: list[int], parts: list[tuple[int, int]]
) -> None:
    costs = StepCosts(*REAL[name])
    work = costs.work(decodes, parts)
    for stage in range(costs.num_stages):
        operators = sum(map(costs.operator_seconds, costs.counts.operators(work, stage)))
        beside = (
            (costs.kernel_seconds(work, stage) + costs.all_reduce_seconds(work, stage))
            if work.tokens
            else 0
        )
        assert costs.stage_seconds(work, stage) == pytest.approx(operators + beside)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(["qwen2.5-14b", "mixtral-8x7b"]), contexts.filter(bool), chunks)
def test_a_stage_of_all_layers_takes_as_long_as_its_parts_together(
    name: str, decodes: list[int], parts: list[tuple[int, int]]
) -> None:
    model, machine = load_shape(name), load_machine("h100")
    whole, halves = (
        StepCosts(model, machine, ParallelLayout(pipeline_parallel=stages)) for stages in (1, 2)
    )
    work = whole.work(decodes, parts)
    assert sum(stage_times(halves, work)) == pytest.approx(stage_times(whole, work)[0])


@pytest.mark.parametrize("factor", [2.0, 10.0])
def test_faster_hardware_is_never_slower(factor: float) -> None:
    model, machine = load_shape("llama-3.1-8b"), load_machine("a100-40")
    layout = ParallelLayout(tensor_parallel=4)
    device = machine.device
    faster = [
        replace(machine, device=msgspec.structs.replace(device, flops=device.flops * factor)),
        replace(
            machine,
            device=msgspec.structs.replace(
                device, memory_bandwidth=device.memory_bandwidth * factor
            ),
        ),
        replace(machine, link=machine.link.scaled(factor)),
    ]
    slow = StepCosts(model, machine, layout)
    work = slow.work([500] * 40, [(100, 700)])
    assert all(
        StepCosts(model, one, layout).stage_seconds(work, 0) < slow.stage_seconds(work, 0)
        for one in faster
    )


# --------------------------------------------------------------------------------------------------
# limits


def only_layers(model: ModelConfig) -> ModelConfig:
    """Without the embedding and head that the closed forms leave out."""
    return replace(model, vocab_size=1, tie_word_embeddings=True)


@pytest.mark.parametrize("name", ["llama-2-70b", "codellama-34b", "llama-3-15b"])
@pytest.mark.parametrize(("tensor", "stages"), [(1, 1), (8, 1), (1, 4), (2, 4)])
def test_seesaws_appendix_a_is_the_limit_of_the_exact_model(
    name: str, tensor: int, stages: int
) -> None:
    model, layout = (
        only_layers(load_shape(name)),
        ParallelLayout(tensor_parallel=tensor, pipeline_parallel=stages),
    )
    machine = load_machine("a100-40-pcie")
    machine = replace(machine, link=replace(machine.link, latency=1e-12), devices_per_node=64)
    costs = StepCosts(model, machine, layout, efficiency=IDEAL)
    algorithm = machine.link.bandwidth * tensor / (2 * (tensor - 1)) if tensor > 1 else float("inf")
    device = machine.device
    formula = AppendixA.of(
        model, bandwidth=device.memory_bandwidth, flops=device.flops, all_reduce_bandwidth=algorithm
    )
    last = costs.num_stages - 1
    # prefill: one prompt of 4000 tokens for each stage; causality leaves n (n + 1) / 2 pairs,
    # activations add bytes
    prompts = costs.work([], [(0, 4000)], sampled=0)
    expected = formula.stage_seconds(formula.prefill(stages, 4000), layout)
    assert costs.stage_seconds(prompts, last) == pytest.approx(expected, rel=0.01)
    # decode: a long context, so that attention weighs; activations are a few percent of the bytes
    decodes = costs.work([8000] * 32, sampled=0)
    times = formula.decode(32 * stages, 8000)
    assert costs.stage_seconds(decodes, last) == pytest.approx(
        formula.stage_seconds(times, layout), rel=0.04
    )
    assert formula.throughput(32 * stages, times, layout) == pytest.approx(
        32 / costs.stage_seconds(decodes, last), rel=0.04
    )


def test_one_layer_on_one_device_is_the_sum_of_the_papers_rows() -> None:
    formula = AppendixA.of(
        load_shape("llama-2-70b"), bandwidth=1.5e12, flops=3e14, all_reduce_bandwidth=1e10
    )
    times = formula.decode(16, 1000)
    assert (
        times.linear_move > times.linear_compute and times.attention_move > times.attention_compute
    )
    assert times.layer == times.linear_move + times.attention_move + times.network
    # with everything on one device, and nothing divided, a stage is all layers (table 3 has the
    # network inside)
    assert formula.stage_seconds(times, ParallelLayout()) == pytest.approx(80 * times.layer)


def test_the_largest_batch_is_what_memory_leaves() -> None:
    model, machine = only_layers(load_shape("llama-2-70b")), load_machine("seesaw-a100-nvlink")
    layout = ParallelLayout(tensor_parallel=4, pipeline_parallel=2)
    costs = StepCosts(model, machine, layout, efficiency=IDEAL)
    formula = AppendixA.of(model, bandwidth=1.0, flops=1.0)
    batch = formula.largest_batch(machine.device.memory_bytes, 1024, layout)
    assert costs.memory.kv_blocks(16) * 16 / 1024 == pytest.approx(batch, rel=1e-3)
    double = replace(layout, data_parallel=2)
    assert formula.largest_batch(machine.device.memory_bytes, 1024, double) == 2 * batch


def test_the_lectures_intensities_are_limits() -> None:
    model = load_shape("llama-2-13b")
    costs = StepCosts(model, load_machine("h100"))
    assert costs.machine.device.intensity == pytest.approx(295, abs=1)
    found = {one.name: one for one in costs.counts.operators(costs.work([2000] * 64), 0)}
    mlp = (found["gate_up"].flops + found["down"].flops) / (
        found["gate_up"].bytes + found["down"].bytes
    )
    assert mlp == pytest.approx(
        mlp_intensity(64, model.hidden_size, model.intermediate_size), rel=0.01
    )
    assert mlp == pytest.approx(64, rel=0.03)
    assert found["attention"].intensity == pytest.approx(attention_intensity(2000, 1), rel=0.01)
    prompt = {one.name: one for one in costs.counts.operators(costs.work([], [(0, 2000)]), 0)}
    assert prompt["attention"].intensity == pytest.approx(
        attention_intensity(2000, 2000) / 2, rel=0.01
    )


def test_decode_of_the_lecture_is_the_limit_without_computing() -> None:
    model, machine = load_shape("llama-2-13b"), load_machine("h100")
    costs = StepCosts(model, machine, efficiency=IDEAL)
    weights, kv = costs.counts.stage_weight_bytes(0), 1000 * costs.counts.kv_bytes_per_token(0)
    exact = costs.stage_seconds(costs.work([1000] * 16), 0)
    bandwidth = machine.device.memory_bandwidth
    assert exact == pytest.approx(decode_seconds(16, weights, kv, bandwidth), rel=0.02)
    assert 16 / exact == pytest.approx(16 / decode_seconds(16, weights, kv, bandwidth), rel=0.02)


# --------------------------------------------------------------------------------------------------
# memory


def test_blocks_are_what_the_fullest_stage_can_hold(machine: Machine) -> None:
    costs = StepCosts(
        tiny_model(num_layers=3), machine, ParallelLayout(pipeline_parallel=2), efficiency=IDEAL
    )
    layer = 2 * (8 * 16 + 8 * 8 + 8 * 32 + 16 * 8)
    # the first stage has two of three layers, and the embedding
    left = 10_000 - 2 * layer - 2 * 256
    assert costs.memory.kv_blocks(4) == left // (4 * 2 * 2 * 4 * 2)
    assert costs.memory.host_kv_blocks(1000, 4) == 1000 // (4 * 3 * 2 * 4 * 2)


def test_what_a_step_takes_lies_beside_the_blocks() -> None:
    t4 = StepCosts(load_shape("llama-2-7b"), load_machine("apex-t4")).memory
    assert t4.kv_blocks(1, 2048) == 1493  # a tenth of the device is enough for such a step
    assert t4.kv_blocks(1, 16_384) < 1000
    with pytest.raises(DoesNotFit, match="a step of 65,536 tokens leaves no room for one KV block"):
        t4.kv_blocks(16, 65_536)


def test_a_steps_bytes_are_its_widest_part_and_the_logits() -> None:
    counts = ModelCounts(tiny_model(), ParallelLayout(pipeline_parallel=2))
    widest = 8 + (8 + 2 * 16) + (16 + 8)  # the residual beside gate_up and down
    assert counts.step_bytes(100, 0) == 100 * widest * 2
    assert counts.step_bytes(100, 1) == 100 * widest * 2 + 100 * 32 * 32
    assert counts.step_bytes(1000, 1) == 1000 * widest * 2 + 256 * 32 * 32


def test_what_does_not_fit_says_by_how_much_and_what_would() -> None:
    costs = StepCosts(load_shape("qwen2.5-32b"), load_machine("l20"))
    with pytest.raises(DoesNotFit) as refusal:
        costs.memory.kv_blocks(16)
    words = str(refusal.value)
    assert "61.0 GiB of weights on each l20 in layout T1, 21.1 GiB more than the 40.0 GiB" in words
    assert "what would fit: 2 devices (layout P2) or 4-bit weights or 8-bit weights" in words
    assert StepCosts(
        load_shape("qwen2.5-32b"), load_machine("l20"), ParallelLayout(pipeline_parallel=2)
    ).memory.kv_blocks(16)
    eight = StepCosts(
        load_shape("qwen2.5-32b"), load_machine("l20"), None, Precision(weight_bits=8)
    )
    assert eight.memory.kv_blocks(16) > 0


def test_nothing_is_advised_that_would_not_fit(machine: Machine) -> None:
    tight = replace(machine, device=msgspec.structs.replace(machine.device, memory_bytes=600.0))
    with pytest.raises(DoesNotFit, match="no number of these devices"):
        StepCosts(tiny_experts(), tight).memory.kv_blocks(16)
