"""StatePool: the owners of the slots that hold recurrent states, and the prefixes that their
snapshots stand for."""

from collections import OrderedDict, deque

from nanoserve.scheduler.kv import CachedColumn
from nanoserve.scheduler.optional import NO_STATE


class StatePool:
    """Hands out slots ``0..num_slots-1``, and finds the snapshot at the end of a cached prefix.

    A slot holds the state of one sequence in all layers, at one position. It is *owned* while its
    reference count is positive. A snapshot is a slot that is found by the column of the prefix
    cache that ends at its position; it may have owners or none. Slots without owner and content are
    used first, then snapshots without owner, least recently used first.

    A snapshot is of no use once its column is forgotten, as no prefix leads to it any longer. Such
    snapshots are dropped before others are reused.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._references = [0] * num_slots
        self._blank: deque[int] = deque(range(num_slots))
        self._reusable: OrderedDict[int, None] = OrderedDict()
        self._columns: list[CachedColumn | None] = [None] * num_slots  # by slot
        self._slots: dict[CachedColumn, int] = {}
        # snapshots with owners that are the first to be reused when they have none
        self._superseded: set[int] = set()

    @property
    def free_slots(self) -> int:
        """Slots without an owner, snapshots or not."""
        return len(self._blank) + len(self._reusable)

    @property
    def snapshots(self) -> dict[CachedColumn, int]:
        """The slot of every snapshot, by the column that ends at its position."""
        return {column: slot for column, slot in self._slots.items() if column.is_known}

    def allocate(self) -> int | None:
        """Take a slot, whose content is lost to the prefix cache; None if all have owners."""
        if not self._blank:
            self._drop_unknown()
        if self._blank:
            slot = self._blank.popleft()
        elif self._reusable:
            slot, _ = self._reusable.popitem(last=False)
            self.forget(slot)
        else:
            return None
        self._references[slot] = 1
        return slot

    def share(self, slot: int) -> None:
        """Add an owner; NO_STATE has none."""
        if slot == NO_STATE:
            return
        if self._references[slot] == 0:
            del self._reusable[slot]
        self._superseded.discard(slot)
        self._references[slot] += 1

    def release(self, slot: int) -> None:
        """Drop an owner. A snapshot without owner is then the most recently used, unless it was to
        be reused first and nobody has shared it since."""
        if slot == NO_STATE:
            return
        self._references[slot] -= 1
        if self._references[slot] > 0:
            return
        if self._columns[slot] is None:
            self._blank.append(slot)
        else:
            self._reusable[slot] = None
            if slot in self._superseded:
                self._superseded.remove(slot)
                self._reusable.move_to_end(slot, last=False)

    def owned_once(self, slot: int) -> bool:
        """Whether it has exactly one owner."""
        return self._references[slot] == 1

    def find(self, column: CachedColumn) -> int | None:
        """The slot of the snapshot at the end of a column; None if there is none."""
        return self._slots.get(column)

    def keep(self, slot: int, column: CachedColumn) -> None:
        """Make an owned slot the snapshot at the end of a column, unless there is one."""
        if column not in self._slots:
            self._slots[column] = slot
            self._columns[slot] = column

    def forget(self, slot: int) -> None:
        """The slot is about to be overwritten; nothing happens if it is no snapshot."""
        column = self._columns[slot]
        if column is not None:
            del self._slots[column]
            self._columns[slot] = None
            self._superseded.discard(slot)

    def reuse_first(self, column: CachedColumn) -> None:
        """Make the snapshot of a column the first to be reused, as soon as it has no owner."""
        slot = self._slots.get(column)
        if slot is None:
            return
        if slot in self._reusable:
            self._reusable.move_to_end(slot, last=False)
        else:
            self._superseded.add(slot)

    def forget_all(self) -> None:
        """No state may be found any longer; owners keep their slots."""
        for slot in self._slots.values():
            self._columns[slot] = None
        self._slots.clear()
        self._superseded.clear()
        self._blank.extend(self._reusable)
        self._reusable.clear()

    def _drop_unknown(self) -> None:
        """Forget the snapshots without owner whose columns are forgotten."""
        for slot in list(self._reusable):
            column = self._columns[slot]
            assert column is not None, "a slot without owner and content is blank"
            if not column.is_known:
                del self._reusable[slot]
                self.forget(slot)
                self._blank.append(slot)
