"""Prompt lookup (Saxena 2023): the draft token is what followed the latest tokens when they last
came."""

from collections.abc import Sequence

LEAST_MATCH = 3
"""Tokens that must have come before; shorter matches are mostly chance."""
_BITS = 21
_MASK = (1 << _BITS * LEAST_MATCH) - 1
"""A run of tokens, whose ids are below 2^21, is one integer: many tuples keep the garbage collector
busy."""


class NgramIndex:
    """Where each run of LEAST_MATCH tokens of one sequence was last followed by something."""

    def __init__(self) -> None:
        self._after: dict[int, int] = {}
        self._read = self._run = 0  # tokens read, and the latest LEAST_MATCH of them

    def propose(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        """At most ``most`` tokens to follow these, which continue those of the last call. A match
        that reaches to the end goes on in its own draft tokens: what repeats is drafted to repeat
        again."""
        after, run = self._after, self._run
        for position in range(self._read, len(tokens)):
            if position >= LEAST_MATCH:
                after[run] = position
            run = (run << _BITS | tokens[position]) & _MASK
        self._read, self._run = len(tokens), run
        found = after.get(run) if len(tokens) > LEAST_MATCH else None
        if found is None:
            return ()
        draft_tokens = [*tokens[found : found + most]]
        period = len(tokens) - found
        while len(draft_tokens) < most:
            draft_tokens.append(draft_tokens[-period])
        return tuple(draft_tokens)
