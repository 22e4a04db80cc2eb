"""Algorithms that quantize weights: round to nearest, GPTQ, AWQ, and the products of LLM.int8().

Weights are [N, K] as in `torch.nn.Linear`. They become integers of 3, 4 or 8 bits, symmetric around
zero, with a scale for each group of columns: those of compressed-tensors. Groups of -1 are whole
rows; a matrix that is given as one row gets one scale. GPTQ and AWQ need statistics of what enters
a layer, which a run over a text gathers.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from nanoserve.models.attention import DenseCausalAttention
from nanoserve.models.decoder import Decoder, DecoderLayer, FeedForward
from triton_ops import GroupQuantized

_GPTQ_BLOCK = 128
_DAMPING = 0.01
"""Share of the mean of the Hessian's diagonal that GPTQ adds to it (section 3.3)."""
_AWQ_EXPONENTS = [place / 20 for place in range(20)]
"""The grid that AWQ searches (section 3.2)."""


def rtn(
    weight: Tensor, bits: int, group: int = -1, *, scale_dtype: torch.dtype = torch.float32
) -> GroupQuantized:
    """Round each number to the nearest code."""
    rows, span = weight.shape
    if group != -1:
        span = group
    groups = weight.float().view(rows, -1, span)
    scales = _scales(groups, bits, scale_dtype)
    codes = _codes(groups, scales.float()[:, :, None], bits)
    return _quantized(codes.view(weight.shape), bits, scales)


def gptq(
    weight: Tensor,
    gram: Tensor,
    bits: int,
    group: int = -1,
    *,
    act_order: bool = False,
    scale_dtype: torch.dtype = torch.float32,
) -> GroupQuantized:
    """GPTQ (arXiv 2210.17323, algorithm 1): round column by column, and after each change the
    columns that are left so that the layer's output changes least. `gram` is the inputs' ``X^T X``,
    [K, K]. With `act_order`, columns of large inputs go first; scales are then those of the weight
    as it was, so that groups stay groups of neighbours (what compressed-tensors calls actorder
    "weight")."""
    rows, columns = weight.shape
    span = columns
    if group != -1:
        span = group
    block = _GPTQ_BLOCK
    # scales are chosen when the columns before have been rounded
    follows_groups = group != -1 and not act_order
    if follows_groups:
        block = group
    order = torch.arange(columns)
    if act_order:
        order = gram.diagonal().argsort(descending=True, stable=True)
    scales = _scales(weight.float().view(rows, -1, span), bits, scale_dtype)
    left = weight.float().T[order].contiguous()
    factor = _inverse_factor(gram[order][:, order])
    codes = torch.empty_like(left)
    for first in range(0, columns, block):
        end = min(first + block, columns)
        if follows_groups:
            scales[:, first // group] = _scales(left[first:end].T, bits, scale_dtype)
        errors = torch.empty_like(left[first:end])
        for column in range(first, end):
            place = int(order[column])
            scale = scales[:, place // span].float()
            codes[place] = _codes(left[column], scale, bits)
            error = (left[column] - codes[place] * scale) / factor[column, column]
            left[column + 1 : end] -= factor[column, column + 1 : end, None] * error
            errors[column - first] = error
        left[end:] -= factor[first:end, end:].T @ errors
    return _quantized(codes.T.contiguous(), bits, scales)


def _inverse_factor(gram: Tensor) -> Tensor:
    """The upper Cholesky factor of the damped Hessian's inverse, float32. The factor 2 of the
    Hessian cancels out."""
    damped = gram.double()
    diagonal = damped.diagonal()
    diagonal.add_(_DAMPING * diagonal.mean())
    diagonal[diagonal == 0] = 1.0  # the inputs of these columns are always zero
    lower = torch.linalg.cholesky(damped)
    inverse = torch.cholesky_inverse(lower)
    factor: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor.float()


def awq_scales(
    weight: Tensor, gram: Tensor, magnitudes: Tensor, bits: int, group: int = -1
) -> Tensor:
    """AWQ (arXiv 2306.00978, equation 4): numbers [K] by which the columns of the weight are to be
    multiplied, and the input divided, so that the output changes least when the weight is rounded.
    `magnitudes` [K] are the mean absolute inputs, `gram` is their ``X^T X``, [K, K]; matrices with
    the same input are given as one."""
    weight = weight.float()
    best = torch.ones_like(magnitudes)
    least = float("inf")
    for exponent in _AWQ_EXPONENTS:
        scales = magnitudes.pow(exponent).clamp(min=1e-4)
        scales = scales / (scales.max() * scales.min()).sqrt()
        rounded = rtn(weight * scales, bits, group).dequantize()
        change = rounded / scales - weight
        error = float(((change @ gram) * change).sum())
        if error < least:
            best = scales
            least = error
    return best


def llm_int8(input: Tensor, weight: Tensor, *, threshold: float = 6.0) -> Tensor:
    """LLM.int8() (arXiv 2208.07339, section 3.2): input [T, K] times weight [N, K] transposed.
    Columns with an input of at least the threshold are multiplied as they are, the others in 8 bits
    with a scale for each row of both."""
    is_outlier = input.abs().amax(0) >= threshold
    exact = functional.linear(input[:, is_outlier], weight[:, is_outlier])
    rounded_input = rtn(input[:, ~is_outlier], 8).dequantize()
    rounded_weight = rtn(weight[:, ~is_outlier], 8).dequantize()
    return exact + functional.linear(rounded_input, rounded_weight)


def run_texts(decoder: Decoder, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Run each text, as token ids [T] or hidden states, through one stage of a model."""
    outputs = []
    for text in inputs:
        length = len(text)
        attention = DenseCausalAttention(decoder.config, 1, length)
        outputs.append(decoder(text, torch.arange(length), attention))
    return outputs


def perplexity(decoder: Decoder, hidden: Sequence[Tensor], texts: Sequence[Tensor]) -> float:
    """exp of the mean negative log probability of all tokens but the first of each text, from the
    hidden states that come from the last stage."""
    losses = []
    for states, text in zip(hidden, texts, strict=True):
        logits = decoder.compute_logits(states[:-1])
        losses.append(functional.cross_entropy(logits, text[1:], reduction="none"))
    return math.exp(torch.cat(losses).double().mean())


class InputStatistics:
    """Statistics of the inputs of a linear layer with K columns."""

    def __init__(self, columns: int) -> None:
        self.gram = torch.zeros(columns, columns)
        """The inputs' ``X^T X``."""
        self.magnitudes = torch.zeros(columns)
        """Sums of absolute values, which are proportional to their means."""

    def add(self, input: Tensor) -> None:
        """input [T, K]"""
        rows = input.float()
        self.gram.addmm_(rows.T, rows)
        self.magnitudes += rows.abs().sum(0)


@contextmanager
def input_statistics(layer: DecoderLayer) -> Iterator[dict[str, InputStatistics]]:
    """Statistics of the inputs of the layer's matrices, by their names in it, of all runs within
    the block."""
    found: dict[str, InputStatistics] = {}

    def gather(statistics: InputStatistics, _: nn.Module, inputs: tuple[Tensor]) -> None:
        statistics.add(inputs[0])

    with ExitStack() as hooks:
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear):
                found[name] = InputStatistics(module.in_features)
                hook = module.register_forward_pre_hook(partial(gather, found[name]))
                hooks.callback(hook.remove)
        yield found


def fold_awq_scales(
    layer: DecoderLayer, statistics: dict[str, InputStatistics], bits: int, group: int = -1
) -> None:
    """Multiply the columns of a dense layer's matrices by their `awq_scales`, and divide the norm
    or the matrix before them, so that the layer computes what it did. Values are shared by the
    query heads of a group, and so are the scales behind them."""
    config = layer.config
    feed_forward = cast(FeedForward, layer.feed_forward)

    def scale(linear: nn.Linear, name: str, magnitudes: Tensor) -> Tensor:
        scales = awq_scales(linear.weight, statistics[name].gram, magnitudes, bits, group)
        linear.weight.mul_(scales)
        return scales

    down_scales = scale(
        feed_forward.down, "feed_forward.down", statistics["feed_forward.down"].magnitudes
    )
    _divide_rows(feed_forward.gate_up, config.intermediate_size, down_scales)
    by_head = statistics["output"].magnitudes.view(config.num_kv_heads, -1, config.head_dim)
    shared = by_head.mean(1, keepdim=True).expand_as(by_head)
    output_scales = scale(layer.output, "output", shared.flatten()).view_as(by_head)
    value_scales = output_scales[:, 0].flatten()
    _divide_rows(layer.qkv, layer.query_size + layer.kv_size, value_scales)
    stored_less = 0.0
    if config.norms.kind == "rms_plus_one":
        stored_less = 1.0
    for norm, linear, name in (
        (layer.attention_norm, layer.qkv, "qkv"),
        (layer.feed_forward_norm, feed_forward.gate_up, "feed_forward.gate_up"),
    ):
        scales = scale(linear, name, statistics[name].magnitudes)
        norm.weight.add_(stored_less).div_(scales).sub_(stored_less)


def _divide_rows(linear: nn.Linear, first: int, divisors: Tensor) -> None:
    """Divide the results of a linear layer, from the row `first` on."""
    linear.weight[first:].div_(divisors[:, None])
    if linear.bias is not None:
        linear.bias[first:].div_(divisors)


def _scales(groups: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Scales of numbers [..., n] over the last dimension, as compressed-tensors has them: half of
    the range of codes is the largest absolute number."""
    half_range = (2**bits - 1) / 2
    largest = groups.abs().amax(-1)
    scales = (largest / half_range).to(dtype)
    return torch.where(scales != 0, scales, 1.0)


def _codes(numbers: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Signed codes, as float32."""
    half = 1 << bits - 1
    return (numbers / scales).round().clamp(-half, half - 1)


def _quantized(codes: Tensor, bits: int, scales: Tensor) -> GroupQuantized:
    if bits == 8:
        return GroupQuantized(codes.to(torch.int8), bits, scales)
    half = 1 << bits - 1
    return GroupQuantized((codes + half).to(torch.uint8), 4, scales, zero=half)
