"""Draft: turns a Decision into a StepPlan, oldest sequences first."""

from collections.abc import Iterable
from itertools import islice

from nanoserve.request import Place, Sequence, Status
from nanoserve.scheduler.lifecycle import Lifecycle
from nanoserve.scheduler.load import Decision, Strategy
from nanoserve.scheduler.plan import Begin, Copy, Row, StepPlan
from nanoserve.scheduler.tiers import Tiers

_PREFILL, _DECODE = Status.PREFILL, Status.DECODE  # looking a member up takes Python 3.11 longer than a call
_DEVICE = Place.DEVICE
_FED = (0,)


class Draft:
    """A plan that is being put together. What it takes up is in flight at once.

    Args:
        lifecycle: the sequences, their queues and blocks; the draft admits and preempts.
        tiers: moves sequences between device and host memory.
        decision: how much the plan shall hold.
        now: seconds on the executor's clock.
        running_decodes: on the device, in flight or not.
        admits: whether waiting prompts may begin; not where a sequence has just given up blocks for older ones.

    Attributes:
        decision: as given.
        rows: of sequences on the device, by sequence.
        host_rows: of sequences on the host, by sequence.
        chunks_behind: sequences in ``rows`` whose chunk follows one in flight.
        transition: the layout to change to, in a plan that holds nothing else.
    """

    def __init__(
        self, lifecycle: Lifecycle, tiers: Tiers, decision: Decision, now: float, *, running_decodes: int, admits: bool
    ) -> None:
        self.decision = decision
        self.rows: dict[int, Row] = {}
        self.host_rows: dict[int, Row] = {}
        self.chunks_behind: list[int] = []
        self.transition: int | None = None
        self._lifecycle = lifecycle
        self._tiers = tiers
        self._blocks = lifecycle.blocks
        self._host = lifecycle.host_tier
        self._now = now
        self._begin: list[Begin] = []
        self._copies: list[Copy] = []
        self._running_decodes = running_decodes
        self._kept_free = 0
        self._gives_way: Sequence | None = None
        self._admits = admits and not lifecycle.owes_blocks

    @property
    def does_something(self) -> bool:
        """Whether it is worth a plan."""
        return bool(self.rows or self.host_rows) or self._tiers.has_news or self.transition is not None

    def plan(self, step: int, layout: int, *, any_under_way: bool) -> StepPlan:
        """The finished plan; ``any_under_way`` says whether host sequences wait for a token."""
        strategy = self._strategy(any_under_way=any_under_way)  # before what the draft does is taken out of it
        return StepPlan(
            step=step,
            begin=tuple(self._begin),
            rows=(*self.rows.values(), *self.host_rows.values()),
            copies=tuple(self._copies),
            swaps=self._tiers.take_begun(),
            end=self._lifecycle.take_ended(),
            layout=layout,
            strategy=strategy,
            transition=self.transition,
        )

    def _strategy(self, *, any_under_way: bool) -> Strategy:
        """As decided where a row on the host says so; else the host sequences under way go on, on an idle device too.

        Who decided that none shall begin did not decide that those under way stand still, which cannot come back.
        """
        if not self.does_something:
            return "overlap"
        if self.host_rows:
            return self.decision.strategy
        return "overlap" if self.rows and any_under_way else "device"

    # ---- decodes ----------------------------------------------------------------------------------------------

    def keep_room_for_prompts(self, partial: list[Sequence]) -> None:
        """The device only passes prompts on to the host: its decodes must not grow into the room for the next one."""
        prompt = partial[0] if partial else self._lifecycle.waiting.oldest
        if prompt is None or self.decision.prefill_tokens <= 0:
            return
        may_begin = self._admits and self._lifecycle.free_slots > 0
        if partial or (may_begin and self._tiers.has_room_to_park(prompt)):
            self._kept_free = self._blocks.pool.blocks_for(len(prompt.tokens)) - len(prompt.block_table)

    def add_decodes(self, ready: list[Sequence]) -> None:
        """The next token of as many sequences as decided; those for which no room can be made sit out."""
        keeps_free, fits = self._kept_free > 0, self._blocks.fits
        for sequence in ready[: self.decision.decodes]:
            if keeps_free and not self._leaves_room_for_prompts(sequence):
                continue
            # An older one may have preempted it meanwhile, sent it to the host, or marked it.
            stays = sequence.status is _DECODE and sequence.place is _DEVICE and sequence is not self._gives_way
            if stays and (fits(sequence, 1) or self._make_room(sequence, 1)):
                self._add_row(sequence, 1)

    def _leaves_room_for_prompts(self, sequence: Sequence) -> bool:
        """Whether it may grow; the oldest always may, so that the device gets emptier some day."""
        return (
            self._blocks.fits_its_own(sequence, 1)
            or sequence is self._lifecycle.running.oldest
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
        """The next token of a ready host sequence; it sits out if no room can be made for it."""
        if sequence.status is not _DECODE or not self._make_host_room(sequence):
            return
        start, length = sequence.computed, len(sequence.tokens)
        new_blocks = self._host.reserve(sequence, length)
        if not sequence.begun:
            self._begin_sequence(sequence)
            new_blocks = sequence.host_table
        self.host_rows[sequence.sequence_id] = Row(
            sequence.sequence_id,
            start,
            tuple(sequence.tokens[start:]),
            sample=True,
            new_blocks=tuple(new_blocks),
            tier="host",
            sub_batch=sub_batch,
        )
        sequence.in_flight += 1
        sequence.computed = length

    def _make_host_room(self, sequence: Sequence) -> bool:
        """As for the device: newer host sequences give way to older ones, newest first, and are computed again."""
        while not self._host.can_reserve(sequence, len(sequence.tokens)):
            victim = self._lifecycle.on_host.newest
            if self._tiers.blocks_leaving_host or victim is None or victim.sequence_id <= sequence.sequence_id:
                return False
            if victim.in_flight:
                victim.preempt_when_answered = True
                return False
            self._lifecycle.preempt(victim)
            self._admits = False
        return True

    # ---- prompts ----------------------------------------------------------------------------------------------

    def add_prefills(self, ready: Iterable[Sequence]) -> None:
        """Prompts within the budget: first those partly computed, then waiting ones."""
        budget = self.decision.prefill_tokens
        for sequence in ready:
            if sequence.status is _PREFILL and sequence is not self._gives_way:  # nor preempted meanwhile
                budget -= self._add_chunk(sequence, budget)
        if not self._admits:
            return  # what was just taken from one sequence is not for a newer one
        lifecycle = self._lifecycle
        while budget > 0 and self._blocks.pool.free_blocks and lifecycle.free_slots > 0:
            if (oldest := lifecycle.waiting.oldest) is None:
                return
            if self.decision.park and not self._tiers.has_room_to_park(oldest):
                return
            lifecycle.admit(oldest)
            computed = self._add_chunk(oldest, budget) if self._fits_beside_decodes(oldest) else 0
            if computed == 0:
                lifecycle.unadmit(oldest)
                return
            budget -= computed

    def _fits_beside_decodes(self, prompt: Sequence) -> bool:
        """Whether the free blocks hold all of a new prompt and one more for each running decode to grow into.

        Without that reserve the newest would soon be preempted, and what it had computed would be computed again, over
        and over: it can be switched off to see what it is worth. For a prompt that only passes through to the host the
        decodes keep room.
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
        if self.decision.park:
            self._tiers.reserve(sequence)
        else:
            self._tiers.cancel_reservation(sequence)
        self._add_row(sequence, chunk)
        return chunk

    # ---- what must move ---------------------------------------------------------------------------------------

    def drain(self, *, nothing_in_flight: bool) -> None:
        """No rows, until nothing runs; then the device is emptied; then its layout changes.

        The oldest move to the host as far as it has room, the others and partly computed prompts are computed again.
        """
        lifecycle = self._lifecycle
        if any(sequence.in_flight for sequence in lifecycle.running):
            return
        for sequence in list(lifecycle.running):
            if sequence.status is not _DECODE or not self._tiers.move_out(sequence):
                lifecycle.preempt(sequence)
        if nothing_in_flight and not len(self._tiers):
            self.transition = self.decision.layout

    def force_oldest(self) -> None:
        """Nothing is in flight and the decision moved nothing: run the oldest sequence, whatever that takes."""
        sequence = self._lifecycle.oldest
        assert sequence is not None, "a sequence is neither running, on the host nor waiting, with nothing in flight"
        if sequence.place is Place.HOST:
            self._tiers.move_in(sequence)  # nothing runs, so the device is empty
            return
        if sequence.status is Status.WAITING:
            self._lifecycle.admit(sequence)
        block_size = self._blocks.pool.block_size
        if not self._make_room(sequence, min(sequence.remaining, block_size)):
            if self._tiers.has_news:
                return  # a victim moves to the host; its blocks are there when it has
            raise RuntimeError(f"sequence {sequence.sequence_id} does not fit an otherwise empty device")
        budget = max(self.decision.prefill_tokens, block_size)
        self._add_row(sequence, min(sequence.remaining, self._blocks.capacity(sequence), budget))

    def _make_room(self, sequence: Sequence, count: int) -> bool:
        """Preempt newer sequences, newest first, until ``count`` more positions fit."""
        while not self._blocks.fits(sequence, count):
            if self._blocks.fits_with(sequence, count, self._tiers.blocks_leaving_device):
                self._lifecycle.owe_blocks(sequence)  # some are on their way back; until then it sits out
                return False
            victim = next(reversed(self._lifecycle.running))
            if victim.sequence_id <= sequence.sequence_id:
                return False
            if victim.in_flight:
                # Its blocks come back with its answer; until then this sequence sits out. One that may move to the host
                # is not marked: it stays out of this plan, and answered it is looked at again before the next.
                self._gives_way = victim
                victim.preempt_when_answered = not self.decision.preempt_to_host
                self._lifecycle.owe_blocks(sequence)
                return False
            self._admits = False
            if not (self.decision.preempt_to_host and victim.status is _DECODE and self._tiers.move_out(victim)):
                self._lifecycle.preempt(victim)
        return True

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
        sequence.in_flight += 1
        sequence.computed = end
        if sequence.status is _PREFILL:
            self._blocks.share_full(sequence, end)
            if sequence.in_flight > 1:
                self.chunks_behind.append(name)
            if end == known:
                self._tiers.park_behind_row(sequence)

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
