"""Choosing how many draft tokens the rows of a step check: the numbers predicted to give most
tokens per second."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from nanoserve.scheduler.predictor import Predictor
from nanoserve.scheduler.work import MAX_DRAFT_TOKENS, StepWork

COUNTS = (0, 1, 2, 3, 4, 5, MAX_DRAFT_TOKENS)
"""Draft tokens that a row may have."""
_LEAST_GAIN = 1.02
"""Least predicted speed-up by speculation: a prediction may be a little wrong, and plain steps are
sure."""
_FADING = 0.9
"""Share of a sequence's record that counts at its next verification: about the last ten do."""
_PRIOR_TRIALS = 2.0
"""Draft tokens that the record of all sequences counts as, in that of a new one."""
_HIGHEST = 0.98


@dataclass(slots=True)
class Acceptance:
    """A running mean of how often a draft token is right, given that the draft tokens before it
    are."""

    accepted: float
    tried: float
    fading: float = _FADING

    def learn(self, draft_tokens: int, accepted: int) -> None:
        """Learn from a verified row of this many draft tokens. The first wrong one ends the lesson:
        later draft tokens tell nothing."""
        tried = min(accepted + 1, draft_tokens)
        self.accepted = self.fading * self.accepted + accepted
        self.tried = self.fading * self.tried + tried

    def rate(self, prior: float) -> float:
        """α, between 0 and 0.98."""
        accepted = self.accepted + _PRIOR_TRIALS * prior
        tried = self.tried + _PRIOR_TRIALS
        return min(_HIGHEST, accepted / tried)


def expected_tokens(rate: float, draft_tokens: int) -> float:
    """Tokens that a row answers, E = (1 - α^(k+1)) / (1 - α) (Leviathan et al. 2023, equation
    1)."""
    if rate >= 1:
        return draft_tokens + 1.0
    return (1 - rate ** (draft_tokens + 1)) / (1 - rate)


@lru_cache(maxsize=128)
def _pieces(percent: int) -> tuple[tuple[float, int, int], ...]:
    """From each of COUNTS to the next: how likely a draft token is right then, negative, and both;
    for α in percent."""
    rate, pieces = percent / 100, []
    for fewer, more in pairwise(COUNTS):
        lost = expected_tokens(rate, fewer) - expected_tokens(rate, more)
        likelihood = lost / (more - fewer)
        pieces.append((likelihood, fewer, more))
    return tuple(pieces)


def choose_counts(
    rates: Sequence[float],
    limits: Sequence[int],
    seconds: Callable[[int, int], float],
    budget: int,
    prompt_tokens: int,
) -> list[int]:
    """The number of draft tokens of each row, from COUNTS, that maximises (ΣE(α, k) + prompt
    tokens) / seconds(Σk, largest k), where the step has at most ``budget`` draft tokens; all 0 if
    speculation is not predicted to gain 2 %.

    A prompt's tokens are as good as an answer's: else draft tokens would seem to pay wherever a
    prompt makes a step long, though each of them delays it.

    Of all ways to spend n draft tokens the best takes the likeliest ones, as each row's next draft
    token is likelier to be right than the one after it. So only the number is searched.
    """
    pieces: list[tuple[float, int, int, int]] = []
    for row, (rate, limit) in enumerate(zip(rates, limits, strict=True)):
        if limit <= 0:
            continue
        for likelihood, fewer, more in _pieces(round(100 * rate)):
            if more > limit:
                break
            pieces.append((likelihood, row, fewer, more))
    pieces.sort()
    tokens = float(len(rates) + prompt_tokens)
    draft_tokens = largest = taken = 0
    best = _LEAST_GAIN * tokens / seconds(0, 0)
    for number, (likelihood, _, fewer, more) in enumerate(pieces, start=1):
        added = more - fewer
        draft_tokens += added
        largest = max(largest, more)
        tokens -= likelihood * added
        if draft_tokens > budget:
            break
        if number in _TRIED or number == len(pieces):
            tokens_per_second = tokens / seconds(draft_tokens, largest)
            if tokens_per_second > best:
                best, taken = tokens_per_second, number
    counts = [0] * len(rates)
    for _, row, _, more in pieces[:taken]:
        counts[row] = more
    return counts


_TRIED = frozenset(accumulate(range(4000), lambda number, _: number + 1 + number // 8, initial=1))
"""How many pieces are tried: all up to 8, then about an eighth more each time, to save time on the
CPU."""


def step_seconds(predictor: Predictor, work: StepWork) -> Callable[[int], float]:
    """Return a function that predicts the time of the step with a number of additional draft
    tokens. Draft tokens read the keys that their row reads anyway."""
    of_chunks = 0.0
    for start, length in work.chunks:
        of_chunks += predictor.prefill_attention_seconds(
            start + length
        ) - predictor.prefill_attention_seconds(start)
    attention = predictor.attention_seconds(work.decode_context) + of_chunks

    def seconds(draft_tokens: int) -> float:
        linear = predictor.linear_seconds(work.tokens + draft_tokens)
        overhead = predictor.step_overhead_seconds(work.sampled + draft_tokens)
        return predictor.num_layers * (linear + attention) + overhead

    return seconds
