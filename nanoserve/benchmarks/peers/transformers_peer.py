"""Hugging Face transformers: generate() as its documentation shows it, with a streamer that looks at the clock."""

import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from nanoserve.benchmarks.peers.protocol import Batch, BatchResult, Opening
from nanoserve.measures.metrics import RequestTiming


class TransformersPeer:
    """A checkpoint directory on the CPU, with torch's scaled dot product attention."""

    name = "transformers"

    def __init__(self, opening: Opening) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(
            opening.model,
            dtype=getattr(torch, opening.dtype),
            attn_implementation="sdpa",
            local_files_only=True,
            use_safetensors=True,
        )
        self._model = model.eval()
        self._model.generation_config.eos_token_id = None  # the work is a number of tokens, whatever they are
        self.description: dict[str, Any] = {
            "dtype": str(self._model.dtype).removeprefix("torch."),
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


# The base class is untyped, but only where transformers is installed.
class _Clock(BaseStreamer):  # type: ignore[misc,unused-ignore]
    """Seconds from its creation to each step's tokens; generate() first shows it the prompt."""

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
