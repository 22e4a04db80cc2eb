"""Quarantine: find the requests that kill worker processes, and tell when the machine is at fault
instead.

A dying worker takes all requests that run there with it. So requests that were in flight at two
deaths run one at a time while all others wait. A request that kills alone fails alone. Everything
fails if deaths go on without a culprit.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable

SUSPICIOUS_DEATHS = 2  # a request that was in flight at this many deaths is suspected
MAX_CULPRITS = 3  # if this many requests in a row kill alone, the machine is at fault
MAX_DEATHS = 3
DEATHS_SECONDS = 60.0
"""Everything fails after this many deaths without a culprit within this many seconds of running.
Starting does not count: a large model takes so long that workers which die at once would be started
forever."""


class Quarantine:
    def __init__(self) -> None:
        self._times_in_flight = Counter[str]()
        self._running = 0.0
        # Each death is a time on the clock, and the seconds that workers had run until then.
        self._deaths: deque[tuple[float, float]] = deque(maxlen=MAX_DEATHS)  # without a culprit
        # of culprits in a row
        self._lone_deaths: deque[tuple[float, float]] = deque(maxlen=MAX_CULPRITS)

    @property
    def suspect(self) -> str | None:
        """The request that runs alone until it has ended, if there is one."""
        return next(
            (name for name, times in self._times_in_flight.items() if times >= SUSPICIOUS_DEATHS),
            None,
        )

    def admits(self, request_id: str) -> bool:
        """Whether a request may run now."""
        return self.suspect in (None, request_id)

    def on_death(self, in_flight: Iterable[str], now: float, *, ran: float) -> str | None:
        """Note that workers died after running for ``ran`` seconds. Returns the request at fault,
        if a suspect ran alone."""
        self._running += ran
        death = (now, self._running)
        suspect = self.suspect
        requests = list(in_flight)
        if suspect is not None and requests == [suspect]:
            self._lone_deaths.append(death)
            self._deaths.clear()
            if len(self._lone_deaths) == MAX_CULPRITS:  # the machine is at fault
                self._deaths.extend(self._lone_deaths)
            return suspect
        self._times_in_flight.update(requests)
        self._deaths.append(death)
        return None

    @property
    def exhausted(self) -> str | None:
        """The number of deaths and their time span in words, once workers died too often; None
        before."""
        if len(self._deaths) < MAX_DEATHS:
            return None
        first, ran_before = self._deaths[0]
        last, ran = self._deaths[-1]
        if ran - ran_before >= DEATHS_SECONDS:
            return None
        return f"{MAX_DEATHS} times within {max(1, math.ceil(last - first))} s"

    def on_answer(self) -> None:
        """Note that a request has received its whole answer, so the machine works."""
        self._lone_deaths.clear()

    def forget(self, request_id: str) -> None:
        self._times_in_flight.pop(request_id, None)
