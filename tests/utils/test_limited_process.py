"""Processes that do untrusted work: time on the clock is held against nobody, and what is wrong is
named."""

import os
import signal
import time
from collections.abc import Iterator
from itertools import count

import pytest

from nanoserve.errors import RuntimeFailure
from nanoserve.text.chat_template import ChatTemplate
from nanoserve.text.grammar.checker import GrammarChecker
from nanoserve.utils import children
from nanoserve.utils.children import LimitedProcess, ProcessUnavailable, processor_seconds
from tests.text.grammar.conftest import BUNDLED

SCHEMA = '{"type":"object","properties":{"name":{"type":"string"}}}'


@pytest.fixture
def checker(monkeypatch: pytest.MonkeyPatch) -> Iterator[GrammarChecker]:
    """On a machine so busy that a start takes far longer than a child may be silent."""
    monkeypatch.setattr(children, "SILENCE_SECONDS", 0.02)
    checker = GrammarChecker(BUNDLED)
    yield checker
    checker.close()


def test_what_gets_on_is_waited_for(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = count()
    monkeypatch.setattr(children, "processor_seconds", lambda _process: next(ticks))
    checker.check(SCHEMA)
    assert checker.knows(SCHEMA)
    assert next(ticks) > 0


def test_silence_is_not_held_against_the_schema(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "processor_seconds", lambda _process: 0.0)
    with pytest.raises(
        ProcessUnavailable,
        match="the process that tries JSON schemas was killed 2 times, or stopped",
    ):
        checker.check(SCHEMA)


def test_a_stopped_process_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate({"default": "{{ messages | length }}"}, {}, "here")
    template.check()
    stopped = next(iter(template._sandboxes.values()))._process
    assert stopped is not None
    ticks = count()
    monkeypatch.setattr(children, "SILENCE_SECONDS", 0.02)
    monkeypatch.setattr(
        children, "processor_seconds", lambda one: 0.0 if one == stopped.pid else next(ticks)
    )
    stopped.send_signal(signal.SIGSTOP)
    assert template.render([{"role": "user", "content": "a"}]) == "1"
    assert stopped.returncode == -signal.SIGKILL
    template.close()


def test_a_process_that_does_not_start_says_so() -> None:
    process = LimitedProcess("nanoserve.nowhere", "the process of a test", {})
    with pytest.raises(
        RuntimeFailure, match=r"^the process of a test does not start: it ended with code 1$"
    ):
        process.ask("{}")


@pytest.mark.skipif(
    not os.path.exists("/proc/self/stat"), reason="nothing tells what another process has computed"
)
def test_processor_time_is_that_of_the_process() -> None:
    before, tick = time.process_time(), 1 / os.sysconf("SC_CLK_TCK")
    measured = processor_seconds(os.getpid())
    assert before - 2 * tick <= measured <= time.process_time() + 2 * tick
