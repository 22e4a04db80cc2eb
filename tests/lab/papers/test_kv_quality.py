"""What smaller caches cost: models with four kinds of attention, and the data of the package."""

import pytest

from nanoserve.config.model_config import ModelConfig
from nanoserve.lab.papers.attention_kinds import KINDS, bytes_of_token, checkpoint_config
from nanoserve.lab.papers.framework import Scale, load_paper
from nanoserve.lab.papers.kv_quality import (
    TrainedModel,
    differs,
    loss_ratio,
    shipped_models,
)
from nanoserve.models.decoder import Decoder


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


def test_the_figure_has_every_kind_with_three_seeds() -> None:
    models = shipped_models()
    assert {(one.kind, one.seed) for one in models} == {(k, s) for k in KINDS for s in range(3)}
    assert len({one.tokens for one in models}) == 1
    (figure,) = load_paper("lecture").chosen("kv-quality")
    finding = figure.make(Scale(), lambda jobs: {})
    assert [row["kind"] for row in finding.rows] == [*KINDS]
    assert len(finding.claims) == 3
