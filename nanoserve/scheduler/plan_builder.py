"""The plan builder: turns a Decision into a StepPlan, oldest sequences first."""

from collections.abc import Iterable
from itertools import islice

from nanoserve.costs.step_features import Strategy
from nanoserve.request import Place, Sequence, Status
from nanoserve.scheduler.load import Decision
from nanoserve.scheduler.plan import Begin, Copy, Row, StepPlan
from nanoserve.scheduler.sequence_table import SequenceTable
from nanoserve.scheduler.tiers import Tiers

_PREFILL, _DECODE = Status.PREFILL, Status.DECODE  # Enum lookup is slow in Python 3.11; hoist it.
_DEVICE = Place.DEVICE
_FED = (0,)


class PlanBuilder:
    """A plan that is being put together. Its rows are in flight as soon as they are added.

    A sequence sits out this plan for one of three reasons: it was preempted or moved while older ones were planned; it
    is the victim of one of them and still in flight; or blocks are kept free for a prompt that is to be parked.
    Waiting prompts sit out as soon as any sequence was preempted or waits for blocks: what was taken from one sequence
    is not for a newer one.

    Args:
        table: the sequences, their queues and blocks; the builder admits and preempts.
        tiers: moves sequences between device and host memory; None without a host tier.
        decision: how much the plan shall hold.
        now: seconds on the executor's clock.
        running_decodes: on the device, in flight or not.
        admits: whether waiting prompts may begin.
    """

    def __init__(
        self,
        table: SequenceTable,
        tiers: Tiers | None,
        decision: Decision,
        now: float,
        *,
        running_decodes: int,
        admits: bool,
    ) -> None:
        self.decision = decision
        self.rows: dict[int, Row] = {}  # by sequence, of those on the device
        self.host_rows: dict[int, Row] = {}  # by sequence, of those on the host
        self.transition: int | None = None  # the layout to change to, in a plan that holds nothing else
        self._table = table
        self._tiers = tiers
        self._blocks = table.blocks
        self._now = now
        self._begin: list[Begin] = []
        self._copies: list[Copy] = []
        self._running_decodes = running_decodes
        self._kept_free = 0
        self._victim_in_flight: Sequence | None = None
        self._admits = admits and not table.waits_for_blocks

    @property
    def does_something(self) -> bool:
        """Whether it is worth a plan."""
        return bool(self.rows or self.host_rows) or self._swaps_begun or self.transition is not None

    @property
    def _swaps_begun(self) -> bool:
        return self._tiers is not None and self._tiers.has_begun_swaps

    def plan(self, step: int, layout: int) -> StepPlan:
        """The finished plan."""
        strategy = self._strategy()  # before the swaps are taken
        return StepPlan(
            step=step,
            begin=tuple(self._begin),
            rows=(*self.rows.values(), *self.host_rows.values()),
            copies=tuple(self._copies),
            swaps=() if self._tiers is None else self._tiers.take_begun(),
            end=self._table.take_ended(),
            layout=layout,
            strategy=strategy,
            transition=self.transition,
        )

    def _strategy(self) -> Strategy:
        """The decided one if a host row begins; otherwise host sequences under way go on, even on an idle device.

        A policy that lets no sequence begin does not want those under way to stand still: they cannot come back.
        """
        if not self.does_something:
            return "overlap"
        if self.host_rows:
            return self.decision.strategy
        under_way = self._tiers is not None and len(self._tiers.cohorts) > 0
        return "overlap" if self.rows and under_way else "device"

    # ---- decodes ----------------------------------------------------------------------------------------------

    def keep_room_for_prompts(self, partial: list[Sequence], tiers: Tiers) -> None:
        """Where prompts only pass through the device, its decodes must not grow into the room for the next one."""
        prompt = partial[0] if partial else self._table.waiting.oldest
        if prompt is None or self.decision.prefill_tokens <= 0:
            return
        may_begin = self._admits and self._table.free_slots > 0
        if partial or (may_begin and tiers.has_room_to_park(prompt)):
            self._kept_free = self._blocks.pool.blocks_for(len(prompt.tokens)) - len(prompt.block_table)

    def add_decodes(self, ready: list[Sequence]) -> None:
        """The next token of as many sequences as decided, skipping those for which no room can be made."""
        keeps_free, fits = self._kept_free > 0, self._blocks.fits
        for sequence in ready[: self.decision.decodes]:
            if keeps_free and not self._leaves_room_for_prompts(sequence):
                continue
            stays = sequence.status is _DECODE and sequence.place is _DEVICE and sequence is not self._victim_in_flight
            if stays and (fits(sequence, 1) or self._make_room(sequence, 1)):
                self._add_row(sequence, 1)

    def _leaves_room_for_prompts(self, sequence: Sequence) -> bool:
        """Whether it may grow. The oldest always may, so that the device empties some day."""
        return (
            self._blocks.fits_its_own(sequence, 1)
            or sequence is self._table.running.oldest
            or self._blocks.pool.free_blocks > self._kept_free
        )

    def begin_host_tokens(self, ready: list[Sequence]) -> None:
        """Asynchronous overlap: as many host sequences as decided begin a token, if there is room for it."""
        for sequence in ready[: self.decision.host_decodes[0]]:
            self._add_host_row(sequence, 0)

    def finish_host_tokens(self, under_way: Iterable[Sequence], ready: list[Sequence]) -> None:
        """Two sub-batches of host sequences, which have their token when the step ends: first those under way."""
        first, second = self.decision.host_decodes
        for sequence in islice(under_way, first + second):
            sub_batch = int(len(self.host_rows) >= first)
            row = Row(sequence.sequence_id, sequence.computed, (), sample=True, tier="host", sub_batch=sub_batch)
            self.host_rows[sequence.sequence_id] = row
        for sequence in ready[: first + second - len(self.host_rows)]:
            self._add_host_row(sequence, int(len(self.host_rows) >= first))

    def _add_host_row(self, sequence: Sequence, sub_batch: int) -> None:
        """The next token of a ready host sequence; skipped if no room can be made for it."""
        if sequence.status is not _DECODE or not self._make_host_room(sequence):
            return
        start, length = sequence.computed, len(sequence.tokens)
        new_blocks = self._table.host_tier.reserve(sequence, length)
        if not sequence.begun:
            self._begin_sequence(sequence)
            new_blocks = sequence.host_table
        row = Row(
            sequence.sequence_id,
            start,
            tuple(sequence.tokens[start:]),
            sample=True,
            new_blocks=tuple(new_blocks),
            tier="host",
            sub_batch=sub_batch,
        )
        self.host_rows[sequence.sequence_id] = row
        sequence.in_flight.append(row)
        sequence.computed = length

    def _make_host_room(self, sequence: Sequence) -> bool:
        """As for the device: preempt newer host sequences, newest first."""
        assert self._tiers is not None
        while not self._table.host_tier.can_reserve(sequence, len(sequence.tokens)):
            victim = self._table.on_host.newest
            if self._tiers.blocks_leaving_host or victim is None or victim.sequence_id <= sequence.sequence_id:
                return False
            if victim.in_flight:
                victim.preempt_when_answered = True
                return False
            self._preempt(victim)
        return True

    # ---- prompts ----------------------------------------------------------------------------------------------

    def add_prefills(self, ready: Iterable[Sequence]) -> None:
        """Prompts within the budget: first those partly computed, then waiting ones."""
        budget, table = self.decision.prefill_tokens, self._table
        for sequence in ready:
            if sequence.status is _PREFILL and sequence is not self._victim_in_flight:
                budget -= self._add_chunk(sequence, budget)
        while self._admits and budget > 0 and self._blocks.pool.free_blocks and table.free_slots > 0:
            if (oldest := table.waiting.oldest) is None or not self._may_park(oldest):
                return
            table.admit(oldest)
            computed = self._add_chunk(oldest, budget) if self._fits_beside_decodes(oldest) else 0
            if computed == 0:
                table.unadmit(oldest)
                return
            budget -= computed

    def _may_park(self, prompt: Sequence) -> bool:
        """Whether the host has room for a prompt, if prompts are parked."""
        return not self.decision.park or (self._tiers is not None and self._tiers.has_room_to_park(prompt))

    def _fits_beside_decodes(self, prompt: Sequence) -> bool:
        """Whether the free blocks hold all of a new prompt and one more for each running decode to grow into.

        Without that reserve the newest would soon be preempted and recomputed, over and over. A policy can switch it
        off, to show what it is worth. Decodes keep room already for a prompt that only passes through to the host.
        """
        if self.decision.park:
            return True
        kept = self._running_decodes * self._blocks.pool.block_size if self.decision.admission_reserve else 0
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
        if self._tiers is not None:
            reserve = self._tiers.reserve if self.decision.park else self._tiers.cancel_reservation
            reserve(sequence)
        self._add_row(sequence, chunk)
        return chunk

    # ---- preemption -------------------------------------------------------------------------------------------

    def drain(self, tiers: Tiers | None, *, nothing_in_flight: bool) -> None:
        """Empty the device as soon as nothing on it is in flight; then change its layout.

        The oldest move to the host as far as it has room. The others and partly computed prompts are recomputed.
        """
        running = self._table.running
        if any(sequence.in_flight for sequence in running):
            return
        for sequence in list(running):
            if sequence.status is not _DECODE or tiers is None or not tiers.move_out(sequence):
                self._table.preempt(sequence)
        if nothing_in_flight and (tiers is None or not tiers.any_moving):
            self.transition = self.decision.layout

    def force_oldest(self) -> None:
        """Nothing is in flight and the decision moved nothing: run the oldest sequence, whatever that takes."""
        sequence = self._table.oldest
        assert sequence is not None, "a sequence is neither running, on the host nor waiting, with nothing in flight"
        if sequence.place is Place.HOST:
            assert self._tiers is not None
            self._tiers.move_in(sequence)  # nothing runs, so the device is empty
            return
        if sequence.status is Status.WAITING:
            self._table.admit(sequence)
        block_size = self._blocks.pool.block_size
        if not self._make_room(sequence, min(sequence.remaining, block_size)):
            if self._swaps_begun:
                return  # a victim moves to the host; its blocks are there when it has
            raise RuntimeError(f"sequence {sequence.sequence_id} does not fit an otherwise empty device")
        budget = max(self.decision.prefill_tokens, block_size)
        self._add_row(sequence, min(sequence.remaining, self._blocks.capacity(sequence), budget))

    def _make_room(self, sequence: Sequence, count: int) -> bool:
        """Preempt newer sequences, newest first, until ``count`` more positions fit."""
        leaving = 0 if self._tiers is None else self._tiers.blocks_leaving_device
        while not self._blocks.fits(sequence, count):
            if self._blocks.fits_with(sequence, count, leaving):
                self._table.wait_for_blocks(sequence)
                return False
            victim = self._table.running.newest
            if victim is None or victim.sequence_id <= sequence.sequence_id:
                return False
            if victim.in_flight:
                # Its blocks come back with its answer. A victim that may move to the host is not marked: it only sits
                # out this plan, and the next one decides again.
                self._victim_in_flight = victim
                victim.preempt_when_answered = not self.decision.preempt_to_host
                self._table.wait_for_blocks(sequence)
                return False
            self._preempt(victim)
            leaving = 0 if self._tiers is None else self._tiers.blocks_leaving_device
        return True

    def _preempt(self, victim: Sequence) -> None:
        """Take its blocks; it is recomputed, or moves to the host if the decision says so."""
        self._admits = False
        moves = self.decision.preempt_to_host and victim.status is _DECODE and victim.place is _DEVICE
        if not (moves and self._tiers is not None and self._tiers.move_out(victim)):
            self._table.preempt(victim)

    # ---- rows -------------------------------------------------------------------------------------------------

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
        name, known = sequence.sequence_id, len(tokens)
        if start < known:
            row = Row(name, start, tuple(tokens[start:end]), end == known, tuple(new_blocks))
        else:  # its token is still being sampled
            row = Row(name, start, _FED, True, tuple(new_blocks), fed=True)
        self.rows[name] = row
        sequence.in_flight.append(row)
        sequence.computed = end
        if sequence.status is _PREFILL:
            self._blocks.share_full(sequence, end)
            if end == known and self._tiers is not None:
                self._tiers.park_after_row(sequence)

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
