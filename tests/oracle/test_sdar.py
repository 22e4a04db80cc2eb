"""SDAR in the whole engine against transformers' Qwen3 with an explicit mask, and against the loop
of SDAR's own generate.py."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from nanoserve.engine.assembly import build_engine
from nanoserve.engine_config import EngineConfig
from nanoserve.models.hub import ResolvedModel
from nanoserve.models.loading import load_model
from nanoserve.request import Request, SamplingParams
from nanoserve.scheduler.plan import StepPlan
from nanoserve.scheduler.scheduler import Scheduler
from tests.oracle.checkpoints import VOCAB_SIZE
from tests.oracle.sdar import END_TOKEN, MASK_TOKEN, Generation, block_causal_logits, make_sdar
from tests.oracle.test_families import TOLERANCE, dense_logits

LENGTH = 4
GREEDY = {"temperature": 0.0, "max_tokens": 14}
DEFAULTS = {"dtype": "float32", "eager": True, "kv_cache_memory": 1 << 22, "max_model_len": 96}
Outputs = dict[tuple[str, int], list[int]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    directory = tmp_path_factory.mktemp("sdar")
    return directory, make_sdar(directory, LENGTH)


class Run:
    """Requests that an engine has carried out."""

    def __init__(self, directory: Path, requests: list[Request], **settings: Any) -> None:
        resolved = ResolvedModel("sdar", directory, directory)
        built = build_engine(resolved, EngineConfig(**DEFAULTS | settings))
        self.plans: list[StepPlan] = []
        self.outputs: Outputs = {}
        self.gains = list[int]()
        engine = built.engine
        self.scheduler: Scheduler = engine.scheduler  # type: ignore[attr-defined]
        self.scheduler.observers.append(self)  # type: ignore[arg-type]
        try:
            for request in requests:
                engine.add(request)
            while engine.has_work:
                for update in engine.step():
                    assert update.sequence.error is None, update.sequence.error
                    key = update.request_id, update.index
                    self.outputs.setdefault(key, []).extend(update.new_tokens)
                    self.gains.append(len(update.new_tokens))
        finally:
            engine.close()
        assert self.scheduler.pool.free_blocks == self.scheduler.pool.num_blocks

    def on_plan(self, plan: StepPlan, *seen: object) -> None:
        self.plans.append(plan)

    def on_result(self, result: object) -> None:
        pass

    on_reset = on_result

    @property
    def denoising_steps(self) -> int:
        return sum(row.canvas is not None for plan in self.plans for row in plan.rows)


def prompts() -> list[tuple[int, ...]]:
    """Longer than a block and not whole blocks, whole blocks, less than a block, one with the
    first's beginning, and a single token."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(3, VOCAB_SIZE - 1, (90,), generator=generator).tolist()
    first = tuple(tokens[:45])
    return [first, tuple(tokens[50:58]), tuple(tokens[60:63]), (*first[:37], 5), (tokens[80],)]


def requests_of(prompts: list[tuple[int, ...]], **params: Any) -> list[Request]:
    return [
        Request(str(number), prompt, SamplingParams(**GREEDY | params), number, (END_TOKEN,))
        for number, prompt in enumerate(prompts)
    ]


def test_logits_are_those_of_transformers(checkpoint: tuple[Path, PreTrainedModel]) -> None:
    """Dense, with masks in the last block."""
    directory, model = checkpoint
    decoder, config = load_model(directory, "fp32")
    tokens = [*prompts()[0][:38], MASK_TOKEN, MASK_TOKEN]
    found = dense_logits(decoder, config, torch.tensor(tokens))
    expected = block_causal_logits(model, tokens, LENGTH)
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


STRATEGIES = {
    "confidence": Generation(None, LENGTH),  # type: ignore[arg-type]
    "confidence:threshold=0.2": Generation(None, LENGTH, 0.2),  # type: ignore[arg-type]
    "confidence:threshold=0.2:steps=2": Generation(None, LENGTH, 0.2, 2),  # type: ignore[arg-type]
    "static": Generation(None, LENGTH, None),  # type: ignore[arg-type]
    "static:steps=3": Generation(None, LENGTH, None, 3),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("denoising", STRATEGIES)
def test_greedy_answers_are_those_of_sdars_own_loop(
    denoising: str, checkpoint: tuple[Path, PreTrainedModel]
) -> None:
    directory, model = checkpoint
    loop = STRATEGIES[denoising]
    loop.model, loop.passes = model, 0
    expected = {(str(n), 0): loop.answer(prompt, 14) for n, prompt in enumerate(prompts())}
    ran = Run(directory, requests_of(prompts()), denoising=denoising)
    assert ran.outputs == expected
    assert ran.denoising_steps == loop.passes
