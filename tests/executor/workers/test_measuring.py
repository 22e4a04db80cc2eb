"""Workers that measure layouts together, for real, and what is kept of it."""

from dataclasses import replace
from pathlib import Path

import pytest

from nanoserve.engine_config import EngineConfig
from nanoserve.errors import UsageError
from nanoserve.executor.profiling import layout_profile
from nanoserve.executor.profiling.layout_profile import kept_layouts, measure_layouts
from nanoserve.executor.start.predictors import make_predictors
from nanoserve.executor.workers import process
from nanoserve.models.hub import resolve_model
from tests.costs.test_layout_profile import MODEL
from tests.costs.test_layout_profile import layout_profile as layout_profile_by_hand

BRIEFLY = """
import nanoserve.executor.workers.measuring as measuring
measuring._EFFORT = measuring.Effort(seconds=0.0, fewest_rounds=1, most_rounds=1, longest_sample=1.0)
"""
"""Code that workers run first: they measure everything once, not for ten seconds."""


def test_two_workers_measure_together_and_the_next_start_finds_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(process, "_PROGRAM", BRIEFLY + process._PROGRAM)
    monkeypatch.setattr(layout_profile, "kept_file", lambda *_: tmp_path / "layouts.json")
    resolved, config, told = (
        resolve_model(None),
        EngineConfig(policy="apex", eager=True),
        list[tuple[str, int, int]](),
    )
    found = measure_layouts(resolved, config, 2, lambda *progress: told.append(progress))
    assert (found.devices, set(found.degrees)) == (2, {1, 2})
    assert told == [("measuring this machine", 0, 1), ("measuring this machine", 1, 1)]
    for times in found.degrees.values():
        assert 0 < times.layer.at(1) < times.layer.at(256)
        assert 0 < times.decode_attention.at(1, 16) < times.decode_attention.at(32, 512)
    assert found.send is not None
    assert found.step.at(1) > 0
    if found.built and found.steady:
        monkeypatch.setattr(layout_profile, "_measured", lambda *_: pytest.fail("it was kept"))
        assert measure_layouts(resolved, config, 2) == found


def test_recurrent_states_are_not_measured() -> None:
    with pytest.raises(UsageError, match="measuring layouts: layers of lfm2 have recurrent states"):
        measure_layouts(resolve_model("dummy:lfm2-350m"), EngineConfig(), 2)


def test_an_engine_predicts_by_what_was_kept_of_its_layouts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    resolved, measured = resolve_model(None), layout_profile_by_hand()
    config = EngineConfig(dtype="bfloat16", eager=True, pipeline_parallel=2, policy="adaptive")
    assert kept_layouts(resolved, config) is None
    monkeypatch.setattr(layout_profile, "_measured", lambda *_: measured)
    assert measure_layouts(resolved, config, 2, anew=True) == measured
    assert kept_layouts(resolved, config) is None, "what is measured anew is for this run"
    assert measure_layouts(resolved, config, 2) == measured
    assert kept_layouts(resolved, config) == measured
    for other in (
        {"dtype": "float32"},
        {"pipeline_parallel": 3},
        {"eager": False},
        {"device": "cuda"},
    ):
        assert kept_layouts(resolved, replace(config, **other)) is None
    (predictor,) = make_predictors(measured.speeds, MODEL, config, measured)
    by_hand = 0.01 + 0.001 / MODEL.num_layers  # a layer, and what each row of a step takes
    assert predictor.linear_seconds(1) == pytest.approx(by_hand)
    assert make_predictors(None, MODEL, config, measured) == (), "the policy asks for no prediction"


def test_a_gpu_is_refused() -> None:
    with pytest.raises(
        UsageError, match="layouts are measured on the CPU, not on cuda: choose --device cpu"
    ):
        measure_layouts(resolve_model(None), EngineConfig(device="cuda"), 2)
