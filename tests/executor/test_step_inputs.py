"""The tensors of a step equal what a loop over tokens says, also once the buffers had to grow."""

from collections.abc import Sequence

import pytest
import torch

from nanoserve.executor.step.forward_pass import BlockTable, BlockTables, InputBuilder, row_ends
from nanoserve.executor.step.staging import Staging
from nanoserve.scheduler.plan import Row

BLOCK_SIZE = 4


def table_of(tables: BlockTables, blocks: Sequence[int]) -> BlockTable:
    table = tables.open()
    for block in blocks[:3]:
        table.extend((block,))
    table.extend(blocks[3:])
    return table


def row(sequence: int, start: int, length: int) -> Row:
    return Row(sequence, start, tuple(range(100 * sequence, 100 * sequence + length)), True)


@pytest.mark.parametrize(
    "rows", [[row(1, 6, 1), row(2, 0, 9), row(3, 3, 2)], [row(1, 40, 300), row(2, 99, 1)]]
)
def test_inputs_equal_a_loop_over_tokens(rows: list[Row]) -> None:
    builder, staging = InputBuilder(BLOCK_SIZE), Staging(torch.device("cpu"))
    every = BlockTables()
    every.close(table_of(every, range(7, 30)))  # nor does a sequence that has ended
    tables = [
        table_of(
            every,
            [
                (place + 1) * 1000 + block
                for block in range((each.start + len(each.tokens) + 3) // BLOCK_SIZE)
            ],
        )
        for place, each in enumerate(rows)
    ]
    # an earlier step leaves nothing behind
    builder.build(rows[::-1], row_ends(rows[::-1]), tables[::-1], staging.add)
    inputs = builder.build(rows, row_ends(rows), tables, staging.add)
    staging.transfer()
    batch = inputs.batch
    expected = [
        (
            token,
            each.start + offset,
            int(table.blocks[position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE,
        )
        for each, table in zip(rows, tables, strict=True)
        for offset, token in enumerate(each.tokens)
        for position in [each.start + offset]
    ]
    columns = (inputs.token_ids, inputs.positions, batch.slot_mapping)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == expected
    assert {column.dtype for column in columns} == {torch.int64}
    lengths = [len(each.tokens) for each in rows]
    assert batch.query_starts.tolist() == [sum(lengths[:place]) for place in range(len(rows) + 1)]
    assert batch.context_lengths.tolist() == [each.start + len(each.tokens) for each in rows]
    width = max(len(table.blocks) for table in tables)
    padded = [[*table.blocks.tolist(), *[0] * (width - len(table.blocks))] for table in tables]
    assert batch.block_tables.tolist() == padded
    assert (
        batch.block_tables.dtype
        == batch.query_starts.dtype
        == batch.context_lengths.dtype
        == torch.int32
    )


def test_tables_keep_apart_however_many_and_long_they_become() -> None:
    tables = BlockTables()
    of_sequence = {sequence: tables.open() for sequence in range(40)}
    for block in range(50):
        for sequence, table in of_sequence.items():
            table.extend((100 * sequence + block,))
    for sequence in range(0, 40, 2):
        tables.close(of_sequence.pop(sequence))
    newest = table_of(tables, range(5))
    assert newest.blocks.tolist() == [0, 1, 2, 3, 4]
    for sequence, table in of_sequence.items():
        assert table.blocks.tolist() == [100 * sequence + block for block in range(50)]
    assert len(tables.blocks) <= 64, "places are used again"
