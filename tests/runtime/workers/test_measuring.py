"""Workers that measure layouts together, for real, and what is kept of it."""

from pathlib import Path

import pytest

from nanoserve.engine_config import EngineConfig
from nanoserve.errors import UsageError
from nanoserve.models.hub import resolve_model
from nanoserve.runtime.launch import layout_profile
from nanoserve.runtime.launch.layout_profile import measure_layouts
from nanoserve.runtime.workers import measuring


def test_two_workers_measure_together_and_the_next_start_finds_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(layout_profile, "profile_file", lambda *_: tmp_path / "layouts.json")
    resolved, config, told = resolve_model(None), EngineConfig(policy="apex", eager=True), list[tuple[str, int, int]]()
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


def test_a_gpu_is_refused() -> None:
    with pytest.raises(UsageError, match="layouts are measured on the CPU, not on cuda: choose --device cpu"):
        measure_layouts(resolve_model(None), EngineConfig(device="cuda"), 2)


def test_all_workers_stop_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are cut, and rounds ended, by what all agree on, whatever a worker's own clock says."""
    too_long, warm_up, first_round, second_round = 0.6, 1.0, 1.5, 2.1
    agreed = iter(
        [0.1, 0.5, too_long, warm_up, *[0.0, 0.2, 0.0, 0.3, first_round], *[0.0, 0.2, 0.0, 0.3, second_round]]
    )
    monkeypatch.setattr(measuring, "_mean", lambda seconds: next(agreed))
    samples = measuring._take({"layer": {(size,): lambda: 0.0 for size in (1, 2, 4)}}, seconds=1.0)
    assert samples == {"layer": {(1,): [0.2, 0.2], (2,): [0.3, 0.3]}}
    assert not list(agreed)
