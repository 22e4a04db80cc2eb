"""Norms and rotation of queries and keys, with the write of keys and values into the paged cache:
everything between the first product of a layer and attention."""

import torch
from torch import Tensor

from triton_ops.cache import cache_write
from triton_ops.registration import OPERATORS


@OPERATORS.define(writes=("query", "key_cache", "value_cache"))
def rotate_and_write(
    query: Tensor,
    projected: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    eps: float,
    norm_adds_one: bool,
    interleaved: bool,
) -> None:
    """Cut projected rows into heads, normalize and rotate those of queries and keys, and store keys
    and values in their slots.

    query: [T, num_heads, head_dim], filled with the rotated queries; projected: [T, (num_heads + 2
    * num_kv_heads) * head_dim], the heads of queries, keys and values side by side; query_norm and
    key_norm: [head_dim], weights of an RMSNorm over each head, to which 1 is added if
    `norm_adds_one`, or None; cos, sin: [T, 1, rotary_dim // 2] of the dtype of the heads, whose
    first rotary_dim dimensions turn: each with its neighbour if `interleaved`, else with the one
    half of them away; key_cache, value_cache: [num_blocks, num_kv_heads, block_size, head_dim];
    slot_mapping as in `cache_write`.
    """
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = key_cache.shape[1]
    heads = projected.view(len(projected), -1, head_dim)
    queries, keys, values = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    if query_norm is not None:
        queries = _normalize(queries, query_norm, eps, adds_one=norm_adds_one)
    if key_norm is not None:
        keys = _normalize(keys, key_norm, eps, adds_one=norm_adds_one)
    query.copy_(_rotate(queries, cos, sin, interleaved=interleaved))
    rotated_keys = _rotate(keys, cos, sin, interleaved=interleaved)
    cache_write(rotated_keys, values, key_cache, value_cache, slot_mapping)


def _normalize(heads: Tensor, weight: Tensor, eps: float, *, adds_one: bool) -> Tensor:
    """RMSNorm over the last dimension, in float32 or float64. Weights are multiplied after the
    rounding to the dtype, but before it where 1 is added to them."""
    exact = heads.to(torch.promote_types(heads.dtype, torch.float32))
    normed = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
    if adds_one:
        return (normed * (1.0 + weight.to(exact.dtype))).to(heads.dtype)
    return weight * normed.to(heads.dtype)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """heads [T, H, head_dim] -> the same shape, with the first dimensions of each turned."""
    rotary_dim = 2 * cos.shape[-1]
    turning = heads[..., :rotary_dim]
    if interleaved:
        first = turning[..., 0::2]
        second = turning[..., 1::2]
    else:
        first, second = turning.chunk(2, dim=-1)
    turned_first = first * cos - second * sin
    turned_second = second * cos + first * sin
    if interleaved:
        turned = torch.stack((turned_first, turned_second), dim=-1).flatten(-2)
    else:
        turned = torch.cat((turned_first, turned_second), dim=-1)
    return torch.cat((turned, heads[..., rotary_dim:]), dim=-1)
