"""How the matrices of a checkpoint are quantized, as its config.json says. No torch here."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanoserve.errors import ModelError


@dataclass(frozen=True, slots=True)
class Quantization:
    """The `quantization_config` of a config.json, as far as tensors are read by it."""

    method: str
    """compressed-tensors, gptq, awq or fp8."""
    bits: int = 8
    group: int = -1
    """Columns that share a scale; -1 means all of a row."""
    zero_is_stored_less_one: bool = False
    """GPTQ version 1 stores zero points less one."""
    ignored: tuple[str, ...] = ()
    """Modules that are not quantized: names, beginnings of names, or `re:` and a regular expression."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], source: str) -> "Quantization":
        """Raises ModelError, one line that begins with `source`, for methods and settings that are not read."""
        method = config.get("quant_method")
        if method in ("gptq", "awq"):
            return cls._of_words(method, config, source)
        if method == "fp8":
            return cls("fp8", ignored=_names(config.get("modules_to_not_convert")))
        if method == "compressed-tensors":
            return cls._of_compressed_tensors(config, source)
        instead = "choose a checkpoint of compressed-tensors, GPTQ, AWQ or GGUF, or the one in 16 bits"
        raise ModelError(f"{source}: quantization method {method!r:.40} is not read; {instead}")

    @classmethod
    def _of_words(cls, method: str, config: Mapping[str, Any], source: str) -> "Quantization":
        bits, group = config.get("bits", config.get("w_bit")), config.get("group_size", config.get("q_group_size"))
        if bits not in ((4, 8) if method == "gptq" else (4,)) or not isinstance(group, int):
            raise ModelError(f"{source}: {method} with {bits!r:.20} bits in groups of {group!r:.20} is not read")
        if method == "awq" and config.get("version", "gemm").lower() != "gemm":
            raise ModelError(f"{source}: AWQ of version {config['version']!r:.20} is not read; only gemm is")
        older = method == "gptq" and config.get("checkpoint_format", "gptq") != "gptq_v2"
        return cls(method, bits, group, older, _names(config.get("modules_to_not_convert")))

    @classmethod
    def _of_compressed_tensors(cls, config: Mapping[str, Any], source: str) -> "Quantization":
        groups = config.get("config_groups")
        schemes = list(groups.values()) if isinstance(groups, dict) else []
        weights = schemes[0].get("weights") if len(schemes) == 1 and isinstance(schemes[0], dict) else None
        if not isinstance(weights, dict):
            raise ModelError(f"{source}: quantization_config must have one entry of config_groups with weights")
        bits, kind = weights.get("num_bits"), weights.get("type")
        if (kind, bits) not in (("int", 3), ("int", 4), ("int", 8), ("float", 8)):
            raise ModelError(f"{source}: weights of type {kind!r:.20} in {bits!r:.20} bits are not read")
        return cls(
            "compressed-tensors", int(bits or 0), weights.get("group_size") or -1, ignored=_names(config.get("ignore"))
        )

    def leaves_alone(self, module: str) -> bool:
        return any(_matches(pattern, module) for pattern in self.ignored)


def _names(value: Any) -> tuple[str, ...]:
    return tuple(name for name in value or () if isinstance(name, str))


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return module == pattern or module.startswith(f"{pattern}.") or f".{pattern}." in f".{module}."


ROUNDING_BITS: Mapping[str, int] = {"int4": 4, "int8": 8}
"""Bits of the weights of each choice of ``--quantization``, which rounds them to nearest while they load."""
ROUNDING_GROUP = 32
"""Columns that share a scale then, on a CPU."""

WEIGHT_BITS: Mapping[str, tuple[int, ...]] = {"rtn": (3, 4, 8), "awq": (3, 4, 8), "gptq": (3, 4, 8), "llm-int8": (8,)}
"""The methods of ``nanoserve quantize``, and the bits that weights may have with each."""
CALIBRATING = ("awq", "gptq")
"""Those that run a text through the model."""
