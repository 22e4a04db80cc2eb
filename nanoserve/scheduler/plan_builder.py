"""The plan builder: turns a Decision into a StepPlan, sequences in order of rank."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from nanoserve.request import Sequence, Status
from nanoserve.scheduler.extension import Moments
from nanoserve.scheduler.kv import NO_BLOCK
from nanoserve.scheduler.load import Decision, Load
from nanoserve.scheduler.plan import Begin, Copy, Row, StepPlan
from nanoserve.scheduler.sequence_table import SequenceTable, in_order

_PREFILL = Status.PREFILL  # Enum lookup is slow in Python 3.11; hoist it.
_PLACEHOLDER = (0,)

MOST_LISTED = 1 << 14
"""Tokens that the parameters of the sequences which begin with a plan may list, unless it is one
sequence. The executor makes a table of them before the step: about 10 ms for so many. Most requests
list none."""


@dataclass(kw_only=True)
class PlanBuilder:
    """A plan that is being put together. Its rows are in flight as soon as they are added.

    A sequence is skipped in this plan if sequences before it need its blocks, whether it can be
    preempted now or is in flight. Without ranks, sequences are in order of age.

    Waiting prompts are admitted last, and only if all of this holds: the scheduler lets prompts
    begin (`admits`), no sequence is short of blocks (`SequenceTable.waits_for_blocks`), and none
    was skipped in this plan. So blocks taken from one sequence never go to one behind it.
    """

    table: SequenceTable
    moments: Moments
    load: Load
    decision: Decision
    now: float
    """Seconds on the executor's clock."""
    admits: bool
    """Whether waiting prompts may begin."""
    acts: bool = False
    """Whether an extension has put something into the plan beside the rows. Only extensions set
    it."""
    kept_free: int = 0
    """Blocks that decodes leave free, but for the first of them. Only extensions set it."""
    taken_tokens: int = 0
    """Tokens of the decision's budget for prompts that something else takes. Only extensions set
    it."""
    prompts_must_fit: bool = True
    """Whether a new prompt begins only if the free blocks hold all that it needs at a time. Only
    extensions set it."""
    rows: list[Row] = field(default_factory=list)
    skipped: set[int] = field(default_factory=set)
    """Sequences that get no row in this plan."""
    prompt_tokens: int = 0
    """Tokens of rows with more than one."""
    longer_rows: int = 0
    _begin: list[Begin] = field(default_factory=list)
    _copies: list[Copy] = field(default_factory=list)
    _listed: int = 0
    """Tokens that the parameters of sequences which begin list."""

    def __post_init__(self) -> None:
        self.admits = self.admits and not self.table.waits_for_blocks
        self._blocks = self.table.blocks
        self._block_size, self._groups = self._blocks.pool.block_size, self._blocks.groups

    @property
    def does_something(self) -> bool:
        return self.acts or bool(self.rows)

    def build(self, decodes: list[Sequence], prefills: list[Sequence]) -> None:
        """Carry the decision out as far as the blocks go: decodes, then prompts. The lists may
        enter the plan, in order; ``prefills`` are partly computed prompts."""
        moments = self.moments
        for before_rows in moments.before_rows:
            decodes = before_rows(self, decodes, prefills)
        self._add_decodes(decodes)
        for after_decodes in moments.after_decodes:
            after_decodes(self)
        self._add_prefills(prefills)
        for after_rows in moments.after_rows:
            after_rows(self)

    def plan(self, step: int) -> StepPlan:
        """Return the plan; the extensions have not completed it yet."""
        return StepPlan(
            step=step,
            begin=tuple(self._begin),
            rows=tuple(self.rows),
            copies=tuple(self._copies),
            end=self.table.take_ended(),
            decodes=len(self.rows) - self.longer_rows,
            prompt_tokens=self.prompt_tokens,
        )

    # ---- decodes and prompts ---------------------------------------------------------------------

    def _add_decodes(self, ready: list[Sequence]) -> None:
        """The next token of as many sequences as decided, skipping those for which no room can be
        made."""
        skipped, rows = self.skipped, self.rows
        for sequence in islice(ready, self.decision.decodes):
            if skipped and sequence.sequence_id in skipped:
                continue
            start, tokens = sequence.computed, sequence.tokens
            if start >= sequence.capacity:
                if self._may_grow(sequence) and self.make_room(sequence, 1):
                    self._add_row(sequence, 1)
            elif sequence.begun:
                # Its last block has room and the executor knows the rest, as for most decodes.
                if start < len(tokens):
                    row = Row(sequence.sequence_id, start, (tokens[start],), True)
                else:  # its token is still being sampled
                    assert start == len(tokens), "at most one token is still being sampled"
                    row = Row(sequence.sequence_id, start, _PLACEHOLDER, True, (), True)
                rows.append(row)
                sequence.in_flight.append(row)
                sequence.computed = start + 1
            else:
                self._add_row(sequence, 1)

    def _add_prefills(self, ready: Iterable[Sequence]) -> None:
        """Prompts within the budget: first those partly computed, then waiting ones."""
        budget, table = self.decision.prefill_tokens - self.taken_tokens, self.table
        for sequence in ready:
            if not self._may_begin(sequence):
                return
            if sequence.sequence_id not in self.skipped:
                budget -= self.add_chunk(sequence, budget)
        if not self.admits or self.skipped:
            return
        while budget > 0 and self._blocks.pool.free_blocks and table.free_slots > 0:
            prompt = table.next_waiting
            if prompt is None or not self._may_begin(prompt):
                return
            if not all(may_admit(self, prompt) for may_admit in self.moments.may_admit):
                return
            # first, so that the blocks of a prefix hit count as its own in the check
            table.admit(prompt)
            computed = 0
            if self._fits_beside_decodes(prompt, budget):
                computed = self.add_chunk(prompt, budget)
            if computed == 0:
                table.unadmit(prompt)
                return
            budget -= computed

    def _may_begin(self, sequence: Sequence) -> bool:
        """Whether the sequence has begun, or may begin with this plan beside those that do. One
        always may."""
        return (
            sequence.begun or not self._listed or self._listed + _listed_by(sequence) <= MOST_LISTED
        )

    def _fits_beside_decodes(self, prompt: Sequence, chunk: int) -> bool:
        """Whether the free blocks hold all that a new prompt needs at a time, and the decision's
        reserve for running decodes."""
        if not self.prompts_must_fit:
            return True
        kept = 0
        if self.decision.admission_reserve:
            kept = self.load.running_decodes * self._groups
        return self.missing_for(prompt, chunk) + kept <= self._blocks.pool.free_blocks

    def missing_for(self, prompt: Sequence, chunk: int) -> int:
        """Blocks that a prompt needs beside those it has, if it is computed in such chunks."""
        if self.decision.whole_prompts:
            chunk = prompt.remaining
        table = prompt.block_table
        return (
            self._blocks.most_held(len(prompt.tokens), chunk) - len(table) + table.count(NO_BLOCK)
        )

    def add_chunk(self, sequence: Sequence, budget: int) -> int:
        """Plan as much of the prompt as budget and free blocks hold; returns how many tokens the
        row has."""
        if self._blocks.slides:  # what only earlier plans read is free for this one
            self._blocks.slide(sequence, sequence.computed)
        chunk = min(sequence.remaining, self._blocks.capacity(sequence))
        if self.decision.whole_prompts:
            if chunk > budget and (self.rows or budget <= 0):
                return 0
        else:
            chunk = min(chunk, budget)
        chunk = self._blocks.cut(sequence, chunk, self.decision.prefill_tokens)
        if chunk <= 0 or (self.decision.whole_prompts and chunk < sequence.remaining):
            return 0
        self._add_prompt_row(sequence, chunk)
        return len(self.rows[-1].tokens)

    # ---- preemption ------------------------------------------------------------------------------

    def force_first(self) -> None:
        """Nothing is in flight and the decision moved nothing: run the first sequence, whatever
        that takes."""
        sequence = self.table.running.first or self.table.next_waiting
        for run_first in self.moments.run_first:
            if run_first(self, sequence):
                return
        assert sequence is not None, "a sequence runs or waits, as nothing is in flight"
        if sequence.status is Status.WAITING:
            self.table.admit(sequence)
        if self.make_room(sequence, min(sequence.remaining, self._block_size)):
            budget = max(self.decision.prefill_tokens, self._block_size)
            count = min(sequence.remaining, self._blocks.capacity(sequence), budget)
            if sequence.status is _PREFILL:
                self._add_prompt_row(sequence, self._blocks.cut(sequence, count, 0))
            else:
                self._add_row(sequence, count)
        if not self.does_something:
            raise RuntimeError(
                f"sequence {sequence.sequence_id} does not fit an otherwise empty device"
            )

    def _may_grow(self, decode: Sequence) -> bool:
        """Whether a decode may take a block. The first always may, so that the device empties in
        the end."""
        if self.kept_free == 0 or decode is self.table.running.first:
            return True
        return self._blocks.pool.free_blocks >= self.kept_free + self._groups

    def make_room(self, sequence: Sequence, count: int) -> bool:
        """Preempt sequences behind it, the last first, until ``count`` more positions fit. Returns
        whether they fit. If the sequence is itself the last, nothing is preempted, and it gets no
        row in this plan."""
        while not self._blocks.fits(sequence, count):
            if any(has_room_soon(sequence, count) for has_room_soon in self.moments.has_room_soon):
                self.table.wait_for_blocks(sequence)
                return False
            victim = self.table.running.last
            if victim is None or in_order(victim) <= in_order(sequence):
                return False
            self.skipped.add(victim.sequence_id)
            if victim.in_flight:
                # It can give way when it is answered. The next plan decides again.
                self.table.wait_for_blocks(sequence)
                return False
            if not any(rescue(self, victim) for rescue in self.moments.rescue):
                self.table.preempt(victim)
        return True

    # ---- rows ------------------------------------------------------------------------------------

    def _add_prompt_row(self, prompt: Sequence, count: int) -> None:
        """Put ``count`` positions of a prompt into the plan; its full blocks may be shared from now
        on."""
        self._add_row(prompt, count)
        self._blocks.share_full(prompt, prompt.computed)
        for after_prompt_row in self.moments.after_prompt_row:
            after_prompt_row(self, prompt)

    def _add_row(self, sequence: Sequence, count: int) -> None:
        """Put ``count`` positions of a sequence into the plan; the blocks they need are free."""
        start, tokens = sequence.computed, sequence.tokens
        assert start <= len(tokens), "at most one of its tokens is still being sampled"
        end = start + count
        new_blocks: list[int] | tuple[()] = ()
        if end > sequence.capacity:  # else its last block has room, as for most decodes
            new_blocks, copies = self._blocks.grow(sequence, count)
            self._copies += [Copy(source, target) for source, target in copies]
        if not sequence.begun:
            self.begin(sequence)
            new_blocks = sequence.block_table
        name, known = sequence.sequence_id, len(tokens)
        if start == known:  # its token is still being sampled
            row = Row(name, start, _PLACEHOLDER, True, tuple(new_blocks), placeholder=True)
        elif count == 1:
            row = Row(name, start, (tokens[start],), end == known, tuple(new_blocks))
        else:
            row = Row(name, start, tuple(tokens[start:end]), end == known, tuple(new_blocks))
            self.prompt_tokens += count
            self.longer_rows += 1
        self.rows.append(row)
        sequence.in_flight.append(row)
        sequence.computed = end

    def begin(self, sequence: Sequence) -> None:
        """Have the executor get to know a sequence with this plan."""
        sequence.begun = True
        self._listed += _listed_by(sequence)
        if sequence.first_scheduled_time is None:
            sequence.first_scheduled_time = self.now
        request = sequence.request
        self._begin.append(
            Begin(
                sequence=sequence.sequence_id,
                tokens=tuple(sequence.tokens),
                prompt_length=sequence.prompt_length,
                index=sequence.index,
                seed=request.seed,
                params=request.params,
                end_tokens=() if request.params.ignore_eos else request.end_tokens,
            )
        )


def _listed_by(sequence: Sequence) -> int:
    return sequence.request.params.listed_tokens(len(sequence.tokens))
