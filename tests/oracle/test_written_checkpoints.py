"""transformers opens every checkpoint that is written here, and finds each tensor under its
name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nanoserve.config.published_shapes import published_shapes
from nanoserve.models.dummy import save_dummy_checkpoint
from nanoserve.models.loading import load_model
from scripts.saving import save_hf
from tests.models.test_shards import write_checkpoint
from tests.oracle.checkpoints import families

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "block_ff_dim": 48,
    "block_multiple_of": 8,
    "full_attn_idxs": [1],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "full_attention_interval": 2,
    "shared_expert_intermediate_size": 24,
    "num_heads": 8,
    "state_size": 10,
    "time_step_rank": 3,
    "shared_intermediate_size": 48,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "layer_types": ["mamba", "attention"],
}
ASSETS = Path(__file__).parents[2] / "nanoserve" / "assets"
BUNDLED = [ASSETS / "storyteller", ASSETS / "storyteller-draft"]
"""The bundled models of a family that transformers has."""
BY_TYPE = {str(shape["model_type"]): shape for shape in published_shapes().values()}
BY_EXPERT = ("gpt_oss", "granitemoe", "granitemoehybrid", "gemma4_text-moe")
"""Written expert by expert, and read so by nanoserve alone: the published tensors hold all experts
of a layer."""


def opened(directory: Path) -> Any:
    model, told = AutoModelForCausalLM.from_pretrained(
        directory, output_loading_info=True, local_files_only=True
    )
    assert not any(told.values()), told  # nothing missing, left over or of another shape
    return model


@pytest.mark.parametrize("model_type", sorted(BY_TYPE.keys() - {"gpt_oss"}))
@pytest.mark.parametrize("file_bytes", [1 << 20, 20_000], ids=["single", "sharded"])
def test_dummies(
    model_type: str, file_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {name: TINY.get(name, value) for name, value in BY_TYPE[model_type].items()}
    shape |= {"head_dim": 8, "pad_token_id": 0}
    if model_type == "gemma4_text":
        # the last layer must have no window
        shape |= {"num_hidden_layers": 6, "global_head_dim": 16}
    # TOML has no null, and transformers takes a missing one for 1536
    shape.setdefault("q_lora_rank", None)
    spec = tmp_path / "shape.json"
    spec.write_text(json.dumps(shape))
    monkeypatch.setattr("nanoserve.models.dummy._FILE_BYTES", file_bytes)
    save_dummy_checkpoint(str(spec), torch.float32, tmp_path)
    assert (tmp_path / "model.safetensors.index.json").exists() == (file_bytes == 20_000)
    opened(tmp_path)


@pytest.mark.parametrize("bundled", BUNDLED, ids=lambda directory: directory.name)
def test_what_training_writes(bundled: Path, tmp_path: Path) -> None:
    decoder, config = load_model(bundled, "bfloat16")
    save_hf(decoder, config, tmp_path)
    for directory in (bundled, tmp_path):
        opened(directory)
    assert AutoTokenizer.from_pretrained(bundled).decode([300]) != ""


@pytest.mark.parametrize("family", [family for family in families() if family not in BY_EXPERT])
def test_those_of_other_tests(family: str, tmp_path: Path) -> None:
    write_checkpoint(family, tmp_path)
    opened(tmp_path)
