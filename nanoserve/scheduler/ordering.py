"""Ordering: which requests go before others, under a policy that ranks them."""

from collections import deque
from statistics import median_low

from nanoserve.errors import shown
from nanoserve.request import Request
from nanoserve.scheduler.load import Policy, policy_failures

MOST_USERS = 10_000
"""Users whose tokens are remembered. A client may make up as many names as it likes."""


class Ordering:
    """Asks the policy for the rank of each arriving request, and says when a request has waited
    long enough.

    ``fair_start`` is the start tag of start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996).
    The tags of a user's requests are the tokens of those before them: prompts count at once,
    answers when they have ended. A user who has asked for nothing lately begins at the virtual
    time, the highest tag that was admitted, so nobody can save up tokens, and a newcomer goes
    before the backlog of everybody else.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy, self._step = policy, 0
        self._young: deque[tuple[int, str]] = deque()  # step of arrival and name, oldest first
        self._virtual_time = 0.0
        self._asked: dict[str, float] = {}  # by user, the tag of the next request
        self._starts: dict[str, float] = {}  # by request that has not ended

    def rank(self, request: Request) -> float:
        """The rank of an arriving request. Raises PolicyFailed if the policy fails or answers no
        number."""
        start = max(self._virtual_time, self._asked.get(request.user, 0.0))
        with policy_failures(f"{type(self._policy).__name__}.rank"):
            rank = self._policy.rank(request, start)
            if not isinstance(rank, int | float) or rank != rank:
                raise ValueError(f"a rank is a number, not {shown(rank)}")
        self._starts[request.request_id], self._asked[request.user] = (
            start,
            start + len(request.prompt),
        )
        if len(self._asked) > MOST_USERS:
            self._virtual_time = max(self._virtual_time, median_low(self._asked.values()))
            self._asked = {
                user: tag for user, tag in self._asked.items() if tag > self._virtual_time
            }
        self._young.append((self._step, request.request_id))
        return rank

    def admit(self, request: Request) -> None:
        self._virtual_time = max(self._virtual_time, self._starts[request.request_id])

    def end(self, request: Request, answered: int) -> None:
        """A request has ended with this many tokens in all its answers."""
        del self._starts[request.request_id]
        self._asked[request.user] = (
            max(self._virtual_time, self._asked.get(request.user, 0.0)) + answered
        )

    def overdue(self, step: int) -> list[str]:
        """The requests that came ``Policy.aging`` steps before this one, and have not been named
        yet."""
        self._step, found = step, list[str]()
        while self._young and self._young[0][0] <= step - self._policy.aging:
            found.append(self._young.popleft()[1])
        return found
