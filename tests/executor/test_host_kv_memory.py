"""--host-kv-memory with one device: what has no room on it waits in host memory, and the answers
stay the same."""

from pathlib import Path

import pytest
import torch

from nanoserve import LLM, SamplingParams
from nanoserve.config.published_shapes import load_shape
from nanoserve.costs.hardware import MachineSpeeds
from nanoserve.engine_config import EngineConfig
from nanoserve.errors import UsageError
from nanoserve.executor.start.predictors import make_predictors
from nanoserve.layout import ParallelLayout
from tests.executor.swaps import watch_swaps
from tests.fakes.integrity import host_pool

PROMPTS = [
    "Once upon a time",
    "The dog",
    "A little girl named Lily went to the park",
    "One day, a boy",
    "Tom and Sam",
]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def answers(**settings: object) -> tuple[list[tuple[int, ...]], LLM]:
    with LLM(dtype="float32", eager=True, max_model_len=64, block_size=8, **settings) as llm:
        llm.generate("A", SamplingParams(max_tokens=1))
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)], llm


def test_preempted_sequences_move_and_their_answers_do_not_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moved = watch_swaps(monkeypatch)
    alone, _ = answers()
    there_and_back, swapping = answers(kv_cache_memory=450_000, host_kv_memory=2_000_000)
    assert moved.count("out") == moved.count("in") > 0
    assert there_and_back == alone
    assert (
        host_pool(swapping.engine.scheduler).free_blocks
        == host_pool(swapping.engine.scheduler).num_blocks
        > 0
    )


@pytest.mark.skipif(
    not Path("/proc/self/maps").is_file(), reason="nothing tells what this process has mapped"
)
def test_one_process_takes_nothing_of_shared_memory() -> None:
    """So there is nothing that it could leave behind, whatever it dies of."""
    with LLM(eager=True, host_kv_memory=2_000_000):
        assert "/dev/shm/nanoserve" not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"host_kv_memory": 2**50},
            r"--host-kv-memory .* GiB is more than the .* that is left for it",
        ),
        (
            {"host_kv_memory": 100_000, "max_model_len": 64},
            r"one sequence may have 64: set --host-kv-memory to .* least",
        ),
        (
            {
                "host_kv_memory": 1 << 16,
                "pipeline_parallel": 2,
                "decode_layout": ParallelLayout(tensor_parallel=2),
            },
            r"holds 16 tokens .* may have 1024: set --host-kv-memory to 4\.0 MiB .* lower --max-model-len to 16",
        ),
        (
            {"policy": "neo", "host_threads": 1024},
            r"--host-threads 1024: only \d+ cores? may .* choose \d+ at most",
        ),
        (
            {"policy": "neo", "profile": "/nowhere/profile.json"},
            r"cannot read /nowhere/profile.json: No such file",
        ),
        ({"policy": "neo", "profile": "/"}, r"/ is not a regular file"),
    ],
)
def test_what_makes_no_sense_is_one_clear_line(settings: dict, line: str) -> None:
    with pytest.raises(UsageError, match=line):
        LLM(eager=True, dtype="float32", **settings)


def test_what_predicts_asks_no_gpu_for_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPUs are the workers': whoever asks takes some hundred megabytes of one, when all of it
    is in use."""

    def asked(*_: object) -> None:
        raise AssertionError("the engine's process asked a GPU")

    for name in ("mem_get_info", "memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, asked)
    speeds = MachineSpeeds(memory_bandwidth=4e9, flops=100e9, host_link_bandwidth=5e9)
    config = EngineConfig(device="cuda", dtype="bfloat16", pipeline_parallel=2)
    (predictor,) = make_predictors(speeds, load_shape("qwen3-0.6b"), config)
    assert predictor.swap_seconds(1000) > 0
