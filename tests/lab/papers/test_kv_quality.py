"""Smaller caches and their cost: models with four kinds of attention, and the data of the package."""

import csv
from pathlib import Path

import pytest

from nanoserve.config.model_config import ModelConfig
from nanoserve.lab.charts import Panel
from nanoserve.lab.papers import kv_quality
from nanoserve.lab.papers.attention_kinds import KINDS, bytes_of_token, checkpoint_config
from nanoserve.lab.papers.framework import Finding, Scale, load_paper
from nanoserve.lab.papers.kv_quality import TrainedModel, differs, loss_ratio
from nanoserve.models.decoder import Decoder
from nanoserve.record.metrics import Spread


def made(kind: str, *losses: float) -> list[TrainedModel]:
    return [TrainedModel(kind, seed, 1, 1, 1, 1, loss) for seed, loss in enumerate(losses)]


@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds_have_as_many_parameters(kind: str) -> None:
    decoder = Decoder(ModelConfig.from_hf(checkpoint_config(kind)))
    # the storyteller's embedding of 4,096 x 256, four layers of 4 x 256 x 256 and 3 x 256 x 768,
    # and nine norms of 256
    expected = 4096 * 256 + 4 * (4 * 256 * 256 + 3 * 256 * 768) + 9 * 256
    assert sum(one.numel() for one in decoder.parameters()) == pytest.approx(expected, rel=1e-3)


def test_the_cache_of_each_kind() -> None:
    # 4 layers of 2 bytes: keys and values of 8, 2 and 1 heads of 32; a latent of 64 and a key of 16
    expected = {"MHA": 4096, "GQA": 1024, "MQA": 512, "MLA": 640}
    assert {kind: bytes_of_token(kind) for kind in KINDS} == expected
    for kind, size in expected.items():
        config = ModelConfig.from_hf(checkpoint_config(kind))
        values = config.value_dim
        if kind == "MLA":  # the values are columns of the keys
            values = 0
        numbers = config.num_kv_heads * (config.head_dim + values)
        assert 2 * config.num_layers * numbers == size


def test_a_difference_below_the_spread_of_seeds_is_none() -> None:
    models = made("MHA", 0.80, 0.82, 0.81) + made("GQA", 0.815, 0.825, 0.82)
    models += made("MQA", 0.90, 0.91, 0.905)
    assert not differs(models, "GQA", "MHA")
    assert differs(models, "MQA", "MHA")
    ratio = loss_ratio(models, "MQA", "MHA")  # seed by seed
    assert (ratio.low, ratio.high) == pytest.approx((0.91 / 0.82, 0.90 / 0.80))


@pytest.fixture(scope="module")
def finding() -> Finding:
    (figure,) = load_paper("lecture").chosen("kv-quality")
    return figure.make(Scale(), lambda jobs: {})


def shipped() -> list[dict[str, str]]:
    path = Path(kv_quality.__file__).with_name("kv_quality.csv")
    with path.open(encoding="utf-8", newline="") as table:
        return [*csv.DictReader(table)]


def test_the_data_has_a_run_of_each_kind_with_each_seed() -> None:
    rows = shipped()
    assert [(row["kind"], int(row["seed"])) for row in rows] == [
        (kind, seed) for kind in KINDS for seed in range(3)
    ]
    assert len({row["tokens"] for row in rows}) == 1
    for row in rows:
        decoder = Decoder(ModelConfig.from_hf(checkpoint_config(row["kind"])))
        assert int(row["parameters"]) == sum(one.numel() for one in decoder.parameters())
        assert int(row["bytes_of_token"]) == bytes_of_token(row["kind"])


def test_claims_are_ratios_of_the_shipped_losses(finding: Finding) -> None:
    found = {(row["kind"], row["seed"]): float(row["nats_per_byte"]) for row in shipped()}
    wanted = [
        Spread.of(found[kind, seed] / found[other, seed] for seed in ("0", "1", "2"))
        for kind, other in (("GQA", "MHA"), ("MQA", "GQA"), ("MLA", "GQA"))
    ]
    assert [claim.ours for claim in finding.claims] == wanted


def test_every_kind_has_a_row_and_every_run_a_point(finding: Finding) -> None:
    assert [row["kind"] for row in finding.rows] == [*KINDS]
    for row in finding.rows:
        losses = [float(one["nats_per_byte"]) for one in shipped() if one["kind"] == row["kind"]]
        mean = sum(losses) / 3
        assert row["loss"] == f"{mean:.4f} [{min(losses):.4f}..{max(losses):.4f}]"
    assert finding.chart is not None
    (points,) = finding.chart.panels
    assert isinstance(points, Panel)
    drawn = [
        (curve.label, place, loss)
        for curve in points.curves
        for place, loss in zip(curve.xs, curve.ys, strict=True)
    ]
    assert drawn == [
        (row["kind"], int(row["bytes_of_token"]), float(row["nats_per_byte"])) for row in shipped()
    ]
