"""Limits on what the garbage collector looks at."""

import gc


def keep_what_is_loaded() -> None:
    """Let no later collection look at what is there now: libraries, and a model. They stay until the process ends, and
    to go through some 200,000 objects takes a tenth of a second, in which no token comes."""
    gc.collect()
    gc.freeze()
