"""Step costs from times that workers measured: sums that can be done by hand."""

from pathlib import Path

import msgspec
import pytest

from nanoserve.config.published_shapes import load_shape
from nanoserve.costs.hardware import MachineSpeeds
from nanoserve.costs.layout_profile import DegreeTimes, LayoutProfile
from nanoserve.costs.predictor import CostPredictor
from nanoserve.costs.profile import read_profile, write_profile
from nanoserve.errors import UsageError
from nanoserve.lab.simulator.planning import PlannedWork, find_candidates
from nanoserve.layout import ParallelLayout
from nanoserve.request import RequestShape
from nanoserve.scheduler.work import StepWork
from tests.costs.profiles import curve, grid

MODEL = load_shape("qwen3-0.6b")  # 28 layers
P2, T2, D2 = (ParallelLayout.parse(name) for name in ("P2", "T2", "D2"))


def degree_times(layer: float, sums: float = 0.0) -> DegreeTimes:
    """A layer takes this long for a token, half of it alone; all-reduces more with every token."""
    return DegreeTimes(
        layer=curve((1, 101), (layer, layer + 100 * sums)),
        lone=curve((1, 101), (layer / 2, layer / 2 + 100 * sums)),
        decode_attention=grid((1, 10), (1, 1000), lambda batch, context: batch * context * 1e-6),
        prefill_attention=curve((10, 1000), (0.01, 1.0)),
        head=curve((1, 11), (0.1, 0.2)),
    )


def layout_profile(sums: float = 0.0) -> LayoutProfile:
    """Tensor parallelism halves a layer of 10 ms; `sums` is what its all-reduces take for a
    token."""
    return LayoutProfile(
        devices=2,
        bits=16,
        memory_bytes=8e9,
        speeds=MachineSpeeds(
            memory_bandwidth=4e9, flops=100e9, host_link_bandwidth=5e9, link_bandwidth=1e9
        ),
        send=curve((1000, 11_000), (0.001, 0.011)),
        step=curve((1, 11), (0.002, 0.012)),
        degrees={1: degree_times(0.01), 2: degree_times(0.005, sums)},
        built=True,
    )


def test_a_step_takes_what_its_parts_took() -> None:
    costs = layout_profile(sums=0.001).costs(MODEL, P2)
    work = costs.work([500, 1500], [(100, 200)], sampled=3)
    (first, second), tokens = (costs.counts.layers(stage) for stage in (0, 1)), 2 + 200
    # two decodes, and a chunk of a prompt from its token 100 on
    attention = 2000 * 1e-6 + 0.3 - 0.1
    assert costs.layers_seconds(tokens, 0) == pytest.approx(first * 0.01)
    assert costs.stage_seconds(work, 0) == pytest.approx(first * (0.01 + attention))
    assert costs.stage_seconds(work, 1) == pytest.approx(second * (0.01 + attention) + 0.12)
    assert costs.send_seconds(work, 0) == pytest.approx(tokens * MODEL.hidden_size * 2 * 1e-6)
    assert costs.send_seconds(work, 1) == 0
    assert costs.host_seconds(StepWork(decodes=6)) == pytest.approx(0.007)
    assert costs.stage_seconds(StepWork(), 0) == 0


def test_ranks_pay_for_their_sums_with_every_token() -> None:
    costs = layout_profile(sums=0.001).costs(MODEL, T2)
    assert costs.layers_seconds(1, 0) == pytest.approx(28 * 0.005)
    assert costs.layers_seconds(51, 0) == pytest.approx(28 * (0.005 + 0.05))


@pytest.mark.parametrize(("sums", "best"), [(0.0, "T2"), (0.01, "P2")])
def test_the_planner_takes_them(sums: float, best: str) -> None:
    """Free sums halve the time of a small batch; dear ones make two stages the better choice."""
    work = PlannedWork((RequestShape(4, 20),) * 8)
    profile = layout_profile(sums)
    found = find_candidates(lambda layout: profile.costs(MODEL, layout), 2, work)
    assert {"P2", "T2", "D2", "P2->T2", "T2->P2"} == {one.name for one in found.fitting}
    estimates = {
        one.name: one.tokens_per_second for one in found.fitting if one.name in ("P2", "T2")
    }
    assert max(estimates, key=estimates.__getitem__) == best


def test_a_stage_has_the_memory_for_itself_while_no_other_computes() -> None:
    costs = layout_profile().costs(MODEL, P2)
    work = costs.work([500])
    assert costs.lone_seconds(work, 0) == pytest.approx(costs.stage_seconds(work, 0) / 2)
    assert CostPredictor(costs).lone_share == pytest.approx(0.5)
    whole = msgspec.structs.replace(degree_times(0.005), lone=None)
    alone = msgspec.structs.replace(layout_profile(), degrees={2: whole}).costs(MODEL, T2)
    assert alone.lone_seconds(work, 0) == alone.stage_seconds(work, 0)
    assert CostPredictor(alone).lone_share == 1.0


def test_times_that_others_disturbed_are_not_steady() -> None:
    profile, layer = layout_profile(), curve((1, 2), (1, 2))
    for high, steady in ((2.9, True), (3.1, False)):
        times = msgspec.structs.replace(
            degree_times(1), layer=msgspec.structs.replace(layer, high=(1.0, high))
        )
        assert (
            msgspec.structs.replace(profile, degrees={1: degree_times(1), 2: times}).steady
            == steady
        )


def test_a_degree_that_nobody_measured_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"a tensor degree of 4 was not measured: use one of \[1, 2\]"
    ):
        layout_profile().costs(MODEL, ParallelLayout(tensor_parallel=4))


def test_a_file_is_the_profile_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "layouts.json"
    write_profile(layout_profile(), path)
    assert read_profile(path, LayoutProfile) == layout_profile()
    path.write_bytes(path.read_bytes().replace(b'"built": true', b'"built": 1'))
    with pytest.raises(UsageError, match="is not a profile"):
        read_profile(path, LayoutProfile)
