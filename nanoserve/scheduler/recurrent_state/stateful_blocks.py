"""StatefulBlocks: block tables of a model some of whose layers have a recurrent state."""

from math import lcm

from nanoserve.request import Sequence, StateSlots
from nanoserve.scheduler.kv import BlockPool, CachedColumn, SequenceBlocks
from nanoserve.scheduler.optional import NO_STATE
from nanoserve.scheduler.recurrent_state.state_pool import StatePool


class StatefulBlocks(SequenceBlocks):
    """Block tables, and the slots of states.

    A cached prefix is of use as far as there are its blocks and a snapshot at its end. Snapshots
    lie at multiples of ``unit``, whole blocks and whole chunks of a scan, and prompts are cut
    there.
    """

    def __init__(self, pool: BlockPool, states: StatePool, chunk: int) -> None:
        super().__init__(pool)
        self.states: StatePool = states
        self.unit = lcm(chunk, pool.block_size)

    def usable_prefix(self, sequence: Sequence) -> list[CachedColumn]:
        columns = super().usable_prefix(sequence)
        while columns:
            slot = self.states.find(columns[-1])
            if slot is not None:
                self.states.share(slot)
                sequence.state = StateSlots(working=NO_STATE, current=slot)
                break
            columns.pop()
        return columns

    def cut(self, prompt: Sequence, count: int, budget: int) -> int:
        """Compute whole units, but where the prompt ends or where the plan's budget is less than a
        unit. What is left of a larger budget begins no unit that it cannot end."""
        if count == prompt.remaining:
            return count
        whole = (prompt.computed + count) // self.unit * self.unit - prompt.computed
        if whole > 0:
            return whole
        if budget < self.unit:
            return count
        return 0

    def may_fork(self, parent: Sequence) -> bool:
        return parent.state is not None and parent.state.for_siblings is not None

    def fork(self, parent: Sequence, sibling: Sequence) -> None:
        super().fork(parent, sibling)
        assert parent.state is not None, "the parent is on the device"
        before_last, working = parent.state.for_siblings, self.states.allocate()
        assert before_last is not None, "it may fork"
        assert working is not None, "a slot was free"
        self.states.share(before_last)
        sibling.state = StateSlots(working=working, current=before_last)

    def release(self, sequence: Sequence) -> None:
        super().release(sequence)
        slots, sequence.state = sequence.state, None
        if slots is None:
            return
        for _, slot in slots.unanswered:
            self.states.release(slot)
        if slots.for_siblings is not None:
            self.states.release(slots.for_siblings)
        if slots.current != slots.working:
            self.states.release(slots.current)
        self.states.release(slots.working)
