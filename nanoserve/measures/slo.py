"""Service-level objectives: what a good answer keeps to."""

import msgspec

from nanoserve.errors import UsageError
from nanoserve.measures.metrics import MILLISECONDS

SLO_NAMES = ("ttft", "tpot", "e2el")


class Slo(msgspec.Struct, frozen=True):
    """What a good answer keeps to, in milliseconds; None where anything is good enough."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    def allows(self, ttft: float, tpot: float | None, e2el: float) -> bool:
        """Whether times in seconds are within all of the limits; a TPOT that does not exist breaks none."""
        pairs = ((self.ttft, ttft), (self.tpot, tpot), (self.e2el, e2el))
        return not any(limit is not None and time is not None and time * MILLISECONDS > limit for limit, time in pairs)


def parse_slo(text: str | None) -> Slo | None:
    """``ttft=2000,tpot=100,e2el=30000``, any of them, in milliseconds. Raises UsageError for anything else."""
    if text is None:
        return None
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = (piece.strip() for piece in part.partition("="))
        try:
            limit = float(number)
        except ValueError:
            limit = -1.0
        if name not in SLO_NAMES or name in limits or not 0 < limit < float("inf"):
            raise UsageError(f"--slo takes milliseconds such as ttft=2000,tpot=100,e2el=30000, not {text!r:.100}")
        limits[name] = limit
    return Slo(**limits)
