"""Baselines are what they are named after: nanoserve's own admission reserve is for its own policies."""

from dataclasses import replace

import pytest

from nanoserve.costs import ParallelLayout
from nanoserve.papers.apex.settings import DEVICE
from nanoserve.papers.cases import System
from nanoserve.papers.gllm.systems import VLLM, WITH_CK
from nanoserve.papers.seesaw.runs import policy_of
from nanoserve.papers.seesaw.settings import STATIC, WHOLE_PROMPTS, LayoutChoice
from nanoserve.scheduler.policies import make_policy
from tests.scheduler.loads import IDLE


@pytest.mark.parametrize("system", [VLLM, WITH_CK, DEVICE], ids=lambda system: system.label)
def test_vllm_and_sarathi_serve_have_no_admission_reserve(system: System) -> None:
    policy = make_policy(system.policy, system.token_budget, dict(system.parameters))
    assert not policy.admission_reserve  # type: ignore[attr-defined]


@pytest.mark.parametrize("policy", [STATIC, WHOLE_PROMPTS])
def test_seesaws_static_configurations_have_none_either_and_share_answers_out(policy: str) -> None:
    static = policy_of(LayoutChoice(prefill=ParallelLayout(pipeline_parallel=4), policy=policy))
    assert not static.admission_reserve  # type: ignore[attr-defined]
    answers_only = replace(IDLE, running_decodes=40, ready_decodes=40, pipeline_depth=4)
    assert static.decide(answers_only).decodes == 10
