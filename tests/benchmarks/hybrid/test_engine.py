"""A real engine: opened with memory for every case, and measured."""

import pytest

from nanoserve.benchmarks.cpu_load import ForeignLoad
from nanoserve.benchmarks.hybrid.cases import Case, Work
from nanoserve.benchmarks.hybrid.engines import open_engine
from nanoserve.benchmarks.hybrid.policies import HybridEngine, Scheduling
from nanoserve.benchmarks.hybrid.rounds import Bench, HybridRound
from nanoserve.benchmarks.pipeline.running import make_requests
from nanoserve.costs.profile import Profile
from nanoserve.engine_config import EngineConfig
from nanoserve.errors import RuntimeFailure
from nanoserve.models.hub import resolve_model
from nanoserve.runtime.host.host_attention import HostAttentionLost
from nanoserve.runtime.launch.model_loading import read_config

pytestmark = pytest.mark.slow

CONFIG = EngineConfig(dtype="float32", eager=True, max_model_len=256, max_num_seqs=16, policy="hybrid", host_threads=1)
WORK = Work(input_tokens=40, outputs=(12, 30), requests=6, shares=(0.35, 1.0), block_size=CONFIG.block_size)
POLICIES = ("sarathi", "neo", "overlap", "hybrid")


def _round(engine: HybridEngine, scheduling: Scheduling, case: Case, vocab_size: int) -> HybridRound:
    bench = Bench(
        case=case.name,
        variants=list(scheduling.variants(case)),
        make_requests=lambda number: make_requests(case.shapes, [0.0] * case.requests, vocab_size, number),
        vocab_size=vocab_size,
        probe=lambda: 1e10,
        foreign=ForeignLoad(),
        keep=lambda variant, run: None,
        engine=engine,
        block_size=CONFIG.block_size,
    )
    return next(bench.rounds(1))


def test_every_case_runs_on_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = resolve_model(None)
    model = read_config(resolved)
    engine = open_engine(resolved, CONFIG, model, WORK, None)
    try:
        scheduling = Scheduling(engine, POLICIES, block_size=CONFIG.block_size, max_num_seqs=16, token_budget=128)
        for case in WORK.cases():
            done = _round(engine, scheduling, case, model.vocab_size)
            for figures in done.variants.values():
                tokens = figures.latencies.device.tokens + figures.latencies.host.tokens
                assert tokens == case.requests * (case.shape.output_tokens - 1)
                assert figures.errors.all is not None and figures.errors.all.steps > 0
                assert (figures.processor_share > 0) == (figures.steps.hybrid > 0)
                assert not (case.holds_everything and figures.steps.hybrid)
            assert (done.variants["overlap"].steps.overlap > 0) == (not case.holds_everything)

        def lost(*arguments: object) -> Profile:
            raise HostAttentionLost("the thread died")

        monkeypatch.setattr("nanoserve.benchmarks.hybrid.engines.measure_shortly", lost)
        with pytest.raises(RuntimeFailure, match="attention on the CPU is lost: the thread died"):
            engine.measure_times()
    finally:
        engine.close()
