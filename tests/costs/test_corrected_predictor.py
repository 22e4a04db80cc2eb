"""A wrong profile is repaired by the steps that it mispredicts."""

import random
from collections.abc import Iterator
from math import exp
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.config.published_shapes import load_shape
from nanoserve.costs.corrected_predictor import CorrectedPredictor
from nanoserve.costs.hardware import load_machine
from nanoserve.costs.predictor import CostPredictor
from nanoserve.costs.step_costs import StepCosts
from nanoserve.scheduler.work import HostBatch, StepFeatures, StepWork
from tests.fakes.distorted_predictor import DistortedPredictor
from tests.fakes.linear_predictor import LinearPredictor

A10 = CostPredictor(StepCosts(load_shape("llama-3.1-8b"), load_machine("apex-a10")))
LAYERS = A10.num_layers
STEPS = 300


def device_step(decodes: int = 10, keys: int = 1000, *chunks: tuple[int, int]) -> StepFeatures:
    return StepFeatures(strategy="device", device=StepWork.of([keys] * decodes, chunks))


def random_steps(generator: random.Random, count: int = STEPS) -> Iterator[StepFeatures]:
    """Decodes, now and then a prompt beside them, and host sequences in two steps of three."""
    for _ in range(count):
        contexts = [generator.randint(100, 2000) for _ in range(generator.randint(1, 80))]
        chunks = (
            [(generator.choice([0, 512]), generator.randint(50, 1500))]
            if generator.random() < 0.3
            else []
        )
        device = StepWork.of(contexts, chunks)
        hosts = [
            HostBatch(
                size := generator.randint(1, 30), size * 900, generator.choice([0, 1, 9, LAYERS])
            )
            for _ in range(2)
        ]
        kind = generator.choice(["device", "overlap", "asymmetric"])
        if kind == "device":
            yield StepFeatures(strategy="device", device=device)
        elif kind == "overlap":
            yield StepFeatures(strategy="overlap", device=device, host=tuple(hosts))
        else:
            yield StepFeatures(
                strategy="asymmetric", device=device, host=(hosts[0],), host_second=(hosts[1],)
            )


def late_errors(
    predictor: CorrectedPredictor,
    seed: int,
    *,
    noise: float = 0.05,
    standstills: float = 0.0,
    count: int = STEPS,
) -> list[float]:
    """Relative errors of the last third of random steps, every one of which the predictor is told
    of."""
    generator, truth, errors = random.Random(seed), CorrectedPredictor(A10), []
    for step in random_steps(generator, count):
        seconds = truth.step_seconds(step)
        errors.append(abs(predictor.step_seconds(step) / seconds - 1))
        measured = seconds * exp(generator.gauss(0, noise))
        predictor.observe(step, 50 * measured if generator.random() < standstills else measured)
        for batch in (*step.host, *step.host_second):
            taken = A10.host_attention_seconds(batch.sequences, batch.context_tokens) * exp(
                generator.gauss(0, noise)
            )
            predictor.observe_host(batch.sequences, batch.context_tokens, taken)
    return errors[-count // 3 :]


# --------------------------------------------------------------------------------------------
# before any step


def test_unmeasured_it_says_what_its_base_says() -> None:
    predictor = CorrectedPredictor(A10)
    assert predictor.num_layers == LAYERS
    assert predictor.linear_seconds(64) == A10.linear_seconds(64)
    assert predictor.attention_seconds(1000) == A10.attention_seconds(1000)
    assert predictor.prefill_attention_seconds(1000) == A10.prefill_attention_seconds(1000)
    assert predictor.host_attention_seconds(3, 1000) == A10.host_attention_seconds(3, 1000)
    assert predictor.step_overhead_seconds() == A10.step_overhead_seconds()
    assert predictor.swap_seconds(100) == A10.swap_seconds(100)
    assert CorrectedPredictor(LinearPredictor(transition=7.0)).transition_seconds(1) == 7.0
    assert [predictor.slowdown(strategy) for strategy in ("device", "asymmetric", "overlap")] == [
        1,
        1,
        1,
    ]
    assert CorrectedPredictor(DistortedPredictor(A10, hybrid=1.5)).slowdown("overlap") == 1.5
    assert set(predictor.corrections.values()) == {1.0}


def test_a_step_of_the_device_takes_what_it_takes_in_the_simulator() -> None:
    costs = StepCosts(load_shape("llama-3.1-8b"), load_machine("apex-a10"))
    step = device_step(20, 1500, (256, 512))
    taken = costs.step_seconds(costs.work([1500] * 20, [(256, 512)]))
    # rows of prompts: see there
    assert CorrectedPredictor(A10).step_seconds(step) == pytest.approx(taken, rel=0.06)


# A layer takes 1 s and 1 s a row, a key 0.001 s on the device and 0.01 s on the CPU, a step 5 s
# more; 4 layers.
BY_HAND = CorrectedPredictor(
    LinearPredictor(linear=1.0, row=1.0, key=0.001, prompt_token=0.5, host_key=0.01, overhead=5.0)
)


def test_a_chunk_takes_what_a_prompt_to_its_end_takes_longer() -> None:
    # 4 rows: 5 s, 2 * 500 keys: 1 s, a prompt's tokens 7 and 8: 1 s, in four layers
    assert BY_HAND.step_seconds(device_step(2, 500, (6, 2))) == pytest.approx(4 * 7 + 5)


def test_host_rows_prolong_the_halves_of_layers_that_they_join() -> None:
    device = StepWork.of([500, 500])
    alone = 4 * (3 + 1) + 5
    # beginning, within, and behind the last of 4 layers
    for attended, halves in ((0, 1), (1, 2), (3, 2), (4, 1)):
        step = StepFeatures(strategy="overlap", device=device, host=(HostBatch(6, 600, attended),))
        assert BY_HAND.step_seconds(step) == pytest.approx(alone + halves / 2 * 6)


def test_host_rows_behind_the_last_layer_are_sampled_too() -> None:
    predictor = CorrectedPredictor(LinearPredictor(sampled_row=0.5, key=0.0))
    device = StepWork.of([500, 500])
    for attended, sampled in ((0, 2), (3, 2), (4, 8)):
        step = StepFeatures(strategy="overlap", device=device, host=(HostBatch(6, 600, attended),))
        assert predictor.step_seconds(step) == pytest.approx(4 + 0.5 * sampled)


def test_an_asymmetric_step_waits_for_whoever_takes_longer() -> None:
    device = StepWork.of([500, 500])
    hidden = StepFeatures(strategy="asymmetric", device=device, host_second=(HostBatch(1, 100),))
    # 1 s of CPU within 4 s
    assert BY_HAND.step_seconds(hidden) == pytest.approx(4 * (3 + 1 + 2) + 5)
    waiting = StepFeatures(
        strategy="asymmetric",
        device=device,
        host=(HostBatch(1, 900),),
        host_second=(HostBatch(1, 900),),
    )
    assert BY_HAND.step_seconds(waiting) == pytest.approx(4 * (9 + 9) + 5)


def test_rows_under_way_skip_the_layers_behind_them() -> None:
    # The CPU has the second of four layers: the rows come to its second half, and the CPU to the
    # third layer.
    under_way = StepFeatures(
        strategy="asymmetric", device=StepWork.of([500, 500]), host_second=(HostBatch(1, 900, 2),)
    )
    assert BY_HAND.step_seconds(under_way) == pytest.approx((4 + 0) + (4 + 2) + 2 * (9 + 2) + 5)


# -------------------------------------------------------------------------------------------------
# correction

FACTORS = st.floats(0.25, 4.0)


@settings(max_examples=6, deadline=None)
@given(
    st.tuples(FACTORS, FACTORS, FACTORS, FACTORS, FACTORS),
    st.floats(-0.15, 0.15),
    st.integers(0, 1000),
)
def test_a_profile_whose_parts_are_all_wrong_is_repaired(
    factors: tuple[float, ...], power: float, seed: int
) -> None:
    wrong = CorrectedPredictor(DistortedPredictor(A10, *factors, power=power))
    errors = late_errors(wrong, seed, standstills=0.02)
    assert median(errors) < 0.06
    assert max(errors) < 0.5


def test_a_right_profile_stays_right() -> None:
    assert median(late_errors(CorrectedPredictor(A10), 3)) < 0.03


def test_each_part_gets_the_factor_that_is_its_own() -> None:
    predictor = CorrectedPredictor(
        DistortedPredictor(A10, linear=0.5, attention=3.0, host_attention=2.0)
    )
    late_errors(predictor, 1, noise=0.02)
    for rows in (16, 64, 1000):
        assert predictor.linear_seconds(rows) == pytest.approx(A10.linear_seconds(rows), rel=0.1)
    for keys in (10_000, 80_000):
        assert predictor.attention_seconds(keys) == pytest.approx(
            A10.attention_seconds(keys), rel=0.35
        )
        assert predictor.host_attention_seconds(9, keys) == pytest.approx(
            A10.host_attention_seconds(9, keys), rel=0.1
        )
    assert predictor.corrections["host attention"] == pytest.approx(0.5, rel=0.1)


def test_a_standstill_does_little_and_is_soon_forgotten() -> None:
    predictor, step = CorrectedPredictor(A10), device_step()
    seconds = predictor.step_seconds(step)
    for _ in range(30):
        predictor.observe(step, seconds)
    predictor.observe(step, 1000 * seconds)
    assert predictor.step_seconds(step) < 1.3 * seconds
    for _ in range(10):
        predictor.observe(step, seconds)
    assert predictor.step_seconds(step) == pytest.approx(seconds, rel=0.02)


def test_a_first_step_that_warms_up_is_forgotten_too() -> None:
    predictor, step = CorrectedPredictor(A10), device_step()
    seconds = predictor.step_seconds(step)
    for measured in (100.0, 20.0, *[1.0] * 40):
        predictor.observe(step, measured * seconds)
    assert predictor.step_seconds(step) == pytest.approx(seconds, rel=0.05)


def test_a_machine_that_becomes_slower_for_good_is_followed() -> None:
    predictor, step = CorrectedPredictor(A10), device_step()
    seconds = predictor.step_seconds(step)
    for factor in [1.0] * 500 + [2.0] * 100:
        predictor.observe(step, factor * seconds)
    assert predictor.step_seconds(step) == pytest.approx(2 * seconds, rel=0.05)


def test_factors_are_bounded() -> None:
    predictor, step = CorrectedPredictor(A10), device_step()
    for _ in range(300):
        predictor.observe(step, 1e6)
        predictor.observe_host(10, 10_000, 1e-9)
    assert all(1 / 8.001 < factor < 8.001 for factor in predictor.corrections.values())
    assert predictor.host_attention_seconds(10, 10_000) == pytest.approx(
        A10.host_attention_seconds(10, 10_000) / 8, rel=0.01
    )


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_what_is_no_time_teaches_nothing(seconds: float) -> None:
    predictor = CorrectedPredictor(A10)
    predictor.observe(device_step(), seconds)
    predictor.observe_host(3, 1000, seconds)
    # waits
    predictor.observe(
        StepFeatures(strategy="overlap", device=StepWork(), host=(HostBatch(3, 1000, 1),)), 5.0
    )
    predictor.observe_host(0, 0, 1.0)
    assert predictor.step_seconds(device_step()) == CorrectedPredictor(A10).step_seconds(
        device_step()
    )


def test_a_strategy_that_slows_all_of_its_steps_down_is_known_for_it_until_it_is_not_used_for_long() -> (
    None
):
    predictor, generator = CorrectedPredictor(A10), random.Random(2)
    for step in random_steps(generator):
        seconds = CorrectedPredictor(A10).step_seconds(step)
        predictor.observe(step, 1.4 * seconds if step.strategy == "overlap" else seconds)
    assert predictor.slowdown("overlap") == pytest.approx(1.4, rel=0.05)
    assert predictor.slowdown("asymmetric") == pytest.approx(1.0, rel=0.05)
    seconds = CorrectedPredictor(A10).step_seconds(device_step())
    for _ in range(3000):
        predictor.observe(device_step(), seconds)
    assert 1.2 < predictor.slowdown("overlap") < 1.3


def test_who_was_told_the_same_predicts_the_same() -> None:
    one, other = CorrectedPredictor(A10), CorrectedPredictor(A10)
    assert late_errors(one, 7) == late_errors(other, 7)
    assert one.corrections == other.corrections
