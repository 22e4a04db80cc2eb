"""Workers keep recurrent states as one process does: stages those of their layers, ranks those of
their heads."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch

from nanoserve.engine.engine import Engine
from nanoserve.engine_config import EngineConfig
from nanoserve.executor.start.model_loading import with_cache_groups
from nanoserve.executor.workers.executor import WorkersExecutor
from nanoserve.models.hub import ResolvedModel
from nanoserve.models.loading import load_model
from nanoserve.request import Request, SamplingParams
from nanoserve.scheduler import make_policy
from nanoserve.scheduler.assembly import make_extensions
from nanoserve.scheduler.plan import Executor
from nanoserve.scheduler.scheduler import Scheduler
from tests.executor.small_model import local_executor
from tests.models.test_shards import write_checkpoint

pytestmark = pytest.mark.slow

SLOTS, BLOCKS, BLOCK_SIZE = 12, 100, 16
GREEDY = SamplingParams(temperature=0, max_tokens=70)
SAMPLED = SamplingParams(temperature=0.8, max_tokens=12, n=2)


def rounds(vocab_size: int) -> list[list[Request]]:
    """Two rounds of requests. Prompts of the second begin as prompts, and an answer, of the
    first."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, vocab_size, (300,), generator=generator).tolist()
    first, second = tuple(tokens[:147]), tuple(tokens[150:247])
    return [
        [
            Request("long", first, GREEDY, seed=1),
            Request("middle", second, GREEDY, seed=2),
            Request("short", (5, 6, 7), SAMPLED, seed=3),
        ],
        [
            Request("longer", (*first, 7, 8), SAMPLED, seed=4),
            Request("again", second, GREEDY, seed=5),
        ],
    ]


def answers(
    executor: Executor, vocab_size: int, slots: int, depth: int
) -> dict[tuple[str, int], tuple[list[int], int]]:
    """The tokens of each sample, and how many of its prompt were cached."""
    scheduler = Scheduler(
        make_policy("throttling", 64),
        num_blocks=BLOCKS,
        block_size=BLOCK_SIZE,
        max_model_len=256,
        pipeline_depth=depth,
        extensions=make_extensions(state_slots=slots),
    )
    engine = Engine(scheduler, executor, vocab_size=vocab_size)
    found: dict[tuple[str, int], tuple[list[int], int]] = {}
    for requests in rounds(vocab_size):
        for request in requests:
            engine.add(request)
        while engine.has_work:
            for update in engine.step():
                assert update.sequence.error is None
                found[update.request_id, update.index] = (
                    update.sequence.output_tokens,
                    update.sequence.cached_tokens,
                )
    return found


LAYOUTS = ({"pipeline_parallel": 2}, {"tensor_parallel": 2})


@pytest.mark.parametrize(
    ("family", "layouts"),
    [
        ("lfm2", LAYOUTS),
        ("qwen3_5_text", LAYOUTS),
        # without attention, blocks take no memory
        ("mamba", LAYOUTS[:1]),
        ("mamba2-single-group", LAYOUTS[1:]),
        # ranks sum the product that makes its steps, keys and queries
        ("jamba", LAYOUTS[1:]),
    ],
)
def test_stages_and_ranks_answer_what_one_process_answers(
    family: str, layouts: Sequence[dict[str, int]], tmp_path: Path
) -> None:
    write_checkpoint(family, tmp_path)
    decoder, config = load_model(tmp_path, "float32")
    alone = local_executor(decoder, num_blocks=BLOCKS, block_size=BLOCK_SIZE, state_slots=SLOTS)
    expected = answers(alone, config.vocab_size, SLOTS, 1)
    alone.close()
    assert expected["longer", 0][1] == expected["again", 0][1] + 64 == 128
    for layout in layouts:
        settings = EngineConfig(
            dtype="float32",
            eager=True,
            block_size=BLOCK_SIZE,
            kv_cache_memory=8 << 20,
            max_model_len=256,
            max_num_seqs=3,
            **layout,
        )
        workers = WorkersExecutor(
            ResolvedModel(family, tmp_path, tmp_path),
            settings,
            model=with_cache_groups(config, settings),
            host_blocks=0,
        )
        with closing(workers):
            (capacity,) = workers.capacities
            found = answers(
                workers, config.vocab_size, workers.state_slots, capacity.pipeline_depth
            )
        assert found == expected, layout
