"""Changing the parallel layout: the drain, what it costs, and that no policy can make it
endless."""

from collections.abc import Callable

import pytest

from nanoserve.errors import RuntimeFailure, UsageError
from nanoserve.request import FinishReason, Request, SamplingParams
from nanoserve.scheduler.load import Decision, Load, Policy
from nanoserve.scheduler.optional import HostDecision, LayoutPlan
from nanoserve.scheduler.plan import StepPlan
from tests.scheduler.tiered import Bench

TO_1 = Decision(64, 64, layout=1)


def _running(**settings: int) -> Bench:
    """Two that decode, of two blocks each, and a prompt that is partly computed."""
    bench = Bench(**settings)
    for name, length in (("a", 4), ("b", 4), ("c", 6)):
        bench.add(name, length, 3)
    bench.step(Decision(10, 0))
    return bench


def _transitions(bench: Bench) -> list[int]:
    return [plan.layouts.transition for plan in bench.plans if plan.layouts.transition is not None]


def test_the_oldest_move_to_the_host_and_the_others_are_computed_again() -> None:
    bench = _running(host_blocks=2, other=5)
    bench.step(TO_1)
    assert bench.swapped() == ["0 out"]
    bench.step()
    assert bench.plans[-1] == StepPlan(2, end=bench.plans[-1].end, layouts=LayoutPlan(transition=1))
    bench.step()
    assert (
        bench.load.layouts.current,
        bench.load.total_blocks,
        bench.scheduler.extensions.layouts.current,
    ) == (
        1,
        5,
        1,
    )
    assert bench.plans[-1].layouts.current == 1
    assert bench.scheduler.table.preemptions == 2
    bench.finish(Decision(64, 64, layout=1, host=HostDecision(swap_in=1)))
    assert _transitions(bench) == [1]


def test_nothing_new_is_planned_until_what_is_in_flight_has_ended() -> None:
    bench = _running(depth=2)
    bench.policy.decision = Decision(0, 1)
    plan = bench.scheduler.schedule(0.0)
    assert plan is not None
    bench.policy.decision = TO_1
    assert bench.scheduler.schedule(0.0) is None
    bench.executor.submit(plan)
    bench.finish()
    assert _transitions(bench) == [1]


def test_a_policy_that_changes_its_mind_while_the_device_drains_goes_on_where_it_was() -> None:
    bench = _running(swap_delay=2)
    bench.step(TO_1)
    bench.step(Decision(64, 64, host=HostDecision(swap_in=1)))
    assert bench.plans[-1].rows
    bench.finish()
    assert _transitions(bench) == []


def test_a_transition_forgets_the_prefix_cache() -> None:
    bench = Bench()
    bench.add("a", 4, 1)
    bench.step()
    bench.add("b", 4, 2)
    bench.step(Decision(64, 64, layout=1))
    again = Request(
        "again", bench.requests["a"].prompt, SamplingParams(temperature=0, max_tokens=1), seed=0
    )
    bench.requests["again"], bench.outputs["again"] = again, []
    bench.engine.add(again)
    (update,) = [one for one in bench.step() if one.request_id == "again"]
    assert update.sequence.cached_tokens == 0
    bench.finish()


@pytest.mark.parametrize(
    "wanted",
    [
        lambda load, asked: asked % 2,
        lambda load, asked: 1 - load.layouts.current,
        lambda load, asked: asked // 3 % 2,
    ],
    ids=["by turns", "always the other", "three and three"],
)
@pytest.mark.parametrize(
    "moves", [Decision(64, 64), Decision(1, 1, host=HostDecision(park=True)), Decision(0, 0)]
)
@pytest.mark.parametrize("host_blocks", [0, 3, 16])
def test_a_policy_that_keeps_changing_its_layout_lets_everything_finish(
    wanted: Callable[[Load, int], int], moves: Decision, host_blocks: int
) -> None:
    bench = Bench(host_blocks=host_blocks, other=8)

    class Restless(Policy):
        def decide(self, load: Load) -> Decision:
            bench.policy.loads.append(load)
            layout = wanted(load, len(bench.policy.loads))
            return Decision(
                moves.prefill_tokens,
                moves.decodes,
                host=HostDecision(park=moves.host.park, swap_in=1),
                layout=layout,
            )

    bench.scheduler.policy = Restless()
    for name in "abcd":
        bench.add(name, 5, 6)
    bench.finish()


def test_a_layout_there_is_not_is_passed_over() -> None:
    bench = Bench()
    bench.add("a", 4, 3)
    bench.finish(Decision(64, 64, layout=7))
    assert _transitions(bench) == []
    assert bench.load.layouts.count == 2


def test_what_does_not_fit_the_smallest_layout_is_refused() -> None:
    bench = Bench(other=3)
    with pytest.raises(
        UsageError, match="may grow to 8 tokens, which take 4 KV blocks, but there are 3"
    ):
        bench.add("a", 4, 4)


def test_a_transition_that_fails_leaves_the_layout_as_it_was() -> None:
    bench = _running(host_blocks=0)
    submit = bench.executor.submit

    def fails_to_change(plan: StepPlan) -> None:
        if plan.layouts.transition is not None:
            bench.executor.end(plan)
            raise RuntimeFailure("the weights did not arrive")
        submit(plan)

    bench.executor.submit = fails_to_change  # type: ignore[method-assign]
    assert bench.step(TO_1) == []
    assert bench.scheduler.extensions.layouts.current == 0
    bench.finish()
    assert bench.scheduler.extensions.layouts.current == 0


def test_a_prompt_that_is_given_up_while_the_device_drains_delays_nothing() -> None:
    bench = _running(swap_delay=1)
    bench.step(TO_1)
    bench.give_up("a")
    bench.give_up("c")
    bench.finish(Decision(64, 64, layout=1, host=HostDecision(swap_in=1)))
    assert _transitions(bench) == [1]
    assert FinishReason.ABORT not in {
        sequence.finish_reason for sequence in bench.scheduler.running
    }
