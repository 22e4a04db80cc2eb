"""The start of the command. From here on, Ctrl-C ends it with one line, even while the rest is
imported.

So this module imports only what Python has loaded at its start.
"""

import _signal  # the functions of `signal`, which imports other modules
import os


def run(*first: str) -> None:
    """The command ``nanoserve``; the words ``first`` are put before the process's arguments."""
    from nanoserve.commands.main import run as parse_and_act

    parse_and_act(*first, early_handler=interrupted)


def interrupted(number: int, frame: object) -> None:
    """End with one line; `nanoserve.commands.main` gives Ctrl-C back to Python once it can say that
    line itself."""
    os.write(2, b"nanoserve: interrupted\n")
    os._exit(130)


# otherwise it is ignored, as under nohup
if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, interrupted)
