"""Write a decoder as a GGUF file, so that llama.cpp computes with the very same weights. Needs the gguf package.

The file has no vocabulary: token ids go in and come out.
"""

from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor

from nanoserve.config import ModelConfig
from nanoserve.errors import UsageError
from nanoserve.models.decoder import Decoder
from nanoserve.models.weights import tensor_parts

_ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
_STORAGE = {
    torch.float32: (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    torch.float16: (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    torch.bfloat16: (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
}


def check_exportable(config: ModelConfig) -> None:
    """Raise UsageError if this writer does not know how llama.cpp wants the model."""
    if config.family not in _ARCHITECTURES or config.rope.kind != "default" or any(config.sliding_windows):
        raise UsageError(
            f"{config.family} with {config.rope.kind} rope cannot be written for llama.cpp; "
            f"{', '.join(_ARCHITECTURES)} with plain rope and full attention can"
        )


def write_gguf(decoder: Decoder, config: ModelConfig, path: Path) -> None:
    """Matrices in the decoder's number format, norms and biases in float32."""
    architecture = _ARCHITECTURES[config.family]
    storage, file_type = _STORAGE[decoder.dtype]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    _write_settings(writer, config, file_type)
    names = gguf.get_tensor_name_map(architecture, config.num_layers)
    parameters = dict(decoder.named_parameters())
    for part in tensor_parts(config):
        tensor = part.region(parameters[part.parameter]).detach()
        if architecture is gguf.MODEL_ARCH.LLAMA and ("q_proj" in part.name or "k_proj" in part.name):
            tensor = _interleaved(tensor, config.head_dim)
        name = names.get_name(part.name, try_suffixes=(".weight", ".bias"))
        assert name is not None, f"GGUF has no place for {part.name}"
        if tensor.dim() == 1:
            writer.add_tensor(name, tensor.float().numpy())
        else:
            writer.add_tensor(name, tensor.contiguous().view(torch.uint8).numpy(), raw_dtype=storage)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_settings(writer: Any, config: ModelConfig, file_type: gguf.LlamaFileType) -> None:
    writer.add_file_type(file_type)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.rope.rotary_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")


def _interleaved(tensor: Tensor, head_dim: int) -> Tensor:
    """Rows in the order of rotation by neighbouring pairs, which llama.cpp's Llama uses, not by halves of a head.

    tensor: [heads * head_dim, ...], the same shape comes back.
    """
    halves = tensor.reshape(-1, 2, head_dim // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)
