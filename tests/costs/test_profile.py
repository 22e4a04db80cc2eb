"""A profile as a file, as step times, as a predictor, and as factors of the cost model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nanoserve.config.model_parts import LayerDifferences
from nanoserve.costs.curves import MeasuredCurve
from nanoserve.costs.hardware import Efficiency
from nanoserve.costs.profile import (
    MeasuredTimes,
    Prediction,
    Profile,
    RunFigures,
    calibrate,
    check_writable,
    read_profile,
    write_profile,
)
from nanoserve.costs.step_costs import StepCosts
from nanoserve.errors import RuntimeFailure, UsageError
from nanoserve.lab.simulator.pipeline import StepTimes, TieredTimes
from tests.costs.conftest import tiny_model
from tests.costs.profiles import curve, grid, made_up_profile


def test_a_step_worked_by_hand() -> None:
    times: StepTimes = MeasuredTimes(made_up_profile())
    work = times.work([20, 30], [(10, 10)], sampled=2)
    linear = 12 * 2  # tokens, layers
    decode = (2 * 25 / 100) * 2
    chunk = (0.4 - 0.1) * 2  # a prompt of 20 less one of 10
    assert times.stage_seconds(work, 0) == pytest.approx(linear + decode + chunk + 2)
    assert times.host_seconds(work) == pytest.approx(2.2 + 0.7)  # three rows
    assert times.with_engine(5.0).host_seconds(work) == pytest.approx(2.2 + 5.0)
    assert times.send_seconds(work, 0) == 0
    assert times.stage_seconds(times.work(), 0) == 0


def test_windows_bound_what_attention_reads() -> None:
    """One layer sees 20 positions, the other all."""
    times = MeasuredTimes(
        made_up_profile(tiny_model(layers=LayerDifferences(sliding_windows=(20, 0))))
    )
    decode = times.work([50])
    assert times.stage_seconds(decode) == pytest.approx(2 + 0.5 + 0.2 + 1)
    without = 40 * 2 + 1
    assert times.stage_seconds(times.work([], [(0, 40)])) == pytest.approx(
        without + 1.6 + 0.4 + 20 * 0.03
    )


def test_host_memory_worked_by_hand() -> None:
    times = MeasuredTimes(made_up_profile())
    assert isinstance(times, TieredTimes)
    assert times.host_attention_seconds(40) == pytest.approx(4)
    assert times.host_exchange_seconds(3) == pytest.approx(0.75)
    assert times.swap_seconds(10, 0) == pytest.approx(0.001 * 10 * 2 * 2 * 4 * 2)
    assert times.reload_seconds(0) == float("inf")


def test_a_file_brings_back_what_was_written(tmp_path: Path) -> None:
    figures = RunFigures(seconds=1.0, ttft_ms=2.0, tpot_ms=3.0)
    prediction = Prediction(
        workload="two", real=(figures, figures), by_profile=figures, by_factors=figures
    )
    profile = made_up_profile(efficiency=Efficiency(matrix=0.25), predictions=(prediction,))
    path = tmp_path / "profile.json"
    check_writable(path)
    write_profile(profile, path)
    assert read_profile(path, Profile) == profile


Change = Callable[[dict[str, Any]], Any]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda found: found.update(schema="nanoserve-bench/1"), "$.schema"),
        (lambda found: found.pop("linear"), "required field `linear`"),
        (lambda found: found.update(linea=1), "unknown field `linea`"),
        (lambda found: found["linear"].update(sizes=[1, "two"]), "$.linear.sizes[1]"),
        (
            lambda found: found["linear"].update(sizes=[10, 1]),
            "ascending, not [10, 1] - at `$.linear`",
        ),
        (lambda found: found["host_attention"]["seconds"].pop(), "$.host_attention"),
        (
            lambda found: found["device"].update(memory_bytes=0),
            "Expected `float` > 0.0 - at `$.device.memory_bytes`",
        ),
        (
            lambda found: found["host"].pop("memory_bytes"),
            "must have memory_bytes, and no measured",
        ),
        (
            lambda found: found["device"].update(measured=True),
            "must have memory_bytes, and no measured",
        ),
        (
            lambda found: found["efficiency"].update(matrix=2),
            "Expected `float` <= 1.0 - at `$.efficiency.matrix`",
        ),
        (lambda found: found["model"].update(num_layers="many"), "$.model.num_layers"),
    ],
)
def test_a_file_that_is_no_profile_is_refused_with_the_key(
    change: Change, says: str, tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    write_profile(made_up_profile(), path)
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))
    with pytest.raises(UsageError) as refused:
        read_profile(path, Profile)
    assert says in str(refused.value)
    assert str(path) in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*none\.json: No such file"):
        read_profile(tmp_path / "none.json", Profile)
    (tmp_path / "text.json").write_text("{")
    with pytest.raises(UsageError, match=r"text\.json is not a profile"):
        read_profile(tmp_path / "text.json", Profile)
    for place in ("none/profile.json", ".", "x" * 300):
        with pytest.raises(RuntimeFailure, match="cannot write"):
            check_writable(tmp_path / place)
    with pytest.raises(RuntimeFailure, match="cannot write"):
        write_profile(made_up_profile(), tmp_path / "none" / "profile.json")


def test_the_kv_cache_is_the_measured_engines() -> None:
    memory = made_up_profile().memory
    assert memory.kv_blocks(16) == 62
    with pytest.raises(UsageError, match="holds 1000 tokens, less than a block of 1001"):
        memory.kv_blocks(1001)


def test_calibration_finds_the_factors_that_the_times_were_made_with() -> None:
    """Times that the cost model itself gives for known factors: those factors come out."""
    known = Efficiency(
        matrix=0.5,
        attention=0.25,
        memory=0.4,
        processor=0.2,
        kernel_seconds=0.01,
        step_seconds=3.0,
        row_seconds=0.5,
    )
    device = msgspec.structs.replace(made_up_profile().device, flops=200.0)
    blank = made_up_profile(device=device, host=device, efficiency=known)
    costs = blank.step_costs()
    per_layer = costs.counts.layer_kv_bytes

    def decode(batch: int, context: int) -> float:
        return max(batch * context * per_layer / (100 * 0.4), batch * context * 32 / (200 * 0.5))

    def host(batch: int, context: int) -> float:
        return max(batch * context * per_layer / 100, batch * context * 32 / 200) / 0.2

    exact = made_up_profile(
        device=device,
        host=device,
        linear=curve(
            (1, 2, 4, 64, 128, 256),
            [layer_seconds(costs, tokens) for tokens in (1, 2, 4, 64, 128, 256)],
        ),
        decode_attention=grid((1, 2, 4), (10, 100), decode),
        host_attention=grid((1, 2, 4), (10, 100), host),
        prefill_attention=pairs_curve(rate=200 * 0.25),
        head=curve((1, 11), [head_seconds(costs, rows) for rows in (1, 11)]),
        inputs=curve((1, 11), (2.25, 4.75)),
        engine=curve((1, 11), (1.25, 3.75)),
    )
    found = calibrate(exact)
    for name in (
        "matrix",
        "attention",
        "memory",
        "processor",
        "kernel_seconds",
        "step_seconds",
        "row_seconds",
    ):
        assert getattr(found, name) == pytest.approx(getattr(known, name), rel=0.02), name


def layer_seconds(costs: StepCosts, tokens: int) -> float:
    """One of the two equal layers, without attention."""
    operators = costs.counts.products(costs.work([1] * tokens, sampled=0), 0)
    kernels = costs.efficiency.kernels_per_layer * costs.efficiency.kernel_seconds
    return sum(costs.operator_seconds(operator) for operator in operators) / 2 + kernels


def head_seconds(costs: StepCosts, rows: int) -> float:
    return costs.operator_seconds(costs.counts.product(costs.counts.head, rows))


def pairs_curve(rate: float) -> MeasuredCurve:
    """32 operations a pair."""
    return curve((10, 20, 40), [32 * size * (size + 1) / 2 / rate for size in (10, 20, 40)])


def test_what_caches_hold_counts_as_read_at_full_bandwidth() -> None:
    quick = grid((1, 4), (10, 100), lambda batch, context: 1e-6)
    found = calibrate(
        made_up_profile(
            decode_attention=quick, host_attention=quick, linear=curve((1, 10), (1e-6, 2e-6))
        )
    )
    assert (found.memory, found.processor, found.matrix) == (1.0, 1.0, 1.0)
