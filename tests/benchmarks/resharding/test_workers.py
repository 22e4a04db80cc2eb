"""Runs on two real workers that change their layout: replayed to equal plans, and simulated with what they took."""

from collections.abc import Iterator

import pytest

from nanoserve.benchmarks.pipeline.running import make_requests
from nanoserve.benchmarks.resharding.engines import open_pair
from nanoserve.benchmarks.resharding.policies import Scheduling, Workers
from nanoserve.benchmarks.resharding.rounds import Variant, figures_of
from nanoserve.benchmarks.resharding.running import run_in_layouts
from nanoserve.engine_config import EngineConfig
from nanoserve.layout import ParallelLayout
from nanoserve.measures.workloads import RequestShape
from nanoserve.models.hub import resolve_model
from nanoserve.runtime.launch.model_loading import read_config

CONFIG = EngineConfig(
    dtype="float32",
    eager=True,
    kv_cache_memory=4 << 20,
    host_kv_memory=6 << 20,
    max_model_len=512,
    max_num_seqs=32,
    pipeline_parallel=2,
    decode_layout=ParallelLayout(tensor_parallel=2),
)
RESOLVED = resolve_model(None)
MODEL = read_config(RESOLVED)
SHAPES = [RequestShape(40 + 3 * number, 10) for number in range(32)]
NAMES = [
    "sarathi, P2",
    "sarathi, T2",
    "prefill-prioritizing, P2 -> T2",
    "decode-prioritizing, P2 -> T2",
    "transition-minimizing, P2 -> T2",
]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    opened = open_pair(RESOLVED, CONFIG, MODEL, progress=None)
    yield opened
    opened.close()


def _contender(workers: Workers, name: str) -> Variant:
    scheduling = Scheduling(block_size=16, max_model_len=512, max_num_seqs=32, token_budget=128)
    return {one.name: one for one in scheduling.variants([workers])}[name]


@pytest.mark.parametrize("name", NAMES)
def test_a_real_run_is_replayed_to_equal_plans(workers: Workers, name: str) -> None:
    variant = _contender(workers, name)
    requests = make_requests(SHAPES, [0.0] * len(SHAPES), MODEL.vocab_size, seed=1)
    run = run_in_layouts(variant.place, variant.make_scheduler, requests, vocab_size=MODEL.vocab_size)
    figures = figures_of(variant, run, MODEL.vocab_size, None)  # which raises at another plan
    assert figures.simulated is not None
    assert figures.simulated.replayed == figures.simulated.plans == len(run.plans)
    assert all(timing.output_tokens == 10 for timing in run.timings)
    if figures.phases is None:
        assert figures.transitions == 0
        return
    assert figures.transitions >= 3, "neither the pool nor the device holds all prompts"
    assert figures.swaps_out is not None and figures.swaps_in is not None and figures.reshards is not None
    assert figures.swaps_out.num_bytes == figures.swaps_in.num_bytes > 0
    assert figures.reshards.count == figures.transitions
    phases = figures.phases
    whole = phases.prefill + phases.decode + phases.draining + phases.resharding
    assert whole == pytest.approx(figures.seconds, rel=0.05), "from the first plan to the last answer"
