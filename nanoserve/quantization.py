"""How the matrices of a checkpoint are quantized, as its config.json says. No torch here."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanoserve.errors import ModelError, UsageError


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


_CPU_GROUPS, _GPU_GROUPS = (32,), (128, 64, 32)


@dataclass(frozen=True, slots=True)
class Rounding:
    """A choice of ``--quantization``, which rounds weights to nearest while they load."""

    bits: int
    group: int | None
    """Columns that share a scale, if the user named them."""

    @classmethod
    def parse(cls, text: str) -> "Rounding":
        """int4 or int8, perhaps with a group, as int4:64. Raises UsageError."""
        named = re.fullmatch(r"(int4|int8)(?::(\d{1,6}))?", str(text), re.ASCII)
        if named is None:
            raise UsageError(f"quantization must be int4 or int8, perhaps with a group as in int4:64, not {text!r:.40}")
        group = None if named[2] is None else int(named[2])
        if group is not None and (group == 0 or group % 32):
            raise UsageError(f"quantization {text}: a group is a multiple of 32 columns")
        return cls(int(named[1].removeprefix("int")), group)

    def group_of(self, columns: int, *, on_gpu: bool) -> int | None:
        """The group for runs of that many columns: the user's, else 32 on a CPU and the largest of 128, 64 and 32 on a
        GPU. None if it does not divide them."""
        groups = (self.group,) if self.group else _GPU_GROUPS if on_gpu else _CPU_GROUPS
        return next((group for group in groups if columns % group == 0), None)
