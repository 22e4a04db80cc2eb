"""Launches the program that rotates queries and keys and writes the cache.

It does not wait for the GPU, and its grid follows from shapes alone: it may be captured in a CUDA
graph.
"""

import torch
from torch import Tensor

from triton_ops.gpu.devices import gpu_of
from triton_ops.gpu.kernels.rotary import rotate_into_slots
from triton_ops.gpu.rotary_constants import NUM_WARPS, num_groups, rotary_constants


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
    """`triton_ops.rotate_and_write`, in one launch: a program per token and group of heads.

    Raises:
        ValueError: if the shapes do not fit together, or a last dimension is not contiguous; the
            program would read and write what is not its own.
    """
    _check(query, projected, (query_norm, key_norm), (cos, sin), (key_cache, value_cache))
    if slot_mapping.shape != query.shape[:1]:
        raise ValueError(f"{slot_mapping.shape[0]} slots are not those of {len(query)} tokens")
    num_tokens, num_heads, head_dim = query.shape
    _, num_kv_heads, block_size, _ = key_cache.shape
    constants = rotary_constants(
        num_heads,
        num_kv_heads,
        head_dim,
        2 * cos.shape[-1],
        block_size,
        norm_adds_one=norm_adds_one,
        interleaved=interleaved,
    )
    groups = num_groups(num_heads, num_kv_heads, constants["HEADS"])
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
        rotate_into_slots[(num_tokens, groups)](
            query,
            projected,
            query_norm,
            key_norm,
            cos,
            sin,
            key_cache,
            value_cache,
            slot_mapping,
            eps,
            *query.stride()[:2],
            projected.stride(0),
            cos.stride(0),
            sin.stride(0),
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            slot_mapping.stride(0),
            **constants,
            **gpu_of(query.device).dependent_launch,
            num_warps=NUM_WARPS,
        )


def _check(
    query: Tensor,
    projected: Tensor,
    norms: tuple[Tensor | None, Tensor | None],
    angles: tuple[Tensor, Tensor],
    caches: tuple[Tensor, Tensor],
) -> None:
    """Raises ValueError for what the program would read or write wrongly."""
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = caches[0].shape[1]
    width = (num_heads + 2 * num_kv_heads) * head_dim
    if projected.shape != (num_tokens, width):
        raise ValueError(
            f"projected rows {tuple(projected.shape)} are not {num_heads} heads of queries and "
            f"{num_kv_heads} of keys and values, {head_dim} wide, of {num_tokens} tokens"
        )
    pairs = angles[0].shape[-1]
    if any(angle.shape != (num_tokens, 1, pairs) for angle in angles) or 2 * pairs > head_dim:
        raise ValueError(f"angles {tuple(angles[0].shape)} do not fit heads {tuple(query.shape)}")
    if caches[0].shape != caches[1].shape or caches[0].shape[-1] != head_dim:
        shapes = " and ".join(str(tuple(cache.shape)) for cache in caches)
        raise ValueError(f"heads {head_dim} wide cannot be written to caches {shapes}")
    weights = [norm for norm in norms if norm is not None]
    if any(weight.shape != (head_dim,) for weight in weights):
        raise ValueError(f"a norm over heads {head_dim} wide has as many weights")
    tensors = (query, projected, *angles, *caches, *weights)
    if any(tensor.stride(-1) != 1 for tensor in tensors):
        raise ValueError("rotation on a GPU takes tensors whose last dimension is contiguous")
