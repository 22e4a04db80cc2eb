"""A real engine: opened with memory for every case, and measured."""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import pytest

from nanoserve.costs.profile import Profile
from nanoserve.engine_config import EngineConfig
from nanoserve.errors import RuntimeFailure
from nanoserve.executor.cpu_attention.host_attention import HostAttentionLost
from nanoserve.executor.start.model_loading import read_config
from nanoserve.lab.benchmarks.policies.engines import open_with_host
from nanoserve.lab.benchmarks.policies.gains import HYBRID
from nanoserve.lab.benchmarks.policies.rounds import Bench
from nanoserve.lab.benchmarks.policies.variants import KvCases, fitted
from nanoserve.lab.commands.bench_hybrid import hybrid_benches
from nanoserve.models.hub import resolve_model

pytestmark = pytest.mark.slow

CONFIG = EngineConfig(
    dtype="float32", eager=True, max_model_len=256, max_num_seqs=16, policy="hybrid", host_threads=1
)
WORK = KvCases(
    input_tokens=40, outputs=(12, 30), requests=6, shares=(0.35, 1.0), block_size=CONFIG.block_size
)
POLICIES = ("sarathi", "neo", "overlap", "hybrid")


def test_every_case_runs_on_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = resolve_model(None)
    model = read_config(resolved)
    with ExitStack() as opened:
        engine = open_with_host(opened, resolved, CONFIG, model, WORK, None)
        config = replace(
            fitted(CONFIG, model, [engine]), max_num_seqs=16, max_num_batched_tokens=128
        )
        for bench in hybrid_benches(
            partial(Bench, probe=lambda: 1e10), engine, POLICIES, WORK, config
        ):
            done = bench.round(1)
            holds_everything = bench.facts["share"] >= 1
            for figures in done.variants.values():
                tokens = (
                    figures["latencies"]["device"]["tokens"]
                    + figures["latencies"]["host"]["tokens"]
                )
                hybrid = any(figures["steps"][strategy] for strategy in HYBRID)
                assert tokens == len(bench.shapes) * (bench.facts["output"] - 1)
                assert figures["errors"]["all"]["steps"] > 0
                assert (figures["processor_share"] > 0) == hybrid
                assert not (holds_everything and hybrid)
            assert (done.variants["overlap"]["steps"]["overlap"] > 0) == (not holds_everything)

        def lost(*arguments: object) -> Profile:
            raise HostAttentionLost("the thread died")

        monkeypatch.setattr("nanoserve.lab.benchmarks.policies.engines.measure_shortly", lost)
        with pytest.raises(RuntimeFailure, match="attention on the CPU is lost: the thread died"):
            engine.measure_times and engine.measure_times()
