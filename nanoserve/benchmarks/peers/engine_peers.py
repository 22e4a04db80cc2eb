"""Engines in this process as peers: nanoserve itself, and Hugging Face transformers as its documentation shows it."""

import sys
import time
from pathlib import Path
from typing import Any

import torch

from nanoserve.benchmarks.driving import EngineDriver
from nanoserve.benchmarks.peers.process import Batch, BatchResult, Opening
from nanoserve.benchmarks.settling import settle
from nanoserve.llm import LLM
from nanoserve.measures.metrics import RequestTiming
from nanoserve.models.dtypes import format_name


class NanoservePeer:
    """The engine behind LLM, given token ids."""

    name = "nanoserve"

    def __init__(self, opening: Opening) -> None:
        self._llm = LLM(
            opening.model,
            dtype=opening.dtype,
            max_model_len=opening.max_length + 1,
            max_num_seqs=opening.max_batch,
            policy=opening.policy,
            eager=opening.eager,
        )
        facts = settle(self._llm, lambda line: print(line, file=sys.stderr))
        self._driver = EngineDriver(self._llm.engine)
        self.description = {name: facts[name] for name in ("dtype", "threads", "operators", "layers")}

    def run(self, batch: Batch) -> BatchResult:
        run = self._driver.run(batch.prompts, [batch.output_tokens] * len(batch.prompts))
        return BatchResult(run.timings, run.tokens)

    def close(self) -> None:
        self._llm.close()


def open_transformers(directory: str | Path, dtype: str, end_tokens: list[int] | None = None) -> Any:
    """transformers' model of a checkpoint directory, with torch's scaled dot product attention."""
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    model = load(
        directory, dtype=getattr(torch, dtype), attn_implementation="sdpa", local_files_only=True, use_safetensors=True
    ).eval()
    model.generation_config.eos_token_id = end_tokens
    return model


class TransformersPeer:
    """generate() on the CPU, with a streamer that looks at the clock."""

    name = "transformers"

    def __init__(self, opening: Opening) -> None:
        # No end tokens: the work is a number of tokens, whatever they are.
        self._model = open_transformers(opening.model, opening.dtype)
        self.description: dict[str, Any] = {
            "dtype": format_name(self._model.dtype),
            "threads": torch.get_num_threads(),
            "attention": self._model.config._attn_implementation,
        }

    def run(self, batch: Batch) -> BatchResult:
        ids = torch.tensor(batch.prompts)
        clock = _Clock()
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=batch.output_tokens,
                do_sample=False,
                pad_token_id=0,
                streamer=clock,
            )
        times = tuple(clock.times)
        answers = output[:, ids.shape[1] :].tolist()
        timings = tuple(RequestTiming(len(prompt), times) for prompt in batch.prompts)
        return BatchResult(timings, tuple(tuple(answer) for answer in answers))

    def close(self) -> None:
        del self._model


class _Clock:
    """A streamer: seconds from its creation to each step's tokens; generate() first shows it the prompt."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._seen_prompt = False
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        if self._seen_prompt:
            self.times.append(time.perf_counter() - self._began)
        self._seen_prompt = True

    def end(self) -> None:
        """Nothing is held back."""
