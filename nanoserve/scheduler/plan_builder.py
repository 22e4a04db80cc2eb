"""The plan builder: turns a Decision into a StepPlan, sequences in order of rank."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import islice

from msgspec.structs import replace

from nanoserve.request import Place, Sequence, Status
from nanoserve.scheduler.cohorts import HostCohorts
from nanoserve.scheduler.kv import NO_BLOCK
from nanoserve.scheduler.load import Decision, Load
from nanoserve.scheduler.plan import Begin, Copy, Row, StepPlan, Swap, work_of
from nanoserve.scheduler.sequence_table import SequenceTable, in_order
from nanoserve.scheduler.speculation.speculator import Speculator
from nanoserve.scheduler.work import Strategy

_PREFILL, _DECODE = Status.PREFILL, Status.DECODE  # Enum lookup is slow in Python 3.11; hoist it.
_DEVICE, _HOST, _MOVING = Place.DEVICE, Place.HOST, Place.MOVING
_FED = (0,)

MOST_LISTED = 1 << 14
"""Tokens that the parameters of the sequences which begin with a plan may list, unless it is one sequence. The executor
makes a table of them before the step: about 10 ms for so many. Most requests list none."""


@dataclass(kw_only=True)
class PlanBuilder:
    """A plan that is being put together. Its rows are in flight as soon as they are added.

    A sequence is skipped in this plan if ones before it need its blocks, whether it can be preempted now or is in
    flight. Once a sequence is skipped or short of blocks no waiting prompt is admitted, so that blocks taken from one
    sequence never go to one behind it. Without ranks, the order is that of age.
    """

    table: SequenceTable
    cohorts: HostCohorts
    in_flight: Collection[StepPlan]
    """The plans that have not ended."""
    load: Load
    decision: Decision
    now: float
    """Seconds on the executor's clock."""
    admits: bool
    """Whether waiting prompts may begin."""
    transition: int | None = None
    """The layout to change to, in a plan that holds nothing else."""
    rows: list[Row] = field(default_factory=list)
    """Rows on the device."""
    _host_rows: list[Row] = field(default_factory=list)
    _swaps: list[Swap] = field(default_factory=list)
    _begin: list[Begin] = field(default_factory=list)
    _copies: list[Copy] = field(default_factory=list)
    _skipped: set[int] = field(default_factory=set)
    _kept_free: int = 0
    _listed: int = 0
    """Tokens that the parameters of sequences which begin list."""
    _prompt_tokens: int = 0
    _other_rows: int = 0
    """Tokens of rows with more than one, and rows of any number but one."""

    def __post_init__(self) -> None:
        self.admits = self.admits and not self.table.waits_for_blocks
        self._blocks = self.table.blocks
        self._block_size, self._groups = self._blocks.pool.block_size, self._blocks.groups
        self._parks = self.decision.park and self._blocks.host_pool.num_blocks > 0

    @property
    def does_something(self) -> bool:
        return bool(self.rows or self._host_rows or self._swaps) or self.transition is not None

    def build(self, decodes: list[Sequence], prefills: list[Sequence], on_host: list[Sequence]) -> None:
        """Carry the decision out as far as the blocks go: swaps, then decodes, then prompts. The lists may enter the
        plan, in order; ``prefills`` are partly computed prompts. Host sequences may move to the device instead."""
        decision = self.decision
        if decision.swap_out and self._blocks.host_pool.num_blocks:
            decodes = self._swap_out(decodes)
        on_host = self._swap_in(on_host)
        if self._parks:
            self._keep_room_for_prompts(prefills)
        self._add_decodes(decodes)
        if decision.strategy == "overlap":
            for sequence in on_host[: decision.host_decodes[0]]:
                self._add_host_row(sequence, 0)
        elif decision.strategy == "asymmetric":
            self._finish_host_tokens(on_host)
        self._add_prefills(prefills)

    def add_guesses(self, speculator: Speculator) -> None:
        """Add guesses to the rows that are sampled, and ask for the next ones, where blocks are free for them. Each
        sequence that runs keeps a free block to grow into: no guess ever costs another sequence its blocks."""
        load, wanted = self.load, self.decision.guesses
        if speculator.rests() and wanted is None:
            return
        rows = [
            (place, row, sequence)
            for place, row in enumerate(self.rows)
            if row.sample and not row.fed and (sequence := self.table.sequences[row.sequence]).place is _DEVICE
        ]
        if not rows:
            return
        sequences = [sequence for *_, sequence in rows]
        beside = load.steps_in_flight, self._prompt_tokens
        chosen = speculator.choose(sequences, lambda: work_of(self.rows), load.predictor, wanted, *beside)
        pool, size, groups = self._blocks.pool, self._block_size, self._groups
        for (place, row, sequence), (guesses, draft) in zip(rows, chosen, strict=True):
            if not (guesses or draft):
                continue
            spare = max(0, pool.free_blocks // groups - len(self.table.running)) * size
            room = sequence.reach - sequence.computed + spare
            guesses = guesses[:room]
            draft = min(draft, room - len(guesses))
            if guesses or draft:
                new_blocks, _ = self._blocks.grow(sequence, len(guesses) + draft)
                blocks = row.new_blocks + tuple(new_blocks)
                count, tokens = len(guesses), row.tokens + guesses
                row = replace(row, tokens=tokens, guesses=count, draft=draft, new_blocks=blocks)
                self.rows[place] = sequence.in_flight[-1] = row
                sequence.computed += count

    def plan(self, step: int, layout: int) -> StepPlan:
        rows = (*self.rows, *self._host_rows)
        return StepPlan(
            step=step,
            begin=tuple(self._begin),
            rows=rows,
            copies=tuple(self._copies),
            swaps=tuple(self._swaps),
            end=self.table.take_ended(),
            layout=layout,
            strategy=self._strategy(),
            transition=self.transition,
            decodes=len(rows) - self._other_rows,
            prompt_tokens=self._prompt_tokens,
        )

    def _strategy(self) -> Strategy:
        """The decided one if a host row begins; else those under way go on, as they cannot come back before."""
        if not self.does_something:
            return "overlap"
        if self._host_rows:
            return self.decision.strategy
        return "overlap" if self.rows and self.cohorts else "device"

    # ---- decodes and prompts ----------------------------------------------------------------------------------

    def _add_decodes(self, ready: list[Sequence]) -> None:
        """The next token of as many sequences as decided, skipping those for which no room can be made."""
        skipped = self._skipped
        for sequence in islice(ready, self.decision.decodes):
            if sequence.sequence_id in skipped:
                continue
            has_room = sequence.computed < sequence.reach  # as for most decodes
            if has_room or (self._may_grow(sequence) and self._make_room(sequence, 1)):
                self._add_row(sequence, 1)

    def _add_prefills(self, ready: Iterable[Sequence]) -> None:
        """Prompts within the budget: first those partly computed, then waiting ones."""
        budget, table = self.decision.prefill_tokens, self.table
        for sequence in ready:
            if not self._may_begin(sequence):
                return
            if sequence.sequence_id not in self._skipped:
                budget -= self._add_chunk(sequence, budget)
        if not self.admits or self._skipped:
            return
        while budget > 0 and self._blocks.pool.free_blocks and table.free_slots > 0:
            if (prompt := table.next_waiting) is None or (self._parks and not self._can_park(prompt)):
                return
            if not self._may_begin(prompt):
                return
            table.admit(prompt)
            computed = self._add_chunk(prompt, budget) if self._fits_beside_decodes(prompt, budget) else 0
            if computed == 0:
                table.unadmit(prompt)
                return
            budget -= computed

    def _may_begin(self, sequence: Sequence) -> bool:
        """Whether the sequence has begun, or may begin with this plan beside those that do. One always may."""
        return sequence.begun or not self._listed or self._listed + _listed_by(sequence) <= MOST_LISTED

    def _fits_beside_decodes(self, prompt: Sequence, chunk: int) -> bool:
        """Whether the free blocks hold all that a new prompt needs at a time, and the decision's reserve for running
        decodes. What windows leave behind between its chunks is not counted."""
        if self._parks:  # decodes already keep room for it
            return True
        kept = self.load.running_decodes * self._groups if self.decision.admission_reserve else 0
        return self._missing_for(prompt, chunk) + kept <= self._blocks.pool.free_blocks

    def _missing_for(self, prompt: Sequence, chunk: int) -> int:
        """Blocks that a prompt needs beside those it has, if it is computed in such chunks."""
        if self.decision.whole_prompts:
            chunk = prompt.remaining
        table = prompt.block_table
        return self._blocks.most_held(len(prompt.tokens), chunk) - len(table) + table.count(NO_BLOCK)

    def _add_chunk(self, sequence: Sequence, budget: int) -> int:
        """Plan as much of the prompt as budget and free blocks hold; returns how many tokens."""
        if self._blocks.slides:  # what only earlier plans read is free for this one
            self._blocks.slide(sequence, sequence.computed)
        chunk = min(sequence.remaining, self._blocks.capacity(sequence))
        if self.decision.whole_prompts:
            if chunk < sequence.remaining or (chunk > budget and (self.rows or budget <= 0)):
                return 0
        else:
            chunk = min(chunk, budget)
        if chunk <= 0:
            return 0
        self._add_prompt_row(sequence, chunk)
        return chunk

    # ---- preemption -------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Preempt everything on the device, as soon as nothing of it is in flight."""
        running = self.table.running
        if not any(sequence.in_flight for sequence in running):
            for sequence in list(running):
                self._preempt(sequence, to_host=True)

    def force_first(self) -> None:
        """Nothing is in flight and the decision moved nothing: run the first sequence, whatever that takes."""
        sequence = self.table.first
        assert sequence is not None, "a sequence is neither running, on the host nor waiting, with nothing in flight"
        if sequence.place is _HOST:
            self._move_in(sequence)  # nothing runs, so the device is empty
            return
        if sequence.status is Status.WAITING:
            self.table.admit(sequence)
        if self._make_room(sequence, min(sequence.remaining, self._block_size)):
            budget = max(self.decision.prefill_tokens, self._block_size)
            add_row = self._add_prompt_row if sequence.status is _PREFILL else self._add_row
            add_row(sequence, min(sequence.remaining, self._blocks.capacity(sequence), budget))
        if not self.does_something:
            raise RuntimeError(f"sequence {sequence.sequence_id} does not fit an otherwise empty device")

    def _make_room(self, sequence: Sequence, count: int) -> bool:
        """Preempt sequences behind it, the last first, until ``count`` more positions fit."""
        while not self._blocks.fits(sequence, count):
            leaving = sum(len(swap.device_blocks) for swap in self.table.leaving("out"))  # at most: shared ones stay
            if leaving and count <= self._blocks.capacity(sequence) + leaving // self._groups * self._block_size:
                self.table.wait_for_blocks(sequence)
                return False
            victim = self.table.running.last
            if victim is None or in_order(victim) <= in_order(sequence):
                return False
            if victim.in_flight:
                # It can give way when it is answered. The next plan decides again.
                self._skipped.add(victim.sequence_id)
                self.table.wait_for_blocks(sequence)
                return False
            self._preempt(victim, to_host=self.decision.preempt_to_host)
        return True

    def _preempt(self, victim: Sequence, *, to_host: bool) -> None:
        """Take its blocks; it moves to the host if it decodes and there is room, else it is recomputed."""
        self._skipped.add(victim.sequence_id)
        moves = to_host and victim.status is _DECODE and victim.place is _DEVICE
        if not (moves and self._move_out(victim)):
            self.table.preempt(victim)

    # ---- swaps ------------------------------------------------------------------------------------------------

    def _swap_out(self, decodes: list[Sequence]) -> list[Sequence]:
        """Move decodes to the host as decided, the last first; returns those that may enter the plan. One that has
        computed no token since it came from there stays, or it could go to and fro endlessly. One in flight cannot move
        before its token, but does not enter the plan either."""
        chosen = [sequence for sequence in reversed(decodes) if sequence.begun][: self.decision.swap_out]
        for sequence in chosen:
            if not sequence.in_flight and not self._move_out(sequence):
                break
        leaving = {one.sequence_id for one in chosen if one.in_flight or one.place is _MOVING}
        return [sequence for sequence in decodes if sequence.sequence_id not in leaving]

    def _swap_in(self, ready: list[Sequence]) -> list[Sequence]:
        """Move host sequences to the device as decided, in order; returns those that stay. A block stays free for
        each decode to grow into, so that nothing has to leave again at once."""
        pool, table = self._blocks.pool, self.table
        for moved, sequence in enumerate(ready[: self.decision.swap_in]):
            growing = len(table.running) + len(table.moving)
            needed = self._blocks.blocks_to_return(sequence) + growing * self._groups
            if table.free_slots <= 0 or needed > pool.free_blocks:
                return ready[moved:]
            self._move_in(sequence)
        return ready[self.decision.swap_in :]

    def _move_out(self, decode: Sequence) -> bool:
        """Move a decode with nothing in flight to the host; False if there is no room for it."""
        if not self.table.host_has_room(decode, decode.computed):
            return False
        self._blocks.trim(decode)
        self._blocks.reserve(decode, decode.computed)
        self._swaps.append(self.table.begin_swap(decode, "out"))
        return True

    def _move_in(self, sequence: Sequence) -> None:
        """Move a host sequence with nothing in flight to the device; the blocks it needs are free."""
        self._blocks.take_back(sequence)
        self._swaps.append(self.table.begin_swap(sequence, "in"))

    # ---- parking ----------------------------------------------------------------------------------------------

    def _keep_room_for_prompts(self, partial: list[Sequence]) -> None:
        """Where prompts only pass through the device, its decodes must not grow into the room for the next one."""
        prompt = partial[0] if partial else self.table.next_waiting
        if prompt is None or self.decision.prefill_tokens <= 0:
            return
        may_begin = self.admits and self.table.free_slots > 0
        if partial or (may_begin and self._can_park(prompt)):
            self._kept_free = self._missing_for(prompt, self.decision.prefill_tokens)

    def _may_grow(self, decode: Sequence) -> bool:
        """Whether a decode may take a block. The first always may, so that the device empties in the end."""
        kept = self._kept_free
        free = self._blocks.pool.free_blocks
        return kept == 0 or decode is self.table.running.first or free >= kept + self._groups

    def _can_park(self, prompt: Sequence) -> bool:
        """Whether the host can hold the prompt and its first token."""
        return self.table.host_has_room(prompt, len(prompt.tokens) + 1)

    def _add_prompt_row(self, prompt: Sequence, count: int) -> None:
        """A prompt to be parked reserves host blocks and moves after its last row, unless one token is left to come."""
        if not self._parks:
            self._blocks.release_host(prompt)
        elif self._can_park(prompt):
            self._blocks.reserve(prompt, len(prompt.tokens) + 1)
        self._add_row(prompt, count)
        self._blocks.share_full(prompt, prompt.computed)
        if prompt.host_table and prompt.remaining == 0 and len(prompt.tokens) + 1 < prompt.max_length:
            self._swaps.append(self.table.begin_swap(prompt, "out", after_row=True))

    # ---- rows -------------------------------------------------------------------------------------------------

    def _add_row(self, sequence: Sequence, count: int) -> None:
        """Put ``count`` positions of a sequence into the plan; the blocks they need are free."""
        start, tokens = sequence.computed, sequence.tokens
        end = start + count
        new_blocks: list[int] | tuple[()] = ()
        if end > sequence.reach:  # else its last block has room, as for most decodes
            new_blocks, copies = self._blocks.grow(sequence, count)
            self._copies += [Copy(*copy) for copy in copies]
        if not sequence.begun:
            self._begin_sequence(sequence)
            new_blocks = sequence.block_table
        name, known = sequence.sequence_id, len(tokens)
        if start < known:
            if count == 1:
                planned: tuple[int, ...] = (tokens[start],)
            else:
                planned = tuple(tokens[start:end])
                self._prompt_tokens += count
                self._other_rows += 1
            row = Row(name, start, planned, end == known, tuple(new_blocks))
        else:  # its token is still being sampled
            row = Row(name, start, _FED, True, tuple(new_blocks), fed=True)
        self.rows.append(row)
        sequence.in_flight.append(row)
        sequence.computed = end

    def _begin_sequence(self, sequence: Sequence) -> None:
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

    # ---- rows on the host -------------------------------------------------------------------------------------

    def _finish_host_tokens(self, ready: list[Sequence]) -> None:
        """Two sub-batches of host sequences, which have their token when the step ends: first those under way."""
        first, second = self.decision.host_decodes
        # A plan in flight may finish the tokens under way: none of them can be named again before it ends.
        overlapping = any(plan.strategy == "overlap" for plan in self.in_flight)
        under_way = [] if overlapping else self.cohorts.most_advanced[:: -1 if self.decision.most_left_first else 1]
        for sequence in under_way[: first + second]:
            sub_batch = int(len(self._host_rows) >= first)
            row = Row(sequence.sequence_id, sequence.computed, (), sample=True, tier="host", sub_batch=sub_batch)
            self._host_rows.append(row)
        self._other_rows += len(self._host_rows)
        for sequence in ready[: first + second - len(self._host_rows)]:
            self._add_host_row(sequence, int(len(self._host_rows) >= first))

    def _add_host_row(self, sequence: Sequence, sub_batch: int) -> None:
        """The next token of a ready host sequence; skipped if no room can be made for it."""
        if sequence.sequence_id in self._skipped or not self._make_host_room(sequence):
            return
        start, length = sequence.computed, len(sequence.tokens)
        new_blocks = self._blocks.reserve(sequence, length)
        if not sequence.begun:
            self._begin_sequence(sequence)
            new_blocks = sequence.host_table
        tokens = tuple(sequence.tokens[start:])
        row = Row(sequence.sequence_id, start, tokens, True, tuple(new_blocks), tier="host", sub_batch=sub_batch)
        self._host_rows.append(row)
        sequence.in_flight.append(row)
        sequence.computed = length

    def _make_host_room(self, sequence: Sequence) -> bool:
        """As on the device: preempt host sequences behind it, the last first."""
        while not self._blocks.can_reserve(sequence, len(sequence.tokens)):
            victim = self.table.on_host.last
            if victim is None or in_order(victim) <= in_order(sequence) or victim.in_flight:
                return False
            if any(self.table.leaving("in")):
                return False
            self._preempt(victim, to_host=False)
        return True


def _listed_by(sequence: Sequence) -> int:
    return sequence.request.params.listed_tokens(len(sequence.tokens))
