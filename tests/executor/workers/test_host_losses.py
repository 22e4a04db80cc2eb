"""One stage loses its attention on the CPU: what is told of host sequences from then on."""

from nanoserve.executor.workers.messages import HostLost
from nanoserve.executor.workers.outstanding import HostLosses
from nanoserve.scheduler.optional import CohortProgress, HostPlan, HostResult, HostRow, HostWork
from nanoserve.scheduler.plan import Answer, Row, StepPlan, StepResult


def plan(step: int, *, host: tuple[int, ...] = (), device: tuple[int, ...] = ()) -> StepPlan:
    rows = [Row(sequence, 4, (1,), sample=True, host=HostRow()) for sequence in host]
    rows += [Row(sequence, 4, (1,), sample=True) for sequence in device]
    return StepPlan(step, rows=tuple(rows), host=HostPlan(strategy="overlap" if host else "device"))


def result(step: int, *sequences: int) -> StepResult:
    return StepResult(step, tuple(Answer(sequence, (2,)) for sequence in sequences))


def heard_of(losses: HostLosses, told: StepResult) -> list[int]:
    return [answer.sequence for answer in losses.answered(told).answers]


def test_nothing_is_kept_back_as_long_as_nothing_is_lost() -> None:
    losses = HostLosses()
    losses.sent(plan(0, host=(1, 2), device=(3,)))
    told = StepResult(
        0,
        (Answer(3, (9,)),),
        host=HostResult(cohorts=(CohortProgress(0, 1),), work=(HostWork(2, 8, 0.1),)),
    )
    assert losses.answered(told) is told
    assert not losses.pending


def test_plans_in_flight_are_silent_about_host_sequences_and_end() -> None:
    losses = HostLosses()
    losses.sent(plan(0, host=(1, 2), device=(3,)))
    losses.sent(plan(1, host=(4,), device=(5,)))
    losses.heard(HostLost(1, "it hangs", forgotten=0))
    assert losses.pending
    assert losses.tell([0, 1]) == StepResult(None, host=HostResult(lost="worker 1: it hangs"))
    assert not losses.pending
    assert heard_of(losses, result(0, 3, 1, 2)) == [3]
    assert heard_of(losses, result(1, 5, 4)) == [5]
    again = plan(2, host=(4,), device=(1,))
    losses.sent(again)
    assert heard_of(losses, result(2, 1, 4)) == [1, 4]


def test_no_progress_is_told_of_cohorts_that_are_lost() -> None:
    losses = HostLosses()
    losses.sent(plan(0, host=(1,)))
    losses.heard(HostLost(0, "it died", forgotten=0))
    losses.tell([0])
    told = losses.answered(
        StepResult(0, host=HostResult(cohorts=(CohortProgress(0, 1),), work=(HostWork(1, 4, 0.1),)))
    )
    assert (told.host.cohorts, len(told.host.work)) == ((), 1)


def test_a_sequence_that_was_lost_and_runs_again_is_heard_of_after_another_loss() -> None:
    losses = HostLosses()
    losses.sent(plan(0, host=(1,)))
    losses.heard(HostLost(0, "it died", forgotten=0))
    losses.tell([0])
    losses.sent(plan(1, host=(7,), device=(1,)))
    losses.heard(HostLost(1, "it died too", forgotten=1))
    assert losses.tell([0, 1]).host.lost == "worker 1: it died too"
    assert heard_of(losses, result(0, 1)) == []
    assert heard_of(losses, result(1, 1, 7)) == [1]


def test_stages_that_fail_together_lose_once() -> None:
    """Two workers hang because the machine does, and one reports after the other."""
    losses = HostLosses()
    losses.heard(HostLost(0, "it hangs", forgotten=0))
    losses.heard(HostLost(1, "it hangs", forgotten=0))
    assert losses.tell([]).host.lost == "worker 0: it hangs"
    losses.heard(HostLost(2, "it hangs", forgotten=0))
    assert not losses.pending
    losses.heard(HostLost(2, "it hangs again", forgotten=1))
    assert losses.pending
