"""The slots of recurrent states, on a list instead of a device: a slot holds the tokens that its
state stands for, so a wrong restore, reuse or save gives wrong tokens."""

from collections.abc import Iterable, Sequence

from nanoserve.scheduler.optional import NO_STATE, StatePlan, StateRow
from nanoserve.scheduler.plan import Row


class StateViolation(AssertionError):
    """The scheduler's plan would have read or written a state that it must not."""


class StateMemory:
    """Carries out what plans say of states, as they promise.

    Args:
        num_slots: slots, which hold nothing at first.
    """

    def __init__(self, num_slots: int) -> None:
        self.slots: list[tuple[int, ...] | None] = [None] * num_slots
        self._current: dict[int, int] = {}

    def lose(self) -> None:
        """No slot holds anything, and no sequence is known."""
        self.slots = [None] * len(self.slots)
        self._current.clear()

    def end(self, sequence: int) -> None:
        """Forget a sequence."""
        self._current.pop(sequence, None)

    def run(self, state: StatePlan, rows: Iterable[Row]) -> None:
        """Compute the states of a plan's rows, whose tokens are all known by now."""
        listed = {row.sequence: row for row in state.rows}
        if len(listed) != len(state.rows):
            raise StateViolation("a plan places the state of a sequence twice")
        placed = [(row, self._placed(row, listed.pop(row.sequence, None))) for row in rows]
        if listed:
            raise StateViolation(f"sequences {list(listed)} have states to place, but no rows")
        self._check_readers([state_row for _, state_row in placed])
        for row, state_row in placed:
            self._compute(row, state_row)

    def prefix(self, sequence: int) -> tuple[int, ...]:
        """The tokens that the sequence's state stands for."""
        tokens = self.slots[self._current[sequence]]
        assert tokens is not None, "its row has just been computed"
        return tokens

    def _placed(self, row: Row, state_row: StateRow | None) -> StateRow:
        if state_row is not None:
            return state_row
        if row.sequence not in self._current:
            raise StateViolation(f"sequence {row.sequence} begins without a slot")
        current = self._current[row.sequence]
        return StateRow(row.sequence, current, current)

    def _check_readers(self, placed: Sequence[StateRow]) -> None:
        """Check that each slot has one writer and that no other row reads it."""
        writers = dict[int, int]()
        for one in placed:
            for slot in _written(one):
                if slot not in range(len(self.slots)):
                    raise StateViolation(f"there is no slot {slot} to write")
                if slot in writers:
                    raise StateViolation(f"two rows write slot {slot}")
                writers[slot] = one.sequence
        for one in placed:
            if writers.get(one.source, one.sequence) != one.sequence:
                raise StateViolation(
                    f"sequence {one.sequence} reads slot {one.source}, which another row writes"
                )

    def _compute(self, row: Row, state_row: StateRow) -> None:
        before: tuple[int, ...] | None = ()
        if state_row.source != NO_STATE:
            before = self.slots[state_row.source]
        if before is None or len(before) != row.start:
            raise StateViolation(
                f"sequence {row.sequence}: slot {state_row.source} holds {before}, not the "
                f"{row.start} tokens before the row"
            )
        after = before + row.tokens
        position = row.start
        for save, slot in state_row.saves:
            if not position < save < len(after):
                raise StateViolation(
                    f"sequence {row.sequence} saves at {save} between {position} and {len(after)}"
                )
            position = save
            self.slots[slot] = after[:save]
        self.slots[state_row.target] = after
        self._current[row.sequence] = state_row.target


def _written(state_row: StateRow) -> list[int]:
    return [*(slot for _, slot in state_row.saves), state_row.target]
