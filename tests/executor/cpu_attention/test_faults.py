"""Faults of the CPU's attention cost host sequences a recomputation, and nobody an answer."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from torch import Tensor

from nanoserve.executor.cpu_attention import host_attention
from nanoserve.executor.cpu_attention.cpu_attention import CpuAttention
from nanoserve.executor.cpu_attention.host_attention import HostAttentionThread
from nanoserve.executor.local import LocalExecutor
from nanoserve.request import FinishReason
from nanoserve.scheduler.cpu_attention.host_decoding import MOST_LOSSES
from tests.executor.cpu_attention.families import Model, small_model
from tests.executor.cpu_attention.lives import Case, HybridSeen, at_random, check, hybrid_engine
from tests.executor.small_model import mechanism_of
from tests.fakes.integrity import check_integrity, host_pool
from tests.scheduler.lives import Arrival

Attend = Callable[..., Tensor | None]


@pytest.fixture
def model() -> Model:
    return small_model("mistral")


class Clock:
    """A day passes when something hangs, and else the time it takes: what is slow does not count as
    hanging."""

    def __init__(self) -> None:
        self.days = 0

    def monotonic(self) -> float:
        return time.monotonic() + 86400 * self.days


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(host_attention, "time", clock)
    monkeypatch.setattr(host_attention, "SECOND_LOOK", 0.0)
    return clock


class Mishaps:
    """Something befalls the CPU's attention at some of its calls, counted from 1.

    Attributes:
        calls: so far.
        released: ends whatever hangs.
        clock: of those that wait for it.
    """

    def __init__(self, at: set[int], mishap: Callable[["Mishaps"], None], clock: Clock) -> None:
        self.calls = 0
        self.clock = clock
        self.released = threading.Event()
        self._at, self._mishap = at, mishap
        self._attend: Attend = host_attention.paged_attention

    def attend(self, *values: Any, **settings: Any) -> None:
        self.calls += 1
        if self.calls in self._at:
            self._mishap(self)
        self._attend(*values, **settings)


def fail(mishaps: Mishaps) -> None:
    raise RuntimeError("an operator failed\nin many lines")


def hang(mishaps: Mishaps) -> None:
    mishaps.clock.days += 1
    mishaps.released.wait(600)


def end(mishaps: Mishaps) -> None:
    raise SystemExit  # as nobody else ends a thread


MISHAPS = {"raises": fail, "hangs": hang, "dies": end}


@pytest.fixture
def befall(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Iterator[Callable[..., Mishaps]]:
    """befall(mishap, {3, 9}): it happens at these calls."""
    made: list[Mishaps] = []

    def begin(mishap: Callable[[Mishaps], None], at: set[int]) -> Mishaps:
        made.append(Mishaps(at, mishap, clock))
        monkeypatch.setattr(host_attention, "paged_attention", made[-1].attend)
        return made[-1]

    yield begin
    for mishaps in made:
        mishaps.released.set()


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Why the host's part was lost, each time."""
    told: list[str] = []
    collect = LocalExecutor.collect

    def collecting(self: LocalExecutor, until: float | None) -> Any:
        results = collect(self, until)
        told.extend(result.host.lost for result in results if result.host.lost is not None)
        return results

    monkeypatch.setattr(LocalExecutor, "collect", collecting)
    return told


@pytest.mark.parametrize(
    ("mishap", "strategy"),
    [("raises", "overlap"), ("raises", "asymmetric"), ("hangs", "overlap"), ("dies", "asymmetric")],
)
def test_a_lost_thread_costs_no_sequence_a_token(
    mishap: str, strategy: str, model: Model, befall: Callable[..., Mishaps], losses: list[str]
) -> None:
    befall(MISHAPS[mishap], {5, 40})
    case = Case("all on the host, " + strategy, num_blocks=30, host_blocks=200)
    seen = check(model, case, at_random(model, 2))
    assert len(losses) == 2 and seen.preemptions > 0, losses
    assert not any("\n" in problem for problem in losses)


@pytest.mark.parametrize("seed", range(2))
def test_losses_in_the_middle_of_everything(
    seed: int, model: Model, befall: Callable[..., Mishaps], losses: list[str]
) -> None:
    lots = random.Random(seed)
    befall(MISHAPS[lots.choice(("raises", "dies"))], {lots.randrange(1, 60), lots.randrange(1, 60)})
    check(model, Case("by lot", seed=seed), at_random(model, seed))
    assert losses


def test_a_thread_that_is_lost_time_and_again_is_done_without(
    model: Model, befall: Callable[..., Mishaps], losses: list[str]
) -> None:
    mishaps = befall(fail, set(range(1, 1000)))
    seen = check(model, Case("overlap", prefix_caching=False), at_random(model, 1))
    assert len(losses) == mishaps.calls == MOST_LOSSES
    assert seen.aborted < len(seen.sequences)


def test_the_device_goes_on_while_the_cpu_hangs(
    model: Model, befall: Callable[..., Mishaps], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a CPU that never comes back, and patience without end, the others get all their
    tokens."""
    mishaps = befall(hang, {2})
    monkeypatch.setattr(HostAttentionThread, "problem", None)
    with closing(hybrid_engine(model, Case("overlap"), HybridSeen())) as engine:
        for request in model.requests[:3]:
            engine.add(request)
        while mishaps.calls < 2 or engine.scheduler.running:
            engine.step()
        hybrid = mechanism_of(engine.executor, CpuAttention).hybrid  # type: ignore[arg-type]
        assert hybrid.pending and mishaps.calls == 2
        mishaps.released.set()
        while engine.has_work:
            engine.step()


def test_an_abort_in_mid_token(model: Model) -> None:
    """Its blocks come back when the token is there that nobody wants any more; its companions are
    not disturbed."""
    seen = HybridSeen()
    case = Case("all on the host, overlap", num_blocks=30, host_blocks=200)
    with closing(hybrid_engine(model, case, seen)) as engine:
        for request in model.requests[:4]:
            engine.add(request)
        hybrid = mechanism_of(engine.executor, CpuAttention).hybrid  # type: ignore[arg-type]
        while not any(len(group.rows) > 1 and group.layer == 1 for group in hybrid.pending):
            engine.step()
        group = next(group for group in hybrid.pending if len(group.rows) > 1)
        name = f"r{group.rows[0].sequence}"
        (update,) = engine.stop(name)
        assert update.sequence.finish_reason is FinishReason.ABORT
        check_integrity(engine.scheduler)
        while engine.has_work:
            engine.step()
            check_integrity(engine.scheduler)
        assert host_pool(engine.scheduler).free_blocks == 200
    for (request, index), sequence in seen.sequences.items():
        model.expected[request, index].check(sequence, request)


def test_a_host_tier_that_is_always_full(model: Model) -> None:
    """It has room for one or two of the requests at a time.

    Who is preempted depends on how soon the CPU answers, so only the moves are counted.
    """
    case = Case("by lot", host_blocks=9, seed=5)
    seen = check(model, case, [Arrival(0, request, None, None) for request in model.requests])
    assert seen.moves["out"] > 0


def test_a_step_without_memory_ends_what_is_in_flight_and_nothing_else(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups on their way are forgotten with it, and what comes later is answered."""
    case = Case("all on the host, overlap", num_blocks=30, host_blocks=200)
    first, second = model.requests[0], model.requests[1]
    seen = HybridSeen()
    with closing(hybrid_engine(model, case, seen)) as engine:
        engine.add(first)
        hybrid = mechanism_of(engine.executor, CpuAttention).hybrid  # type: ignore[arg-type]
        while not hybrid.pending:
            engine.step()
        with monkeypatch.context() as patch:
            patch.setattr(
                model.decoder,
                "apply_final_norm",
                lambda hidden: (_ for _ in ()).throw(MemoryError()),
            )
            while engine.has_work:
                super(type(engine), engine).step()
        assert not hybrid.pending
        engine.add(second)
        while engine.has_work:
            engine.step()
        assert host_pool(engine.scheduler).free_blocks == 200
    model.expected["r1", 0].check(seen.sequences["r1", 0], "the one behind")
