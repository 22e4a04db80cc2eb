"""RecurrentState: where the rows of a plan find and leave the states of their sequences, and which
states are kept for others."""

from msgspec.structs import replace

from nanoserve.request import PlannedRow, Sequence, StateSlots, Status
from nanoserve.scheduler.extension import Extension
from nanoserve.scheduler.kv import BlockPool, CachedColumn
from nanoserve.scheduler.optional import NO_STATE, StatePlan, StateRow
from nanoserve.scheduler.plan import Answer, Row, StepPlan
from nanoserve.scheduler.plan_builder import PlanBuilder
from nanoserve.scheduler.recurrent_state.state_pool import StatePool
from nanoserve.scheduler.recurrent_state.stateful_blocks import StatefulBlocks
from nanoserve.scheduler.scheduler import Scheduler

CHUNK = 64
"""Positions that the scan of a prompt computes together. It lies at multiples of this number, and
so do snapshots."""
_HEADER = 8
"""Tokens that a chat template has, at most, between the end of a message and the text of the
next."""
_PREFILL = Status.PREFILL  # Enum lookup is slow in Python 3.11; hoist it.


class RecurrentState(Extension):
    """The recurrent states of a scheduler's sequences.

    Each sequence that runs has a working slot. A row that ends at a multiple of the unit leaves its
    state in a slot of its own, which is a snapshot from then on: the next row reads it and writes
    to the working slot again. So this kind of snapshot costs no copy. Within a prompt's row,
    snapshots are taken where other prompts are likely to part from this one: where a message ends.

    Plans run in order, so the prompts of the next plan may begin at the snapshots that this one
    takes. Those of decodes may be read once the row is answered: only then all tokens before them
    are known. A slot that a plan reads is owned until that plan is complete, so only later plans
    write to it.
    """

    def __init__(self, num_slots: int, *, chunk: int = CHUNK) -> None:
        self.pool = StatePool(num_slots)
        self._chunk = chunk
        self._passed: list[int] = []
        """Slots that the plan which is being completed reads or writes, to be given up after it."""

    @property
    def num_working(self) -> int:
        """Sequences that run in a working slot."""
        running = [one.state for one in self._table.running if one.state is not None]
        return len([slots for slots in running if slots.working != NO_STATE])

    def make_blocks(self, pool: BlockPool, windows: tuple[int, ...]) -> StatefulBlocks:
        """Make the block tables of a scheduler, with these slots. Raises ValueError if one of its
        cache groups has a window."""
        if any(windows):
            raise ValueError("recurrent states together with sliding windows: choose one")
        return StatefulBlocks(pool, self.pool, self._chunk)

    def attach(self, scheduler: Scheduler) -> None:
        self._table = scheduler.table
        self._blocks = scheduler.table.blocks
        assert isinstance(self._blocks, StatefulBlocks), "the scheduler took them from here"
        self._unit = self._blocks.unit
        self._block_size = scheduler.pool.block_size

    # ---- a plan is made --------------------------------------------------------------------------

    def after_prompt_row(self, builder: PlanBuilder, prompt: Sequence) -> None:
        """Give a prompt its working slot with its first row. A slot was free when it was admitted.
        If that was the snapshot from which it goes on, its rows overwrite the snapshot."""
        slots = prompt.state
        if slots is None:
            slots = prompt.state = StateSlots(working=NO_STATE, current=NO_STATE)
        if slots.working != NO_STATE:
            return
        working = self.pool.allocate()
        if working is None:
            working = slots.current
            assert working != NO_STATE and self.pool.owned_once(working), "a slot was free"
            self.pool.forget(working)
        slots.working = working
        slots.lasting = lasting_positions(
            prompt.request.prompt, prompt.request.end_tokens, self._unit
        )

    def complete(self, plan: StepPlan) -> StepPlan:
        begun = {begin.sequence for begin in plan.begin}
        moved = list[StateRow]()
        for row in plan.rows:
            sequence = self._table.sequences[row.sequence]
            slots = sequence.state
            assert slots is not None, "a sequence begins with a slot"
            end = row.start + len(row.tokens)
            if sequence.status is _PREFILL:
                placed = self._place_prompt(sequence, slots, row)
            elif slots.current != slots.working or end % self._unit == 0:
                placed = self._place_decode(sequence, slots, row)
            else:  # it reads and writes its own slot, as most decodes do
                continue
            if placed.source != placed.target or placed.saves or row.sequence in begun:
                moved.append(placed)
        for slot in self._passed:
            self.pool.release(slot)
        self._passed.clear()
        if not moved:
            return plan
        return replace(plan, state=StatePlan(tuple(moved)))

    def _place_prompt(self, prompt: Sequence, slots: StateSlots, row: Row) -> StateRow:
        """Choose where a prompt's row finds and leaves its state, and what it saves on its way."""
        end = row.start + len(row.tokens)
        saves = self._save_within(prompt, slots, row.start, end)
        if prompt.fork is not None and prompt.fork.siblings:
            self._save_for_siblings(prompt, slots, row.start, end, saves)
        snapshot = None
        if end % self._unit == 0:
            snapshot = self._new_snapshot(prompt, slots, end)
        return self._place(slots, row, snapshot, saves)

    def _place_decode(self, sequence: Sequence, slots: StateSlots, row: Row) -> StateRow:
        """Choose where a decode's row finds and leaves its state."""
        end = row.start + 1
        snapshot = None
        if end % self._unit == 0 and self._blocks.pool.prefix_caching:
            self._supersede_latest(slots)
            snapshot = self.pool.allocate()
        if snapshot is not None:
            self.pool.share(snapshot)  # until the row is answered
            slots.unanswered.append((end, snapshot))
        return self._place(slots, row, snapshot, {})

    def _place(
        self, slots: StateSlots, row: Row, snapshot: int | None, saves: dict[int, int]
    ) -> StateRow:
        """Let a row end in a snapshot's slot, or in the working slot if there is none."""
        source, target = slots.current, slots.working
        if source != target:
            self._passed.append(source)
        if snapshot is not None:
            target = snapshot
        slots.current = target
        return StateRow(row.sequence, source, target, tuple(sorted(saves.items())))

    def _save_within(
        self, prompt: Sequence, slots: StateSlots, start: int, end: int
    ) -> dict[int, int]:
        """Choose slots for the states within a prompt's row; returns them by position."""
        saves = dict[int, int]()
        last = (len(prompt.tokens) - 1) // self._unit * self._unit
        for position in sorted({*slots.lasting, last}):
            if start < position < end:
                snapshot = self._new_snapshot(prompt, slots, position)
                if snapshot is not None:
                    saves[position] = snapshot
                    self._passed.append(snapshot)
        return saves

    def _new_snapshot(self, prompt: Sequence, slots: StateSlots, position: int) -> int | None:
        """Take a slot for the state of a prompt at this position; None if none is free, or there is
        such a snapshot already."""
        column = self._column(prompt, position)
        if column is None or self.pool.find(column) is not None:
            return None
        is_lasting = position in slots.lasting
        if not is_lasting:
            self._supersede_latest(slots)
        snapshot = self.pool.allocate()
        if snapshot is not None:
            self.pool.keep(snapshot, column)
            if not is_lasting:
                slots.latest = column
        return snapshot

    def _save_for_siblings(
        self,
        parent: Sequence,
        slots: StateSlots,
        start: int,
        end: int,
        saves: dict[int, int],
    ) -> None:
        """Keep the state before the last token of the prompt, at which the other samples begin.
        Where no slot is free, they will compute the prompt again."""
        position = parent.prompt_length - 1
        if not start <= position < end:
            return
        if position in saves:
            kept: int | None = saves[position]
            self.pool.share(saves[position])
        elif position > start:
            kept = self.pool.allocate()
            if kept is not None:
                saves[position] = kept
        else:
            kept = self._give_up_current(slots)
        slots.for_siblings = kept

    def _give_up_current(self, slots: StateSlots) -> int | None:
        """Keep the slot that a row reads, which must not write to it then; None if no other slot is
        free."""
        if slots.current == slots.working:
            working = self.pool.allocate()
            if working is None:
                return None
            slots.working = working
        self.pool.share(slots.current)
        return slots.current

    def _supersede_latest(self, slots: StateSlots) -> None:
        """A newer snapshot of the sequence is about to be taken: the one before it is the first to
        be reused, perhaps for the newer one."""
        if slots.latest is not None:
            self.pool.reuse_first(slots.latest)
            slots.latest = None

    def _column(self, sequence: Sequence, position: int) -> CachedColumn | None:
        """The prefix cache's column that ends at a position, which is a multiple of the unit; None
        if it is not known."""
        index = position // self._block_size - 1
        if index >= len(sequence.cached_columns):
            return None
        column: CachedColumn = sequence.cached_columns[index]
        return column

    # ---- results ---------------------------------------------------------------------------------

    def answered(self, sequence: Sequence, row: PlannedRow, answer: Answer) -> None:
        """Let others find the snapshot after a decode's row, as its tokens are known now; also if
        the answer has ended with it."""
        slots = sequence.state
        assert slots is not None, "a sequence in flight has a slot"
        if slots.for_siblings is not None and sequence.fork is None:
            self.pool.release(slots.for_siblings)  # each of them is an owner by now
            slots.for_siblings = None
        if not slots.unanswered or slots.unanswered[0][0] != row.start + 1:
            return
        position, slot = slots.unanswered.pop(0)
        if answer.error is None and len(sequence.tokens) >= position:
            self._blocks.share_full(sequence, position)
            column = self._column(sequence, position)
            assert column is not None, "all blocks up to there are shared"
            self.pool.keep(slot, column)
            slots.latest = column
        self.pool.release(slot)

    def abandon(self, *, all_is_lost: bool) -> None:
        if all_is_lost:
            self.pool.forget_all()


def lasting_positions(
    prompt: tuple[int, ...], end_tokens: tuple[int, ...], unit: int
) -> frozenset[int]:
    """The positions of a prompt, multiples of the unit, at which other prompts are likely to go
    another way: the ends of the first message, which many users share, and of the last two, of
    which the last may be edited or the answer to it given again. Templates drop old reasoning, so
    the next turn may part where the answer begins. A message ends with one of the ``end_tokens``;
    the next one begins with a header that is always the same."""
    places = range(len(prompt))
    ends = [place + 1 for place in places if prompt[place] in end_tokens]
    reached = [len(prompt) - 1]
    for end in {*ends[:1], *ends[-2:]}:
        reached += [end, end + _HEADER]
    positions = {place // unit * unit for place in reached}
    return frozenset(position for position in positions if 0 < position < len(prompt))
