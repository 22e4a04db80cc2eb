"""An executor without a model that checks memory: the oracle for everything that schedules.

It keeps ``(token, position, group)`` in every (tier, block, slot), carries out what plans say in
the order they promise, reads each row's block table back against the sequence's true prefix,
poisons blocks that nobody owns any more, and answers with a hash of the prefix as the next token. A
scheduler that loses, shares or reuses a block wrongly cannot get the right tokens from it, and
mostly trips one of its checks first.

Where there are several cache groups, each row writes and reads all of them; of a group with a
window it reads what its first query sees on. Nothing else of a table counts: blocks behind the
window may be anybody's.

A placeholder row reads the token that the plan before sampled; one whose token the scheduler had
been told is a mistake.

Swaps take their time: what they read must not change meanwhile, and nobody may use what they write.
Host sequences advance by a layer in each overlapped plan in which the CPU is done with their
attention. It is the same in a pipeline: a group waits at a layer of one stage, and plans pass each
stage in their order. A transition finds an empty device, and leaves nothing in its memory.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import chain, cycle

from msgspec.structs import replace

from nanoserve.request import SamplingParams
from nanoserve.scheduler.kv import NO_BLOCK
from nanoserve.scheduler.optional import CohortProgress, HostResult, Swap, Tier, draft_of, tier_of
from nanoserve.scheduler.plan import Answer, Begin, Copy, Row, StepPlan, StepResult
from nanoserve.scheduler.windows import first_seen
from tests.fakes.state_memory import StateMemory

POISON = (-1, -1, -1)
Slot = tuple[int, int, int]
"""The token a slot holds, its position in the sequence, and the cache group that wrote it."""

NextToken = Callable[[Sequence[int], Begin], int]
Drafter = Callable[[Sequence[int], Begin, int], Sequence[int]]
"""Draft tokens for the tokens that follow: at most so many."""


class MemoryViolation(AssertionError):
    """The scheduler's plan would have read or written what it must not."""


def next_token(prefix: Sequence[int], begin: Begin, vocab_size: int = 50) -> int:
    """A "model" and its sampler: a function of everything that may shape the next token, and of
    nothing else.

    Greedy depends on the prefix alone; with a temperature also on (seed, sample index); with
    penalties also on the counts of prompt and output tokens, so that a wrong ``prompt_length`` is
    noticed.
    """
    params = begin.params
    parts: list[object] = [tuple(prefix)]
    if params.temperature > 0:
        parts += [begin.seed, begin.index, len(prefix)]
    if _penalizes(params):
        parts.append(sorted(prefix[begin.prompt_length :]))
    return blake2b(repr(parts).encode(), digest_size=4).digest()[0] % vocab_size


def _penalizes(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1
        or params.presence_penalty != 0
        or params.frequency_penalty != 0
    )


@dataclass
class _Record:
    """Knowledge of the executor about a sequence, from its Begin on. Its first row says in which tier it
    lives."""

    begin: Begin
    tokens: list[int]
    last_plan: int | None = None
    block_table: list[int] = field(default_factory=list)
    computed: int = 0
    tier: Tier | None = None


@dataclass
class _SwapUnderWay:
    swap: Swap
    due: int
    content: list[list[Slot]]
    """Contents of the blocks that it reads, when it began."""


@dataclass
class _Cohort:
    """Host sequences that began a token in the same plan."""

    rows: dict[int, Row]
    layers: int = 0


class MemoryCheckingExecutor:
    """Runs plans on a dictionary instead of a device.

    Args:
        num_blocks: blocks on the device.
        block_size: slots per block.
        host_blocks: blocks of the host tier.
        depth: plans that may be in flight; each is answered when ``depth`` of them are, or when
            nothing else is left.
        async_scheduling: whether placeholder rows are taken; two plans may be in flight then.
        other_layouts: blocks on the device in parallel layouts 1, 2, ...
        swap_delay: how many times results are collected before a swap is done.
        num_layers: plans that a host sequence's token takes under overlap, but for the one it
            begins in, if the CPU is always done in time.
        cpu_is_done: whether it is, of one cohort after the other in each plan, round and round. A
            plan without rows on the device waits for it.
        model: gives the next token.
        drafter: draft tokens what the model will say.
        windows: of the cache groups.
        state_slots: slots of recurrent states; with none, the model has no such layers. With some,
            the answers depend on what the slots hold.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        host_blocks: int = 0,
        depth: int = 1,
        async_scheduling: bool = False,
        other_layouts: Sequence[int] = (),
        swap_delay: int = 0,
        num_layers: int = 2,
        cpu_is_done: Sequence[bool] = (True,),
        model: NextToken = next_token,
        drafter: Drafter = lambda prefix, begin, count: (),
        windows: tuple[int, ...] = (0,),
        state_slots: int = 0,
    ) -> None:
        self.windows = windows
        self.states = StateMemory(state_slots) if state_slots else None
        self.max_in_flight = 2 if async_scheduling else depth
        self.async_scheduling = async_scheduling
        self.ready = True
        self.block_size = block_size
        self.num_layers = num_layers
        self._cpu_is_done = cycle(cpu_is_done)
        self.model = model
        self.drafter = drafter
        self.plans: list[StepPlan] = []
        self.closed = False
        self._memory: dict[Tier, list[list[Slot]]] = {
            "device": [[POISON] * block_size for _ in range(num_blocks)],
            "host": [[POISON] * block_size for _ in range(host_blocks)],
        }
        self._layouts = (num_blocks, *other_layouts)
        self._layout = 0
        self._swap_delay = swap_delay
        self._swaps: list[_SwapUnderWay] = []
        self._cohorts: dict[int, _Cohort] = {}
        self._records: dict[int, _Record] = {}
        self._results: deque[StepResult] = deque()
        self._time = 0.0

    # ---- the Executor protocol ----

    def submit(self, plan: StepPlan) -> None:
        if plan.layouts.current != self._layout:
            raise MemoryViolation(
                f"plan {plan.step} is for layout {plan.layouts.current}, but {self._layout} runs"
            )
        self.plans.append(plan)
        if plan.layouts.transition is not None:
            self._results.append(self._change_layout(plan, plan.layouts.transition))
            return
        if not plan.rows and plan.host.strategy != "overlap":
            if not plan.host.swaps:
                raise MemoryViolation(f"plan {plan.step} does nothing")
            self._run(plan)
            return
        if len(self._results) >= self.max_in_flight:
            raise MemoryViolation(
                f"plan {plan.step}: more than {self.max_in_flight} plans in flight"
            )
        self._results.append(self._run(plan))

    def collect(self, until: float | None) -> list[StepResult]:
        self._time += 1.0
        results = [self._results.popleft()] if self._results else []
        done = [swap for swap in self._swaps if swap.due <= self._time]
        if done:
            self._swaps = [swap for swap in self._swaps if swap.due > self._time]
            results.append(
                StepResult(
                    None, host=HostResult(swapped=tuple(self._finish_swap(swap) for swap in done))
                )
            )
        return results

    def now(self) -> float:
        return self._time

    def close(self) -> None:
        self.closed = True

    # ---- what a plan does ----

    def _run(self, plan: StepPlan) -> StepResult:
        self.end(plan)
        for begin in plan.begin:
            if begin.sequence in self._records:
                raise MemoryViolation(f"sequence {begin.sequence} begins twice without an end")
            self._records[begin.sequence] = _Record(begin, list(begin.tokens))
        self._check_tiers(plan)
        for copy in plan.copies:
            self._copy(copy)
        for row in plan.rows:
            self._poison_new_blocks(row)
        for swap in plan.host.swaps:
            self._prepare_swap(swap)
            if not swap.after_row:
                self._begin_swap(swap)
        if plan.rows and plan.host.strategy == "device" and self._cohorts:
            raise MemoryViolation(f"plan {plan.step} lets host sequences under way stand still")
        if not plan.rows and plan.host.strategy == "overlap" and self._results:
            raise MemoryViolation(
                f"plan {plan.step} holds nothing, and others are in flight that host sequences "
                "pass with"
            )
        if len({row.sequence for row in plan.rows}) != len(plan.rows):
            raise MemoryViolation(f"plan {plan.step} holds a sequence twice")
        rows = [self._with_fed_token(row) for row in plan.rows if row.tokens]
        for row in rows:  # all rows write before any reads
            self._write(row)
        if self.states is not None:
            self.states.run(plan.state, rows)
        elif plan.state.rows:
            raise MemoryViolation(f"plan {plan.step} places states that the model has not")
        for swap in plan.host.swaps:
            if swap.after_row:
                self._check_filled(swap, plan)
                self._begin_swap(swap)
        answers = [self._read_and_answer(row) for row in self._rows_to_answer(plan)]
        progress = tuple(
            CohortProgress(step, cohort.layers) for step, cohort in self._cohorts.items()
        )
        return StepResult(plan.step, tuple(answers), host=HostResult(cohorts=progress))

    def _rows_to_answer(self, plan: StepPlan) -> list[Row]:
        """Rows of the device, and those of host sequences that have come to the end of their
        token."""
        on_host = {row.sequence: row for row in plan.rows if row.host is not None}
        rows = [row for row in plan.rows if row.sample and row.host is None]
        if plan.host.strategy == "asymmetric":
            return rows + [self._leave_cohort(row) for row in on_host.values()]
        if plan.host.strategy == "overlap":
            waits = not any(row.host is None for row in plan.rows)
            for cohort in self._cohorts.values():
                if not next(self._cpu_is_done) and not waits:
                    continue
                cohort.layers += 1
                if cohort.layers == self.num_layers:
                    rows += cohort.rows.values()
            self._cohorts = {
                step: one for step, one in self._cohorts.items() if one.layers < self.num_layers
            }
            if on_host:
                self._cohorts[plan.step] = _Cohort(on_host)
        return rows

    def _leave_cohort(self, row: Row) -> Row:
        """A row of no tokens names one under way; any other begins and ends in this step."""
        for step, cohort in list(self._cohorts.items()):
            if row.sequence in cohort.rows:
                if row.tokens:
                    raise MemoryViolation(
                        f"sequence {row.sequence} begins a token with one under way"
                    )
                del cohort.rows[row.sequence]
                if not cohort.rows:
                    del self._cohorts[step]
                return row
        if not row.tokens:
            raise MemoryViolation(f"sequence {row.sequence} is not under way")
        return row

    def _check_tiers(self, plan: StepPlan) -> None:
        """Rows only where their sequence is, and only those the strategy knows."""
        moving = {swap.sequence for swap in plan.host.swaps if not swap.after_row}
        moving |= {one.swap.sequence for one in self._swaps}
        under_way = set(chain.from_iterable(cohort.rows for cohort in self._cohorts.values()))
        for row in plan.rows:
            record = self._record(row)
            record.tier = record.tier or tier_of(row)
            if row.sequence in moving or tier_of(row) != record.tier:
                raise MemoryViolation(f"sequence {row.sequence} has a row where it is not")
            if row.host is not None and (plan.host.strategy == "device" or not row.sample):
                raise MemoryViolation(f"plan {plan.step} has no place for a row on the host")
            if plan.host.strategy == "overlap" and (row.sequence in under_way or not row.tokens):
                raise MemoryViolation(f"sequence {row.sequence} begins a token with one under way")
            if row.host is not None and row.host.sub_batch and plan.host.strategy != "asymmetric":
                raise MemoryViolation(
                    f"sequence {row.sequence} cannot be in sub-batch {row.host.sub_batch}"
                )

    def end(self, plan: StepPlan) -> None:
        """The sequences that this plan ends, and nothing else of it."""
        for sequence in plan.end:
            self._end(sequence, plan)

    def forget_what_is_in_flight(self) -> None:
        """Somebody has told the scheduler that it failed."""
        self._results.clear()
        self._swaps.clear()
        self._cohorts.clear()

    def _end(self, sequence: int, plan: StepPlan) -> None:
        """Forget a sequence; poison what no correct scheduler can let anyone read again.

        Full blocks may stay cached, and a fork may still want the block in which the prompt ends.
        What a swap reads is poisoned when the swap is done.
        """
        ended = self._records.pop(sequence)
        if self.states is not None:
            self.states.end(sequence)
        if ended.tier is None:
            return
        keep = max(
            ended.computed // self.block_size,
            (ended.begin.prompt_length - 1) // self.block_size + 1,
        )
        keep *= len(self.windows)
        forgotten = set(ended.block_table[keep:] if ended.tier == "device" else ended.block_table)
        for swap in plan.host.swaps:
            if swap.sequence == sequence:
                forgotten -= set(
                    swap.device_blocks if swap.direction == "out" else swap.host_blocks
                )
        self._poison(ended.tier, forgotten)

    def _poison(self, tier: Tier, blocks: set[int]) -> None:
        """Blocks among them that no sequence uses."""
        used = set(
            chain.from_iterable(
                self._held(one) for one in self._records.values() if one.tier == tier
            )
        )
        for block in blocks - used - {NO_BLOCK}:
            self._memory[tier][block] = [POISON] * self.block_size

    # ---- swaps and transitions ----

    def _prepare_swap(self, swap: Swap) -> None:
        """Check that what it writes is nobody's, and let it hold nothing."""
        if swap.sequence in self._records and not swap.after_row:
            raise MemoryViolation(f"sequence {swap.sequence} moves but was not ended where it was")
        if len(swap.device_blocks) != len(swap.host_blocks):
            raise MemoryViolation(f"swap {swap.swap} does not pair its blocks")
        _, target = _ends(swap)
        for tier, block in target:
            if any(
                record.tier == tier and block in self._held(record)
                for record in self._records.values()
            ):
                raise MemoryViolation(
                    f"swap {swap.swap} writes over {tier} block {block}, which is in use"
                )
            if any((tier, block) in chain(*_ends(other.swap)) for other in self._swaps):
                raise MemoryViolation(
                    f"swap {swap.swap} writes over {tier} block {block}, which another swap moves"
                )
            self._memory[tier][block] = [POISON] * self.block_size

    def _check_filled(self, swap: Swap, plan: StepPlan) -> None:
        """A swap that follows its row: all that the sequence needs moves, and the row is the last
        of its prompt."""
        row = next((row for row in plan.rows if row.sequence == swap.sequence), None)
        if row is None or not row.sample or row.host is not None or swap.direction != "out":
            raise MemoryViolation(
                f"swap {swap.swap} follows no row that computes the last of a prompt"
            )
        record = self._records[swap.sequence]
        needed = set(self._held(record))
        if not needed <= set(swap.device_blocks) <= set(record.block_table) - {NO_BLOCK}:
            raise MemoryViolation(f"swap {swap.swap} moves other blocks than its sequence has")
        self._check_prefix(row, record)

    def _begin_swap(self, swap: Swap) -> None:
        source, _ = _ends(swap)
        content = [list(self._memory[tier][block]) for tier, block in source]
        self._swaps.append(_SwapUnderWay(swap, int(self._time) + 1 + self._swap_delay, content))

    def _finish_swap(self, under_way: _SwapUnderWay) -> int:
        """Byte for byte: what was there when it began is what arrives, in blocks that nobody has
        touched."""
        source, target = _ends(under_way.swap)
        for content, (tier, block) in zip(under_way.content, source, strict=True):
            if self._memory[tier][block] != content:
                raise MemoryViolation(
                    f"{tier} block {block} was written while swap {under_way.swap.swap} read it"
                )
        for content, (tier, block) in zip(under_way.content, target, strict=True):
            if self._memory[tier][block] != [POISON] * self.block_size:
                raise MemoryViolation(
                    f"{tier} block {block} was written before swap {under_way.swap.swap} filled it"
                )
            self._memory[tier][block] = content
        if under_way.swap.direction == "in":
            self._poison("host", set(under_way.swap.host_blocks))
        return under_way.swap.swap

    def _change_layout(self, plan: StepPlan, layout: int) -> StepResult:
        if self._results or self._swaps or self._cohorts:
            raise MemoryViolation(f"transition in plan {plan.step} with something in flight")
        if plan.rows or plan.begin or plan.copies or plan.host.swaps:
            raise MemoryViolation(f"transition in plan {plan.step} is not alone")
        self.end(plan)
        if on_device := [key for key, record in self._records.items() if record.tier == "device"]:
            raise MemoryViolation(
                f"transition in plan {plan.step} with sequences {on_device} on the device"
            )
        self._layout = layout
        self._memory["device"] = [[POISON] * self.block_size for _ in range(self._layouts[layout])]
        return StepResult(plan.step)

    # ---- rows ----

    def _poison_new_blocks(self, row: Row) -> None:
        """Blocks that start at or behind the row's first position are fresh: what they held before
        is nobody's."""
        held = len(self._record(row).block_table)
        for index, block in enumerate(row.new_blocks, start=held):
            if index // len(self.windows) * self.block_size >= row.start:
                self._memory[tier_of(row)][block] = [POISON] * self.block_size

    def _copy(self, copy: Copy) -> None:
        device = self._memory["device"]
        device[copy.target] = list(device[copy.source])

    def _record(self, row: Row) -> _Record:
        if row.sequence not in self._records:
            raise MemoryViolation(f"sequence {row.sequence} has a row but never began")
        return self._records[row.sequence]

    def _with_fed_token(self, row: Row) -> Row:
        """The row as it is on the device, where the token is."""
        if not row.placeholder:
            return row
        record = self._record(row)
        in_flight = [result.step for result in self._results]
        if (
            not self.async_scheduling
            or row.tokens != (0,)
            or row.host is not None
            or not row.sample
        ):
            raise MemoryViolation(f"sequence {row.sequence}: its row may not be a placeholder")
        if in_flight != [record.last_plan] or row.start != len(record.tokens) - 1:
            raise MemoryViolation(
                f"sequence {row.sequence}: no plan in flight samples the token at {row.start}"
            )
        return replace(row, tokens=(record.tokens[row.start],))

    def _write(self, row: Row) -> None:
        record = self._record(row)
        record.last_plan = self.plans[-1].step
        record.block_table += row.new_blocks
        known = tuple(record.tokens[row.start : row.start + len(row.tokens)])
        if not known or known != row.tokens[: len(known)]:
            raise MemoryViolation(
                f"sequence {row.sequence}: row at {row.start} holds tokens it does not have"
            )
        if row.sample != (row.start + len(row.tokens) >= len(record.tokens)):
            raise MemoryViolation(
                f"sequence {row.sequence}: only its last known position may be sampled"
            )
        for position, token in enumerate(row.tokens, start=row.start):
            for group in range(len(self.windows)):
                block, slot = self._slot(record, position, group)
                self._check_no_other_reader(row, block, slot, (token, position, group))
                self._memory[tier_of(row)][block][slot] = (token, position, group)
        record.computed = row.start + len(known)

    def _slot(self, record: _Record, position: int, group: int = 0) -> tuple[int, int]:
        index, slot = divmod(position, self.block_size)
        place = index * len(self.windows) + group
        if place >= len(record.block_table) or record.block_table[place] == NO_BLOCK:
            raise MemoryViolation(
                f"sequence {record.begin.sequence} has no block for position {position}"
            )
        return record.block_table[place], slot

    def _held(self, record: _Record) -> list[int]:
        """The blocks that the sequence's next queries see, or that its next tokens are written
        to."""
        table, groups, held = record.block_table, len(self.windows), list[int]()
        for group, window in enumerate(self.windows):
            held += table[
                first_seen(record.computed, window) // self.block_size * groups + group :: groups
            ]
        return held

    def _check_no_other_reader(self, row: Row, block: int, slot: int, content: Slot) -> None:
        """Another sequence's computed prefix must not be written over with something else."""
        before = self._memory[tier_of(row)][block][slot]
        if before in (POISON, content):
            return
        for other, record in self._records.items():
            if (
                other != row.sequence
                and record.tier == tier_of(row)
                and block in self._held(record)
            ):
                place = record.block_table.index(block)
                group, position = (
                    place % len(self.windows),
                    place // len(self.windows) * self.block_size + slot,
                )
                if (
                    position < len(record.tokens)
                    and (record.tokens[position], position, group) == before
                ):
                    raise MemoryViolation(
                        f"sequence {row.sequence} writes over block {block} of sequence {other}"
                    )

    def _read_and_answer(self, row: Row) -> Answer:
        record = self._records[row.sequence]
        draft_tokens = row.tokens[len(record.tokens) - row.start :]
        if len(draft_tokens) != draft_of(row).verify:
            raise MemoryViolation(
                f"sequence {row.sequence} has {len(draft_tokens)} draft tokens and says "
                f"{draft_of(row).verify}"
            )
        if draft_of(row).propose:
            self._slot(record, row.start + len(row.tokens) + draft_of(row).propose - 1)
        self._check_prefix(row, record)
        answered: list[int] = []
        for draft_token in (*draft_tokens, None):
            prefix: Sequence[int] = record.tokens
            if self.states is not None:
                prefix = self.states.prefix(row.sequence)
            token = self.model(prefix, record.begin)
            record.tokens.append(token)
            answered.append(token)
            if token != draft_token:
                break
        record.computed += len(answered) - 1  # the draft tokens that are right
        draft = self.drafter(record.tokens, record.begin, draft_of(row).propose)
        return Answer(sequence=row.sequence, tokens=tuple(answered), draft=tuple(draft))

    def _check_prefix(self, row: Row, record: _Record) -> None:
        for group, window in enumerate(self.windows):
            for position in range(first_seen(row.start, window), len(record.tokens)):
                block, slot = self._slot(record, position, group)
                found, expected = (
                    self._memory[tier_of(row)][block][slot],
                    (record.tokens[position], position, group),
                )
                if found != expected:
                    raise MemoryViolation(
                        f"sequence {row.sequence}: block {block} slot {slot} holds {found}, not "
                        f"{expected}"
                    )


def _ends(swap: Swap) -> tuple[list[tuple[Tier, int]], list[tuple[Tier, int]]]:
    """The blocks that a swap reads, and those that it writes."""
    device: list[tuple[Tier, int]] = [("device", block) for block in swap.device_blocks]
    host: list[tuple[Tier, int]] = [("host", block) for block in swap.host_blocks]
    return (device, host) if swap.direction == "out" else (host, device)
