"""HostTier: sequences move to host memory and back, as decided, and prompts are parked there."""

from msgspec.structs import replace

from nanoserve.request import Place, Sequence, Status
from nanoserve.scheduler.extension import Extension
from nanoserve.scheduler.host_tier.host_blocks import HostBlocks
from nanoserve.scheduler.host_tier.swaps import Swaps
from nanoserve.scheduler.load import Load
from nanoserve.scheduler.optional import HostLoad, Swap
from nanoserve.scheduler.plan import StepPlan, StepResult
from nanoserve.scheduler.plan_builder import PlanBuilder
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.scheduler.sequence_table import RankOrdered, in_order


class HostTier(Extension):
    """KV blocks in host memory, and the sequences whose KV is there."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self.on_host = RankOrdered()
        self.ready: list[Sequence] = []
        """Host sequences that may enter the plan that is being made."""
        self._planned: list[Swap] = []

    def attach(self, scheduler: Scheduler) -> None:
        self._table = scheduler.table
        self._device = scheduler.table.blocks
        self.blocks = HostBlocks(self._num_blocks, self._device)
        self.pool = self.blocks.pool
        self.swaps = Swaps(self._table, self.blocks)
        self._table.queues[Place.HOST] = self.on_host
        self._table.queues[Place.MOVING] = self._table.busy

    def lose(self, *, for_good: bool) -> None:
        """All KV in host memory is lost, and nothing in flight of sequences there will be answered.
        Moving sequences keep theirs: what swaps have read or written is whole. If it is lost
        ``for_good``, nothing moves to the host any longer, and prompts with a reservation stay on
        the device."""
        lost = [one for one in self._table.sequences.values() if one.place is Place.HOST]
        for sequence in lost:
            self._table.requeue(sequence)
        self.blocks.is_closed = for_good
        if for_good:
            for sequence in self._table.running:
                self.blocks.release(sequence)

    # ---- a plan is made --------------------------------------------------------------------------

    def survey(self, load: Load) -> None:
        self.ready = [sequence for sequence in self.on_host if not sequence.in_flight]
        free_blocks = total_blocks = 0
        if not self.blocks.is_closed:
            free_blocks = self.pool.free_blocks // self.pool.groups
            total_blocks = self.pool.num_blocks // self.pool.groups
        load.host = HostLoad(
            decodes=len(self.on_host),
            ready=len(self.ready),
            context_tokens=sum([sequence.computed for sequence in self.on_host]),
            moving=len(self._table.busy),
            free_blocks=free_blocks,
            total_blocks=total_blocks,
        )

    def before_rows(
        self, builder: PlanBuilder, decodes: list[Sequence], prefills: list[Sequence]
    ) -> list[Sequence]:
        if builder.decision.host.swap_out:
            decodes = self._swap_out(builder, decodes)
        self._swap_in(builder)
        if builder.decision.host.park:
            builder.prompts_must_fit = False  # decodes keep room for the next one
            self._keep_room_for_prompts(builder, prefills)
        return decodes

    def _swap_out(self, builder: PlanBuilder, decodes: list[Sequence]) -> list[Sequence]:
        """Move decodes to the host as decided, the last first; returns the decodes that may enter
        the plan. A decode that has computed no token since it came from the host stays, or it could
        go to and fro endlessly. A decode in flight cannot move before its token, but does not enter
        the plan either."""
        chosen = [sequence for sequence in reversed(decodes) if sequence.begun][
            : builder.decision.host.swap_out
        ]
        for sequence in chosen:
            if not sequence.in_flight and not self.move_out(builder, sequence):
                break
        leaving = {one.sequence_id for one in chosen if one.in_flight or one.place is Place.MOVING}
        return [sequence for sequence in decodes if sequence.sequence_id not in leaving]

    def _swap_in(self, builder: PlanBuilder) -> None:
        """Move ready host sequences to the device as decided, in order. A block stays free for each
        decode to grow into, so that nothing has to leave again at once."""
        table, pool = self._table, self._device.pool
        moved = 0
        for sequence in self.ready[: builder.decision.host.swap_in]:
            growing = len(table.running) + len(table.busy)
            needed = self.blocks.blocks_to_return(sequence) + growing * pool.groups
            if table.free_slots <= 0 or needed > pool.free_blocks:
                break
            self._move_in(builder, sequence)
            moved += 1
        self.ready = self.ready[moved:]

    def move_out(self, builder: PlanBuilder, sequence: Sequence) -> bool:
        """Move a sequence with nothing in flight to the host; False if it does not decode on the
        device, or there is no room for it."""
        if sequence.status is not Status.DECODE or sequence.place is not Place.DEVICE:
            return False
        if not self.blocks.can_reserve(sequence, sequence.computed):
            return False
        self._device.trim(sequence)  # draft tokens that were wrong left blocks
        self.blocks.reserve(sequence, sequence.computed)
        self._add(builder, self.swaps.begin(sequence, "out"))
        return True

    def _move_in(self, builder: PlanBuilder, sequence: Sequence) -> None:
        """Move a host sequence with nothing in flight to the device; the blocks it needs are
        free."""
        self.blocks.take_back(sequence)
        self._add(builder, self.swaps.begin(sequence, "in"))

    def _add(self, builder: PlanBuilder, swap: Swap) -> None:
        self._planned.append(swap)
        builder.acts = True

    def has_room_soon(self, sequence: Sequence, count: int) -> bool:
        # at most: shared ones stay
        leaving = sum([len(swap.device_blocks) for swap in self.swaps.leaving("out")])
        positions = leaving // self._device.groups * self._device.pool.block_size
        return leaving > 0 and count <= self._device.capacity(sequence) + positions

    def rescue(self, builder: PlanBuilder, victim: Sequence) -> bool:
        return builder.decision.host.preempt and self.move_out(builder, victim)

    def run_first(self, builder: PlanBuilder, first: Sequence | None) -> bool:
        candidate = self.on_host.first
        if candidate is None or self._table.running:
            return False
        if first is not None and in_order(first) < in_order(candidate):
            return False
        self._move_in(builder, candidate)  # nothing runs, so the device is empty
        return True

    def complete(self, plan: StepPlan) -> StepPlan:
        if not self._planned:
            return plan
        swaps, self._planned = self._planned, []
        return replace(plan, host=replace(plan.host, swaps=tuple(swaps)))

    # ---- parking ---------------------------------------------------------------------------------

    def _keep_room_for_prompts(self, builder: PlanBuilder, partial: list[Sequence]) -> None:
        """Where prompts only pass through the device, its decodes must not grow into the room for
        the next one."""
        prompt = partial[0] if partial else self._table.next_waiting
        if prompt is None or builder.decision.prefill_tokens <= 0:
            return
        may_begin = builder.admits and self._table.free_slots > 0
        if partial or (may_begin and self._can_park(prompt)):
            builder.kept_free = builder.missing_for(prompt, builder.decision.prefill_tokens)

    def _can_park(self, prompt: Sequence) -> bool:
        """Whether the host can hold the prompt and its first token."""
        return self.blocks.can_reserve(prompt, len(prompt.tokens) + 1)

    def may_admit(self, builder: PlanBuilder, prompt: Sequence) -> bool:
        return not builder.decision.host.park or self._can_park(prompt)

    def after_prompt_row(self, builder: PlanBuilder, prompt: Sequence) -> None:
        """A prompt to be parked reserves host blocks and moves after its last row, unless one token
        is left to come."""
        if not builder.decision.host.park:
            self.blocks.release(prompt)
            return
        if self._can_park(prompt):
            self.blocks.reserve(prompt, len(prompt.tokens) + 1)
        if (
            prompt.host_table
            and prompt.remaining == 0
            and len(prompt.tokens) + 1 < prompt.max_length
        ):
            self._add(builder, self.swaps.begin(prompt, "out", after_row=True))

    # ---- results ---------------------------------------------------------------------------------

    def answered_elsewhere(self, sequence: Sequence) -> None:
        """A parked prompt has its first token, a host sequence its next one, or a finished one
        nothing in flight."""
        if sequence.status is not Status.PREFILL:
            self._table.release_siblings(sequence)
        if sequence.in_flight:
            return
        if sequence.place is Place.MOVING:
            self.swaps.row_answered(sequence)
        elif sequence.status is Status.FINISHED:
            self._table.retire(sequence)

    def take_in(self, result: StepResult, gained: int) -> None:
        for swap in result.host.swapped:
            self.swaps.answered(swap)

    def released(self, sequence: Sequence) -> None:
        self.blocks.release(sequence)

    def abandon(self, *, all_is_lost: bool) -> None:
        self.swaps.abandon()
