"""The trace of hybrid steps: how each was run and predicted, what else was weighed, and what the
CPU did."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from nanoserve.costs.corrected_predictor import CorrectedPredictor
from nanoserve.engine.engine import Engine
from nanoserve.lab.simulator.executor import END_TOKEN, VOCAB_SIZE, SimulatedExecutor
from nanoserve.lab.simulator.fleet import drive
from nanoserve.record.chrome_trace import ChromeTraceFile
from nanoserve.record.events import Collected, ExecutorFailed
from nanoserve.record.forecasts import learn_from_results
from nanoserve.record.recorder import recorder_of
from nanoserve.record.trace import RunTrace, facts_of
from nanoserve.request import Request, SamplingParams
from nanoserve.scheduler import make_policy
from nanoserve.scheduler.assembly import make_extensions
from nanoserve.scheduler.optional import CohortProgress, HostPlan, HostResult, HostRow, HostWork
from nanoserve.scheduler.plan import Answer, Row, StepPlan, StepResult
from nanoserve.scheduler.scheduler import Scheduler
from tests.fakes.linear_predictor import LinearPredictor
from tests.lab.simulator.tier_times import TierTimes
from tests.record.planned import planned
from tests.record.tracks import tracks_of

LAYERS = 3


def events_of(path: Path) -> tuple[dict[str, list[dict[str, Any]]], list[dict[str, Any]]]:
    """Bars by the name of their track, and counters."""
    events = json.loads(path.read_text())
    return tracks_of(events), [event for event in events if event["ph"] == "C"]


@pytest.mark.parametrize("policy", ["overlap", "hybrid"])
def test_a_hybrid_run_tells_how_each_step_was_predicted(policy: str, tmp_path: Path) -> None:
    predictor = CorrectedPredictor(
        LinearPredictor(num_layers=LAYERS, linear=0.3, row=0.01, host_key=0.02)
    )
    scheduler = Scheduler(
        make_policy(policy, 32),
        num_blocks=24,
        block_size=2,
        max_model_len=48,
        prefix_caching=False,
        extensions=make_extensions(host_blocks=200),
        predictors=[predictor],
    )
    learn_from_results(scheduler)
    times = TierTimes(
        num_layers=LAYERS, layer=0.1, token=0.01, key=0.01, host_key=0.008, swap_token=0.01
    )
    requests = [
        Request(
            f"r{number}",
            (1,) * 9,
            SamplingParams(),
            12,
            end_tokens=(END_TOKEN,),
            arrival_time=number / 2,
        )
        for number in range(24)
    ]
    engine = Engine(scheduler, SimulatedExecutor(times, block_size=2), vocab_size=VOCAB_SIZE)
    file = ChromeTraceFile(tmp_path / "trace.json")
    recorder_of(engine).add(RunTrace(file, engine.now(), close=file.close))
    drive(engine, requests)
    engine.close()

    bars, counters = events_of(tmp_path / "trace.json")
    steps = [bar for name in bars if name.startswith("micro-batch") for bar in bars[name]]
    assert all(bar["args"]["measured_ms"] > 0 for bar in steps)
    # those without rows let the host go on
    predicted = [bar for bar in steps if bar["args"]["sequences"]]
    assert all(bar["args"]["predicted_ms"] > 0 for bar in predicted)
    overlapped = [bar for bar in steps if bar["args"]["strategy"] == "overlap"]
    assert overlapped
    assert all(bar["name"].startswith("overlap: ") for bar in overlapped)
    assert any(bar["args"].get("layers_of_cohorts") for bar in overlapped)
    weighed = [bar["args"]["alternatives"] for bar in predicted]
    if policy == "hybrid":
        assert any(set(one) == {"device", "overlap", "asymmetric"} for one in weighed)
    assert any(bar["args"]["decided"]["host_decodes"] != [0, 0] for bar in predicted)
    for name in ("attention on the CPU", "cohort 0"):
        spans = sorted((bar["ts"], bar["ts"] + bar["dur"]) for bar in bars[name])
        assert spans
        assert all(before[1] <= after[0] + 0.2 for before, after in pairwise(spans)), (
            "rounded to 0.1 us"
        )
    corrections = [
        one["args"] for one in counters if one["name"] == "corrections of the prediction"
    ]
    assert corrections[0]["linear"] == 1.0
    assert corrections[-1]["linear"] < 0.8


def test_a_step_that_nobody_predicted_tells_what_it_took() -> None:
    result = StepResult(7, host=HostResult(cohorts=(CohortProgress(5, 2),)), seconds=0.25)
    facts = {"strategy": "overlap", "measured_ms": 250.0, "layers_of_cohorts": {"step 5": 2}}
    assert facts_of(StepPlan(7, host=HostPlan(strategy="overlap")), None, result) == facts


def _result(time: float, result: StepResult) -> Collected:
    return Collected(time, time, (result,))


def on_host(*sequences: int) -> tuple[Row, ...]:
    return tuple(Row(sequence, 4, (1,), True, host=HostRow()) for sequence in sequences)


def test_the_cpus_work_is_drawn_back_to_back_up_to_when_it_was_told(tmp_path: Path) -> None:
    with ChromeTraceFile(tmp_path / "trace.json") as file:
        trace = RunTrace(file, 10.0)
        trace(
            _result(
                14.0,
                StepResult(None, host=HostResult(work=(HostWork(2, 18, 1.0), HostWork(1, 5, 2.0)))),
            )
        )
        # some of it was before 14
        trace(_result(16.0, StepResult(None, host=HostResult(work=(HostWork(1, 6, 3.0),)))))
        trace(_result(17.0, StepResult(1, host=HostResult(lost="it hangs"))))
    bars, _ = events_of(tmp_path / "trace.json")
    spans = [(bar["ts"] / 1e6, bar["dur"] / 1e6) for bar in bars["attention on the CPU"]]
    assert spans == [(1, 1), (2, 2), (4, 2), (7, 0)]
    assert bars["attention on the CPU"][0]["args"] == {"sequences": 2, "keys": 18, "ms": 1000.0}
    assert bars["attention on the CPU"][3]["name"] == "it hangs"


@pytest.mark.parametrize("end", ["answered", "lost", "host_lost"])
def test_a_cohort_lasts_until_all_of_it_is_answered_or_lost(end: str, tmp_path: Path) -> None:
    with ChromeTraceFile(tmp_path / "trace.json") as file:
        trace = RunTrace(file, 0.0)
        trace(planned(StepPlan(3, rows=on_host(5, 6), host=HostPlan(strategy="overlap")), 1.0))
        trace(planned(StepPlan(4, rows=on_host(7), host=HostPlan(strategy="overlap")), 2.0))
        trace(_result(3.0, StepResult(4, (Answer(5, (1,)),))))
        last = {
            "answered": StepResult(5, (Answer(6, (1,)),)),
            "lost": StepResult(5, lost="killed"),
            "host_lost": StepResult(5, host=HostResult(lost="killed")),
        }[end]
        trace(_result(4.0, last))
        trace(planned(StepPlan(6, rows=on_host(8), host=HostPlan(strategy="overlap")), 5.0))
        trace(_result(6.0, StepResult(6, (Answer(8, (1,)),))))
    bars, _ = events_of(tmp_path / "trace.json")
    first, another = bars["cohort 0"]
    assert (first["name"], first["ts"], first["dur"]) == ("2 host sequences", 1e6, 3e6)
    assert (another["ts"], another["args"]) == (5e6, {"step": 6})
    assert len(bars.get("cohort 1", [])) == (end != "answered")


def test_cohorts_of_a_failed_step_are_forgotten(tmp_path: Path) -> None:
    with ChromeTraceFile(tmp_path / "trace.json") as file:
        trace = RunTrace(file, 0.0)
        trace(planned(StepPlan(3, rows=on_host(5, 6), host=HostPlan(strategy="overlap")), 1.0))
        trace(ExecutorFailed(1.5))
        trace(_result(2.0, StepResult(None, lost="killed")))
    assert "cohort 0" not in events_of(tmp_path / "trace.json")[0]
