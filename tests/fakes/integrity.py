"""Invariants of the scheduler's blocks, queues and states. Tests check them after every step."""

from collections import Counter
from collections.abc import Iterable

from nanoserve.request import Place, Sequence, Status
from nanoserve.scheduler.canvas.canvas_blocks import AlignedCanvasBlocks, FreeCanvasBlocks
from nanoserve.scheduler.host_tier.host_tier import HostTier
from nanoserve.scheduler.kv import NO_BLOCK, BlockPool
from nanoserve.scheduler.optional import NO_STATE, draft_of
from nanoserve.scheduler.recurrent_state.state_pool import StatePool
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.scheduler.sequence_table import SequenceTable
from nanoserve.scheduler.windows import WindowedBlocks, first_seen
from tests.record.planned import step_tokens


def check_integrity(scheduler: Scheduler) -> None:
    """Raise RuntimeError if blocks, queues and states contradict each other."""
    table = scheduler.table
    sequences = list(table.sequences.values())
    for sequence in sequences:
        _check_state(table, sequence)
    _check_device_blocks(table, sequences)
    if table.blocks.states is not None:
        _check_states(table.blocks.states, sequences)
    elif any(sequence.state is not None for sequence in sequences):
        raise RuntimeError("a sequence has a state, and the model has none")
    host = scheduler.extensions.host
    if host is not None:
        _check_host(table, host, sequences)
    elif any(sequence.host_table for sequence in sequences) or table.busy:
        raise RuntimeError("a sequence is on a host that is not there")
    if any(
        (plan.decodes, plan.prompt_tokens) != step_tokens(plan)
        for plan in scheduler.plans_in_flight.values()
    ):
        raise RuntimeError("a plan's count of its tokens is wrong")
    if table.waiting.tokens != sum(len(sequence.tokens) for sequence in table.waiting):
        raise RuntimeError("the count of waiting tokens is wrong")
    for queue in (table.running, table.busy, *([] if host is None else [host.on_host])):
        if not all(table.quarantine.admits(one.request.request_id) for one in queue):
            raise RuntimeError("a sequence runs that the quarantine holds back")
    suspect, next_waiting = table.quarantine.suspect, table.next_waiting
    if suspect is not None and suspect not in table.requests:
        raise RuntimeError("sequences are held back for a request that is gone")
    admitted = (one for one in table.waiting if table.quarantine.admits(one.request.request_id))
    if next_waiting is not next(admitted, None):
        raise RuntimeError("the next waiting sequence is not the oldest that the quarantine admits")


def _check_state(table: SequenceTable, sequence: Sequence) -> None:
    place, status, plans = sequence.place, sequence.status, len(sequence.in_flight)
    holds_kv = sequence.block_table or sequence.host_table or sequence.computed or plans
    moves_after_row = place is Place.MOVING and plans > 0
    elsewhere = place in (Place.HOST, Place.MOVING) and not moves_after_row
    known = len(sequence.tokens) - (status is Status.DECODE)
    draft_tokens = sum(draft_of(row).verify for row in sequence.in_flight)
    goes_on = not sequence.finished
    remaining = range(1 - plans - draft_tokens, 2 - plans - draft_tokens)
    if isinstance(
        table.blocks, (AlignedCanvasBlocks, FreeCanvasBlocks)
    ):  # of its canvas, and of the one before it
        remaining = range(table.blocks.end_of_canvas(0) * (2 - min(1, plans)))
        known = len(sequence.tokens)
    contradictions = {
        "its queue says otherwise": (sequence in table.running)
        != (goes_on and place is Place.DEVICE)
        or (sequence in table.busy) != (place is Place.MOVING),
        "does not decode": elsewhere and status not in (Status.DECODE, Status.FINISHED),
        "holds device blocks": place is Place.HOST
        and bool(sequence.block_table or sequence.cached_columns),
        "holds something": place is Place.NONE and bool(holds_kv),
        "waits with KV, or has none and does not wait": (status is Status.WAITING)
        != (place is Place.NONE),
        f"has {sequence.remaining} tokens to compute in {plans} plans": status is Status.DECODE
        and sequence.remaining not in remaining,
        "shares a block of unknown tokens": len(sequence.cached_columns)
        * table.blocks.pool.block_size
        > known,
    }
    for contradiction, is_so in contradictions.items():
        if is_so:
            raise RuntimeError(
                f"sequence {sequence.sequence_id} is {status} in {place}, but {contradiction}"
            )


def _check_device_blocks(table: SequenceTable, sequences: Iterable[Sequence]) -> None:
    """The pool's owners are exactly these sequences' tables."""
    pool, owners = table.blocks.pool, Counter[int]()
    for sequence in sequences:
        owners.update(block for block in sequence.block_table if block != NO_BLOCK)
        copy_source = () if sequence.fork is None else sequence.fork.copy_source
        owners.update(copy_source)
        if not copy_source and sequence.place is not Place.HOST:
            reached = len(sequence.block_table) // pool.groups * pool.block_size
            if reached < sequence.computed or reached != sequence.capacity:
                raise RuntimeError(
                    f"sequence {sequence.sequence_id} has fewer blocks than computed tokens"
                )
            _check_windows(table, sequence)
    check_pool(pool, owners)


def _check_windows(table: SequenceTable, sequence: Sequence) -> None:
    """A group has every block that a query may still see, and of a window no more than its plans in
    flight see."""
    blocks, size = table.blocks, table.blocks.pool.block_size
    position = sequence.in_flight[0].start if sequence.in_flight else sequence.computed
    window_start = sequence.window_start or 0
    siblings = [] if sequence.fork is None else sequence.fork.siblings
    if isinstance(blocks, FreeCanvasBlocks) and siblings:  # compute the prompt's last token later
        position = min(position, sequence.prompt_length - 1)
    windows = blocks.windows if isinstance(blocks, WindowedBlocks) else (0,) * blocks.groups
    for group, window in enumerate(windows):
        column = sequence.block_table[group :: blocks.groups]
        needed = first_seen(position, window) // size
        if NO_BLOCK in column[needed:]:
            raise RuntimeError(
                f"sequence {sequence.sequence_id} has given back a block that group {group} needs"
            )
        answered = sequence.status is not Status.FINISHED and sequence.place is Place.DEVICE
        if answered and any(
            block != NO_BLOCK for block in column[: first_seen(window_start, window) // size]
        ):
            raise RuntimeError(
                f"sequence {sequence.sequence_id} keeps a block behind the window of group {group}"
            )
        if (
            blocks.slides
            and answered
            and sequence.status is Status.DECODE
            and window_start < position
        ):
            raise RuntimeError(f"sequence {sequence.sequence_id} has not slid to its position")


def _check_host(table: SequenceTable, host: HostTier, sequences: Iterable[Sequence]) -> None:
    """The host pool's owners are exactly these sequences' host tables, and each block has one
    owner."""
    pool, owners = host.pool, Counter[int]()
    moving = [swap.sequence for swap in host.swaps.in_flight.values()]
    if sorted(moving) != sorted(one.sequence_id for one in table.busy):
        raise RuntimeError("the sequences of swaps and those that move differ")
    for sequence in sequences:
        is_there = not sequence.finished and sequence.place is Place.HOST
        if (sequence in host.on_host) != is_there:
            raise RuntimeError(
                f"sequence {sequence.sequence_id} is in {sequence.place}, but its queue says "
                "otherwise"
            )
        host_table = sequence.host_table or []
        owners.update(block for block in host_table if block != NO_BLOCK)
        columns = len(host_table) // pool.groups
        if sequence.place is Place.HOST and pool.blocks_for(sequence.computed) > columns:
            raise RuntimeError(
                f"sequence {sequence.sequence_id} has fewer host blocks than computed tokens"
            )
    check_pool(pool, owners)
    if max(owners.values(), default=0) > 1:
        raise RuntimeError("a host block has two owners")


def _check_states(pool: StatePool, sequences: Iterable[Sequence]) -> None:
    """The owners of slots are exactly these sequences, and each that runs has one of its own."""
    owners, working = Counter[int](), set[int]()
    for sequence in sequences:
        slots = sequence.state
        if (slots is None) != (sequence.place is Place.NONE):
            raise RuntimeError(f"sequence {sequence.sequence_id} is in {sequence.place}: {slots}")
        if slots is None:
            continue
        held = [slots.working, *(slot for _, slot in slots.unanswered)]
        if slots.current != slots.working:
            held.append(slots.current)
        if slots.for_siblings is not None:
            held.append(slots.for_siblings)
        owners.update(slot for slot in held if slot != NO_STATE)
        if slots.working == NO_STATE or slots.working in working:
            raise RuntimeError(f"sequence {sequence.sequence_id} has no slot of its own")
        if (slots.current == NO_STATE) != (sequence.computed == 0):
            raise RuntimeError(f"sequence {sequence.sequence_id} has lost its state")
        working.add(slots.working)
    free = [*pool._blank, *pool._reusable]
    if len(free) != len(set(free)):
        raise RuntimeError("a slot is free twice")
    if pool._references != [owners[slot] for slot in range(pool.num_slots)]:
        raise RuntimeError(f"slots have references {pool._references}, and owners {owners}")
    if set(free) != {slot for slot in range(pool.num_slots) if owners[slot] == 0}:
        raise RuntimeError("free slots and slots without an owner differ")
    if pool._slots != {column: slot for slot, column in enumerate(pool._columns) if column}:
        raise RuntimeError("the snapshots by column and by slot differ")
    if not all((slot in pool._reusable) == (slot in pool._slots.values()) for slot in free):
        raise RuntimeError("a snapshot is blank, or a slot without content waits to be reused")


def host_pool(scheduler: Scheduler) -> BlockPool:
    """The blocks in host memory; an empty pool without a host tier."""
    host = scheduler.extensions.host
    return (
        BlockPool(0, scheduler.pool.block_size, prefix_caching=False) if host is None else host.pool
    )


def check_pool(pool: BlockPool, owners: Counter[int]) -> None:
    """Compare a pool with the caller's count of owners for each block.

    Raises:
        RuntimeError: if a block is leaked, used twice, or both free and owned.
    """
    free = list(pool._blank) + list(pool._reusable)
    if len(free) != len(set(free)):
        raise RuntimeError("a block is free twice")
    for block in range(pool.num_blocks):
        if pool._references[block] != owners[block]:
            raise RuntimeError(
                f"block {block}: {pool._references[block]} references, {owners[block]} owners"
            )
    if set(free) != {block for block, count in enumerate(pool._references) if count == 0}:
        raise RuntimeError("free blocks and blocks without an owner differ")
    if any(pool._cached[block] is not None for block in pool._blank):
        raise RuntimeError("a cached block is listed as blank")
    _check_columns(pool)


def _check_columns(pool: BlockPool) -> None:
    """Known columns are those of cached blocks, and those that come before them."""
    columns = list(pool._known.values())
    if not all(column.is_known and pool._known[column.address] is column for column in columns):
        raise RuntimeError("a column is not known, or has another address than it says")
    of_blocks = [(block, column) for block, column in enumerate(pool._cached) if column is not None]
    if not all(column.is_known for _, column in of_blocks):
        raise RuntimeError("a cached block belongs to a column that is not known")
    followers = Counter(
        previous for previous, _ in (column.address for column in columns) if previous in columns
    )
    cached = {(column, column.blocks.index(block)): block for block, column in of_blocks}
    for column in columns:
        if column.followers != followers[column]:
            raise RuntimeError("a column has other followers than it says")
        if column.followers == 0 and max(column.blocks) == NO_BLOCK:
            raise RuntimeError("a column is kept for nothing")
        if column.blocks != [cached.pop((column, group), NO_BLOCK) for group in range(pool.groups)]:
            raise RuntimeError("a column's blocks and the cached ones differ")
    if cached:
        raise RuntimeError("a cached block has no column")
