"""A GGUF file as a Hugging Face model directory: config.json and a tokenizer from its metadata, and a link to it."""

import atexit
import json
import logging
import math
import struct
from collections.abc import Mapping
from functools import cache, lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec

from nanoserve.config.model_config import ModelConfig
from nanoserve.errors import shown
from nanoserve.models.gguf_file import GgufFile, open_gguf
from nanoserve.models.gguf_vocabulary import BYTE, CONTROL, USER_DEFINED, GgufVocabulary, listed, read_vocabulary
from nanoserve.models.hub import LINK_NAME
from nanoserve.utils.files import replace_file
from nanoserve.utils.temporary import choose_directory, make_directory, remove_directory

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor of numbers that Llama 3's rotary frequencies are divided by."""

_FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe", "glm4": "glm4"}
# Keys of config.json -> keys of GGUF behind the architecture's name, all for whole numbers.
_NEEDED_SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}
_OTHER_SIZES = {
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "sliding_window": "attention.sliding_window",
}
_EXPERT_SIZES = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}

_ROPE_KEYS = {
    *("dimension_count", "freq_base", "scale_linear", "scaling.type", "scaling.factor", "scaling.finetuned"),
    *("scaling.original_context_length", "scaling.attn_factor", "scaling.yarn_beta_fast", "scaling.yarn_beta_slow"),
    *("scaling.yarn_ext_factor", "scaling.yarn_attn_factor", "scaling.yarn_log_multiplier"),
}
"""Keys behind the architecture's name and `rope.` that are known; another one would change the angles of positions."""

_SAMPLING_KEYS: Mapping[str, tuple[str, type[int] | type[float]]] = {
    "temperature": ("temp", float),
    "top_k": ("top_k", int),
    "top_p": ("top_p", float),
    "min_p": ("min_p", float),
    "repetition_penalty": ("penalty_repeat", float),
}
"""Keys of generation_config.json -> keys of GGUF behind general.sampling, and what they hold."""
_CARD_SAMPLING = {"smollm2": {"temperature": 0.2, "top_p": 0.9}}
"""Recommendations of model cards by general.basename, for chat models whose files have none."""

_GPT2_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{%s}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS = {
    "gpt-2": _GPT2_WORDS,
    "smollm": _GPT2_WORDS,
    "llama-bpe": _LLAMA3_WORDS % "1,3",
    "glm4": _LLAMA3_WORDS % "1,3",
    "chatglm-bpe": _LLAMA3_WORDS % "1,3",
    "qwen2": _LLAMA3_WORDS % "1",
}
"""Regular expressions that divide text into words before pairs are merged, by `tokenizer.ggml.pre`."""


def gguf_config(path: Path) -> ModelConfig:
    """The shape of the model in the file. Raises ModelError as `gguf_directory` does."""
    return ModelConfig.from_hf(_config(open_gguf(path)), source=str(path))


def gguf_directory(path: Path) -> Path:
    """A model directory for the file, which is removed with this process. Raises ModelError, one line that names the
    file, if it is damaged or not supported."""
    return model_directory(open_gguf(path))


@cache
def model_directory(file: GgufFile) -> Path:
    """A model directory for the open file, as `gguf_directory` says."""
    config, vocabulary, sampling = _config(file), read_vocabulary(file), _sampling(file)
    if vocabulary is not None:
        config |= {"bos_token_id": vocabulary.named.get("bos"), "eos_token_id": list(vocabulary.end_tokens)}
    ModelConfig.from_hf(config, source=str(file.path))
    make_directory(directory := choose_directory())
    atexit.register(remove_directory, directory)
    (directory / LINK_NAME).symlink_to(file.path.absolute())
    replace_file(directory / "config.json", json.dumps(config))
    if sampling:
        replace_file(directory / "generation_config.json", json.dumps({"do_sample": True} | sampling))
    if vocabulary is not None:
        _write_tokenizer(file, vocabulary, directory)
    return directory


def _config(file: GgufFile) -> dict[str, Any]:
    architecture = file.get("general.architecture", str, "")
    if architecture not in _FAMILIES:
        raise file.fail(f"architecture {shown(architecture)} is not supported; supported: {', '.join(_FAMILIES)}")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise file.fail("tensor token_embd.weight is missing")
    config: dict[str, Any] = {key: file.need(f"{architecture}.{name}", int) for key, name in _NEEDED_SIZES.items()}
    config |= {key: file.find(f"{architecture}.{name}", int) for key, name in _OTHER_SIZES.items()}
    if config["head_dim"] is None:
        del config["head_dim"]
    family = _FAMILIES[architecture]
    if architecture == "llama" and config["sliding_window"]:
        family = "mistral"
    if file.get(f"{architecture}.expert_count", int, 0) or family == "qwen3_moe":
        config |= _experts(file, architecture)
        family = "mixtral" if architecture == "llama" else family
    types = {name.removesuffix(".weight"): one.type.name for name, one in file.tensors.items() if one.type.size > 1}
    return config | {
        "model_type": family,
        "tensor_names": "gguf",
        "vocab_size": embedding.shape[0],
        "rms_norm_eps": file.need(f"{architecture}.attention.layer_norm_rms_epsilon", float),
        "dtype": "float16",
        "quantization_config": {"quant_method": "gguf", "tensor_types": types} if types else None,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "rope_parameters": _rope(file, architecture) | _rope_scaling(file, f"{architecture}.rope."),
    }


def _experts(file: GgufFile, architecture: str) -> dict[str, Any]:
    """The sizes of a mixture of experts; those of Mixtral are as large as the file's feed-forward part."""
    names = dict(_EXPERT_SIZES)
    if architecture == "llama":
        del names["moe_intermediate_size"]
    sizes = {key: file.need(f"{architecture}.{name}", int) for key, name in names.items()}
    return {**sizes, "num_local_experts": sizes["num_experts"], "norm_topk_prob": True}


def _rope(file: GgufFile, architecture: str) -> dict[str, Any]:
    """How fast which dimensions of a head turn."""
    heads = file.get(f"{architecture}.attention.head_count", int, 0) or 1
    whole = file.get(f"{architecture}.embedding_length", int, 0) // heads
    head_dim = file.get(f"{architecture}.attention.key_length", int, whole)
    rotated = file.get(f"{architecture}.rope.dimension_count", int, head_dim)
    rope: dict[str, Any] = {
        "rope_theta": file.get(f"{architecture}.rope.freq_base", float, 10000.0),
        "partial_rotary_factor": rotated / head_dim if head_dim else 1.0,
    }
    if factors := file.tensors.get(ROPE_FACTORS):
        if factors.type.name != "F32":
            raise file.fail(f"tensor {ROPE_FACTORS} is {factors.type.name}, not F32")
        stored = factors.data[factors.offset : factors.offset + factors.num_bytes]
        rope["frequency_factors"] = [factor for (factor,) in struct.iter_unpack("<f", stored)]
    return rope


def _rope_scaling(file: GgufFile, prefix: str) -> dict[str, Any]:
    """How a longer context is made of the trained one, as llama.cpp reads it: a factor without a type is linear, one of
    0 is none, and type none ignores it."""
    for key in file.metadata:
        if key.startswith(prefix) and key.removeprefix(prefix) not in _ROPE_KEYS:
            raise file.fail(f"{key:.80} is not supported")
    kind = file.get(f"{prefix}scaling.type", str, "linear")
    factor = file.find(f"{prefix}scaling.factor", float)
    if factor is None:
        factor = file.get(f"{prefix}scale_linear", float, 0.0)  # its name in old files
    if kind == "none" or (kind in ("linear", "yarn") and not factor):
        kind, factor = "default", 1.0
    _refuse_rope_numbers(file, f"{prefix}scaling.", kind)
    scaling = {"rope_type": kind, "factor": factor}
    if kind != "yarn":
        return scaling
    magnitude = 1.0 + 0.1 * math.log(factor) if factor > 0 else 1.0
    return scaling | {
        "original_max_position_embeddings": file.find(f"{prefix}scaling.original_context_length", int),
        "attention_factor": file.get(f"{prefix}scaling.attn_factor", float, 1.0) * magnitude,
        "beta_fast": file.find(f"{prefix}scaling.yarn_beta_fast", float),
        "beta_slow": file.find(f"{prefix}scaling.yarn_beta_slow", float),
    }


def _refuse_rope_numbers(file: GgufFile, prefix: str, kind: str) -> None:
    """Raise ModelError for numbers that would change the result and cannot be followed. Versions of llama.cpp do not
    agree on what yarn_attn_factor and yarn_log_multiplier do to these architectures."""
    is_yarn = kind == "yarn"
    followed = {"yarn_attn_factor": (1.0,), "yarn_log_multiplier": (0.0,), "yarn_ext_factor": (float(is_yarn), -1.0)}
    if not is_yarn:
        followed["attn_factor"] = (1.0,)
    for name, numbers in followed.items():
        found = file.get(f"{prefix}{name}", float, numbers[0])
        if found not in numbers:
            raise file.fail(f"{prefix}{name} of {found:g} is not supported with rope scaling of type {kind}")


def _sampling(file: GgufFile) -> dict[str, Any]:
    found = {key: file.find(f"general.sampling.{name}", kind) for key, (name, kind) in _SAMPLING_KEYS.items()}
    given = {key: value for key, value in found.items() if value is not None}
    card = _CARD_SAMPLING.get(file.get("general.basename", str, ""), {})
    return given or (card if "tokenizer.chat_template" in file.metadata else {})


# ------------------------------------------------------------------------------------ The tokenizer


def _write_tokenizer(file: GgufFile, vocabulary: GgufVocabulary, directory: Path) -> None:
    tokens, kind = vocabulary.tokens, vocabulary.kind
    named = {name: vocabulary.named[key] for name, key in _NAMED.items() if key in vocabulary.named}
    settings: dict[str, Any] = {f"{name}_token": tokens[number] for name, number in named.items()}
    settings["made_from"] = str(file.path)
    settings["added_tokens_decoder"] = {
        str(number): {"content": token, "special": token_type == CONTROL}
        for number, (token, token_type) in enumerate(zip(tokens, vocabulary.types, strict=True))
        if token_type in (CONTROL, USER_DEFINED)
    }
    adds_bos = kind == "llama" or file.find("tokenizer.ggml.pre", str) == "llama-bpe"  # as llama.cpp assumes
    settings["add_bos_token"] = file.get("tokenizer.ggml.add_bos_token", bool, adds_bos)
    settings["add_eos_token"] = file.get("tokenizer.ggml.add_eos_token", bool, False)
    if template := file.get("tokenizer.chat_template", str, ""):
        settings["chat_template"] = template
    if kind == "gpt2":
        replace_file(directory / "tokenizer.json", _byte_level_tokenizer(file, tokens, settings))
    else:
        prefix = file.get("tokenizer.ggml.add_space_prefix", bool, True)
        try:
            replace_file(directory / "tokenizer.model", _sentencepiece_model(vocabulary, prefix=prefix))
        except (ValueError, OverflowError) as error:
            raise file.fail(f"the tokenizer's scores or types are damaged ({error})") from error
    replace_file(directory / "tokenizer_config.json", json.dumps(settings))


_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def _byte_level_tokenizer(file: GgufFile, tokens: list[str], settings: Mapping[str, Any]) -> bytes:
    """tokenizer.json of a byte-level BPE vocabulary. The library writes only the parts around the vocabulary, since it
    takes long to build one."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    if "tokenizer.ggml.pre" not in file.metadata:
        told = "tokenizer.ggml.pre is missing, so text is divided into words as for gpt-2; answers may be worse"
        logging.getLogger("nanoserve").warning("nanoserve: %s: %s: convert the model again", file.path, told)
    words = file.get("tokenizer.ggml.pre", str, "gpt-2")
    if words not in _WORDS:
        raise file.fail(f"pre-tokenizer {shown(words)} is not supported; supported: {', '.join(_WORDS)}")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = _merges(file, vocabulary)
    tokenizer = Tokenizer(models.BPE({}, [], ignore_merges=words == "llama-bpe"))
    before = [pre_tokenizers.Digits(individual_digits=True)] if words == "smollm" else []
    split = pre_tokenizers.Split(Regex(_WORDS[words]), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*before, split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    if words == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    added = settings["added_tokens_decoder"].values()
    for special, add in ((True, tokenizer.add_special_tokens), (False, tokenizer.add_tokens)):
        add([AddedToken(entry["content"], normalized=False) for entry in added if entry["special"] is special])
    tokenizer.post_processor = _surrounding(file, vocabulary, settings)
    whole = json.loads(tokenizer.to_str())
    whole["model"] |= {"vocab": vocabulary, "merges": merges}
    whole["added_tokens"] = sorted(
        ({**entry, "id": vocabulary[entry["content"]]} for entry in whole["added_tokens"]), key=itemgetter("id")
    )
    return msgspec.json.encode(whole)


def _merges(file: GgufFile, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """The pairs of tokens that are merged. Raises ModelError if a half or the whole is no token."""
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in listed(file, "merges", str))]
    for left, right in pairs:
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            wrong = next(token for token in (left + right, left, right) if token not in vocabulary)
            raise file.fail(f"the tokenizer's merges do not fit its tokens ({shown(wrong)} is none)")
    return pairs


def _surrounding(file: GgufFile, vocabulary: Mapping[str, int], settings: Mapping[str, Any]) -> Any:
    """The post-processor that puts BOS and EOS around a text. A tokenizer.json has it itself: the settings
    add_bos_token and add_eos_token do not count beside it."""
    from tokenizers import processors

    added = [f"{name}_token" for name in ("bos", "eos") if settings[f"add_{name}_token"]]
    spelled = {name: settings[name] for name in added if name in settings}
    pieces = (spelled.get("bos_token"), "$A", spelled.get("eos_token"))
    try:
        return processors.TemplateProcessing(
            single=[piece for piece in pieces if piece is not None],
            special_tokens=[(token, vocabulary[token]) for token in spelled.values()],
        )
    except ValueError as error:
        raise file.fail(f"the tokenizer's BOS or EOS is spelled in a way that is not supported ({error})") from error


def _sentencepiece_model(vocabulary: GgufVocabulary, *, prefix: bool) -> bytes:
    """A sentencepiece model of these pieces, in the wire format of protocol buffers (sentencepiece_model.proto)."""
    bpe, byte_fallback = _integer(3, 2), _integer(35, int(BYTE in vocabulary.types))
    normalizer = _text(1, b"identity") + _integer(3, int(prefix)) + _integer(4, 0) + _integer(5, 1)
    pieces = (
        _text(1, _text(1, token.encode()) + _varint(2 << 3 | 5) + struct.pack("<f", score) + _integer(3, token_type))
        for token, score, token_type in zip(vocabulary.tokens, vocabulary.scores, vocabulary.types, strict=True)
    )
    return b"".join(pieces) + _text(2, bpe + byte_fallback) + _text(3, normalizer)


@lru_cache(1024)  # a vocabulary has few lengths and types
def _varint(number: int) -> bytes:
    """Seven bits in each byte, the lowest first. Raises ValueError if the number is negative."""
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + _varint(number >> 7)


@lru_cache(1024)
def _integer(field: int, number: int) -> bytes:
    return _varint(field << 3) + _varint(number)


def _text(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content
