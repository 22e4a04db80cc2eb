"""How the matrices of a checkpoint are quantized, as its config.json says. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanoserve.errors import ModelError


@dataclass(frozen=True, slots=True)
class Quantization:
    """The `quantization_config` of a config.json, as far as tensors are read by it."""

    method: str
    """compressed-tensors, gptq, awq, fp8 or mxfp4."""
    bits: int = 8
    group: int = -1
    """Columns that share a scale; -1 means all of a row."""
    rows: int = 1
    """Rows that share a scale."""
    zero_is_stored_less_one: bool = False
    """GPTQ version 1 stores zero points less one."""
    has_zeros: bool = False
    """Whether every matrix of compressed-tensors must have zero points."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], source: str) -> "Quantization":
        """Modules to be left alone are known by their tensors, so the lists of them are not read. Raises ModelError,
        one line that begins with `source`, for methods and settings that are not read."""
        method = config.get("quant_method")
        if method in ("gptq", "awq"):
            return cls._of_words(method, config, source)
        if method == "fp8":
            rows, group = _block(config["weight_block_size"], source) if config.get("weight_block_size") else (1, -1)
            return cls("fp8", 8, group, rows)
        if method == "mxfp4":
            return cls("mxfp4", 4, 32)
        if method == "compressed-tensors":
            return cls._of_compressed_tensors(config, source)
        instead = "choose one of compressed-tensors, GPTQ, AWQ, fp8, MXFP4 or GGUF, or 16 bits and --quantization int4"
        raise ModelError(f"{source}: quantization method {method!r:.40} is not read; {instead}")

    @classmethod
    def _of_words(cls, method: str, config: Mapping[str, Any], source: str) -> "Quantization":
        bits, group = config.get("bits", config.get("w_bit")), config.get("group_size", config.get("q_group_size"))
        if not (isinstance(bits, int) and bits in ((4, 8) if method == "gptq" else (4,)) and _is_group(group)):
            raise ModelError(f"{source}: {method} with {bits!r:.20} bits in groups of {group!r:.20} is not read")
        version = config.get("version", "gemm")
        if method == "awq" and str(version).lower() != "gemm":
            raise ModelError(f"{source}: AWQ of version {version!r:.20} is not read; only gemm is")
        older = method == "gptq" and config.get("checkpoint_format", "gptq") != "gptq_v2"
        return cls(method, bits, group, zero_is_stored_less_one=older)

    @classmethod
    def _of_compressed_tensors(cls, config: Mapping[str, Any], source: str) -> "Quantization":
        groups = config.get("config_groups")
        schemes = list(groups.values()) if isinstance(groups, dict) else []
        weights = schemes[0].get("weights") if len(schemes) == 1 and isinstance(schemes[0], dict) else None
        if not isinstance(weights, dict):
            raise ModelError(f"{source}: quantization_config must have one entry of config_groups with weights")
        stored, bits, kind = config.get("format"), weights.get("num_bits"), weights.get("type")
        if stored not in (None, *_COMPRESSED_FORMATS):
            raise ModelError(f"{source}: format {stored!r:.40} is not read; only {', '.join(_COMPRESSED_FORMATS)} are")
        rows, group = 1, weights.get("group_size") or -1
        if weights.get("strategy") == "block":
            rows, group = _block(weights.get("block_structure"), source)
        if (kind, bits, rows > 1) not in _COMPRESSED_TYPES or not _is_group(group):
            what = f"type {kind!r:.20} in {bits!r:.20} bits and groups of {group!r:.20}"
            raise ModelError(f"{source}: weights of {what} are not read")
        return cls("compressed-tensors", int(bits or 0), group, rows, has_zeros=weights.get("symmetric") is False)


_COMPRESSED_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_COMPRESSED_TYPES = [("int", 3, False), ("int", 4, False), ("int", 8, False), ("float", 8, False), ("float", 8, True)]
"""Types and bits of weights, and whether several rows may share a scale."""


def _is_group(value: Any) -> bool:
    return type(value) is int and (value == -1 or value > 0)


def _block(value: Any, source: str) -> tuple[int, int]:
    """Rows and columns of a block."""
    if not isinstance(value, list) or len(value) != 2 or not all(type(size) is int and size > 0 for size in value):
        raise ModelError(f"{source}: the block of rows and columns that share a scale must be two sizes: {value!r:.40}")
    return value[0], value[1]


ROUNDING_BITS: Mapping[str, int] = {"int4": 4, "int8": 8}
"""Bits of the weights of each choice of ``--quantization``, which rounds them to nearest while they load."""
ROUNDING_GROUP = 32
"""Columns that share a scale then, on a CPU."""
