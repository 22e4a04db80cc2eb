"""Speculative decoding over worker processes: the answers of plain decoding, also after a worker
has died."""

from pathlib import Path

import pytest

import nanoserve
from nanoserve.models.hub import resolve_model
from nanoserve.models.loading import load_model
from tests.executor.test_drafting import KINDS, spelled, write_head
from tests.processes import MARK, kill, new_mark, workers
from tests.scheduler.test_speculation import PROMPTS, SETTINGS, _facts

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("layout", "speculate", "policy"),
    [
        ({"pipeline_parallel": 2}, "draft:storyteller-draft", "throttling"),
        ({"tensor_parallel": 2}, "draft:storyteller", "sarathi"),
        ({"pipeline_parallel": 2, "tensor_parallel": 2}, "ngram", "adaptive"),
        ({"pipeline_parallel": 2, "tensor_parallel": 2}, "eagle", "sarathi"),
        ({"tensor_parallel": 2}, "eagle3", "sarathi"),
        ({"pipeline_parallel": 2}, "medusa", "throttling"),
    ],
)
def test_draft_tokens_change_no_answer_of_workers(
    layout: dict[str, int],
    speculate: str,
    policy: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    is_random = speculate in KINDS
    if is_random:
        target, _ = load_model(resolve_model(None).directory, "float32")
        speculate = spelled(speculate, write_head(speculate, target, tmp_path))
    monkeypatch.setenv(MARK, mark := new_mark())
    settings = {"dtype": "float32", "eager": True, "seed": 0}
    with (
        nanoserve.LLM(**settings) as plain,
        nanoserve.LLM(
            speculate=speculate, policy=policy, max_num_batched_tokens=64, **layout, **settings
        ) as speculating,
    ):
        proposer = speculating.engine.scheduler.extensions.drafts.proposer
        for name in ("greedy", "random", "penalties", "grammar"):
            expected = _facts(plain.generate(PROMPTS, SETTINGS[name]))
            assert _facts(speculating.generate(PROMPTS, SETTINGS[name])) == expected, name
        assert proposer.counts.draft_tokens > 0
        assert sum(proposer.counts.accepted) > 0 or is_random
        deltas = speculating.stream(PROMPTS[0], SETTINGS["greedy"])
        next(deltas)
        kill(workers(mark)[-1])
        list(deltas)
        assert _facts(speculating.generate(PROMPTS, SETTINGS["random"])) == _facts(
            plain.generate(PROMPTS, SETTINGS["random"])
        )
        assert speculating.status.losses == 1
