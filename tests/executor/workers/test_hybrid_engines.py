"""Whole engines whose stages attend on the CPU: the bundled model's answers, and what servers of
them live through."""

import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoserve import LLM, SamplingParams
from nanoserve.costs.profile import write_profile
from nanoserve.engine.assembly import build_engine
from nanoserve.engine_config import EngineConfig
from nanoserve.errors import UsageError
from nanoserve.executor.workers.executor import WorkersExecutor
from nanoserve.models.hub import ResolvedModel
from nanoserve.request import Request
from nanoserve.scheduler.plan import StepPlan
from tests.costs.profiles import made_up_profile
from tests.executor.cpu_attention.servers import HYBRID, MODEL, PROMPTS, busy, texts, whole_texts
from tests.oracle.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.processes import MARK, kill, marked, new_mark, workers
from tests.server.starting import PATIENCE_SECONDS, Server, running

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
SMALL: dict[str, Any] = {
    "kv_cache_memory": 1 << 20,
    "host_kv_memory": 32 << 20,
    "max_model_len": 100,
}
STAGES = ("--pp", "2", *HYBRID)


# --------------------------------------------------------------------------------------------------
# in this process


def ask(llm: LLM) -> list[tuple[int, ...]]:
    return [
        tuple(output.outputs[0].token_ids) for output in llm.generate([*PROMPTS, *PROMPTS], GREEDY)
    ]


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    with LLM(dtype="float32", eager=True) as llm:
        return ask(llm)


@pytest.fixture
def strategies(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the strategies of plans with host sequences that workers are sent."""
    count, submit = Counter[str](), WorkersExecutor.submit

    def counting(executor: WorkersExecutor, plan: StepPlan) -> None:
        count[plan.host.strategy] += any(row.host is not None for row in plan.rows)
        submit(executor, plan)

    monkeypatch.setattr(WorkersExecutor, "submit", counting)
    return count


@pytest.mark.parametrize(
    ("policy", "stages"), [("neo", 2), ("overlap", 3), ("apex", 3), ("hybrid", 2)]
)
def test_the_bundled_model_says_the_same(
    policy: str, stages: int, expected: list[tuple[int, ...]], strategies: Counter[str]
) -> None:
    with LLM(dtype="float32", eager=True, policy=policy, pipeline_parallel=stages, **SMALL) as llm:
        assert ask(llm) == expected
    assert policy == "hybrid" or strategies.total() > 0, strategies


@torch.inference_mode()
def test_layers_of_two_kinds_say_what_transformers_says(
    tmp_path: Path, strategies: Counter[str]
) -> None:
    """Attention on the CPU puts layers with a window and layers without into one cache group."""
    reference = make_checkpoint("gemma3_text", tmp_path)
    prompts = torch.randint(3, VOCAB_SIZE, (8, 30), generator=torch.Generator().manual_seed(3))
    memory = {**SMALL, "kv_cache_memory": 1 << 18}
    settings = EngineConfig(
        dtype="float32", eager=True, policy="overlap", pipeline_parallel=2, **memory
    )
    twenty = SamplingParams(temperature=0.0, max_tokens=20)
    with closing(
        build_engine(ResolvedModel("gemma", tmp_path, tmp_path), settings).engine
    ) as engine:
        for number, prompt in enumerate(prompts.tolist()):
            engine.add(Request(str(number), tuple(prompt), twenty, seed=0))
        answers: dict[str, list[int]] = {}
        while engine.has_work:
            for update in engine.step():
                answers.setdefault(update.request_id, []).extend(update.new_tokens)
    tokens = prompts
    for _ in range(20):
        tokens = torch.cat((tokens, reference(tokens).logits[:, -1:].argmax(-1)), dim=1)
    assert answers == {str(number): answer for number, answer in enumerate(tokens[:, 30:].tolist())}
    assert strategies["overlap"] > 0


def test_two_engines_of_two_stages(
    expected: list[tuple[int, ...]], strategies: Counter[str]
) -> None:
    settings = {**SMALL, "host_kv_memory": 64 << 20}
    with LLM(
        dtype="float32",
        eager=True,
        policy="overlap",
        pipeline_parallel=2,
        data_parallel=2,
        **settings,
    ) as llm:
        assert ask(llm) == expected
    assert strategies["overlap"] > 0


def test_a_profile_of_something_else_is_refused_in_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MARK, mark := new_mark())
    path = tmp_path / "profile.json"
    write_profile(made_up_profile(), path)
    with pytest.raises(UsageError, match=r"profile.json is a profile of another ") as caught:
        LLM(
            dtype="float32",
            eager=True,
            policy="overlap",
            pipeline_parallel=2,
            profile=str(path),
            **SMALL,
        )
    assert "\n" not in str(caught.value)
    assert marked(mark) == []


# --------------------------------------------------------------------------------------------------
# as a server


@pytest.fixture
def mark() -> Iterator[str]:
    mark = new_mark()
    yield mark
    assert marked(mark) == []


def test_a_server_whose_stage_is_killed_and_that_is_told_to_end(mark: str) -> None:
    whole = whole_texts()
    with running(*STAGES, *MODEL, **{MARK: mark}) as server:
        readers = busy(server)
        kill(workers(mark)[1])
        assert texts(readers) == whole
        assert server.metric("nanoserve:worker_losses_total") == 1
        readers = busy(server)
        server.process.send_signal(signal.SIGTERM)
        assert texts(readers) == whole
        assert server.process.wait(PATIENCE_SECONDS) == 0, server.log


@pytest.mark.parametrize("engine", [STAGES, HYBRID], ids=["two stages", "one process"])
def test_a_server_that_is_told_twice_does_not_wait(engine: tuple[str, ...], mark: str) -> None:
    server = Server("--port", "0", *engine, *MODEL, **{MARK: mark})
    server.wait_ready()
    busy(server)
    for _ in range(2):
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    server.process.wait(PATIENCE_SECONDS)
    assert "Traceback" not in server.log, server.log
    assert not server.left_behind(), server.left_behind()
    shutil.rmtree(server.directory)
