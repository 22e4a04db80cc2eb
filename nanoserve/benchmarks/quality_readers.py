"""nanoserve and Hugging Face transformers as the quality benchmark uses them."""

from pathlib import Path
from typing import Any

import torch

from nanoserve.llm import LLM
from nanoserve.request import SamplingParams


class NanoserveReader:
    """An open LLM."""

    name = "nanoserve"

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def log_likelihood(self, tokens: tuple[int, ...]) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
        scored = self._llm.generate(list(tokens), params)[0].prompt_logprobs or ()
        return sum(entry.logprob for entry in scored if entry is not None)

    def answer(self, tokens: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
        output = self._llm.generate(list(tokens), SamplingParams(temperature=0.0, max_tokens=max_tokens))[0].outputs[0]
        return output.token_ids[:-1] if output.finish_reason == "stop" else output.token_ids


class TransformersReader:
    """A checkpoint directory, read by transformers."""

    name = "transformers"

    def __init__(self, directory: Path, dtype: str, end_tokens: tuple[int, ...]) -> None:
        from transformers import AutoModelForCausalLM

        self._end_tokens = end_tokens
        model: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=getattr(torch, dtype), attn_implementation="sdpa", local_files_only=True
        )
        self._model = model.eval()
        self._model.generation_config.eos_token_id = list(end_tokens) or None

    def log_likelihood(self, tokens: tuple[int, ...]) -> float:
        ids = torch.tensor([tokens])
        with torch.inference_mode():
            logprobs = self._model(ids).logits[0, :-1].float().log_softmax(-1)
        return float(logprobs.gather(1, ids[0, 1:, None]).double().sum())

    def answer(self, tokens: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
        ids = torch.tensor([tokens])
        with torch.inference_mode():
            output = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
            )
        answer = tuple(output[0, ids.shape[1] :].tolist())
        return answer[:-1] if answer and answer[-1] in self._end_tokens else answer
