"""Engines in this process as peers: nanoserve itself, and Hugging Face transformers as its
documentation shows it."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from nanoserve.lab.benchmarks.driving import EngineDriver, EngineRun
from nanoserve.lab.benchmarks.peers.process import Opening, Prompts
from nanoserve.lab.benchmarks.settling import settle
from nanoserve.llm import LLM
from nanoserve.models.dtypes import format_name
from nanoserve.record.metrics import RequestTiming


class NanoservePeer:
    """The engine behind LLM, given token ids."""

    def __init__(self, opening: Opening) -> None:
        self.llm = LLM(
            opening.model,
            dtype=opening.dtype,
            max_model_len=opening.max_length + 1,
            max_num_seqs=opening.max_batch,
            policy=opening.policy,
            eager=opening.eager,
            quantization=opening.quantization,
        )
        facts = settle(self.llm, lambda line: print(line, file=sys.stderr))
        self._driver = EngineDriver(self.llm.engine)
        self.description = {
            name: facts[name] for name in ("dtype", "threads", "operators", "layers")
        }

    def run(self, prompts: Prompts, output_tokens: int) -> EngineRun:
        return self._driver.run(prompts, [output_tokens] * len(prompts))


def open_transformers(
    directory: str | Path, dtype: str, end_tokens: list[int] | None = None
) -> Any:
    """transformers' model of a checkpoint directory, with torch's scaled dot product attention."""
    from transformers import AutoModelForCausalLM

    load: Any = AutoModelForCausalLM.from_pretrained
    model = load(
        directory,
        dtype=getattr(torch, dtype),
        attn_implementation="sdpa",
        local_files_only=True,
        use_safetensors=True,
    ).eval()
    model.generation_config.eos_token_id = end_tokens
    return model


class TransformersPeer:
    """generate() on the CPU, with a streamer that looks at the clock."""

    def __init__(self, opening: Opening) -> None:
        # No end tokens: the work is a number of tokens, whatever they are.
        self._model = open_transformers(opening.model, opening.dtype)
        self.description = {
            "dtype": format_name(self._model.dtype),
            "threads": torch.get_num_threads(),
            "attention": self._model.config._attn_implementation,
        }

    def run(self, prompts: Prompts, output_tokens: int) -> EngineRun:
        ids = torch.tensor(prompts)
        # generate() first shows its streamer the prompt, then the tokens of each step
        moments: list[float] = []
        streamer = SimpleNamespace(
            put=lambda _: moments.append(time.perf_counter()), end=lambda: None
        )
        began = time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=output_tokens,
                do_sample=False,
                pad_token_id=0,
                streamer=streamer,
            )
        answers = output[:, ids.shape[1] :].tolist()
        timing = RequestTiming(ids.shape[1], tuple(moment - began for moment in moments[1:]))
        return EngineRun((timing,) * len(prompts), tuple(tuple(answer) for answer in answers))
