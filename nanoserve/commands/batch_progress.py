"""What engines with two layouts do during an offline batch, counted between their steps."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from nanoserve.layout import ParallelLayout
from nanoserve.record.counters import EngineStatus
from nanoserve.request import SequenceUpdate

_MOVING = -1  # a phase is its layout's number, or this while an engine changes from one layout to another


@dataclass(slots=True)
class Phases:
    """What engines with two layouts do, and how fast, from what is seen between their steps.

    Where there are several engines, a second that one of them spends in a phase counts as its part of a second, so
    rates are those of all engines in that phase.
    """

    layouts: Sequence[ParallelLayout]  # that of prompts and that of decodes, of all engines together
    seconds: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))  # in each phase
    prompts: int = 0  # prompts with a known first token
    prompt_tokens: int = 0
    answer_tokens: int = 0  # generated, but for these first ones
    fullest: float = 0.0  # the largest share of host memory that was seen in use
    _seen: float = 0.0
    _status: EngineStatus | None = None
    _begun: set[tuple[str, int]] = field(default_factory=set)

    def observe(self, now: float, updates: Sequence[SequenceUpdate], status: EngineStatus) -> None:
        """Count what sequences gained until now, and the time since the last call to the phase that was then seen."""
        for update in updates:
            self.answer_tokens += len(update.new_tokens)
            if update.new_tokens and (sample := (update.request_id, update.index)) not in self._begun:
                self._begun.add(sample)
                self.answer_tokens -= 1
                if update.index == 0:  # further samples of a prompt begin with the KV of the first
                    self.prompts += 1
                    self.prompt_tokens += update.sequence.prompt_length - update.sequence.cached_tokens
        self._begun.difference_update((update.request_id, update.index) for update in updates if update.finished)
        for phase in self._phases:
            self.seconds[phase] += (now - self._seen) / len(self._phases)
        self._seen, self._status = now, status
        self.fullest = max(self.fullest, self.pool_share)

    @property
    def pool_share(self) -> float:
        """The share of the blocks in host memory that are in use."""
        if self._status is None or not self._status.total_host_blocks:
            return 0.0
        return 1 - self._status.free_host_blocks / self._status.total_host_blocks

    @property
    def state(self) -> str:
        """Phase, rates, host memory and transitions, for now; if phases differ, how many engines are in which."""
        counts = Counter(self._phases or [0])
        names = [
            "moving" if phase == _MOVING else f"{('prefill', 'decode')[phase]} {self.layouts[phase].name}"
            for phase in sorted(counts, reverse=True)
        ]
        if len(names) > 1:
            names = [f"{counts[phase]} {name}" for phase, name in zip(sorted(counts, reverse=True), names, strict=True)]
        return f"{', '.join(names)}, host pool {self.pool_share:.0%}, {self._turns}; {self._rates}"

    @property
    def summary(self) -> str:
        """The same, looking back."""
        return f"{self._rates}, host pool at most {self.fullest:.0%}, {self._turns}"

    def seconds_left(self, rows: int, finished: int, tokens: int) -> float | None:
        """Seconds until ``rows`` are done, at the pace of the ``finished`` ones with ``tokens``; None before any."""
        if not finished or not self.prompts:
            return None
        prompts_left = max(0, rows - self.prompts)
        tokens_left = max(0.0, rows * (tokens / finished - 1) - self.answer_tokens)
        if tokens_left and not self.answer_tokens:
            return None
        prefill, decode = self.seconds[0], self.seconds[1]
        seconds = prompts_left * prefill / self.prompts + tokens_left * decode / max(1, self.answer_tokens)
        return seconds * (1 + self.seconds[_MOVING] / max(prefill + decode, 1e-9))

    @property
    def _phases(self) -> list[int]:
        """The phase of each engine."""
        if self._status is None:
            return []
        pairs = zip(self._status.layouts, self._status.changing, strict=True)
        return [_MOVING if changing else layout for layout, changing in pairs]

    @property
    def _rates(self) -> str:
        done = (self.prompt_tokens, self.answer_tokens)
        return ", ".join(
            f"{layout.name} {tokens / self.seconds[phase]:,.0f} tokens/s" if self.seconds[phase] else f"{layout.name} -"
            for phase, (layout, tokens) in enumerate(zip(self.layouts, done, strict=True))
        )

    @property
    def _turns(self) -> str:
        """Transitions of all engines so far."""
        number = 0 if self._status is None else self._status.transitions
        return f"{number} transition" + "s" * (number != 1)
