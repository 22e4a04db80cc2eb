"""Continuous batching of Hugging Face transformers, given the same requests."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from nanoserve.benchmarks.gpu.cases import CannotRun
from nanoserve.measures.workloads import RequestShape

_POLL_SECONDS = 0.2


def run_transformers(
    config: Mapping[str, Any],
    prompts: Sequence[tuple[int, ...]],
    shapes: Sequence[RequestShape],
    *,
    device: torch.device,
    dtype: torch.dtype,
    patience: float,
) -> dict[str, Any]:
    """Output tokens per second of a random model of this shape, warmed up; each request has its own output length.

    What is left after `patience` seconds is given up: the rate is then that of the requests that ended until then, too
    low by what others had begun, and `cut` is true.

    Raises:
        CannotRun: where transformers cannot be imported, or knows no continuous batching.
    """
    if device.type != "cuda":
        raise CannotRun("needs a GPU")
    try:
        import transformers
    except ImportError as error:
        raise CannotRun(f"transformers is not importable ({error})") from error
    settings, library = dict(config), cast(Any, transformers)  # which is typed in part
    hf_config = library.AutoConfig.for_model(settings.pop("model_type"), **settings)
    with device:
        model = library.AutoModelForCausalLM.from_config(hf_config, dtype=dtype, attn_implementation="sdpa").eval()
    if not hasattr(model, "continuous_batching_context_manager"):
        raise CannotRun("this version of transformers has no continuous batching")
    longest = max(shape.output_tokens for shape in shapes)
    generation = library.GenerationConfig(max_new_tokens=longest, do_sample=False, eos_token_id=-1)
    with model.continuous_batching_context_manager(
        generation_config=generation, block=True, timeout=10, workload_hints=_hints(shapes)
    ) as manager:
        _collect(manager, prompts[:8], [8] * len(prompts[:8]), patience)
        began = time.perf_counter()
        lengths = _collect(manager, prompts, [shape.output_tokens for shape in shapes], patience)
        seconds = time.perf_counter() - began
        if len(lengths) < len(prompts):
            manager.stop(block=True, timeout=10, hard_stop=True)  # leaving would wait for all requests
        attention = model.config._attn_implementation
    return {
        "output_tokens_per_s": sum(lengths) / seconds,
        "requests_done": len(lengths),
        "cut": len(lengths) < len(prompts),
        "attention": attention,
        "run_seconds": seconds,
    }


def _hints(shapes: Sequence[RequestShape]) -> Any:
    """What generate_batch tells the manager of the work to come."""
    from transformers.generation.continuous_batching.utils import WorkloadHints

    return WorkloadHints(
        max_prompt_length=max(shape.input_tokens for shape in shapes),
        max_generated_length=max(shape.output_tokens for shape in shapes),
        num_requests=len(shapes),
    )


def _collect(manager: Any, prompts: Sequence[tuple[int, ...]], lengths: Sequence[int], patience: float) -> list[int]:
    """How many tokens each request that ended in time was given."""
    deadline = time.perf_counter() + patience
    for prompt, length in zip(prompts, lengths, strict=True):
        manager.add_request(list(prompt), max_new_tokens=length, eos_token_id=-1)
    done: list[int] = []
    while len(done) < len(prompts) and time.perf_counter() < deadline:
        result = manager.get_result(timeout=_POLL_SECONDS)
        if result is not None and result.is_finished():
            if result.error is not None:
                raise CannotRun(f"a request failed: {result.error}")
            done.append(len(result.generated_tokens))
        elif result is None and not manager.is_running():
            raise CannotRun("its generation thread ended")
    return done
