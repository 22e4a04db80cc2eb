"""Ctrl-C while it is deferred."""

import os
import signal

import pytest

from nanoserve.utils.interrupts import deferred_interrupts, prompt_interrupts


def _press(times: int) -> None:
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGINT)


def test_one_comes_after_the_block() -> None:
    done = False
    with pytest.raises(KeyboardInterrupt), deferred_interrupts():
        _press(1)
        done = True
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_one_comes_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), deferred_interrupts():
        _press(2)
        pytest.fail("it goes on")


def test_it_stays_an_interrupt_when_a_library_makes_another_error_of_it() -> None:
    with pytest.raises(KeyboardInterrupt), deferred_interrupts():
        try:
            _press(2)
        except KeyboardInterrupt:
            raise ValueError("could not determine the shape") from None


def test_errors_without_one_are_left_alone() -> None:
    with pytest.raises(ValueError, match="as it was"), deferred_interrupts():
        raise ValueError("as it was")


def test_what_is_left_for_good_is_not_deferred() -> None:
    reached = []
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), prompt_interrupts(), deferred_interrupts():
        signal.raise_signal(signal.SIGINT)
        reached.append("the line after it")
    assert reached == []
    assert signal.getsignal(signal.SIGINT) is handler
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as under nohup
    with prompt_interrupts():
        signal.raise_signal(signal.SIGINT)
