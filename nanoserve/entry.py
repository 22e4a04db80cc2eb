"""The command's first step: from here on Ctrl-C ends in one line, also while the rest is imported.

So nothing is imported here that Python does not have already when it starts.
"""

import _signal  # what `signal`, which imports others, takes its functions from
import os


def run(*first: str) -> None:
    """The command ``nanoserve``; ``first`` are words put before the process's arguments."""
    from nanoserve.commands.main import run as parse_and_act

    parse_and_act(*first)


def interrupted(number: int, frame: object) -> None:
    """Say so and end; until `nanoserve.commands.main` does."""
    os.write(2, b"nanoserve: interrupted\n")
    os._exit(130)


if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:  # else it is ignored, as behind nohup
    _signal.signal(_signal.SIGINT, interrupted)
