"""Tokens of the storyteller that drafters foresee, in short runs; and how often their draft tokens could be
accepted."""

import numpy as np
import pytest
import torch

from nanoserve.lab.papers.drafted_stories import LOOKAHEAD, DraftedStories
from nanoserve.lab.papers.ratio_test import optimal_acceptance, shared_noise_acceptance
from nanoserve.llm import LLM
from nanoserve.models import rounding
from nanoserve.models.hub import DRAFT, resolve_model
from nanoserve.models.loading import load_model
from nanoserve.request import SamplingParams


def test_a_draft_model_draft_tokens_four_at_a_time() -> None:
    (found,) = DraftedStories(f"draft:{DRAFT}", True, (0,), 2).run()
    assert 1.2 < found.tokens_a_step < 4
    assert found.accepted[0] >= found.accepted[1] >= found.accepted[2] >= found.accepted[3] > 0
    assert sum(found.accepted[LOOKAHEAD:]) == 0
    assert found.rows <= 2 * 128


@pytest.mark.slow
@torch.inference_mode()
def test_shared_noise_accepts_nearly_as_many_draft_tokens_as_any_scheme_can() -> None:
    """At 1,500 places of stories, at temperature 1."""
    with LLM(dtype="float32", eager=True) as llm:
        (output,) = llm.generate(
            "Once upon a time", SamplingParams(seed=0, n=12, max_tokens=128, ignore_eos=True)
        )
    texts = [torch.tensor([*output.prompt_token_ids, *one.token_ids]) for one in output.outputs]
    p, q = (_probabilities(name, texts) for name in (DRAFT, None))
    optimal, shared = optimal_acceptance(p, q), shared_noise_acceptance(p, q)
    bound = optimal / (2 - optimal)  # (1 - TV) / (1 + TV)
    assert (bound <= shared + 1e-9).all()
    assert (shared <= optimal + 1e-9).all()
    assert [one.mean() for one in (optimal, shared, bound)] == pytest.approx(
        [0.51, 0.47, 0.39], abs=0.04
    )


def _probabilities(name: str | None, texts: list[torch.Tensor]) -> np.ndarray:
    decoder, _ = load_model(resolve_model(name).directory, "float32")
    hidden = torch.cat(rounding.run_texts(decoder, texts))
    return decoder.compute_logits(hidden).double().softmax(-1).numpy()
