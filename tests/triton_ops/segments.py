"""Steps of segments that are cut anywhere, as the tests of layers with a recurrent state build
them."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# absolute and relative
TOLERANCES = {
    torch.float32: (3e-6, 2e-5),
    torch.bfloat16: (1e-5, 2**-8),
    torch.float16: (2e-5, 2**-11),
}


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    absolute, relative = TOLERANCES[dtype]
    torch.testing.assert_close(found, expected, atol=absolute, rtol=relative)


@dataclass(frozen=True)
class Row:
    """Consecutive positions of one sequence, cut into segments of these lengths."""

    position: int
    lengths: tuple[int, ...]
    is_new: bool = False
    in_place: bool = False
    """Whether its last segment writes the slot that its first one reads."""


MIXED = [
    Row(70, (1,)),
    Row(0, (3, 61, 64, 2), is_new=True),
    Row(5, (1,), in_place=True),
    Row(0, (1,), is_new=True),
    Row(37, (1, 1, 90, 1, 5)),
    Row(64, (65,), in_place=True),
    Row(127, (1, 64, 1), in_place=True),
    Row(0, (1, 1), is_new=True),
]
SLOTS = 40


@dataclass(frozen=True)
class Step:
    """A step's table of segments, and where its rows' tokens and slots are."""

    segments: Tensor
    tokens: list[range]
    sources: list[int]
    """The slot that each row reads, or -1."""
    written: list[list[int]]
    """The slots that each row writes, the last one last."""


def make_step(rows: list[Row], seed: int = 0) -> Step:
    """Lay out rows one after another in shuffled slots."""
    order = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(seed)).tolist()
    slots = iter(order)
    table = list[tuple[int, ...]]()
    tokens, sources, written = list[range](), list[int](), list[list[int]]()
    begin = 0
    for row in rows:
        source, position = -1 if row.is_new else next(slots), row.position
        targets = list(itertools.islice(slots, len(row.lengths)))
        if row.in_place:
            targets[-1] = source
        sources.append(source)
        written.append(targets)
        tokens.append(range(begin, begin + sum(row.lengths)))
        for length, target in zip(row.lengths, targets, strict=True):
            table.append((begin, begin + length, source, target, position))
            begin, position, source = begin + length, position + length, target
    return Step(torch.tensor(table, dtype=torch.int32).view(-1, 5), tokens, sources, written)


def poisoned(states: Tensor, step: Step) -> Tensor:
    """The states with NaN in each slot that no row reads."""
    unread = [slot for slot in range(SLOTS) if slot not in step.sources]
    states[unread] = torch.nan
    return states


def only_written(before: Tensor, after: Tensor, step: Step) -> None:
    kept = [slot for slot in range(SLOTS) if slot not in itertools.chain(*step.written)]
    torch.testing.assert_close(after[kept], before[kept], equal_nan=True, atol=0, rtol=0)


# --------------------------------------------------------------------------------- the same bits


class Call(Protocol):
    """The arguments of an operator."""

    out: Tensor
    states: Tensor

    def run(self, step: Step) -> None: ...

    def part(self, tokens: range) -> Self:
        """Take some tokens, with the same states."""


def parts(step: Step, row: int, *, by_segment: bool) -> list[tuple[range, Tensor]]:
    """A row's tokens and table for a step that has nothing else; or those of each segment."""
    tokens = step.tokens[row]
    is_of_row = (step.segments[:, 0] >= tokens.start) & (step.segments[:, 1] <= tokens.stop)
    found = []
    for table in torch.split(step.segments[is_of_row], 1 if by_segment else SLOTS):
        begin, end = int(table[0, 0]), int(table[-1, 1])
        shifted = table.clone()
        shifted[:, :2] -= begin
        found.append((range(begin, end), shifted))
    return found


def run_in_parts(step: Step, call: Call, *, by_segment: bool) -> None:
    """Run an operator for one row, or one segment, after the other."""
    for row in range(len(step.tokens)):
        for tokens, table in parts(step, row, by_segment=by_segment):
            call.part(tokens).run(Step(table, [], [], []))


def assert_same(implementation: str, found: Tensor, expected: Tensor) -> None:
    """Compare bits. Torch's own functions give others where a vector ends."""
    if implementation == "plain":
        assert_close(found, expected, found.dtype)
    else:
        assert torch.equal(found, expected)


def assert_nothing_changes(call: Call, empty: Step) -> None:
    states = call.states.clone()
    call.run(empty)
    torch.testing.assert_close(call.states, states, equal_nan=True, atol=0, rtol=0)


CUTS = [(64, 136), (128, 72), (64, 64, 64, 8), (64, 128, 1)]
"""Lengths of segments of a prompt that is cut at multiples of CHUNK."""


def assert_cuts_change_nothing(
    implementation: str, make_call: Callable[[Step], Call], lengths: tuple[int, ...]
) -> None:
    """Compare a prompt with the same one cut into segments of these lengths: in one step, and in a
    step for each of them."""
    whole, cut = (make_step([Row(0, some, is_new=True)]) for some in ((sum(lengths),), lengths))
    call = make_call(whole)
    call.run(whole)
    for in_steps in (False, True):
        call_cut = make_call(whole)
        if in_steps:
            run_in_parts(cut, call_cut, by_segment=True)
        else:
            call_cut.run(cut)
        last, last_cut = whole.written[0][-1], cut.written[0][-1]
        assert_same(implementation, call_cut.out, call.out)
        assert_same(implementation, call_cut.states[last_cut], call.states[last])


def assert_rows_do_not_depend_on_others(
    implementation: str, make_call: Callable[[Step], Call]
) -> None:
    """Compare the rows of a step with steps of one row each."""
    step = make_step(MIXED)
    together, alone = make_call(step), make_call(step)
    together.run(step)
    run_in_parts(step, alone, by_segment=False)
    written = list(itertools.chain(*step.written))
    assert_same(implementation, together.out, alone.out)
    assert_same(implementation, together.states[written], alone.states[written])
