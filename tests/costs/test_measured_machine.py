"""A machine of measured speeds: the cost model takes them as they are."""

import math

import msgspec
import pytest

from nanoserve.config.published_shapes import load_shape
from nanoserve.costs.counts import Precision, divide_layers
from nanoserve.costs.hardware import Machine, MachineSpeeds
from nanoserve.costs.predictor import CostPredictor, layout_predictors
from nanoserve.costs.step_costs import StepCosts
from nanoserve.errors import UsageError
from nanoserve.layout import ParallelLayout

MODEL = load_shape("qwen3-0.6b")
SPEEDS = MachineSpeeds(
    memory_bandwidth=4e9,
    flops=100e9,
    host_link_bandwidth=5e9,
    link_bandwidth=1e9,
    link_latency=1e-4,
)
P2, T2 = ParallelLayout(pipeline_parallel=2), ParallelLayout(tensor_parallel=2)
MACHINE = SPEEDS.machine(devices=2, memory_bytes=2**33)


def predictors(machine: Machine, bits: int, *layouts: ParallelLayout) -> tuple[CostPredictor, ...]:
    return layout_predictors(
        [StepCosts(MODEL, machine, layout, Precision.of(bits)) for layout in layouts]
    )


def test_weights_and_keys_move_at_the_measured_speed_and_no_share_of_it() -> None:
    stages, ranks = predictors(MACHINE, 32, P2, T2)
    kv_bytes = 2 * MODEL.num_layers * MODEL.num_kv_heads * MODEL.head_dim * 4 / 2
    # the first stage has more layers, for the head
    longer = divide_layers(MODEL, 2)[0] / (MODEL.num_layers / 2)
    assert stages.swap_seconds(1000) == pytest.approx(1000 * kv_bytes * longer / 5e9)
    assert ranks.swap_seconds(1000) == pytest.approx(1000 * kv_bytes / 5e9)
    weights = (
        MODEL.num_layers * (2 * 2048 * 1024 + 2 * 1024 * 1024 + 3 * 1024 * 3072)
        + MODEL.vocab_size * 1024
    )
    assert (
        stages.transition_seconds(1)
        == ranks.transition_seconds(1)
        == pytest.approx(weights * 4 / 2 / 5e9, rel=1e-3)
    )
    # the tied embedding lies in both stages
    assert ranks.transition_seconds(0) > ranks.transition_seconds(1)


def test_half_the_bits_move_in_half_the_time() -> None:
    (wide,), (narrow,) = (predictors(MACHINE, bits, T2) for bits in (32, 16))
    assert wide.swap_seconds(512) == pytest.approx(2 * narrow.swap_seconds(512))


def test_tensor_parallelism_pays_for_a_slow_link_with_every_token() -> None:
    slow = msgspec.structs.replace(SPEEDS, link_bandwidth=1e6).machine(
        devices=2, memory_bytes=2**33
    )
    near, far = (predictors(machine, 32, P2, T2) for machine in (MACHINE, slow))
    # two all-reduces a layer, of two ranks
    more = 2 * 512 * MODEL.hidden_size * 4 * (1 / 1e6 - 1 / 1e9)
    assert far[1].linear_seconds(512) - near[1].linear_seconds(512) == pytest.approx(more)
    assert far[0].linear_seconds(512) == near[0].linear_seconds(512)


def test_one_worker_alone_has_a_link_that_takes_no_time() -> None:
    alone = MachineSpeeds(memory_bandwidth=4e9, flops=100e9, host_link_bandwidth=5e9)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(alone), type=MachineSpeeds) == alone
    (predictor,) = predictors(alone.machine(devices=1, memory_bytes=2**33), 32, ParallelLayout())
    assert 0 < predictor.linear_seconds(1) < math.inf


def test_speeds_of_a_cpu_do_not_overlap() -> None:
    cpu = msgspec.structs.replace(SPEEDS, overlaps=False).machine(devices=2)
    (both,), (longer,) = (predictors(machine, 16, P2) for machine in (cpu, MACHINE))
    # 25 tokens balance: 2 * 25 operations a byte
    assert 1.3 < both.linear_seconds(25) / longer.linear_seconds(25) <= 2


def test_what_cannot_be_is_refused() -> None:
    speeds = msgspec.to_builtins(SPEEDS)
    with pytest.raises(msgspec.ValidationError, match=r"Expected `float` > 0.0 - at `\$.flops`"):
        msgspec.convert(speeds | {"flops": 0.0}, MachineSpeeds)
    with pytest.raises(msgspec.ValidationError, match="link_latency"):
        msgspec.convert(speeds | {"link_latency": -1.0}, MachineSpeeds)
    with pytest.raises(UsageError, match="2 devices"):
        predictors(MACHINE, 32, ParallelLayout(tensor_parallel=4))
