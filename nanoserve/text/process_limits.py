"""Limits that a process sets on itself before it works for strangers."""

import signal
import sys


def limit_resources(memory: int, stack: int | None = None) -> None:
    """Bound this process's memory and stack in bytes, and let an interrupt at the terminal go to the parent alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if stack is not None:
            resource.setrlimit(resource.RLIMIT_STACK, (stack, stack))


def limit_time(seconds: float) -> None:
    """End this process when it has computed for `seconds`; 0 lifts the limit. Waiting does not count."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, seconds)
