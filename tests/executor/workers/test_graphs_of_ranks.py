"""Decode steps of ranks and stages are captured, with the CPU in the GPU's place: the answers are
those of one process without graphs, and all ranks replay the same steps."""

from contextlib import closing
from pathlib import Path

import pytest

from nanoserve.executor.workers import process
from nanoserve.layout import ParallelLayout
from tests.executor.workers.graph_worker import NOTES, PROGRAM
from tests.executor.workers.loads import ROOMY_BLOCKS, Case, Reference, start_workers

BUCKETS = (1, 2, 4, 6)
CASES = [
    Case("sarathi", token_budget=24, seed=1),
    Case("throttling", token_budget=7, max_num_seqs=5, seed=2),
]


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the notes of workers that are started from now on."""
    monkeypatch.setattr(process, "_PROGRAM", PROGRAM)
    monkeypatch.setenv(NOTES, str(tmp_path))
    return tmp_path


def read_notes(path: Path) -> list[tuple[int, ...]]:
    return [tuple(map(int, line.split())) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("stages", "degree"),
    [
        pytest.param(2, 1, id="p2"),
        pytest.param(1, 2, id="t2"),
        pytest.param(2, 2, id="t2p2", marks=pytest.mark.slow),
    ],
)
def test_workers_replay_decode_steps(
    stages: int, degree: int, reference: Reference, notes: Path
) -> None:
    layout = {"pipeline_parallel": stages, "tensor_parallel": degree}
    workers = start_workers(reference, eager=False, max_num_seqs=BUCKETS[-1], **layout)
    with closing(workers):
        seen = reference.check(workers, CASES)
    assert seen.together == stages, "as many micro-batches in flight as there are stages"
    of_ranks = [read_notes(notes / str(rank)) for rank in range(stages * degree)]
    for rows, longest, replayed, *_ in of_ranks[0]:
        fits = longest == 1 and rows <= BUCKETS[-1]
        assert replayed == (min(size for size in BUCKETS if size >= rows) if fits else 0)
    assert len({step[2] for step in of_ranks[0]}) > 2, "none, and several sizes"
    for others in of_ranks[1:]:
        assert [step[:3] for step in others] == [step[:3] for step in of_ranks[0]]
    assert all(step[3] for of_rank in of_ranks for step in of_rank), "layers are compiled"
    samples = [of_rank[-1][4] == 1 for of_rank in of_ranks]
    alone = degree == 1  # ranks gather logits, which they do as before
    assert samples == [alone and rank == stages - 1 for rank in range(stages * degree)]
    assert not (notes / "overwritten").exists(), "hidden states that were still being sent"


@pytest.mark.slow
def test_graphs_outlast_a_change_of_layout(reference: Reference, notes: Path) -> None:
    """Workers take turns as stages and as ranks; each layout has graphs of its own, which read the
    weights and the cache where both layouts have them."""
    workers = start_workers(
        reference,
        eager=False,
        host_blocks=ROOMY_BLOCKS,
        max_num_seqs=BUCKETS[-1],
        pipeline_parallel=2,
        decode_layout=ParallelLayout(tensor_parallel=2),
        policy="seesaw",
    )
    case = Case("decode-prioritizing", token_budget=7, host_blocks=ROOMY_BLOCKS, seed=3)
    with closing(workers):
        seen = reference.check(workers, [case])
    assert seen.transitions >= 5
    first, second = (read_notes(notes / str(rank)) for rank in range(2))
    assert [step[:3] for step in first] == [step[:3] for step in second]
    assert len({step[2] for step in first}) > 2, "none, and several sizes"
