"""An executor without a model that checks memory: the oracle for everything that schedules.

It keeps ``(token, position)`` in every (tier, block, slot), carries out what plans say in the order they promise,
reads each row's block table back against the sequence's true prefix, poisons blocks that nobody owns any more, and
answers with a hash of the prefix as the next token. A scheduler that loses, shares or reuses a block wrongly cannot
get the right tokens from it, and mostly trips one of its checks first.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from nanoserve.request import SamplingParams
from nanoserve.scheduler.plan import Answer, Begin, Copy, Row, StepPlan, StepResult, Swap, Tier

POISON = (-1, -1)
Slot = tuple[int, int]
"""The token a slot holds, and its position in the sequence."""

NextToken = Callable[[Sequence[int], Begin], int]


class MemoryViolation(AssertionError):
    """The scheduler's plan would have read or written what it must not."""


def next_token(prefix: Sequence[int], begin: Begin, vocab_size: int = 50) -> int:
    """A "model" and its sampler: a function of everything that may shape the next token, and of nothing else.

    Greedy depends on the prefix alone; with a temperature also on (seed, sample index); with penalties also on the
    counts of prompt and output tokens, so that a wrong ``prompt_length`` is noticed.
    """
    params = begin.params
    parts: list[object] = [tuple(prefix)]
    if params.temperature > 0:
        parts += [begin.seed, begin.index, len(prefix)]
    if _penalizes(params):
        parts.append(sorted(prefix[begin.prompt_length :]))
    return blake2b(repr(parts).encode(), digest_size=4).digest()[0] % vocab_size


def _penalizes(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


@dataclass
class _Record:
    """What the executor knows of a sequence."""

    begin: Begin
    tokens: list[int]
    block_table: list[int] = field(default_factory=list)
    computed: int = 0


class MemoryCheckingExecutor:
    """Runs plans on a dictionary instead of a device.

    Args:
        num_blocks: blocks per tier.
        block_size: slots per block.
        depth: plans that may be in flight; each is answered when ``depth`` of them are, or when nothing else is left.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, host_blocks: int = 0, depth: int = 1, model: NextToken = next_token
    ) -> None:
        self.max_in_flight = depth
        self.block_size = block_size
        self.model = model
        self.plans: list[StepPlan] = []
        self.closed = False
        self._memory: dict[Tier, list[list[Slot]]] = {
            "device": [[POISON] * block_size for _ in range(num_blocks)],
            "host": [[POISON] * block_size for _ in range(host_blocks)],
        }
        self._records: dict[int, _Record] = {}
        self._results: deque[StepResult] = deque()
        self._time = 0.0

    # ---- the Executor protocol ----

    def submit(self, plan: StepPlan) -> None:
        if len(self._results) >= self.max_in_flight:
            raise MemoryViolation(f"plan {plan.step}: more than {self.max_in_flight} plans in flight")
        self.plans.append(plan)
        self._results.append(self._run(plan))

    def collect(self, until: float | None) -> list[StepResult]:
        self._time += 1.0
        return [self._results.popleft()] if self._results else []

    def now(self) -> float:
        return self._time

    def close(self) -> None:
        self.closed = True

    # ---- what a plan does ----

    def _run(self, plan: StepPlan) -> StepResult:
        for sequence in plan.end:
            self._end(sequence)
        for begin in plan.begin:
            if begin.sequence in self._records:
                raise MemoryViolation(f"sequence {begin.sequence} begins twice without an end")
            self._records[begin.sequence] = _Record(begin, list(begin.tokens))
        for copy in plan.copies:
            self._copy(copy)
        for row in plan.rows:
            self._poison_new_blocks(row)
        swapped = tuple(self._swap(swap) for swap in plan.swaps)
        if len({row.sequence for row in plan.rows}) != len(plan.rows):
            raise MemoryViolation(f"plan {plan.step} holds a sequence twice")
        for row in plan.rows:  # all rows write before any reads
            self._write(row)
        answers = tuple(self._read_and_answer(row) for row in plan.rows if row.sample)
        return StepResult(step=plan.step, answers=answers, swapped=swapped)

    def _end(self, sequence: int) -> None:
        """Forget a sequence; poison what no correct scheduler can let anyone read again.

        Full blocks may stay cached, and a fork may still want the block in which the prompt ends.
        """
        ended = self._records.pop(sequence)
        keep = max(ended.computed // self.block_size, (ended.begin.prompt_length - 1) // self.block_size + 1)
        still_used = {block for record in self._records.values() for block in record.block_table}
        for block in set(ended.block_table[keep:]) - still_used:
            self._memory["device"][block] = [POISON] * self.block_size

    def _poison_new_blocks(self, row: Row) -> None:
        """Blocks that start at or behind the row's first position are fresh: what they held before is nobody's."""
        held = len(self._record(row).block_table)
        for index, block in enumerate(row.new_blocks, start=held):
            if index * self.block_size >= row.start:
                self._memory[row.tier][block] = [POISON] * self.block_size

    def _copy(self, copy: Copy) -> None:
        device = self._memory["device"]
        device[copy.target] = list(device[copy.source])

    def _swap(self, swap: Swap) -> int:
        device, host = self._memory["device"], self._memory["host"]
        for device_block, host_block in zip(swap.device_blocks, swap.host_blocks, strict=True):
            if swap.direction == "out":
                host[host_block] = list(device[device_block])
            else:
                device[device_block] = list(host[host_block])
        return swap.swap

    def _record(self, row: Row) -> _Record:
        if row.sequence not in self._records:
            raise MemoryViolation(f"sequence {row.sequence} has a row but never began")
        return self._records[row.sequence]

    def _write(self, row: Row) -> None:
        record = self._record(row)
        record.block_table += row.new_blocks
        known = tuple(record.tokens[row.start : row.start + len(row.tokens)])
        if not known or known != row.tokens[: len(known)]:
            raise MemoryViolation(f"sequence {row.sequence}: row at {row.start} holds tokens it does not have")
        if row.sample != (row.start + len(row.tokens) >= len(record.tokens)):
            raise MemoryViolation(f"sequence {row.sequence}: only its last known position may be sampled")
        for position, token in enumerate(row.tokens, start=row.start):
            block, slot = self._slot(record, position)
            self._check_no_other_reader(row, block, slot, (token, position))
            self._memory[row.tier][block][slot] = (token, position)
        record.computed = row.start + len(known)

    def _slot(self, record: _Record, position: int) -> tuple[int, int]:
        index, slot = divmod(position, self.block_size)
        if index >= len(record.block_table):
            raise MemoryViolation(f"sequence {record.begin.sequence} has no block for position {position}")
        return record.block_table[index], slot

    def _check_no_other_reader(self, row: Row, block: int, slot: int, content: Slot) -> None:
        """Another sequence's computed prefix must not be written over with something else."""
        before = self._memory[row.tier][block][slot]
        if before in (POISON, content):
            return
        for other, record in self._records.items():
            if other != row.sequence and block in record.block_table:
                position = record.block_table.index(block) * self.block_size + slot
                if position < len(record.tokens) and (record.tokens[position], position) == before:
                    raise MemoryViolation(f"sequence {row.sequence} writes over block {block} of sequence {other}")

    def _read_and_answer(self, row: Row) -> Answer:
        record = self._records[row.sequence]
        guesses = row.tokens[len(record.tokens) - row.start :]
        self._check_prefix(row, record)
        answered: list[int] = []
        for guess in (*guesses, None):
            token = self.model(record.tokens, record.begin)
            record.tokens.append(token)
            answered.append(token)
            if token != guess:
                break
        return Answer(sequence=row.sequence, tokens=tuple(answered))

    def _check_prefix(self, row: Row, record: _Record) -> None:
        for position, token in enumerate(record.tokens):
            block, slot = self._slot(record, position)
            found = self._memory[row.tier][block][slot]
            if found != (token, position):
                raise MemoryViolation(
                    f"sequence {row.sequence}, position {position}: block {block} slot {slot} holds {found}, "
                    f"not {(token, position)}"
                )
