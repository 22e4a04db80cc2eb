"""Draft: turns a Decision into a StepPlan, oldest sequences first."""

from collections.abc import Iterable

from nanoserve.request import Sequence, Status
from nanoserve.scheduler.lifecycle import Lifecycle
from nanoserve.scheduler.load import Decision
from nanoserve.scheduler.plan import Begin, Copy, Row, StepPlan

_PREFILL, _DECODE = Status.PREFILL, Status.DECODE  # looking a member up takes Python 3.11 longer than a call


class Draft:
    """A plan that is being put together. What it takes up is in flight at once.

    Args:
        lifecycle: the sequences, their queues and blocks; the draft admits and preempts.
        decision: how much the plan shall hold.
        now: seconds on the executor's clock.

    Attributes:
        rows: by sequence.
    """

    def __init__(self, lifecycle: Lifecycle, decision: Decision, now: float) -> None:
        self.rows: dict[int, Row] = {}
        self._lifecycle = lifecycle
        self._blocks = lifecycle.blocks
        self._decision = decision
        self._now = now
        self._begin: list[Begin] = []
        self._copies: list[Copy] = []
        self._preempted = False

    def plan(self, step: int) -> StepPlan:
        """The finished plan."""
        return StepPlan(
            step=step,
            begin=tuple(self._begin),
            rows=tuple(self.rows.values()),
            copies=tuple(self._copies),
            end=self._lifecycle.take_ended(),
        )

    def add_decodes(self, ready: list[Sequence]) -> None:
        """The next token of as many sequences as decided; those for which no room can be made sit out."""
        for sequence in ready[: self._decision.decodes]:
            # An older one may have preempted it meanwhile.
            if sequence.status is _DECODE and self._make_room(sequence, 1):
                self._add_row(sequence, 1)

    def add_prefills(self, ready: Iterable[Sequence]) -> None:
        """Prompts within the budget: first those partly computed, then waiting ones."""
        budget = self._decision.prefill_tokens
        for sequence in ready:
            if sequence.status is _PREFILL:  # not preempted meanwhile
                budget -= self._add_chunk(sequence, budget)
        if self._preempted:
            return  # what was just taken from one sequence is not for a newer one
        lifecycle = self._lifecycle
        while budget > 0 and self._blocks.pool.free_blocks and len(lifecycle.running) < lifecycle.max_num_seqs:
            if (oldest := lifecycle.waiting.oldest) is None:
                return
            lifecycle.admit(oldest)
            computed = self._add_chunk(oldest, budget)
            if computed == 0:
                lifecycle.unadmit(oldest)
                return
            budget -= computed

    def _add_chunk(self, sequence: Sequence, budget: int) -> int:
        """Plan as much of the prompt as budget and free blocks hold; returns how many tokens."""
        chunk = min(sequence.remaining, self._blocks.capacity(sequence))
        if self._decision.whole_prompts:
            first = not self.rows
            if chunk < sequence.remaining or (chunk > budget and not (first and budget > 0)):
                return 0
        else:
            chunk = min(chunk, budget)
        if chunk <= 0:
            return 0
        self._add_row(sequence, chunk)
        return chunk

    def force_oldest(self) -> None:
        """Nothing is in flight and the decision moved nothing: run the oldest sequence, whatever that takes."""
        sequence = self._lifecycle.oldest
        assert sequence is not None, "a sequence is neither running nor waiting, with nothing in flight"
        if sequence.status is Status.WAITING:
            self._lifecycle.admit(sequence)
        block_size = self._blocks.pool.block_size
        if not self._make_room(sequence, min(sequence.remaining, block_size)):
            raise RuntimeError(f"sequence {sequence.sequence_id} does not fit an otherwise empty device")
        budget = max(self._decision.prefill_tokens, block_size)
        self._add_row(sequence, min(sequence.remaining, self._blocks.capacity(sequence), budget))

    def _make_room(self, sequence: Sequence, count: int) -> bool:
        """Preempt newer sequences, newest first, until ``count`` more positions fit."""
        while not self._blocks.fits(sequence, count):
            victim = next(reversed(self._lifecycle.running))
            if victim.sequence_id <= sequence.sequence_id:
                return False
            if victim.in_flight:
                # Its blocks come back with its answer; until then this sequence sits out.
                victim.preempt_when_answered = True
                return False
            self._lifecycle.preempt(victim)
            self._preempted = True
        return True

    def _add_row(self, sequence: Sequence, count: int) -> None:
        """Put ``count`` positions of a sequence into the plan; the blocks they need are free."""
        start, tokens = sequence.computed, sequence.tokens
        end = start + count
        new_blocks, copy = self._blocks.grow(sequence, count)
        if copy is not None:
            self._copies.append(Copy(*copy))
        if not sequence.begun:
            self._begin_sequence(sequence)
            new_blocks = sequence.block_table
        sample = end == len(tokens)
        self.rows[sequence.sequence_id] = Row(
            sequence.sequence_id, start, tuple(tokens[start:end]), sample, tuple(new_blocks)
        )
        sequence.in_flight = 1
        sequence.computed = end
        if sequence.status is _PREFILL:
            self._blocks.share_full(sequence)

    def _begin_sequence(self, sequence: Sequence) -> None:
        sequence.begun = True
        if sequence.first_scheduled_time is None:
            sequence.first_scheduled_time = self._now
        request = sequence.request
        begin = Begin(
            sequence=sequence.sequence_id,
            tokens=tuple(sequence.tokens),
            prompt_length=sequence.prompt_length,
            index=sequence.index,
            seed=request.seed,
            params=request.params,
            end_tokens=() if request.params.ignore_eos else request.end_tokens,
        )
        self._begin.append(begin)
