"""The plan builder: turns a Decision into a StepPlan, oldest sequences first."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from nanoserve.request import Sequence, Status
from nanoserve.scheduler.load import Decision
from nanoserve.scheduler.plan import Begin, Copy, Row, StepPlan
from nanoserve.scheduler.sequence_table import SequenceTable

_PREFILL = Status.PREFILL  # Enum lookup is slow in Python 3.11; hoist it.
_FED = (0,)


@dataclass(kw_only=True)
class PlanBuilder:
    """A plan that is being put together. Its rows are in flight as soon as they are added.

    A sequence is skipped in this plan if older ones need its blocks, whether it can be preempted now or is in flight.
    Once a sequence is skipped or short of blocks no waiting prompt is admitted, so that blocks taken from one sequence
    never go to a newer one.
    """

    table: SequenceTable
    """The sequences, their queues and blocks; the builder admits and preempts."""
    decision: Decision
    """How much the plan shall hold."""
    now: float
    """Seconds on the executor's clock."""
    running_decodes: int
    """Decodes on the device, in flight or not."""
    admits: bool
    """Whether waiting prompts may begin."""
    transition: int | None = None
    """The layout to change to, in a plan that holds nothing else."""
    rows: dict[int, Row] = field(default_factory=dict)
    """Rows on the device, by sequence."""
    _begin: list[Begin] = field(default_factory=list)
    _copies: list[Copy] = field(default_factory=list)
    _skipped: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.admits = self.admits and not self.table.waits_for_blocks
        self._blocks = self.table.blocks
        self._block_size = self._blocks.pool.block_size

    @property
    def does_something(self) -> bool:
        """Whether it is worth a plan."""
        return bool(self.rows) or self.transition is not None

    def build(self, decodes: list[Sequence], prefills: list[Sequence]) -> None:
        """Carry the decision out as far as the blocks go.

        Args:
            decodes: those that may enter the plan, oldest first.
            prefills: partly computed prompts that may.
        """
        self._add_decodes(decodes)
        self._add_prefills(prefills)

    def plan(self, step: int, layout: int) -> StepPlan:
        """The finished plan."""
        return StepPlan(
            step=step,
            begin=tuple(self._begin),
            rows=tuple(self.rows.values()),
            copies=tuple(self._copies),
            end=self.table.take_ended(),
            layout=layout,
            transition=self.transition,
        )

    # ---- decodes and prompts ----------------------------------------------------------------------------------

    def _add_decodes(self, ready: Iterable[Sequence]) -> None:
        """The next token of as many sequences as decided, skipping those for which no room can be made."""
        size, fits, skipped, add_row = self._block_size, self._blocks.fits, self._skipped, self._add_row
        for sequence in islice(ready, self.decision.decodes):
            if sequence.sequence_id in skipped:
                continue
            has_room = sequence.computed < len(sequence.block_table) * size  # as for most decodes
            if has_room or fits(sequence, 1) or self._make_room(sequence, 1):
                add_row(sequence, 1)

    def _add_prefills(self, ready: Iterable[Sequence]) -> None:
        """Prompts within the budget: first those partly computed, then waiting ones."""
        budget, table = self.decision.prefill_tokens, self.table
        for sequence in ready:
            if sequence.sequence_id not in self._skipped:
                budget -= self._add_chunk(sequence, budget)
        if not self.admits or self._skipped:
            return
        while budget > 0 and self._blocks.pool.free_blocks and table.free_slots > 0:
            if (oldest := table.waiting.oldest) is None or not self._may_begin(oldest):
                return
            table.admit(oldest)
            computed = self._add_chunk(oldest, budget) if self._fits_beside_decodes(oldest) else 0
            if computed == 0:
                table.unadmit(oldest)
                return
            budget -= computed

    def _may_begin(self, prompt: Sequence) -> bool:
        """Whether a waiting prompt may be admitted, as far as other memory than the device's is concerned."""
        return True

    def _fits_beside_decodes(self, prompt: Sequence) -> bool:
        """Whether the free blocks hold all of a new prompt and one more for each running decode to grow into.

        Without that reserve the newest would soon be preempted and recomputed, over and over. A policy can switch it
        off, to show what it is worth.
        """
        kept = self.running_decodes * self._blocks.pool.block_size if self.decision.admission_reserve else 0
        return self._blocks.fits(prompt, prompt.remaining + kept)

    def _add_chunk(self, sequence: Sequence, budget: int) -> int:
        """Plan as much of the prompt as budget and free blocks hold; returns how many tokens."""
        chunk = min(sequence.remaining, self._blocks.capacity(sequence))
        if self.decision.whole_prompts:
            first = not self.rows
            if chunk < sequence.remaining or (chunk > budget and not (first and budget > 0)):
                return 0
        else:
            chunk = min(chunk, budget)
        if chunk <= 0:
            return 0
        self._add_row(sequence, chunk)
        return chunk

    # ---- preemption -------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Preempt everything on the device, as soon as nothing of it is in flight."""
        running = self.table.running
        if not any(sequence.in_flight for sequence in running):
            for sequence in list(running):
                self._preempt(sequence, to_host=True)

    def force_oldest(self) -> None:
        """Nothing is in flight and the decision moved nothing: run the oldest sequence, whatever that takes."""
        sequence = self.table.oldest
        assert sequence is not None, "a sequence is neither running, on the host nor waiting, with nothing in flight"
        if sequence.status is Status.WAITING:
            self.table.admit(sequence)
        block_size = self._blocks.pool.block_size
        if self._make_room(sequence, min(sequence.remaining, block_size)):
            budget = max(self.decision.prefill_tokens, block_size)
            self._add_row(sequence, min(sequence.remaining, self._blocks.capacity(sequence), budget))
        if not self.does_something:
            raise RuntimeError(f"sequence {sequence.sequence_id} does not fit an otherwise empty device")

    def _make_room(self, sequence: Sequence, count: int) -> bool:
        """Preempt newer sequences, newest first, until ``count`` more positions fit."""
        while not self._blocks.fits(sequence, count):
            leaving = self._blocks_leaving()
            if leaving and count <= self._blocks.capacity(sequence) + leaving * self._blocks.pool.block_size:
                self.table.wait_for_blocks(sequence)
                return False
            victim = self.table.running.newest
            if victim is None or victim.sequence_id <= sequence.sequence_id:
                return False
            if victim.in_flight:
                # It can give way when it is answered. The next plan decides again.
                self._skipped.add(victim.sequence_id)
                self.table.wait_for_blocks(sequence)
                return False
            self._preempt(victim, to_host=self.decision.preempt_to_host)
        return True

    def _blocks_leaving(self) -> int:
        """Blocks that will be free without preempting anything; some only with a host tier."""
        return 0

    def _preempt(self, victim: Sequence, *, to_host: bool) -> None:
        """Take its blocks; without a host tier it is always recomputed."""
        self._skipped.add(victim.sequence_id)
        self.table.preempt(victim)

    # ---- rows -------------------------------------------------------------------------------------------------

    def _add_row(self, sequence: Sequence, count: int) -> None:
        """Put ``count`` positions of a sequence into the plan; the blocks they need are free."""
        start, tokens = sequence.computed, sequence.tokens
        end = start + count
        new_blocks: list[int] | tuple[()] = ()
        if end > len(sequence.block_table) * self._block_size:  # else its last block has room, as for most decodes
            new_blocks, copy = self._blocks.grow(sequence, count)
            if copy is not None:
                self._copies.append(Copy(*copy))
        if not sequence.begun:
            self._begin_sequence(sequence)
            new_blocks = sequence.block_table
        name, known = sequence.sequence_id, len(tokens)
        if start < known:
            planned = (tokens[start],) if count == 1 else tuple(tokens[start:end])
            row = Row(name, start, planned, end == known, tuple(new_blocks))
        else:  # its token is still being sampled
            row = Row(name, start, _FED, True, tuple(new_blocks), fed=True)
        self.rows[name] = row
        sequence.in_flight.append(row)
        sequence.computed = end
        if sequence.status is _PREFILL:
            self._blocks.share_full(sequence, end)

    def _begin_sequence(self, sequence: Sequence) -> None:
        sequence.begun = True
        if sequence.first_scheduled_time is None:
            sequence.first_scheduled_time = self.now
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
