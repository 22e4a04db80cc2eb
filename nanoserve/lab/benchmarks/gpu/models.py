"""Engines with random weights, open one at a time: of small models of every family, and of
published shapes."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from nanoserve.lab.benchmarks.driving import EngineDriver
from nanoserve.lab.benchmarks.gpu.device import GpuBench
from nanoserve.llm import LLM
from nanoserve.models.hub import DUMMY_PREFIX
from nanoserve.utils.temporary import temporary_directory

VOCAB_SIZE = 4096  # number of tokens in the tokenizer of dummy models

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 50000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_SPARSE = {
    "moe_intermediate_size": 64,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
}


def _family(model_type: str, **settings: Any) -> dict[str, Any]:
    shape: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 512,
    }
    return {"model_type": model_type, **shape, **settings}


FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": _family("llama", tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama-llama3": _family("llama", rope_parameters=_LLAMA3_ROPE),
    "llama-yarn": _family("llama", rope_parameters=_YARN_ROPE),
    "mistral": _family("mistral", sliding_window=24),
    "qwen2": _family("qwen2", head_dim=80, num_key_value_heads=1),
    "qwen2-window": _family(
        "qwen2", use_sliding_window=True, sliding_window=20, max_window_layers=1
    ),
    "qwen3": _family("qwen3", head_dim=128, tie_word_embeddings=True),
    "glm": _family("glm", attention_bias=True),
    "glm4": _family("glm4", head_dim=256),
    "mixtral": _family("mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=24),
    "qwen3_moe": _family("qwen3_moe", mlp_only_layers=[1], **_SPARSE),
}
"""Configurations of all model families: biases, ties, windows, ropes and experts in every
combination that exists."""


@dataclass(frozen=True, slots=True)
class TimedEngine:
    """An LLM that is ready to be timed, what drives it, and how many steps its executor wants in
    flight."""

    llm: LLM
    driver: EngineDriver
    in_flight: int


class EngineShelf:
    """Holds at most one engine, so that each has the device's memory for itself."""

    def __init__(self, bench: GpuBench) -> None:
        self._bench = bench
        self._held: tuple[Any, TimedEngine] | None = None
        self._closing = ExitStack()

    def get(self, model: str, *, eager: bool = False, **settings: Any) -> TimedEngine:
        """The engine of these settings of LLM; any other is closed first. `model` is one of
        FAMILIES or a published model. In a dry run every engine is eager: compiling for a CPU takes
        a minute and proves nothing about a GPU."""
        settings |= {"device": str(self._bench.device), "eager": eager or self._bench.dry_run}
        if self._held is None or self._held[0] != (model, settings):
            self.close()
            shape = model
            if model in FAMILIES:
                path = self._closing.enter_context(temporary_directory()) / "config.json"
                path.write_text(json.dumps(FAMILIES[model]), encoding="utf-8")
                shape = str(path)
            llm = LLM(DUMMY_PREFIX + shape, seed=0, enable_prefix_caching=False, **settings)
            self._closing.enter_context(llm)
            llm.built.prepare()
            engine = TimedEngine(llm, EngineDriver(llm.engine), llm.engine.executor.max_in_flight)
            self._held = (model, settings), engine
        return self._held[1]

    def close(self) -> None:
        """Give the engine's memory back, and what torch keeps for others that are gone: an engine
        asks what is free."""
        self._held = None
        self._closing.close()
        self._bench.give_back()
