"""The number of files and sockets that this process may have open at once."""

import os
import resource
from contextlib import suppress


def allow_descriptors(wanted: int) -> int:
    """Raise this process's limit of open files to `wanted`, as far as the system allows. Returns
    the number of files that it may open, at most `wanted`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    allowed = wanted
    if hard != resource.RLIM_INFINITY:
        allowed = min(wanted, hard)
    with suppress(OSError, ValueError):  # on macOS the system may allow fewer than the hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        return allowed
    return soft


def open_descriptors() -> int:
    """Count the files and sockets that are open now."""
    return len(os.listdir("/dev/fd")) - 1  # one is open to list them
