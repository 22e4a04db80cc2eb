"""``nanoserve profile`` from end to end, on a model so small that it takes no time; no time is
looked at."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from nanoserve.costs.profile import Profile, read_profile
from nanoserve.executor.profiling.parts import (
    Effort,
    beside_host,
    curve_of,
    difference_of,
    grid_of,
    over,
    take_rounds,
)
from nanoserve.lab.benchmarks.profiling import SIZES
from nanoserve.lab.benchmarks.roofline import BandwidthProbe
from tests.lab.benchmarks.conftest import Run

FEWEST_ROUNDS = 3
BRIEFLY = Effort(
    seconds=0.0, fewest_rounds=FEWEST_ROUNDS, most_rounds=FEWEST_ROUNDS, longest_sample=1.0
)


@pytest.fixture
def run(run_command: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs ``nanoserve ARGUMENTS`` here, with few sizes."""
    monkeypatch.setattr("nanoserve.lab.benchmarks.roofline._PRODUCT_SIZES", (64,))
    measuring = "nanoserve.lab.benchmarks.profiling"
    monkeypatch.setattr(f"{measuring}.BandwidthProbe", lambda: BandwidthProbe(2**20))
    monkeypatch.setattr(f"{measuring}.EFFORT", BRIEFLY)
    few = replace(
        SIZES, tokens=(1, 4, 40, 64), batches=(1, 4), contexts=(16, 32), copies=(2**10, 2**12)
    )
    monkeypatch.setattr(f"{measuring}.SIZES", replace(few, kv_bytes=2**20))
    monkeypatch.setattr("nanoserve.lab.benchmarks.profiling.MOST_REQUESTS", 4)
    return run_command


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    """A dummy model of two layers, whose context is too short for the longest kind of request."""
    config = {"model_type": "llama", "vocab_size": 4096, "hidden_size": 32, "intermediate_size": 48}
    config |= {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    config |= {
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "torch_dtype": "float32",
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return f"dummy:{path}"


def test_a_profile_is_measured_written_shown_and_simulated(
    run: Run, tiny: str, tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    limits = (
        "--max-num-batched-tokens",
        64,
        "--max-num-seqs",
        8,
        "--kv-cache-memory",
        "2MiB",
        "--eager",
        "--dtype",
        "float32",
    )
    code, out, err = run("profile", "-m", tiny, *limits, "--json", path)
    assert code == 0
    assert "measuring, round 3" in err
    for part in (
        "layer without attention",
        "decode attention",
        "4 x 32 keys",
        "head and sampling",
        "factors: matrix",
    ):
        assert part in out
    profile = read_profile(path, Profile)
    assert profile.model.num_layers == 2
    assert profile.linear.sizes == (1, 4, 40, 64)
    assert profile.decode_attention.contexts == (16, 32)
    assert profile.prefill_attention.sizes == (16, 32, 64)
    assert profile.engine.sizes == (1, 4)
    assert profile.host == profile.device
    assert profile.host_attention.batches == profile.host_exchange.sizes == (1, 4)
    assert profile.settings["rounds"] == FEWEST_ROUNDS
    assert profile.memory.kv_tokens == 2**21 // (2 * 2 * 2 * 8 * 4)
    closed, open_loop = profile.predictions
    assert closed.workload.startswith("4 requests of 85+64, at once")
    assert "a second" in open_loop.workload
    assert len(closed.real) == 3
    assert all(run.seconds > 0 for run in (*closed.real, closed.by_profile, closed.by_factors))

    report = tmp_path / "simulated.json"
    code, out, _ = run(
        "simulate", "--profile", path, "--requests", 3, "--lengths", "20+5", "--json", report
    )
    assert code == 0
    assert f"simulated: {tiny} on {profile.device.name}, as measured" in out
    document = json.loads(report.read_text())
    assert document["settings"]["kv_blocks"] == profile.memory.kv_tokens // 16
    assert document["rows"][0]["output_tokens"] == 15

    host = (
        "--host-kv-memory",
        "0.001GiB",
        "--num-blocks",
        4,
        "--policy",
        "overlap",
        "--json",
        report,
    )
    code, out, _ = run("simulate", "--profile", path, *host, "--requests", 6, "--lengths", "20+5")
    assert code == 0
    assert "4 KV blocks, 262 in host memory" in out
    assert json.loads(report.read_text())["rows"][0]["host_tokens"] > 0


def test_nothing_is_measured_if_the_file_cannot_be_written(run: Run, tmp_path: Path) -> None:
    code, out, err = run("profile", "--json", tmp_path / "none" / "profile.json")
    assert (code, out) == (1, "")
    assert "cannot write" in err
    assert "measuring" not in err


@pytest.mark.parametrize("limit", ["--max-num-batched-tokens", "--max-num-seqs", "--max-model-len"])
def test_an_engine_too_small_to_draw_lines_is_refused(run: Run, tiny: str, limit: str) -> None:
    code, _, err = run("profile", "-m", tiny, "--eager", limit, 2)
    assert code == 2
    assert f"{limit} is too small to profile" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "is not a profile (nanoserve-profile/3)"),
        (("--pp", 2), "--profile brings model and machine, and has one stage"),
        (("--model", "qwen3-8b"), "--profile brings model and machine, and has one stage"),
        (("--prefill-parallel", "P2"), "--profile has one layout"),
    ],
)
def test_simulate_refuses_in_one_line(
    run: Run, tmp_path: Path, arguments: tuple[object, ...], says: str
) -> None:
    path = tmp_path / "profile.json"
    path.write_text("{}")
    code, _, err = run("simulate", "--profile", path, *arguments)
    assert code == 2
    assert says in err
    assert len(err.splitlines()) == 1


def test_rounds_take_every_point_in_turn_and_forget_the_first() -> None:
    taken: list[int] = []

    def probe(number: int) -> Callable[[], float]:
        def sample() -> float:
            taken.append(number)
            return float(len(taken))

        return sample

    samples = take_rounds({"a": {(1,): probe(1), (2,): probe(2)}}, lambda text: None, BRIEFLY)
    assert taken == [1, 2] * (FEWEST_ROUNDS + 1)
    assert samples == {"a": {(1,): [3.0, 5.0, 7.0], (2,): [4.0, 6.0, 8.0]}}


def test_brief_samples_are_repeated_within_a_round() -> None:
    effort = replace(BRIEFLY, fewest_rounds=1, most_rounds=1, repeat_seconds=100.0)
    samples = take_rounds({"a": {(1,): lambda: 1.0}}, lambda text: None, effort)
    assert 1 < len(samples["a"][1,]) < 100


def test_without_time_for_a_round_the_warm_up_counts() -> None:
    effort = replace(BRIEFLY, fewest_rounds=0)
    assert take_rounds({"a": {(1,): lambda: 2.0}}, lambda text: None, effort) == {
        "a": {(1,): [2.0]}
    }


def test_sizes_beyond_one_that_takes_too_long_are_left_out() -> None:
    probes = {
        "curve": {(size,): lambda: 1.0 for size in (1, 2, 3)},
        "grid": {(1, size): lambda: 1.0 for size in (1, 2)},
    }
    samples = take_rounds(probes, lambda text: None, replace(BRIEFLY, longest_sample=-1.0))
    assert list(samples["curve"]) == [(1,), (2,)]  # two are always needed
    assert list(samples["grid"]) == [(1, 1), (1, 2)]


def test_workers_that_agree_on_a_clock_agree_on_what_is_sampled() -> None:
    """Sizes are cut, and rounds ended, by that clock alone: it moves only while a probe runs."""
    now = 0.0

    def probe(size: int) -> float:
        nonlocal now
        now += size
        return float(size)

    effort = Effort(seconds=15.0, fewest_rounds=1, most_rounds=100, longest_sample=3.0)
    samples = take_rounds({"a": over(probe, (1, 2, 4, 8))}, lambda text: None, effort, lambda: now)
    assert samples == {"a": {(1,): [1.0, 1.0], (2,): [2.0, 2.0], (4,): [4.0]}}


def test_curves_and_grids_are_medians_with_quartiles() -> None:
    found = curve_of({(1,): [3.0, 1.0, 2.0], (2,): [5.0, 5.0, 5.0]})
    assert (found.sizes, found.low, found.seconds, found.high) == (
        (1, 2),
        (1.5, 5.0),
        (2.0, 5.0),
        (2.5, 5.0),
    )
    less = difference_of(
        {(1,): [3.0, 1.0, 2.0], (2,): [5.0, 5.0, 5.0]}, {(1,): [0.5, 9.0], (2,): [6.0, 7.0]}
    )
    assert less.seconds[0] == 1.5
    assert 0 < less.seconds[1] < 1e-6
    cells = grid_of(
        {(1, 16): [1.0, 1.0], (1, 32): [2.0, 4.0], (2, 16): [5.0, 5.0], (2, 32): [6.0, 6.0]}
    )
    assert cells.seconds == ((1.0, 3.0), (5.0, 6.0))
    assert cells.low == ((1.0, 2.5), (5.0, 6.0))
    assert curve_of({(1,): [3.0], (2,): [5.0]}).low == (3.0, 5.0)


def test_the_device_is_slowed_no_more_than_the_threads_beside_it_explain() -> None:
    def found(beside: float) -> dict[str, dict[tuple[int, ...], list[float]]]:
        return {"alone": {(1, 16): [2.0]}, "beside host": {(1, 16): [beside]}}

    assert [beside_host(found(beside), 2.0) for beside in (1.0, 3.0, 9.0)] == [1.0, 1.5, 2.0]
    assert beside_host({}, 2.0) == 1.0
