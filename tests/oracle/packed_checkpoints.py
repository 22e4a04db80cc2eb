"""Quantized Hugging Face checkpoints of small random models, packed by hand as each format's
documentation says."""

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

MXFP4 = gguf.GGMLQuantizationType.MXFP4
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column that lies in each nibble of a word, the lowest first."""


def rounded(
    weight: Tensor, bits: int, group: int, *, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Unsigned codes [N, K], float16 scales and zero points [N, K / group], and the values that
    they stand for."""
    groups = weight.view(len(weight), -1, group)
    if symmetric:
        scales = (groups.abs().amax(-1) / ((1 << bits - 1) - 1)).half()
        zeros = torch.full_like(scales, 1 << bits - 1).int()
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = ((high - low) / ((1 << bits) - 1)).half()
        zeros = (-low / scales.float()).round().clamp(0, (1 << bits) - 1).int()
    codes = (groups / scales.float()[:, :, None]).round().int() + zeros[:, :, None]
    codes = codes.clamp(0, (1 << bits) - 1)
    values = (codes - zeros[:, :, None]).float() * scales.float()[:, :, None]
    return codes.view(weight.shape), scales, zeros, values.view(weight.shape)


def words(numbers: Tensor, bits: int) -> Tensor:
    """int [N, K] -> int32 words along the second dimension: one long stream of bits, the lowest
    first."""
    codes = numbers.numpy().astype(np.uint32)
    stream = (codes[:, :, None] >> np.arange(bits, dtype=np.uint32) & 1).reshape(len(codes), -1)
    whole_words = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    packed = np.packbits(whole_words.astype(np.uint8), axis=1, bitorder="little")
    return torch.from_numpy(packed.view("<i4"))


def write_packed(
    model: PreTrainedModel, directory: Path, method: str, *, modules: str = "proj", **settings: Any
) -> None:
    """Write a checkpoint whose layers are quantized where the pattern is found in their names, and
    give the model the values that they have there.

    Methods are compressed-tensors, int8 (compressed-tensors without packing), gptq, gptq_v2, awq,
    fp8 and mxfp4; settings are bits, group, symmetric and, for a shuffled order of columns,
    act_order.
    """
    tensors: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            module = name.removesuffix(".weight")
            if parameter.dim() == 2 and re.search(modules, name) and not name.endswith("_bias"):
                packed, values = _PACKERS[method](parameter.detach(), **settings)
                tensors |= {
                    f"{module}.{suffix}": tensor.contiguous() for suffix, tensor in packed.items()
                }
                parameter.copy_(values)
            elif parameter.dim() == 3 and not name.endswith(("conv1d.weight", "conv.weight")):
                stacked = parameter.mT if model.config.model_type == "gpt_oss" else parameter
                tensors |= _experts(name, stacked, method, **settings)
            else:
                tensors[name] = parameter.detach().clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict() | {"quantization_config": _section(method, **settings)}
    (directory / "config.json").write_text(json.dumps(config))


def _experts(name: str, parameter: Tensor, method: str, **settings: Any) -> dict[str, Tensor]:
    """The tensors of all experts of a layer: one for each matrix; those of MXFP4 are stacked. The
    matrices of gpt-oss are given transposed, and their rows of gate and up take turns."""
    prefix, _, fused = name.rpartition(".")
    names = (
        ("gate_proj", "up_proj")
        if fused == "gate_up_proj" and parameter.is_contiguous()
        else (fused,)
    )
    tensors: dict[str, Tensor] = {}
    stacked: dict[str, list[Tensor]] = defaultdict(list)
    for expert, matrices in enumerate(parameter):
        for matrix, own in zip(matrices.chunk(len(names)), names, strict=True):
            packed, values = _PACKERS[method](matrix.detach().clone(), **settings)
            matrix.copy_(values)
            for suffix, tensor in packed.items():
                tensors[f"{prefix}.{expert}.{own}.{suffix}"] = tensor.contiguous()
                stacked[f"{name}_{suffix.removeprefix('weight_')}"].append(tensor)
    if method != "mxfp4":
        return tensors
    return {
        name: torch.stack(found).view(len(parameter), -1, *found[0].shape[1:])
        for name, found in stacked.items()
    }


def _section(method: str, bits: int = 8, group: int = -1, **settings: Any) -> dict[str, Any]:
    if method in ("compressed-tensors", "int8"):
        weights = {"num_bits": bits, "type": "int", "group_size": group if group > 0 else None}
        weights["symmetric"] = settings.get("symmetric", True)
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        return {
            "quant_method": "compressed-tensors",
            "config_groups": groups,
            "ignore": ["lm_head"],
        }
    if method == "fp8":
        return {"quant_method": "fp8", "weight_block_size": [128, 128]}
    if method == "mxfp4":
        return {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["lm_head", "model.embed_tokens"],
        }
    name = "awq" if method == "awq" else "gptq"
    return {"quant_method": name, "bits": bits, "group_size": group, "checkpoint_format": method}


def _compressed(
    weight: Tensor, bits: int, group: int, *, symmetric: bool = True
) -> tuple[dict[str, Tensor], Tensor]:
    codes, scales, zeros, values = rounded(weight, bits, group, symmetric=symmetric)
    packed = {
        "weight_packed": words(codes, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        packed["weight_zero_point"] = words(zeros.T, bits).T
    return packed, values


def _int8(
    weight: Tensor, *, symmetric: bool = True, per_row: bool = True
) -> tuple[dict[str, Tensor], Tensor]:
    """One scale for each row, or for all."""
    rows = weight if per_row else weight.view(1, -1)
    low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    zeros = torch.zeros_like(low) if symmetric else -128 - (low * 255 / (high - low)).round()
    scales = (
        rows.abs().amax(1, keepdim=True) / 127 if symmetric else (high - low) / 255
    ).bfloat16()
    codes = (weight / scales.float() + zeros).round().clamp(-128, 127).to(torch.int8)
    numbers = (
        {"weight_scale": scales}
        if symmetric
        else {"weight_scale": scales, "weight_zero_point": zeros.to(torch.int8)}
    )
    packed = {name: found if per_row else found.view(1) for name, found in numbers.items()}
    return {"weight": codes} | packed, (codes.float() - zeros) * scales.float()


def _gptq(
    weight: Tensor, bits: int, group: int, *, act_order: bool = False, less_one: bool = True
) -> tuple[dict[str, Tensor], Tensor]:
    columns = weight.shape[1]
    order = torch.randperm(columns) if act_order else torch.arange(columns)
    codes, scales, zeros, values = rounded(weight[:, order], bits, group, symmetric=False)
    back = order.argsort()
    packed = {
        "qweight": words(codes[:, back], bits).T,
        "qzeros": words((zeros.T - int(less_one)) % (1 << bits), bits),
        "scales": scales.T,
        "g_idx": (torch.arange(columns) // group)[back].int(),
    }
    return packed, values[:, back]


def _gptq_v2(
    weight: Tensor, bits: int, group: int, *, act_order: bool = False
) -> tuple[dict[str, Tensor], Tensor]:
    return _gptq(weight, bits, group, act_order=act_order, less_one=False)


def _awq(weight: Tensor, bits: int, group: int) -> tuple[dict[str, Tensor], Tensor]:
    codes, scales, zeros, values = rounded(weight, bits, group, symmetric=False)

    def interleaved(numbers: Tensor) -> Tensor:
        return words(numbers.view(len(numbers), -1, 8)[:, :, AWQ_COLUMNS].flatten(1), bits)

    return {
        "qweight": interleaved(codes.T),
        "qzeros": interleaved(zeros.T),
        "scales": scales.T,
    }, values


def _fp8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    height, width = (-(-size // 128) for size in weight.shape)
    scales = torch.rand(height, width) * 0.01 + 0.001
    each = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[
        : weight.shape[0], : weight.shape[1]
    ]
    stored = (weight / each).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale_inv": scales}, stored.float() * each


def _mxfp4(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Round as gguf does; its blocks hold the first 16 numbers in the low halves of their bytes, those
    of Hugging Face the numbers at even places."""
    blocks = torch.from_numpy(gguf.quants.quantize(weight.numpy(), MXFP4)).view(len(weight), -1, 17)
    numbers = torch.cat((blocks[:, :, 1:] & 15, blocks[:, :, 1:] >> 4), dim=2)
    packed = {
        "weight_blocks": numbers[:, :, ::2] | numbers[:, :, 1::2] << 4,
        "weight_scales": blocks[:, :, 0],
    }
    return packed, torch.from_numpy(gguf.quants.dequantize(blocks.flatten(1).numpy(), MXFP4))


_PACKERS: dict[str, Any] = {
    "compressed-tensors": _compressed,
    "int8": _int8,
    "gptq": _gptq,
    "gptq_v2": _gptq_v2,
    "awq": _awq,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
}
