"""Requests through a real scheduler, on an executor with a clock of its own."""

import pytest

from nanoserve.engine.dispatcher import Dispatcher
from nanoserve.errors import RuntimeFailure, UsageError
from nanoserve.lab.benchmarks.driving import EngineDriver
from nanoserve.lab.benchmarks.floors import step_kind
from nanoserve.scheduler.work import StepWork
from tests.lab.benchmarks.fakes import VirtualExecutor, virtual_engine


def test_every_token_has_its_time() -> None:
    driver = EngineDriver(virtual_engine(VirtualExecutor()))
    run = driver.run([(1, 2, 3, 4)], [3])
    # four prompt tokens take two seconds, each decode half a second
    assert run.timings[0].token_times == (2.0, 2.5, 3.0)
    assert [step.executor_seconds for step in run.steps] == [2.0, 0.5, 0.5]
    assert [step_kind(step.work) for step in run.steps] == ["prefill", "decode", "decode"]


def test_each_request_gets_its_own_number_of_tokens() -> None:
    run = EngineDriver(virtual_engine(VirtualExecutor())).run([(1, 2), (3, 4, 5)], [1, 4])
    assert [(timing.input_tokens, timing.output_tokens) for timing in run.timings] == [
        (2, 1),
        (3, 4),
    ]
    assert run.tokens == ((0,), (1, 1, 1, 1))


def test_requests_of_several_engines_are_counted_together() -> None:
    """Both engines number their steps from 0; the steps overlap, so that none is said to have taken
    its time."""
    work: list[StepWork] = []
    several = Dispatcher([virtual_engine(VirtualExecutor()) for _ in range(2)], lambda until: None)
    run = EngineDriver(several, work.append).run([(1, 2), (3, 4, 5), (6, 7)], [3, 4, 2])
    assert [timing.output_tokens for timing in run.timings] == [3, 4, 2]
    assert sum(one.tokens - one.decodes for one in work) == 7
    assert sum(one.decodes for one in work) == 2 + 3 + 1
    assert run.steps == ()


def test_a_second_run_finds_nothing_in_the_cache() -> None:
    executor = VirtualExecutor()
    driver = EngineDriver(virtual_engine(executor))
    first, second = (driver.run([tuple(range(20))], [2]) for _ in range(2))
    assert first.timings == second.timings
    assert executor.plans[2].rows[0].start == 0


def test_a_request_that_fails_ends_the_run_and_leaves_nothing_behind() -> None:
    executor = VirtualExecutor(error="no numbers")
    engine = virtual_engine(executor)
    driver = EngineDriver(engine)
    with pytest.raises(RuntimeFailure, match="no numbers"):
        driver.run([(1, 2), (3, 4)], [5, 5])
    assert not engine.has_work
    executor.error = None
    assert driver.run([(1, 2)], [1]).timings[0].token_times == (1.0,)


def test_a_request_that_does_not_fit_is_refused() -> None:
    engine = virtual_engine(VirtualExecutor())
    with pytest.raises(UsageError, match="the context holds 64"):
        EngineDriver(engine).run([(1,), tuple(range(64))], [1, 1])
    assert not engine.has_work
