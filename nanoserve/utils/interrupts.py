"""Ctrl-C, deferred to a moment when it does no harm."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt after the block instead of inside it; a second Ctrl-C is raised at
    once. An error of a block with a Ctrl-C becomes KeyboardInterrupt too: a library may have made
    it of the second one.

    This holds where Python raises it: in the main thread, with the default handler.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    interrupted = False

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    except Exception:
        if not interrupted:
            raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if interrupted:
        raise KeyboardInterrupt


@contextmanager
def prompt_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt at once inside the block: a `deferred_interrupts` in it does not wait
    for its end, and another handler of Ctrl-C rests. Nothing that is begun there may be gone on
    with. This holds in the main thread, unless Ctrl-C is ignored."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
