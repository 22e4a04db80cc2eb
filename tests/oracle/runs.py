"""Runs of whole engines, for tests of models that write canvases."""

from pathlib import Path
from typing import Any

from nanoserve.engine.assembly import build_engine
from nanoserve.engine_config import EngineConfig
from nanoserve.models.hub import ResolvedModel
from nanoserve.request import Request, TokenLogprob
from nanoserve.scheduler.plan import StepPlan
from nanoserve.scheduler.scheduler import Scheduler

DEFAULTS = {"dtype": "float32", "eager": True, "kv_cache_memory": 1 << 22, "max_model_len": 96}
Outputs = dict[tuple[str, int], list[int]]


class Run:
    """Requests that an engine has carried out."""

    def __init__(self, directory: Path, requests: list[Request], **settings: Any) -> None:
        resolved = ResolvedModel("model", directory, directory)
        built = build_engine(resolved, EngineConfig(**DEFAULTS | settings))
        self.plans: list[StepPlan] = []
        self.outputs: Outputs = {}
        self.gains = list[int]()
        self.logprobs: dict[tuple[str, int], list[TokenLogprob]] = {}
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
                    self.logprobs[key] = update.sequence.logprobs
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
