"""Quantized Hugging Face checkpoints of small random models, packed by hand as each format's documentation says."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.oracle.checkpoints import FAMILIES

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column that lies in each nibble of a word, the lowest first."""


def rounded(weight: Tensor, bits: int, group: int, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Unsigned codes [N, K], float16 scales and zero points [N, K / group], and the values that they stand for."""
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
    """int [N, K] -> int32 words along the second dimension: one long stream of bits, the lowest first."""
    rows = []
    for row in numbers.tolist():
        stream = sum(int(number) << bits * place for place, number in enumerate(row))
        count = -(-len(row) * bits // 32)
        rows.append([stream >> 32 * place & 0xFFFFFFFF for place in range(count)])
    unsigned = torch.tensor(rows, dtype=torch.int64)
    return torch.where(unsigned >= 1 << 31, unsigned - (1 << 32), unsigned).int()


def make_packed_checkpoint(family: str, method: str, directory: Path, **settings: Any) -> PreTrainedModel:
    """A random model of the family, with the values that its checkpoint has; arguments are as in `write_packed`."""
    torch.manual_seed(3)
    config = FAMILIES[family]()
    config.intermediate_size = 128
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.15)
    write_packed(model, directory, method, **settings)
    return model


def write_packed(model: PreTrainedModel, directory: Path, method: str, **settings: Any) -> None:
    """Write a checkpoint whose linear layers are quantized, and give the model the values that they have there.

    Methods are compressed-tensors, int8 (compressed-tensors without packing), gptq, gptq_v2, awq and fp8; settings are
    bits, group, symmetric and, for a shuffled order of columns, act_order.
    """
    tensors: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            module = name.removesuffix(".weight")
            if parameter.dim() == 2 and "proj" in name:
                packed, values = _PACKERS[method](parameter.detach(), **settings)
                tensors |= {f"{module}.{suffix}": tensor.contiguous() for suffix, tensor in packed.items()}
                parameter.copy_(values)
            else:
                tensors[name] = parameter.detach().clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict() | {"quantization_config": _section(method, **settings)}
    (directory / "config.json").write_text(json.dumps(config))


def _section(method: str, bits: int = 8, group: int = -1, **settings: Any) -> dict[str, Any]:
    if method in ("compressed-tensors", "int8"):
        weights = {"num_bits": bits, "type": "int", "group_size": group if group > 0 else None}
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["lm_head"]}
    if method == "fp8":
        return {"quant_method": "fp8", "weight_block_size": [128, 128]}
    name = "awq" if method == "awq" else "gptq"
    return {"quant_method": name, "bits": bits, "group_size": group, "checkpoint_format": method}


def _compressed(weight: Tensor, bits: int, group: int, *, symmetric: bool = True) -> tuple[dict[str, Tensor], Tensor]:
    codes, scales, zeros, values = rounded(weight, bits, group, symmetric=symmetric)
    packed = {
        "weight_packed": words(codes, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        packed["weight_zero_point"] = words(zeros.T, bits).T
    return packed, values


def _int8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    codes = (weight / scales.float()).round().clamp(-127, 127).to(torch.int8)
    return {"weight": codes, "weight_scale": scales}, codes.float() * scales.float()


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


def _gptq_v2(weight: Tensor, bits: int, group: int, *, act_order: bool = False) -> tuple[dict[str, Tensor], Tensor]:
    return _gptq(weight, bits, group, act_order=act_order, less_one=False)


def _awq(weight: Tensor, bits: int, group: int) -> tuple[dict[str, Tensor], Tensor]:
    codes, scales, zeros, values = rounded(weight, bits, group, symmetric=False)

    def interleaved(numbers: Tensor) -> Tensor:
        return words(numbers.view(len(numbers), -1, 8)[:, :, AWQ_COLUMNS].flatten(1), bits)

    return {"qweight": interleaved(codes.T), "qzeros": interleaved(zeros.T), "scales": scales.T}, values


def _fp8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    height, width = (-(-size // 128) for size in weight.shape)
    scales = torch.rand(height, width) * 0.01 + 0.001
    each = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: weight.shape[0], : weight.shape[1]]
    stored = (weight / each).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale_inv": scales}, stored.float() * each


_PACKERS: dict[str, Any] = {
    "compressed-tensors": _compressed,
    "int8": _int8,
    "gptq": _gptq,
    "gptq_v2": _gptq_v2,
    "awq": _awq,
    "fp8": _fp8,
}
