"""Memory of sequences, by arithmetic on the models' published shapes: states beside keys and
values."""

import pytest
from transformers import JambaConfig

from nanoserve.costs.counts import ModelCounts
from nanoserve.lab.papers.framework import Finding, Scale, load_paper
from nanoserve.lab.papers.sequence_memory import STATE_LENGTHS, STATE_MODELS
from tests.costs.conftest import qwen3_next

MIB, GIB = 2**20, 2**30


@pytest.fixture(scope="module")
def found() -> Finding:
    (figure,) = (one for one in load_paper("lecture").figures if one.number == "state")

    def run_nothing(jobs: object) -> None:
        raise AssertionError("the figure is counted")

    return figure.make(Scale(seeds=(0,), full=False), run_nothing)


def test_qwen3_next_is_as_the_cost_model_counts_it() -> None:
    counts, listed = ModelCounts(qwen3_next()), STATE_MODELS["qwen3-next-80b-a3b"]
    assert listed.state_bytes == counts.state_bytes(0) == 73.6875 * MIB
    assert listed.token_bytes == counts.kv_bytes_per_token(0) == 24576


def test_jamba_is_as_its_configuration_says() -> None:
    """Jamba-v0.1 has the defaults of transformers."""
    config, listed = JambaConfig(), STATE_MODELS["jamba-v0.1"]
    recurrent = config.layers_block_type.count("mamba")
    assert (recurrent, len(config.layers_block_type)) == (28, 32)
    channels = config.mamba_expand * config.hidden_size
    layer = channels * (4 * config.mamba_d_state + 2 * (config.mamba_d_conv - 1))
    assert listed.state_bytes == recurrent * layer == 15.3125 * MIB
    head_dim = config.hidden_size // config.num_attention_heads
    assert listed.token_bytes == 4 * 2 * config.num_key_value_heads * head_dim * 2


def test_sizes_at_256k_are_those_that_are_known(found: Finding) -> None:
    assert STATE_LENGTHS[-1] == 256 * 1024
    rows = {row["model"]: row for row in found.rows}
    assert rows["jamba-v0.1"]["256k"] == 4 + 15.3125 / 1024
    assert rows["mixtral-8x7b"]["256k"] == 32
    assert rows["qwen3-next-80b-a3b"]["256k"] == 6 + 73.6875 / 1024
    # 80 heads of 64 x 128 in float32, 5,376 channels of 3 inputs in 16 bits, 64 layers
    mamba = 64 * (80 * 64 * 128 * 4 + 5376 * 3 * 2) / GIB
    assert {rows["mamba2-2.7b"][length] for length in ("1k", "8k", "32k", "256k")} == {mamba}
    assert rows["qwen3-next-80b-a3b"]["worth"] == 3144
    # 10 layers of Gemma 3 27B keep all, 52 keep 1,024, each 8,192 bytes of a token
    assert rows["gemma-3-27b"]["256k"] == 8192 * (10 * 256 + 52) * 1024 / GIB
    assert rows["gemma-3-27b"]["token"] == 10 * 8192


def test_a_state_pays_from_1048_tokens_on(found: Finding) -> None:
    """36 layers with 2 key heads of 256 keep 73,728 bytes of a token; the state is 1,048 of them."""
    claims = {claim.says: claim for claim in found.claims}
    (from_here,) = (one for says, one in claims.items() if says.startswith("tokens from which on"))
    assert from_here.ours.mean == 73.6875 * MIB / (36 * 2 * 2 * 256 * 2) == 1048
    (short,) = (one for says, one in claims.items() if "of 512 tokens" in says)
    assert short.ours.mean == (73.6875 * MIB + 512 * 24576) / (512 * 4 * 24576)
    assert [claim.holds for claim in found.claims] == ["yes"] * 5 + ["no"]
    assert found.claims[1].assumption.startswith(
        "4.0 GiB of keys and values and 15.3 MiB of state against 32 GiB;"
    )
