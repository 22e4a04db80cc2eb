"""Runs on two real workers that change their layout: replayed to equal plans, and simulated with
what they took."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from nanoserve.engine_config import EngineConfig
from nanoserve.executor.start.model_loading import read_config
from nanoserve.lab.benchmarks.policies.engines import open_workers
from nanoserve.lab.benchmarks.policies.metrics import layout_metrics
from nanoserve.lab.benchmarks.policies.rounds import Run
from nanoserve.lab.benchmarks.policies.variants import OpenEngine, make_requests
from nanoserve.lab.commands.bench_reshard import resharding_variants
from nanoserve.layout import ParallelLayout
from nanoserve.models.hub import resolve_model
from nanoserve.request import RequestShape

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
def workers() -> Iterator[OpenEngine]:
    with ExitStack() as opened:
        yield open_workers(opened, "P2 -> T2", RESOLVED, CONFIG, MODEL, None)


@pytest.mark.parametrize("name", NAMES)
def test_a_real_run_is_replayed_to_equal_plans(workers: OpenEngine, name: str) -> None:
    config = replace(CONFIG, max_num_batched_tokens=128)
    variant = {one.name: one for one in resharding_variants([workers], config)}[name]
    requests = make_requests(SHAPES, [0.0] * len(SHAPES), MODEL.vocab_size, seed=1)
    record = variant.run(requests)
    run = Run(variant, record)
    figures = layout_metrics(run, run)  # which raises at another plan
    assert figures["simulated"]["replayed"] == figures["simulated"]["plans"] == len(record.plans)
    assert all(timing.output_tokens == 10 for timing in record.timings)
    phases = figures["phases"]
    if phases is None:
        assert figures["transitions"] == 0
        return
    assert figures["transitions"] >= 3, "neither the pool nor the device holds all prompts"
    assert figures["swaps_out"].num_bytes == figures["swaps_in"].num_bytes > 0
    assert figures["reshards"].count == figures["transitions"]
    whole = sum(phases[part] for part in ("prefill", "decode", "draining", "resharding"))
    assert whole == pytest.approx(figures["seconds"], rel=0.05), (
        "from the first plan to the last answer"
    )
