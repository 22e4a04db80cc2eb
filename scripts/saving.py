"""Write a decoder as a Hugging Face checkpoint, which other software can read."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from nanoserve.config.model_config import ModelConfig
from nanoserve.errors import UsageError
from nanoserve.models.checkpoint_writing import copy_other_files, write_config, write_tensors
from nanoserve.models.decoder import Decoder
from nanoserve.models.dtypes import format_name
from nanoserve.models.loading import SINGLE_NAME, open_checkpoint
from nanoserve.models.packed import region_of
from nanoserve.models.weights import tensor_parts
from nanoserve.utils.files import read_json_object


def save_hf(
    decoder: Decoder,
    config: ModelConfig,
    directory: str | Path,
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Write config.json and model.safetensors, readable as LlamaForCausalLM; `dtype` converts, None
    keeps the model's.

    Raises UsageError for a family other than Llama, or for rope scaling: nothing trained here needs
    them.
    """
    if config.family != "llama" or config.rope.kind != "default" or config.rope.frequency_factors:
        raise UsageError(
            "only Llama models without rope scaling can be saved, not "
            f"{config.family}/{config.rope.kind}"
        )
    dtype = dtype or decoder.dtype
    save_checkpoint(decoder, config, llama_config(config, dtype), directory, dtype=dtype)


def save_checkpoint(
    decoder: Decoder,
    config: ModelConfig,
    fields: Mapping[str, Any],
    directory: str | Path,
    *,
    dtype: torch.dtype | None = None,
) -> None:
    """Write config.json with these fields, of which the model's config was read, and
    model.safetensors; `dtype` converts, None keeps the model's."""
    parameters = dict(decoder.named_parameters())
    tensors = {
        part.name: part.region(parameters[part.parameter])
        .detach()
        .to("cpu", dtype or decoder.dtype)
        .contiguous()
        .clone()
        for part in tensor_parts(config)
    }
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(fields, indent=2, sort_keys=True)
    (target / "config.json").write_text(text + "\n", encoding="utf-8")


def llama_config(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of a Llama model with weights of this dtype."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norms.eps,
        "rope_theta": config.rope.theta,
        "attention_bias": config.attention.qkv_bias,
        "mlp_bias": config.feed_forward.bias,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
        "torch_dtype": format_name(dtype),
    }


def save_like(decoder: Decoder, source: Path, directory: Path) -> None:
    """Write a decoder in the shape and the number format of the model directory `source`, with its
    tokenizer and its settings. config.json is the last file."""
    config = ModelConfig.from_directory(source)
    with open_checkpoint(source, config) as checkpoint:
        tensors = {
            part.name: region_of(decoder, part).detach().to(checkpoint.view(part).dtype)
            for part in checkpoint.parts
        }
    write_tensors(directory / SINGLE_NAME, tensors)
    copy_other_files(source, directory)
    write_config(directory, read_json_object(source / "config.json"))
