"""Equal weights for every engine: a decoder written as safetensors for transformers and as GGUF for
llama.cpp.

Files of a dummy model are kept in the user's cache directory: its weights never change.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from nanoserve.config.model_config import ModelConfig
from nanoserve.errors import RuntimeFailure, UsageError
from nanoserve.lab.benchmarks.machine import cache_directory
from nanoserve.models.decoder import Decoder
from nanoserve.models.dtypes import DTYPES, format_name, resolve_dtype
from nanoserve.models.dummy import DUMMY_SEED, make_dummy_model, save_dummy_checkpoint
from nanoserve.models.hub import DUMMY_PREFIX, LINK_NAME, ResolvedModel, dummy_config, dummy_shape
from nanoserve.models.loading import load_model
from nanoserve.models.weights import tensor_parts
from nanoserve.utils.temporary import choose_directory, make_directory, remove_directory

# version of the file format in the cache's names; raise it to make peers' files be rewritten
_FILES = 2
_ARCHITECTURES = {
    "llama": "LLAMA",
    "mistral": "LLAMA",
    "qwen2": "QWEN2",
    "qwen3": "QWEN3",
    "gemma3_text": "GEMMA3",
}
"""The gguf package's names of families, and below of number formats: of a matrix, and of a file of
such."""
_STORAGE = {
    torch.float32: ("F32", "ALL_F32"),
    torch.float16: ("F16", "MOSTLY_F16"),
    torch.bfloat16: ("BF16", "MOSTLY_BF16"),
}


def checkpoint_directory(model: ResolvedModel, dtype: str) -> Path:
    """A directory that transformers reads: the model's own, or for a dummy one that is written
    here. Raises RuntimeFailure if it cannot be written."""
    if model.directory is not None:
        return model.directory
    return _kept(
        _dummy_key(model.name, dtype),
        lambda target: save_dummy_checkpoint(model.name, DTYPES[dtype], target),
    )


def gguf_file(model: ResolvedModel, dtype: str, quantization: str | None) -> Path:
    """The GGUF file that the model is, or one of its weights in this number format; with
    `quantization`, llama.cpp's own rounding of it. Raises UsageError for a model that has no place
    in a GGUF file here, RuntimeFailure if it cannot be written."""
    plain = own_gguf_file(model) or _plain_gguf_file(model, dtype)
    if quantization is None:
        return plain
    from nanoserve.lab.benchmarks.peers.llama_cpp_peer import write_quantized

    key = f"{plain.parent.name}-{plain.stem}-{plain.stat().st_mtime_ns:x}-{quantization}"
    return (
        _kept(key, lambda target: write_quantized(plain, target / LINK_NAME, quantization))
        / LINK_NAME
    )


def own_gguf_file(model: ResolvedModel) -> Path | None:
    """The GGUF file that the model is; None for others."""
    if model.directory is None:
        return None
    link = model.directory / LINK_NAME
    if not link.is_file():
        return None
    return link.resolve()


def _plain_gguf_file(model: ResolvedModel, dtype: str) -> Path:
    directory, name, shape = model.directory, model.name, model_config(model)
    if shape.quantization is not None:
        raise UsageError(
            f"{name} is quantized, and cannot be written for llama.cpp; compare a GGUF file of it"
        )
    kinds, windows = {rope.kind for rope in shape.rope_kinds}, any(shape.layers.sliding_windows)
    if (
        shape.family not in _ARCHITECTURES
        or kinds != {"default"}
        or windows != (shape.family == "gemma3_text")
    ):
        raise UsageError(
            f"{shape.family} with {', '.join(sorted(kinds))} rope cannot be written for llama.cpp; "
            f"{', '.join(_ARCHITECTURES)} with plain rope can, with windows only the last"
        )

    def write(target: Path) -> None:
        if directory is None:
            decoder, config = make_dummy_model(name, dtype)
        else:
            decoder, config = load_model(directory, dtype)
        _write_gguf(decoder, config, target / LINK_NAME)

    if directory is None:
        return _kept(_dummy_key(name, dtype) + "-gguf", write) / LINK_NAME
    stamp = max(file.stat().st_mtime_ns for file in directory.iterdir())
    return _kept(f"{directory.name}-{stamp:x}-{dtype}-gguf", write) / LINK_NAME


def _dummy_key(name: str, dtype: str) -> str:
    """The shape is part of it: a config.json may change under the same name."""
    shape = json.dumps(dummy_shape(name) | {"torch_dtype": dtype}, sort_keys=True).encode()
    digest = hashlib.blake2s(shape, digest_size=6).hexdigest()
    plain = Path(name).name.removeprefix(DUMMY_PREFIX).removesuffix(".json")
    return f"dummy-{plain}-{dtype}-seed{DUMMY_SEED}-files{_FILES}-{digest}"


def _kept(key: str, write: Callable[[Path], None]) -> Path:
    """The cache's directory of that key, written if it is not there; half-written ones never
    show."""
    target = cache_directory() / "weights" / key
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        make_directory(draft := choose_directory(target.parent))
        try:
            write(draft)
            draft.replace(target)
        finally:
            remove_directory(draft)
    except OSError as error:
        raise RuntimeFailure(
            f"cannot write weights for the peers to {target}: {error.strerror or error}"
        ) from error
    return target


def model_config(model: ResolvedModel) -> ModelConfig:
    """The shape of a model, without its weights."""
    if model.directory is None:
        return dummy_config(model.name)
    return ModelConfig.from_directory(model.directory)


def dtype_name(dtype: str, config: ModelConfig) -> str:
    """The number format that ``--dtype`` means for this model on this CPU, as torch calls it."""
    return format_name(resolve_dtype(dtype, torch.device("cpu"), config.dtype))


def _write_gguf(decoder: Decoder, config: ModelConfig, path: Path) -> None:
    """Matrices in the decoder's number format, norms and biases in float32. The file has no
    vocabulary: token ids go in and come out."""
    import gguf

    architecture = gguf.MODEL_ARCH[_ARCHITECTURES[config.family]]
    storage, file_type = _STORAGE[decoder.dtype]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_file_type(gguf.LlamaFileType[file_type])
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.rope.rotary_dim)
    # llama.cpp knows that of windows
    writer.add_rope_freq_base(max(rope.theta for rope in config.rope_kinds))
    if any(config.layers.sliding_windows):
        writer.add_sliding_window(max(config.layers.sliding_windows))
    writer.add_layer_norm_rms_eps(config.norms.eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    parameters = dict(decoder.named_parameters())
    for part in tensor_parts(replace(config, tensor_names="gguf")):
        tensor = part.region(parameters[part.parameter]).detach()
        if architecture is gguf.MODEL_ARCH.LLAMA and (
            ".attn_q." in part.name or ".attn_k." in part.name
        ):
            tensor = _interleaved(tensor, config.head_dim)
        if tensor.dim() == 1:
            # a file has what norms multiply by
            stored_less_one = config.norms.kind == "rms_plus_one"
            writer.add_tensor(part.name, (tensor.float() + stored_less_one).numpy())
        else:
            content = tensor.contiguous().view(torch.uint8).numpy()
            writer.add_tensor(part.name, content, raw_dtype=gguf.GGMLQuantizationType[storage])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(tensor: Tensor, head_dim: int) -> Tensor:
    """Rows in the order of rotation by neighbouring pairs, which llama.cpp's Llama uses, not by
    halves of a head. tensor: [heads * head_dim, ...], the same shape comes back."""
    halves = tensor.reshape(-1, 2, head_dim // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)
