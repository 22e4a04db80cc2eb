"""What the rows of a plan amount to for whoever predicts or simulates them."""

from collections.abc import Callable, Iterable

from nanoserve.costs.work import Chunk, StepWork
from nanoserve.scheduler.plan import Row


def work_of(rows: Iterable[Row], sum_up: Callable[[list[int], list[Chunk], int], StepWork] = StepWork.of) -> StepWork:
    """Sum rows up.

    Args:
        rows: of a plan.
        sum_up: makes work of the decodes' contexts, the chunks and how many rows are sampled.
    """
    contexts: list[int] = []
    chunks: list[Chunk] = []
    sampled = 0
    for row in rows:
        sampled += row.sample
        if len(row.tokens) == 1:
            contexts.append(row.start + 1)
        else:
            chunks.append((row.start, len(row.tokens)))
    return sum_up(contexts, chunks, sampled)
