"""Baselines are what they are named after: nanoserve's own admission reserve is for its own
policies."""

from dataclasses import replace

import pytest

from nanoserve.lab.papers.apex.settings import DEVICE
from nanoserve.lab.papers.cases import System
from nanoserve.lab.papers.gllm.systems import VLLM, WITH_CK
from nanoserve.lab.papers.seesaw.settings import STATIC, WHOLE_PROMPTS
from tests.scheduler.loads import IDLE


@pytest.mark.parametrize(
    "system", [VLLM, WITH_CK, DEVICE, STATIC, WHOLE_PROMPTS], ids=lambda system: system.label
)
def test_vllm_and_sarathi_serve_have_no_admission_reserve(system: System) -> None:
    assert not system.make_policy().admission_reserve  # type: ignore[attr-defined]


@pytest.mark.parametrize("system", [STATIC, WHOLE_PROMPTS], ids=lambda system: system.label)
def test_seesaws_static_configurations_share_answers_out(system: System) -> None:
    answers_only = replace(IDLE, running_decodes=40, ready_decodes=40, pipeline_depth=4)
    assert system.make_policy().decide(answers_only).decodes == 10
