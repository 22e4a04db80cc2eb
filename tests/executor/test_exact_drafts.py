"""Token for token, in float32: whatever drafts, a tiny real model answers what it would answer each
request alone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as changed

from nanoserve.engine.engine import Engine
from nanoserve.executor.drafting.draft_model import DraftModel
from nanoserve.executor.drafting.drafter import DraftedSequence, Drafter
from nanoserve.executor.sampling.sampler import SamplingRows, SamplingState, sample
from nanoserve.executor.step.staging import Staging
from nanoserve.scheduler import Decision, Load, Policy, make_policy
from nanoserve.scheduler.assembly import make_extensions
from nanoserve.scheduler.plan import Begin
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.scheduler.speculation.draft_proposer import DraftProposer
from tests.executor.small_model import VOCAB_SIZE, dense_logits, local_executor, small_decoder
from tests.fakes.linear_predictor import LinearPredictor
from tests.scheduler.lives import Arrival, check_outputs, live, lives

DECODER = small_decoder()


@torch.inference_mode()
def _next(tokens: Sequence[int], state: SamplingState) -> int:
    """Return the token that the model samples next: everything anew, without a cache, a batch or a scheduler."""
    staging = Staging(torch.device("cpu"))
    rows = SamplingRows.stage([state], [len(tokens)], staging)
    staging.transfer()
    return int(sample(dense_logits(DECODER, tokens)[-1:], rows).tokens[0])


def plain(tokens: Sequence[int], begin: Begin) -> int:
    return _next(tokens, SamplingState(changed(begin, tokens=tuple(tokens)), VOCAB_SIZE))


class Oracle:
    """Knows what comes, and says something else by ``shift``; the ``fails``-th time it raises."""

    features = None

    def __init__(self, shift: int = 0, fails: int = 0) -> None:
        self._shift, self._fails, self._calls = shift, fails, 0

    def draft(self, sequences: Sequence[DraftedSequence], counts: Sequence[int]) -> list[list[int]]:
        self._calls += 1
        if self._fails and self._calls % self._fails == 0:
            raise RuntimeError("a bad day")
        return [
            self._one(sequence, count) for sequence, count in zip(sequences, counts, strict=True)
        ]

    def _one(self, sequence: DraftedSequence, count: int) -> list[int]:
        found = list[int]()
        for _ in range(count):
            found.append(_next([*sequence.tokens, *found], sequence.sampling.after(found)))
        return [(token + self._shift) % VOCAB_SIZE for token in found]


def _draft_model(num_blocks: int, block_size: int, *, noise: float) -> DraftModel:
    """The model itself, or one like it."""
    decoder = small_decoder()
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=noise)
    return DraftModel(decoder, num_blocks=num_blocks, block_size=block_size)


def _drafter(name: str, num_blocks: int, block_size: int) -> Drafter | None:
    match name:
        case "ngram":
            return None
        case "itself" | "one like it":
            return _draft_model(num_blocks, block_size, noise=0.05 * (name != "itself"))
        case _:
            return {"knows": Oracle(), "errs": Oracle(1), "raises": Oracle(fails=3)}[name]


@dataclass
class Setting(Policy):
    """A policy that sets how many draft tokens there are."""

    draft_tokens: int
    policy: Policy

    def decide(self, load: Load) -> Decision:
        return replace(self.policy.decide(load), draft_tokens=self.draft_tokens)


SAMPLERS = st.sampled_from(
    [
        {},
        {"top_k": 5},
        {"top_p": 0.8, "temperature": 1.3},
        {"min_p": 0.1, "temperature": 1.0},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"logit_bias": {5: 3.0, 9: -50.0}, "temperature": 0.7},
        {"top_k": 30, "top_p": 0.9, "min_p": 0.02, "temperature": 0.8, "presence_penalty": 0.3},
    ]
)


@st.composite
def _sampled_lives(draw: st.DrawFn) -> dict:
    life = draw(lives())

    def sampled(arrival: Arrival) -> Arrival:
        request = arrival.request
        return replace(
            arrival, request=replace(request, params=changed(request.params, **draw(SAMPLERS)))
        )

    return {**life, "arrivals": [sampled(arrival) for arrival in life["arrivals"]]}


@pytest.mark.parametrize("name", ["knows", "errs", "raises", "itself", "one like it", "ngram"])
@settings(max_examples=10, deadline=None, phases=[Phase.reuse, Phase.generate])
@given(
    life=_sampled_lives(),
    policy=st.sampled_from(["sarathi", "throttling", "adaptive", "prefill-first", "decode-first"]),
    draft_tokens=st.sampled_from([None, None, 0, 1, 4, 9]),
    predictors=st.sampled_from([(), (LinearPredictor(),), (LinearPredictor(row=0.3),)]),
)
def test_tokens_are_those_of_plain_decoding(
    name: str, life: dict, policy: str, draft_tokens: int | None, predictors: tuple
) -> None:
    """Beside chunks, preemption, forks, shared prefixes and aborts, with samplers of all kinds."""
    blocks, size, budget = life["num_blocks"], life["block_size"], life["token_budget"]
    drafter = _drafter(name, blocks, size)
    executor = local_executor(
        DECODER,
        num_blocks=blocks,
        block_size=size,
        async_scheduling=life["async_scheduling"],
        verifies_drafts=True,
        drafter=drafter,
    )
    decides = make_policy(policy, budget)
    proposer = DraftProposer(
        looks_up=drafter is None, token_budget=budget + 8, async_scheduling=life["async_scheduling"]
    )
    scheduler = Scheduler(
        decides if draft_tokens is None else Setting(draft_tokens, decides),
        num_blocks=blocks,
        block_size=size,
        max_model_len=life["max_model_len"],
        max_num_seqs=life["max_num_seqs"],
        prefix_caching=life["prefix_caching"],
        async_scheduling=life["async_scheduling"],
        predictors=predictors,
        extensions=make_extensions(proposer=proposer),
    )
    outputs, reasons = live(Engine(scheduler, executor, vocab_size=VOCAB_SIZE), life["arrivals"])
    executor.close()

    check_outputs(life["arrivals"], life["max_model_len"], outputs, reasons, model=plain)
    assert scheduler.pool.free_blocks == blocks
    counts = proposer.counts
    if draft_tokens == 0:
        assert counts.rows == 0
    if name == "errs":
        assert sum(counts.accepted) == 0
    if name == "knows":
        assert sum(counts.accepted) == counts.draft_tokens
