"""A GGUF file as a Hugging Face model directory: config.json and a tokenizer from its metadata, and
a link to it."""

import atexit
import json
import logging
import math
import struct
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec

from nanoserve.config.model_config import ModelConfig
from nanoserve.errors import shown
from nanoserve.models.gguf_file import GgufFile, is_array, open_gguf
from nanoserve.models.gguf_gemma import gemma2, gemma3, gemma4, gpt_oss
from nanoserve.models.gguf_hybrid import (
    GRANITES,
    granite,
    granite_family,
    granite_hybrid,
    jamba,
    nemotron_h,
)
from nanoserve.models.gguf_layers import cohere, latent_attention, ministral, olmo
from nanoserve.models.gguf_recurrent import gated_delta_net, mamba, mamba2, short_convolutions
from nanoserve.models.gguf_vocabulary import (
    BYTE,
    CONTROL,
    USER_DEFINED,
    GgufVocabulary,
    listed,
    read_vocabulary,
)
from nanoserve.models.gguf_words import MORE_WORDS, SAME_WORDS, WHOLE_WORDS, WITH_BOS
from nanoserve.models.hub import LINK_NAME
from nanoserve.utils.files import replace_file
from nanoserve.utils.temporary import choose_directory, make_directory, remove_directory

GATE_UP_EXPERTS = "ffn_gate_up_exps"
"""The name of the first matrices of gpt-oss's experts, which files have apart."""

_FAMILIES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "glm4": "glm4",
    "lfm2": "lfm2",
    "lfm2moe": "lfm2_moe",
    "mamba": "mamba",
    "mamba2": "mamba2",
    "qwen3next": "qwen3_next",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
    "jamba": "jamba",
    "granite": "granite",
    "granitemoe": "granitemoe",
    "granitehybrid": "granitemoehybrid",
    "nemotron_h": "nemotron_h",
    "nemotron_h_moe": "nemotron_h",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gpt-oss": "gpt_oss",
    "smollm3": "smollm3",
    "olmo2": "olmo3",
    "cohere2": "cohere2",
    "mistral3": "ministral3",
    "deepseek2": "deepseek_v2",
}
_RECURRENT: Mapping[str, Callable[[GgufFile, str], dict[str, Any]]] = {
    "lfm2": short_convolutions,
    "lfm2moe": short_convolutions,
    "mamba": mamba,
    "mamba2": mamba2,
    "qwen3next": gated_delta_net,
    "qwen35": gated_delta_net,
    "qwen35moe": gated_delta_net,
    "jamba": jamba,
    "granitehybrid": granite_hybrid,
    "nemotron_h": nemotron_h,
    "nemotron_h_moe": nemotron_h,
}
"""Readers of the keys of layers with a recurrent state, by the architecture's name."""
_DIFFERING: Mapping[str, Callable[[GgufFile, str], dict[str, Any]]] = {
    "gemma2": gemma2,
    "gemma3": gemma3,
    "gemma4": gemma4,
    "gpt-oss": gpt_oss,
}
"""Readers of the keys of layers that attend in different ways, by the architecture's name."""
_LAYERS: Mapping[str, Callable[[GgufFile, str, Mapping[str, Any]], dict[str, Any]]] = {
    "olmo2": olmo,
    "cohere2": cohere,
    "mistral3": ministral,
    "deepseek2": latent_attention,
}
"""Readers of other keys about layers, given the rope that most architectures have."""
_OTHER_NORMS = ("nemotron_h", "nemotron_h_moe", "cohere2")
"""Architectures that have another key for what their norms add to the variance."""
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
_BY_LAYER = ("feed_forward_length", "attention.head_count_kv")
"""Sizes for which hybrid models have an array, with a number for each layer."""
_AS_LARGE_EXPERTS = ("llama", "jamba", *GRANITES)
"""Architectures whose experts have the inner size of the file's feed-forward part."""
_EXPERT_SIZES = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}

_ROPE_KEYS = frozenset(
    {
        "dimension_count",
        "freq_base",
        "scale_linear",
        "scaling.type",
        "scaling.factor",
        "scaling.finetuned",
        "scaling.original_context_length",
        "scaling.attn_factor",
        "scaling.yarn_beta_fast",
        "scaling.yarn_beta_slow",
        "scaling.yarn_ext_factor",
        "scaling.yarn_attn_factor",
        "scaling.yarn_log_multiplier",
    }
)
"""Keys behind the architecture's name and `rope.` that are known; another one would change the
angles of positions."""
_WITH_MULTIPLIER = ("mistral3.", "deepseek2.")
"""Architectures whose yarn_log_multiplier is followed, by the beginnings of their keys."""

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
_QWEN3_5_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS = {
    "gpt-2": _GPT2_WORDS,
    "smollm": _GPT2_WORDS,
    "mpt": _GPT2_WORDS,
    "olmo": _GPT2_WORDS,
    "refact": _GPT2_WORDS,
    "llama-bpe": _LLAMA3_WORDS % "1,3",
    "lfm2": _LLAMA3_WORDS % "1,3",
    "dbrx": _LLAMA3_WORDS % "1,3",
    "glm4": _LLAMA3_WORDS % "1,3",
    "chatglm-bpe": _LLAMA3_WORDS % "1,3",
    "qwen2": _LLAMA3_WORDS % "1",
    "qwen35": _QWEN3_5_WORDS,
}
"""Regular expressions that divide text into words before pairs are merged, by
`tokenizer.ggml.pre`."""
_NORMALIZED = ("qwen2", "qwen35", "deepseek-r1-qwen", "command-r", "tiny_aya")
"""Pre-tokenizers of models whose tokenizers normalize text (NFC)."""


def gguf_config(path: Path) -> ModelConfig:
    """The shape of the model in the file. Raises ModelError as `gguf_directory` does."""
    return ModelConfig.from_hf(_config(open_gguf(path)), source=str(path))


def gguf_directory(path: Path) -> Path:
    """A model directory for the file, which is removed with this process. Raises ModelError, one
    line that names the file, if it is damaged or not supported."""
    return model_directory(open_gguf(path))


@cache
def model_directory(file: GgufFile) -> Path:
    """A model directory for the open file, as `gguf_directory` says."""
    config = _config(file)
    vocabulary = read_vocabulary(file)
    sampling = _sampling(file)
    if vocabulary is not None:
        config["bos_token_id"] = vocabulary.named.get("bos")
        config["eos_token_id"] = list(vocabulary.end_tokens)
    ModelConfig.from_hf(config, source=str(file.path))
    directory = choose_directory()
    make_directory(directory)
    atexit.register(remove_directory, directory)
    (directory / LINK_NAME).symlink_to(file.path.absolute())
    replace_file(directory / "config.json", json.dumps(config))
    if sampling:
        generation = {"do_sample": True} | sampling
        replace_file(directory / "generation_config.json", json.dumps(generation))
    if vocabulary is not None:
        _write_tokenizer(file, vocabulary, directory)
    return directory


def _config(file: GgufFile) -> dict[str, Any]:
    architecture = file.get("general.architecture", str, "")
    if architecture not in _FAMILIES:
        raise file.fail(
            f"architecture {shown(architecture)} is not supported; supported: "
            f"{', '.join(_FAMILIES)}"
        )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise file.fail("tensor token_embd.weight is missing")
    config: dict[str, Any] = {}
    recurrent = _RECURRENT.get(architecture)
    for key, name in (_NEEDED_SIZES | _OTHER_SIZES).items():
        stored = f"{architecture}.{name}"
        # an array says of what kind each layer is
        if name in _BY_LAYER and is_array(file.metadata.get(stored)):
            continue
        if key in _NEEDED_SIZES:
            config[key] = file.need(stored, int)
        else:
            config[key] = file.find(stored, int)
    if config["head_dim"] is None:
        del config["head_dim"]
    num_experts = file.get(f"{architecture}.expert_count", int, 0)
    has_experts = num_experts != 0
    if architecture not in GRANITES:
        has_experts = has_experts or architecture.endswith(("moe", "next"))
    if has_experts:
        config |= _experts(file, architecture)
    config["model_type"] = _model_type(
        architecture,
        has_experts=has_experts,
        has_window=bool(config["sliding_window"]),
        has_shared=f"{architecture}.expert_shared_feed_forward_length" in file.metadata,
    )
    config["tensor_names"] = "gguf"
    config["vocab_size"] = embedding.shape[0]
    if architecture not in _OTHER_NORMS:
        config["rms_norm_eps"] = file.need(
            f"{architecture}.attention.layer_norm_rms_epsilon", float
        )
    config["dtype"] = "float16"
    config["quantization_config"] = _quantization(file)
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config["mlp_bias"] = any(name.endswith(".ffn_gate.bias") for name in file.tensors)
    config["attention_bias"] = any(name.endswith(".attn_q.bias") for name in file.tensors)
    config["rope_parameters"] = _rope(file, architecture) | _rope_scaling(
        file, f"{architecture}.rope."
    )
    if architecture in GRANITES:
        config |= granite(file, architecture)
    if recurrent is not None:
        config |= recurrent(file, architecture)
    if architecture in _DIFFERING:
        config |= _DIFFERING[architecture](file, architecture)
    if architecture in _LAYERS:
        config |= _LAYERS[architecture](file, architecture, config["rope_parameters"])
    return config


def _model_type(architecture: str, *, has_experts: bool, has_window: bool, has_shared: bool) -> str:
    """The family of config.json; GGUF calls Mixtral and Mistral llama."""
    if architecture == "llama" and has_experts:
        return "mixtral"
    if architecture == "llama" and has_window:
        return "mistral"
    if architecture in GRANITES:
        return granite_family(architecture, has_experts=has_experts, has_shared=has_shared)
    return _FAMILIES[architecture]


def _quantization(file: GgufFile) -> dict[str, Any] | None:
    """The `quantization_config` of config.json: the type of each quantized tensor; None if there
    are none."""
    types = {}
    takes_turns = file.get("general.architecture", str, "") == "gpt-oss"
    for name, tensor in file.tensors.items():
        if tensor.type.size > 1:
            module = name.removesuffix(".weight")
            if takes_turns:
                module = module.replace("ffn_gate_exps", GATE_UP_EXPERTS)
            types[module] = tensor.type.name
    if not types:
        return None
    return {"quant_method": "gguf", "tensor_types": types}


def _experts(file: GgufFile, architecture: str) -> dict[str, Any]:
    """The sizes of a mixture of experts."""
    sizes: dict[str, Any] = {}
    for key, name in _EXPERT_SIZES.items():
        if key != "moe_intermediate_size" or architecture not in _AS_LARGE_EXPERTS:
            sizes[key] = file.need(f"{architecture}.{name}", int)
    sizes["num_local_experts"] = sizes["num_experts"]
    sizes["norm_topk_prob"] = True
    return sizes


def _rope(file: GgufFile, architecture: str) -> dict[str, Any]:
    """How fast which dimensions of a head turn."""
    heads = file.get(f"{architecture}.attention.head_count", int, 0)
    width = file.get(f"{architecture}.embedding_length", int, 0)
    head_dim = file.get(f"{architecture}.attention.key_length", int, width // max(heads, 1))
    rotated = file.get(f"{architecture}.rope.dimension_count", int, head_dim)
    rope: dict[str, Any] = {
        "rope_theta": file.get(f"{architecture}.rope.freq_base", float, 10000.0)
    }
    rope["partial_rotary_factor"] = 1.0
    if head_dim:
        rope["partial_rotary_factor"] = rotated / head_dim
    factors = file.rope_factors()
    if factors:
        rope["frequency_factors"] = factors
    return rope


def _rope_scaling(file: GgufFile, prefix: str) -> dict[str, Any]:
    """How a longer context is made of the trained one, as llama.cpp reads it: a factor without a
    type is linear, one of 0 is none, and type none ignores it."""
    known = _ROPE_KEYS
    if prefix.startswith("qwen35"):  # sections are for images; a text's positions are all the same
        known |= {"dimension_sections"}
    if prefix.startswith(("gemma", "olmo2.")):  # of layers with a window
        known |= {"freq_base_swa"}
    if prefix.startswith("gemma"):
        known |= {"dimension_count_swa"}
    for key in file.metadata:
        if key.startswith(prefix) and key.removeprefix(prefix) not in known:
            raise file.fail(f"{key:.80} is not supported")
    scaling = f"{prefix}scaling."
    kind = file.get(f"{scaling}type", str, "linear")
    factor = file.find(f"{scaling}factor", float)
    if factor is None:
        factor = file.get(f"{prefix}scale_linear", float, 0.0)  # its name in old files
    if kind in ("linear", "yarn") and factor == 0:
        kind = "none"
    if kind == "none":
        kind = "default"
        factor = 1.0
    magnitude = 1.0
    if kind == "yarn" and factor > 0:
        magnitude += 0.1 * math.log(factor)
    _refuse_rope_numbers(file, scaling, kind, magnitude)
    found: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        found["original_max_position_embeddings"] = file.find(
            f"{scaling}original_context_length", int
        )
        found["attention_factor"] = file.get(f"{scaling}attn_factor", float, 1.0) * magnitude
        found["beta_fast"] = file.find(f"{scaling}yarn_beta_fast", float)
        found["beta_slow"] = file.find(f"{scaling}yarn_beta_slow", float)
        # a file does not say that the borders of gpt-oss are not rounded
        found["truncate"] = not prefix.startswith("gpt-oss.")
    return found


def _refuse_rope_numbers(file: GgufFile, prefix: str, kind: str, magnitude: float) -> None:
    """Raise ModelError for numbers that would change the result and cannot be followed. Versions of
    llama.cpp do not agree on what yarn_attn_factor and yarn_log_multiplier do to most
    architectures. A yarn_attn_factor that is YaRN's usual magnitude changes nothing."""
    followed: dict[str, tuple[float, ...]] = {"yarn_attn_factor": (1.0, magnitude)}
    if not prefix.startswith(_WITH_MULTIPLIER):
        followed["yarn_log_multiplier"] = (0.0,)
    if kind == "yarn":
        followed["yarn_ext_factor"] = (1.0, -1.0)
    else:
        followed["yarn_ext_factor"] = (0.0, -1.0)
        followed["attn_factor"] = (1.0,)
    for name, numbers in followed.items():
        found = file.get(f"{prefix}{name}", float, numbers[0])
        if not any(math.isclose(found, number, rel_tol=1e-6) for number in numbers):
            raise file.fail(
                f"{prefix}{name} of {found:g} is not supported with rope scaling of type {kind}"
            )


def _sampling(file: GgufFile) -> dict[str, Any]:
    """The settings that the file recommends, or its model's card."""
    given: dict[str, Any] = {}
    for key, (name, kind) in _SAMPLING_KEYS.items():
        value = file.find(f"general.sampling.{name}", kind)
        if value is not None:
            given[key] = value
    if given or "tokenizer.chat_template" not in file.metadata:
        return given
    return _CARD_SAMPLING.get(file.get("general.basename", str, ""), {})


# ------------------------------------------------------------------------------------ The tokenizer


def _write_tokenizer(file: GgufFile, vocabulary: GgufVocabulary, directory: Path) -> None:
    settings = _tokenizer_settings(file, vocabulary)
    if _merges_characters(file, vocabulary):
        replace_file(directory / "tokenizer.json", _character_tokenizer(file, vocabulary, settings))
    elif vocabulary.kind == "gpt2":
        replace_file(
            directory / "tokenizer.json", _byte_level_tokenizer(file, vocabulary.tokens, settings)
        )
    else:
        prefix = file.get("tokenizer.ggml.add_space_prefix", bool, True)
        try:
            model = _sentencepiece_model(vocabulary, prefix=prefix)
        except (ValueError, OverflowError) as error:
            raise file.fail(f"the tokenizer's scores or types are damaged ({error})") from error
        replace_file(directory / "tokenizer.model", model)
    replace_file(directory / "tokenizer_config.json", json.dumps(settings))


def _merges_characters(file: GgufFile, vocabulary: GgufVocabulary) -> bool:
    """Whether pairs of characters are merged, not of bytes: in Gemma 4, and in Gemma 3 where it was
    converted without a sentencepiece model."""
    return vocabulary.kind == "gemma4" or file.find("tokenizer.ggml.pre", str) == "gemma4"


def _tokenizer_settings(file: GgufFile, vocabulary: GgufVocabulary) -> dict[str, Any]:
    """The content of tokenizer_config.json."""
    settings: dict[str, Any] = {}
    for name, key in _NAMED.items():
        if key in vocabulary.named:
            settings[f"{name}_token"] = vocabulary.tokens[vocabulary.named[key]]
    settings["made_from"] = str(file.path)
    added = {}
    for number, token in enumerate(vocabulary.tokens):
        token_type = vocabulary.types[number]
        if token_type in (CONTROL, USER_DEFINED):
            added[str(number)] = {"content": token, "special": token_type == CONTROL}
    settings["added_tokens_decoder"] = added
    pre_tokenizer = file.find("tokenizer.ggml.pre", str)
    adds_bos = vocabulary.kind == "llama" or pre_tokenizer in WITH_BOS
    # both as llama.cpp assumes
    adds_bos = adds_bos or _merges_characters(file, vocabulary)
    settings["add_bos_token"] = file.get("tokenizer.ggml.add_bos_token", bool, adds_bos)
    settings["add_eos_token"] = file.get("tokenizer.ggml.add_eos_token", bool, False)
    template = file.get("tokenizer.chat_template", str, "")
    if template:
        settings["chat_template"] = template
    return settings


_SPACE = "▁"  # as sentencepiece writes it
_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def _byte_level_tokenizer(file: GgufFile, tokens: list[str], settings: Mapping[str, Any]) -> bytes:
    """tokenizer.json of a byte-level BPE vocabulary. The library writes only the parts around the
    vocabulary, since it takes long to build one."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    if "tokenizer.ggml.pre" not in file.metadata:
        told = (
            "tokenizer.ggml.pre is missing, so text is divided into words as for gpt-2; answers "
            "may be worse"
        )
        logging.getLogger("nanoserve").warning(
            "nanoserve: %s: %s: convert the model again", file.path, told
        )
    words = file.get("tokenizer.ggml.pre", str, "gpt-2")
    expressions = _expressions(file, words)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = _merges(file, vocabulary)
    tokenizer = Tokenizer(models.BPE({}, [], ignore_merges=words in WHOLE_WORDS))
    steps: list[Any] = []
    if words in ("smollm", "refact", "command-r"):
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    for expression in expressions:
        steps.append(pre_tokenizers.Split(Regex(expression), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if words in _NORMALIZED:
        tokenizer.normalizer = normalizers.NFC()
    _add_tokens(file, tokenizer, vocabulary, settings)
    return _with_vocabulary(tokenizer.to_str(), vocabulary, merges)


def _character_tokenizer(
    file: GgufFile, vocabulary: GgufVocabulary, settings: Mapping[str, Any]
) -> bytes:
    """tokenizer.json of a vocabulary of characters, in which spaces are written as sentencepiece
    does, and unknown characters as bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    ids = {token: number for number, token in enumerate(vocabulary.tokens)}
    merges = _merges(file, ids)
    unknown = settings.get("unk_token")
    model = models.BPE({}, [], unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    _add_tokens(file, tokenizer, ids, settings)
    return _with_vocabulary(tokenizer.to_str(), ids, merges)


def _add_tokens(
    file: GgufFile, tokenizer: Any, vocabulary: Mapping[str, int], settings: Mapping[str, Any]
) -> None:
    """Give a tokenizer the tokens that are no words, and what surrounds a text."""
    from tokenizers import AddedToken

    special, ordinary = [], []
    for entry in settings["added_tokens_decoder"].values():
        token = AddedToken(entry["content"], normalized=False)
        if entry["special"]:
            special.append(token)
        else:
            ordinary.append(token)
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(ordinary)
    tokenizer.post_processor = _surrounding(file, vocabulary, settings)


def _expressions(file: GgufFile, words: str) -> tuple[str, ...]:
    """The expressions of a pre-tokenizer; each divides what those before it have left."""
    if words in MORE_WORDS:
        return MORE_WORDS[words]
    alike = SAME_WORDS.get(words, words)
    if alike in _WORDS:
        return (_WORDS[alike],)
    supported = ", ".join(dict.fromkeys([*_WORDS, *SAME_WORDS, *MORE_WORDS]))
    raise file.fail(f"pre-tokenizer {shown(words)} is not supported; supported: {supported}")


def _with_vocabulary(
    tokenizer: str, vocabulary: Mapping[str, int], merges: list[tuple[str, str]]
) -> bytes:
    """A tokenizer.json with this vocabulary, and with added tokens under their ids in it."""
    whole = json.loads(tokenizer)
    whole["model"]["vocab"] = vocabulary
    whole["model"]["merges"] = merges
    for entry in whole["added_tokens"]:
        entry["id"] = vocabulary[entry["content"]]
    whole["added_tokens"].sort(key=itemgetter("id"))
    return msgspec.json.encode(whole)


def _merges(file: GgufFile, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """The pairs of tokens that are merged. Raises ModelError if a half or the whole is no token."""
    pairs = []
    for merge in listed(file, "merges", str):
        left, _, right = merge.partition(" ")
        whole = left + right
        if left not in vocabulary or right not in vocabulary or whole not in vocabulary:
            wrong = next(token for token in (whole, left, right) if token not in vocabulary)
            raise file.fail(
                f"the tokenizer's merges do not fit its tokens ({shown(wrong)} is none)"
            )
        pairs.append((left, right))
    return pairs


def _surrounding(file: GgufFile, vocabulary: Mapping[str, int], settings: Mapping[str, Any]) -> Any:
    """The post-processor that puts BOS and EOS around a text. A tokenizer.json has it itself: the
    settings add_bos_token and add_eos_token do not count beside it."""
    from tokenizers import processors

    pieces = ["$A"]
    special = []
    bos, eos = settings.get("bos_token"), settings.get("eos_token")
    if settings["add_bos_token"] and bos is not None:
        pieces.insert(0, bos)
        special.append((bos, vocabulary[bos]))
    if settings["add_eos_token"] and eos is not None:
        pieces.append(eos)
        special.append((eos, vocabulary[eos]))
    try:
        return processors.TemplateProcessing(single=pieces, special_tokens=special)
    except ValueError as error:
        raise file.fail(
            f"the tokenizer's BOS or EOS is spelled in a way that is not supported ({error})"
        ) from error


def _sentencepiece_model(vocabulary: GgufVocabulary, *, prefix: bool) -> bytes:
    """A sentencepiece model of these pieces, in the wire format of protocol buffers
    (sentencepiece_model.proto)."""
    model = bytearray()
    for number, token in enumerate(vocabulary.tokens):
        piece = _text(1, token.encode())
        piece += _score(2, vocabulary.scores[number])
        piece += _integer(3, vocabulary.types[number])
        model += _text(1, piece)
    trainer = _integer(3, 2)  # byte-pair encoding
    # whether unknown characters are spelled in bytes
    trainer += _integer(35, int(BYTE in vocabulary.types))
    model += _text(2, trainer)
    normalizer = _text(1, b"identity")
    normalizer += _integer(3, int(prefix))
    normalizer += _integer(4, 0)  # extra whitespace stays
    normalizer += _integer(5, 1)  # whitespace is written as a character of its own
    model += _text(3, normalizer)
    return bytes(model)


@lru_cache(1024)  # a vocabulary has few lengths and types
def _varint(number: int) -> bytes:
    """Seven bits in each byte, the lowest first. Raises ValueError if the number is negative."""
    if number < 128:
        return bytes([number])
    low = number & 127
    return bytes([low | 128]) + _varint(number >> 7)


@lru_cache(1024)
def _integer(field: int, number: int) -> bytes:
    return _varint(field << 3) + _varint(number)


def _score(field: int, number: float) -> bytes:
    tag = _varint(field << 3 | 5)
    return tag + struct.pack("<f", number)


def _text(field: int, content: bytes) -> bytes:
    tag = _varint(field << 3 | 2)
    return tag + _varint(len(content)) + content
