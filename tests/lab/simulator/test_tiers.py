"""Whole simulations with host memory, attention on the host and two layouts, by policies that do
one thing each."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from nanoserve.config.published_shapes import load_shape
from nanoserve.costs.hardware import load_machine
from nanoserve.costs.predictor import CostPredictor
from nanoserve.costs.step_costs import StepCosts
from nanoserve.errors import UsageError
from nanoserve.lab.simulator import SimulationResult, Workload, burst, fixed_lengths, simulate
from nanoserve.layout import ParallelLayout
from nanoserve.record.chrome_trace import ChromeTraceFile
from nanoserve.record.trace import RunTrace
from nanoserve.scheduler.load import Decision, Load, Policy
from nanoserve.scheduler.optional import HostDecision
from nanoserve.scheduler.policies.transition_minimizing import TransitionMinimizing
from nanoserve.scheduler.work import Strategy
from tests.lab.simulator.linear_times import LinearTimes
from tests.lab.simulator.tier_times import TierTimes
from tests.record.tracks import tracks_of


@dataclass(frozen=True)
class ParkThenAttend(Policy):
    """Computes a prompt a step, parks it, and attends for it on the host."""

    strategy: Strategy

    def decide(self, load: Load) -> Decision:
        if load.first_waiting_fits():
            return Decision(4, 0, whole_prompts=True, host=HostDecision(park=True))
        hosts = (load.host.ready, 0) if self.strategy == "overlap" else (0, load.host.decodes)
        return Decision(
            0, load.ready_decodes, host=HostDecision(strategy=self.strategy, decodes=hosts)
        )


class TwoLayouts(Policy):
    """Prompts in layout 0, each parked; then all answers in layout 1."""

    def decide(self, load: Load) -> Decision:
        if load.layouts.current == 0:
            if load.waiting_tokens or load.running_decodes or load.host.moving:
                return Decision(64, 0, whole_prompts=True, host=HostDecision(park=True))
            return Decision(0, 0, layout=1)
        return Decision(0, load.ready_decodes, host=HostDecision(swap_in=load.host.ready), layout=1)


def _run(
    policy: object, times: TierTimes, requests: int, answer: int, **settings: object
) -> SimulationResult:
    workload = Workload(burst(), fixed_lengths(4, answer), limit=requests)
    options = {"num_blocks": 40, "block_size": 4, "host_blocks": 30, **settings}
    return simulate(policy, times, workload, **options)  # type: ignore[arg-type]


def test_tokens_on_the_host_alone_by_hand() -> None:
    # The prompt takes 3 seconds, and its block, which leaves with it, 4. Each of 2 more tokens:
    # half a layer; the CPU 0.5; two halves, thrice; and the last half: 3 layers and 3 times the
    # CPU.
    result = _run(ParkThenAttend("overlap"), TierTimes(host_key=0.1), requests=1, answer=3)
    assert result.seconds == pytest.approx(4 + (3 + 3 * 0.5) + (3 + 3 * 0.6))
    assert (result.host_tokens, result.swapped_out_tokens, result.swapped_in_tokens) == (2, 4, 0)
    assert result.strategy_steps == {"device": 1, "overlap": 8}
    assert result.processor_share == pytest.approx(3 * 1.1 / result.seconds)
    assert result.host_peak == pytest.approx(2 / 30)


@pytest.mark.parametrize("strategy", ["overlap", "asymmetric"])
def test_everything_is_answered_on_the_host(strategy: Strategy) -> None:
    result = _run(ParkThenAttend(strategy), TierTimes(host_key=0.01), requests=6, answer=8)
    assert (result.requests, result.output_tokens, result.host_tokens) == (6, 48, 42)
    assert result.strategy_steps[strategy] > 0
    assert 0 < result.host_occupancy < result.host_peak < 1
    assert result.occupancies["host"] == result.host_series
    assert result.transitions == 0


def test_prompts_in_one_layout_and_answers_in_the_other() -> None:
    first, second = (
        TierTimes(num_stages=3, reload=6.0, swap_token=0.3),
        TierTimes(reload=5.0, swap_token=0.3),
    )
    result = _run(TwoLayouts(), first, requests=4, answer=5, other_layouts=[(second, 20)])
    assert (result.requests, result.output_tokens) == (4, 20)
    assert (result.transitions, result.transition_seconds) == (1, pytest.approx(5))
    # All prompts in one step through three stages of 1 second, with 4 swaps out of 0.4 each beside
    # it; 4 swaps in of 1.2; and steps.
    assert result.layout_seconds[0] == pytest.approx(3)
    assert result.layout_seconds[1] == pytest.approx(
        result.seconds - 5.0 - result.layout_seconds[0]
    )
    assert (result.swapped_out_tokens, result.swapped_in_tokens) == (16, 16)
    assert len(result.bubble_shares) == 3 + 1
    assert result.bubble_shares[0] == pytest.approx(1 - 1 / 3)


def test_decoding_begins_with_the_first_sequence_that_has_come_in() -> None:
    # Swaps in end 1.2, 2.4, 3.6 and 4.8 seconds after the transition, steps of 3 seconds begin at
    # 1.2, 4.2 and 7.2.
    first, second = TierTimes(num_stages=3, swap_token=0.3), TierTimes(reload=5.0, swap_token=0.3)
    result = _run(
        TransitionMinimizing(64), first, requests=4, answer=5, other_layouts=[(second, 20)]
    )
    assert (result.transitions, result.swapped_in_tokens) == (1, 16)
    assert [decodes for _, _, decodes, prompt_tokens in result.tokens_series if not prompt_tokens][
        :3
    ] == [1, 3, 4]


def test_a_fleet_adds_its_tiers_up() -> None:
    one = _run(ParkThenAttend("overlap"), TierTimes(host_key=0.01), requests=3, answer=4)
    three = _run(
        ParkThenAttend("overlap"), TierTimes(host_key=0.01), requests=9, answer=4, replicas=3
    )
    assert three.host_tokens == 3 * one.host_tokens == 27
    assert three.strategy_steps == {name: 3 * steps for name, steps in one.strategy_steps.items()}
    assert three.layout_seconds == pytest.approx([3 * one.seconds])
    assert three.processor_share == pytest.approx(one.processor_share)


def test_predictors_reach_the_policy() -> None:
    seen = []

    class Watching(Policy):
        def decide(self, load: Load) -> Decision:
            seen.append(load.predictor)
            return Decision(8, load.ready_decodes)

    costs = StepCosts(load_shape("llama-3.1-8b"), load_machine("apex-a10"))
    predictor = CostPredictor(costs)
    workload = Workload(burst(), fixed_lengths(4, 2), limit=1)
    simulate(Watching(), costs, workload, num_blocks=9, predictors=[predictor])
    assert seen
    assert all(one is predictor for one in seen)


def test_times_that_know_no_host_are_refused() -> None:
    workload = Workload(burst(), fixed_lengths(4, 2), limit=1)
    with pytest.raises(TypeError, match="see TieredTimes"):
        simulate(TwoLayouts(), LinearTimes(), workload, num_blocks=9, host_blocks=9)


def test_attention_on_the_host_is_refused_for_several_stages() -> None:
    with pytest.raises(UsageError, match="one pipeline stage, not for 3"):
        _run(ParkThenAttend("overlap"), TierTimes(num_stages=3), requests=1, answer=3)


def test_host_link_cpu_and_transitions_have_tracks_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    layouts = (ParallelLayout(pipeline_parallel=2), ParallelLayout(tensor_parallel=2))
    times = TierTimes(swap_token=0.3)
    with ChromeTraceFile(path) as file:
        trace = RunTrace(file, 0.0, layouts=layouts)
        _run(TwoLayouts(), times, 1, 3, other_layouts=[(times, 20)], observers=[trace])
    bars = tracks_of(json.loads(path.read_text()))
    assert set(bars) == {
        "micro-batch 0",
        "phases",
        "swaps",
        "worker 0",
        "worker 0, swaps out",
        "worker 0, swaps in",
    }
    assert [bar["name"] for bar in bars["worker 0"]] == [
        "compute",
        "re-shard to T2",
        *["compute"] * 2,
    ]
    assert [bar["name"] for bar in bars["swaps"]] == ["1 blocks out", "1 blocks in"]
    assert bars["swaps"][0]["args"] == {"swap": 0, "sequence": 0, "blocks": 1}
    assert [bar["args"] for bar in bars["worker 0, swaps out"]] == [{"swap": 0}], (
        "no bytes are known"
    )
    phases = ["prefill in P2", "draining P2", "re-shard to T2", "decode in T2"]
    assert [bar["name"] for bar in bars["phases"]] == phases


def test_attention_on_the_cpu_is_drawn_when_it_runs(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with ChromeTraceFile(path) as file:
        _run(
            ParkThenAttend("overlap"),
            TierTimes(host_key=0.1),
            1,
            2,
            observers=[RunTrace(file, 0.0)],
        )
    bars = tracks_of(json.loads(path.read_text()))
    assert [bar["name"] for bar in bars["attention on the CPU"]] == ["1 sequences"] * 3
    spans = [(bar["ts"] / 1e6, bar["dur"] / 1e6) for bar in bars["attention on the CPU"]]
    assert spans == [(4.5, 0.5), (6, 0.5), (7.5, 0.5)], "each between two halves of a layer"
