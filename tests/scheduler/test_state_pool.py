"""The owners of slots for recurrent states, and which snapshot is reused first."""

from nanoserve.scheduler.kv import CachedColumn
from nanoserve.scheduler.optional import NO_STATE
from nanoserve.scheduler.recurrent_state.state_pool import StatePool


def _columns(count: int) -> list[CachedColumn]:
    return [CachedColumn(("", (number,)), [number]) for number in range(count)]


def _with_snapshots(columns: list[CachedColumn], num_slots: int) -> StatePool:
    """A pool with a snapshot of each column, the first one least recently used."""
    pool = StatePool(num_slots)
    for column in columns:
        slot = pool.allocate()
        assert slot is not None
        pool.keep(slot, column)
        pool.release(slot)
    return pool


def test_a_slot_has_an_owner_until_it_is_released() -> None:
    pool = StatePool(2)
    taken = [pool.allocate(), pool.allocate()]
    assert sorted(taken) == [0, 1] and pool.allocate() is None  # type: ignore[type-var]
    pool.share(0)
    pool.release(0)
    assert pool.owned_once(0) and pool.free_slots == 0
    pool.release(0)
    assert pool.free_slots == 1 and pool.allocate() == 0


def test_a_state_before_the_first_position_takes_no_slot() -> None:
    pool = StatePool(1)
    pool.share(NO_STATE)
    pool.release(NO_STATE)
    assert pool.free_slots == 1


def test_slots_without_content_go_first_and_then_the_least_recently_used_snapshot() -> None:
    columns = _columns(3)
    pool = _with_snapshots(columns, num_slots=4)
    assert [pool.find(column) for column in columns] == [0, 1, 2] and pool.free_slots == 4
    pool.share(0)  # somebody reads the oldest
    pool.release(0)
    assert [pool.allocate() for _ in range(5)] == [3, 1, 2, 0, None]
    assert pool.snapshots == {}


def test_a_snapshot_with_an_owner_is_not_reused() -> None:
    columns = _columns(2)
    pool = _with_snapshots(columns, num_slots=2)
    pool.share(0)
    assert (pool.free_slots, pool.allocate(), pool.allocate()) == (1, 1, None)
    assert pool.find(columns[0]) == 0 and pool.find(columns[1]) is None


def test_a_snapshot_may_be_made_the_first_to_be_reused() -> None:
    columns = _columns(3)
    pool = _with_snapshots(columns, num_slots=3)
    pool.reuse_first(columns[2])
    pool.reuse_first(CachedColumn(("", (9,)), [9]))
    assert [pool.allocate() for _ in range(3)] == [2, 0, 1]


def test_with_an_owner_it_is_the_first_when_it_has_none() -> None:
    columns = _columns(3)
    pool = _with_snapshots(columns, num_slots=3)
    for slot in (1, 2):
        pool.share(slot)
        pool.reuse_first(columns[slot])
    pool.share(2)  # somebody else begins with it: it is of use
    for slot in (1, 2, 2):
        pool.release(slot)
    assert [pool.allocate() for _ in range(3)] == [1, 0, 2]
    for slot in (1, 0, 2):
        pool.release(slot)
    assert pool.free_slots == 3 and pool.snapshots == {}


def test_a_column_has_one_snapshot() -> None:
    (column,) = _columns(1)
    pool = _with_snapshots([column], num_slots=2)
    second = pool.allocate()
    assert second == 1
    pool.keep(second, column)
    pool.release(second)
    assert pool.snapshots == {column: 0} and pool.allocate() == 1, "it has no content"


def test_snapshots_of_forgotten_columns_go_before_others() -> None:
    columns = _columns(4)
    pool = _with_snapshots(columns, num_slots=4)
    pool.share(3)
    columns[2].is_known = columns[3].is_known = False
    assert set(pool.snapshots) == {columns[0], columns[1]}
    assert pool.allocate() == 2, "the oldest is still known"
    pool.release(3)
    assert pool.allocate() == 3
    assert [pool.find(column) for column in columns] == [0, 1, None, None]


def test_all_can_be_forgotten_while_owners_keep_their_slots() -> None:
    columns = _columns(3)
    pool = _with_snapshots(columns, num_slots=3)
    pool.share(1)
    pool.forget_all()
    assert pool.snapshots == {} and pool.free_slots == 2
    assert {pool.allocate(), pool.allocate()} == {0, 2} and pool.allocate() is None
    pool.release(1)
    assert pool.allocate() == 1
