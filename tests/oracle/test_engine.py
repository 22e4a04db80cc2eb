"""The whole engine against Hugging Face transformers and against itself: the tokens never depend on
how they were scheduled.

Policies, block sizes, chunk sizes, prefix caching and preemption are covered pairwise, over all
families together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from nanoserve.config.model_config import ModelConfig
from nanoserve.engine.engine import Engine
from nanoserve.executor.compile.layer_runner import LayerRunner
from nanoserve.models.decoder import Decoder
from nanoserve.models.loading import load_model
from nanoserve.request import Request, SamplingParams
from nanoserve.scheduler import make_policy
from nanoserve.scheduler.assembly import make_extensions
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.scheduler.windows import most_blocks
from tests.executor.small_model import local_executor
from tests.fakes.integrity import check_integrity
from tests.oracle.checkpoints import FAMILIES, VOCAB_SIZE
from tests.oracle.conftest import QUANTIZED

Checkpoint = Callable[[str], tuple[Path, PreTrainedModel]]

OUTPUT_TOKENS = 20
LONGEST = 96
"""Tokens of the longest sequence that there may be."""


@dataclass(frozen=True)
class Setting:
    """One way to schedule. ``tight`` leaves blocks for one longest sequence, so that sequences
    preempt each other."""

    policy: str
    block_size: int
    token_budget: int
    prefix_caching: bool
    tight: bool

    def num_blocks(self, config: ModelConfig) -> int:
        tokens = LONGEST if self.tight else 1000
        return most_blocks(config.cache_groups.windows, tokens, self.block_size)

    def state_slots(self, config: ModelConfig) -> int:
        if config.recurrent is None:
            return 0
        return 4 if self.tight else 30


SETTINGS = [
    Setting("sarathi", 16, 2048, True, False),
    Setting("sarathi", 4, 7, False, True),
    Setting("sarathi", 32, 64, True, True),
    Setting("prefill-first", 16, 64, True, True),
    Setting("prefill-first", 4, 2048, False, False),
    Setting("prefill-first", 32, 7, True, False),
    Setting("decode-first", 16, 7, False, True),
    Setting("decode-first", 4, 64, True, False),
    Setting("decode-first", 32, 2048, True, True),
]


def prompts() -> list[tuple[int, ...]]:
    """A long one, one with the same beginning, a short one, a single token, and the first once
    more."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(3, VOCAB_SIZE, (120,), generator=generator).tolist()
    first = tuple(tokens[:45])
    return [first, (*first[:33], *tokens[50:60]), tuple(tokens[60:77]), (tokens[80],), first]


def run(
    decoder: Decoder,
    config: ModelConfig,
    setting: Setting,
    requests: list[Request],
    layers: LayerRunner | None = None,
) -> tuple[list, Scheduler]:
    """Each sample's tokens, in the order of the requests."""
    num_blocks = setting.num_blocks(config)
    state_slots = setting.state_slots(config)
    executor = local_executor(
        decoder,
        num_blocks=num_blocks,
        block_size=setting.block_size,
        layers=layers,
        state_slots=state_slots,
    )
    scheduler = Scheduler(
        make_policy(setting.policy, setting.token_budget),
        num_blocks=num_blocks,
        block_size=setting.block_size,
        max_model_len=LONGEST,
        prefix_caching=setting.prefix_caching,
        windows=decoder.config.cache_groups.windows,
        extensions=make_extensions(state_slots=state_slots),
    )
    engine = Engine(scheduler, executor, vocab_size=config.vocab_size)
    outputs: dict[tuple[str, int], list[int]] = {
        (request.request_id, index): [] for request in requests for index in range(request.params.n)
    }
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for update in engine.step():
            assert update.sequence.error is None
            outputs[update.request_id, update.index] += update.new_tokens
        check_integrity(scheduler)
    engine.close()
    return list(outputs.values()), scheduler


def transformers_choices(
    model: PreTrainedModel, prompts: Sequence[tuple[int, ...]], answers: list[list[int]]
) -> list[list[int]]:
    """Choose with Hugging Face's model behind each prompt and behind each token of its answer. Answers
    are the model's own where its choices are the same, `OUTPUT_TOKENS` of them."""
    return [
        _choices(model, prompt, tuple(answer))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


@cache
@torch.inference_mode()
def _choices(model: PreTrainedModel, prompt: tuple[int, ...], answer: tuple[int, ...]) -> list[int]:
    logits = model(torch.tensor([prompt + answer]), use_cache=False).logits[0]
    choices: list[int] = logits[len(prompt) - 1 :].argmax(-1).tolist()
    return choices[:OUTPUT_TOKENS]


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, *QUANTIZED])
def test_greedy_tokens_are_those_of_transformers_however_they_are_scheduled(
    family: str, checkpoint: Checkpoint
) -> None:
    directory, model = checkpoint(family)
    decoder, config = load_model(directory, "fp32")
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS)
    requests = [
        Request(str(number), prompt, params, seed=0) for number, prompt in enumerate(prompts())
    ]
    preemptions = 0
    place = [*FAMILIES, *QUANTIZED].index(family)
    # One of each policy; of a quantized checkpoint one, since its weights make no difference to the
    # scheduler.
    few = SETTINGS[place % 3 :: 3] if family in FAMILIES else [SETTINGS[place % len(SETTINGS)]]
    # in the first, sequences always preempt each other
    for setting in dict.fromkeys((SETTINGS[1], *few)):
        outputs, scheduler = run(decoder, config, setting, requests)
        assert outputs == transformers_choices(model, prompts(), outputs), setting
        preemptions += scheduler.table.preemptions
    assert preemptions > 0, "no setting was tight enough"


def test_seeded_samples_do_not_depend_on_what_shares_the_batch(checkpoint: Checkpoint) -> None:
    decoder, config = load_model(checkpoint("qwen3")[0], "fp32")
    variants = [
        SamplingParams(temperature=0.9, top_p=0.8, n=2, max_tokens=OUTPUT_TOKENS),
        SamplingParams(temperature=1.5, top_k=9, repetition_penalty=1.3, max_tokens=OUTPUT_TOKENS),
        SamplingParams(
            temperature=0.7,
            min_p=0.1,
            presence_penalty=1,
            frequency_penalty=0.5,
            max_tokens=OUTPUT_TOKENS,
        ),
        SamplingParams(
            temperature=1.0, logit_bias={7: 2.0, 9: -100.0}, n=3, max_tokens=OUTPUT_TOKENS
        ),
        SamplingParams(temperature=0, frequency_penalty=2, max_tokens=OUTPUT_TOKENS),
    ]
    requests = [
        Request(str(number), prompt, params, seed=40 + number)
        for number, (prompt, params) in enumerate(zip(prompts(), variants, strict=True))
    ]
    alone = [
        outputs
        for request in requests
        for outputs in run(decoder, config, SETTINGS[0], [request])[0]
    ]
    assert len({tuple(output) for output in alone}) == len(alone)
    for setting in SETTINGS[::4]:  # each policy and block size
        assert run(decoder, config, setting, requests)[0] == alone, setting


STATEFUL = [
    family
    for family in FAMILIES
    if family.startswith(
        ("lfm2", "qwen3_next", "qwen3_5", "mamba", "nemotron_h", "jamba", "granitemoehybrid")
    )
]


def long_prompts() -> list[tuple[int, ...]]:
    """Prompts of several chunks of a scan: one, one that goes on behind it, one that parts from it
    at its 150th token, a short one, and the first once more."""
    generator = torch.Generator().manual_seed(6)
    tokens = torch.randint(3, VOCAB_SIZE, (400,), generator=generator).tolist()
    first = tuple(tokens[:201])
    return [
        first,
        tuple(tokens[:240]),
        (*first[:150], *tokens[250:300]),
        tuple(tokens[300:317]),
    ] + [first]


@pytest.mark.slow
@pytest.mark.parametrize("family", STATEFUL)
@pytest.mark.parametrize(("token_budget", "middle"), [(64, 128), (100, 128), (2048, 0)])
def test_recurrent_states_are_found_again_wherever_a_prompt_is_cut(
    family: str, token_budget: int, middle: int, checkpoint: Checkpoint
) -> None:
    """Prompts come one after another, so later ones begin at snapshots of earlier ones: at the end
    of a prompt, or in its ``middle``, where chunks end."""
    directory, model = checkpoint(family)
    decoder, config = load_model(directory, "fp32")
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS)
    executor = local_executor(decoder, num_blocks=80, block_size=16, state_slots=30)
    scheduler = Scheduler(
        make_policy("sarathi", token_budget),
        num_blocks=80,
        block_size=16,
        max_model_len=512,
        extensions=make_extensions(state_slots=30),
    )
    engine = Engine(scheduler, executor, vocab_size=config.vocab_size)
    answers, cached = list[list[int]](), list[int]()
    for number, prompt in enumerate(long_prompts()):
        engine.add(Request(str(number), prompt, params, seed=0))
        answers.append([])
        while engine.has_work:
            for update in engine.step():
                assert update.sequence.error is None
                answers[-1] += update.new_tokens
                latest = update.sequence
            check_integrity(scheduler)
        cached.append(latest.cached_tokens)
    engine.close()
    assert answers == transformers_choices(model, long_prompts(), answers)
    assert cached == [0, 192, middle, 0, 192]
