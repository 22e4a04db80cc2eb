"""Sampling on the device against sampling on the CPU: the same logits and seeds give the same tokens.

Random numbers and sums are integers on both. Exponentials and logarithms may differ in their last bit, which hardly
ever decides between two tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanoserve.benchmarks.gpu.results import GpuCase
from nanoserve.benchmarks.gpu.setting import GpuSetting
from nanoserve.request import SamplingParams
from nanoserve.runtime.sampling.sampler import Sampled, SamplingRows, SamplingState, sample
from nanoserve.runtime.step.staging import Staging
from nanoserve.scheduler.plan import Begin

VOCAB_SIZE = 32003
"""A prime number, as large as a small model's vocabulary."""
ROWS = 16
"""Requests of each setting."""
_PENALTIES: dict[str, Any] = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3}
_PROMPT_LENGTH = 4
_LIKELIEST = 8
"""A row's likeliest tokens are what penalties and biases are about: anything else would hardly show."""

SETTINGS: Mapping[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "top_k": SamplingParams(top_k=40),
    "top_p": SamplingParams(top_p=0.9),
    "top_k and top_p": SamplingParams(top_k=40, top_p=0.9),
    "min_p": SamplingParams(min_p=0.05),
    "penalties": SamplingParams(**_PENALTIES),
    "penalties, greedy": SamplingParams(temperature=0.0, **_PENALTIES),
    "logit_bias": SamplingParams(logit_bias={7: 14.0, 20011: 13.0}),
    "min_tokens": SamplingParams(temperature=0.5, min_tokens=100),
    "all of them": SamplingParams(temperature=0.8, top_k=40, top_p=0.9, min_p=0.05, min_tokens=100, **_PENALTIES),
}


def sampling_cases(setting: GpuSetting) -> Iterator[GpuCase]:
    """Each setting alone, then all in one batch, whose rows are drawn in groups."""
    for name, params in SETTINGS.items():
        yield GpuCase(f"sampling, {name}", partial(_check_sampling, setting, [params] * ROWS))
    mixed = [params for _ in range(ROWS) for params in SETTINGS.values()]
    yield GpuCase("sampling, in one batch", partial(_check_sampling, setting, mixed))


@torch.inference_mode()
def _check_sampling(setting: GpuSetting, batch: Sequence[SamplingParams]) -> dict[str, Any]:
    """The last row's logits are no numbers, which is to be found out; its token may be any."""
    logits = random_logits(len(batch))
    logits[-1, VOCAB_SIZE // 2] = torch.nan
    expected = draw(logits, batch)
    found = draw(logits.to(setting.device), batch)
    tokens, valid = found.tokens.cpu(), found.valid.cpu()
    differs = (valid != expected.valid) | (expected.valid & (tokens != expected.tokens))
    different = differs.nonzero()[:, 0].tolist()
    return {"check": "sampling", "rows": len(batch), "different_rows": different, "ok": not different}


def random_logits(rows: int) -> Tensor:
    """float32 [rows, VOCAB_SIZE], of numbers that a bfloat16 model could give: the likeliest often tie."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, VOCAB_SIZE, generator=generator).mul(3.0).bfloat16().float()


def draw(logits: Tensor, batch: Sequence[SamplingParams]) -> Sampled:
    """One token for each row, on the device of the logits, behind tokens that were the row's likeliest."""
    states, staging = [], Staging(logits.device)
    for row, likely in enumerate(logits.nan_to_num().cpu().topk(_LIKELIEST).indices.tolist()):
        tokens = (*likely[:_PROMPT_LENGTH], *likely[2:], *likely[4:6])
        begin = Begin(row, tokens, _PROMPT_LENGTH, row % 3, 7919 * row, batch[row], tuple(likely[:2]))
        states.append(SamplingState(begin, VOCAB_SIZE))
    rows = SamplingRows.stage(states, [len(tokens) + row for row in range(len(states))], staging)
    staging.transfer()
    return sample(logits, rows)
