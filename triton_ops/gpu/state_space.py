"""Launches the programs of state-space layers.

Nothing here waits for the GPU: grids follow from the number of segments and from shapes, and the
programs read the table of segments on the device.
"""

import torch
import triton
from torch import Tensor

from triton_ops.gpu.devices import gpu_of
from triton_ops.gpu.kernels.state_space import (
    attend_in_chunks,
    scan_dual,
    scan_selectively,
    step_dual,
)
from triton_ops.gpu.recurrent import _check_contiguous
from triton_ops.gpu.recurrent_constants import CHUNK
from triton_ops.gpu.state_space_constants import (
    DUAL_ATTENTION,
    DUAL_STEP,
    LARGEST_SCANNED_STATE,
    SELECTIVE,
    dual_attention_constants,
    dual_scan_constants,
    dual_scan_launch,
    dual_step_constants,
    selective_constants,
)


def state_space_dual(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    time_step: Tensor,
    states: Tensor,
    segments: Tensor,
) -> None:
    """`triton_ops.state_space_dual`. Raises UnsupportedByGpu.

    Rows of more than one token are scanned in chunks; not in float32, whose exact products leave
    the matrix units idle.
    """
    num_segments = segments.shape[0]
    _, num_heads, state_size, head_dim = states.shape
    tensors = (out, query, key, value, decay, time_step, states)
    _check_contiguous(segments, *(tensor[:1] for tensor in tensors))
    if num_segments == 0:
        return
    shape = (num_heads // key.shape[1], state_size, head_dim)
    has_products = query.dtype != torch.float32 and state_size <= LARGEST_SCANNED_STATE
    scans = has_products and query.shape[0] > num_segments
    constants = dual_step_constants(*shape, only_single=scans)
    with torch.cuda.device_of(states):  # type: ignore[no-untyped-call]
        step_dual[(num_segments, num_heads, triton.cdiv(head_dim, constants["COLUMNS"]))](
            *tensors,
            segments,
            num_segments,
            *(tensor.stride(0) for tensor in tensors),
            **constants,
            num_warps=DUAL_STEP.num_warps,
            num_stages=DUAL_STEP.num_stages,
        )
        if scans:
            _scan(tensors, segments, shape)


def _scan(tensors: tuple[Tensor, ...], segments: Tensor, shape: tuple[int, int, int]) -> None:
    """Compute rows of more than one token. `tensors`: arguments of `state_space_dual`, in order;
    `shape`: as `dual_scan_constants` takes it."""
    out, *inputs, states = tensors
    num_segments, (num_tokens, num_heads, head_dim) = segments.shape[0], out.shape
    local = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    attending = dual_attention_constants(*shape)
    attended = (local, *inputs)
    chunks = num_tokens // CHUNK + 2 * num_segments  # at most: segments begin and end within some
    attend_in_chunks[(chunks, num_heads, triton.cdiv(head_dim, attending["COLUMNS"]))](
        *attended,
        segments,
        num_segments,
        *(tensor.stride(0) for tensor in attended),
        **attending,
        num_warps=DUAL_ATTENTION.num_warps,
        num_stages=DUAL_ATTENTION.num_stages,
    )
    scanning = dual_scan_constants(*shape)
    launch = dual_scan_launch(gpu_of(out.device).generation, shape[1])
    scanned = (out, *inputs, local, states)
    scan_dual[(num_segments, num_heads, triton.cdiv(head_dim, scanning["COLUMNS"]))](
        *scanned,
        segments,
        num_segments,
        *(tensor.stride(0) for tensor in scanned),
        **scanning,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )


def selective_scan(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    time_step: Tensor,
    rates: Tensor,
    states: Tensor,
    segments: Tensor,
) -> None:
    """`triton_ops.selective_scan`. Raises UnsupportedByGpu."""
    num_segments = segments.shape[0]
    _, num_channels, state_size = states.shape
    strided = (out, query, key, value, time_step)
    _check_contiguous(segments, rates, *(tensor[:1] for tensor in (*strided, states)))
    if num_segments == 0:
        return
    constants = selective_constants(state_size, single_tokens=value.shape[0] <= num_segments)
    with torch.cuda.device_of(states):  # type: ignore[no-untyped-call]
        scan_selectively[(num_segments, triton.cdiv(num_channels, constants["CHANNELS"]))](
            *strided,
            rates,
            states,
            segments,
            num_segments,
            num_channels,
            *(tensor.stride(0) for tensor in (*strided, states)),
            **constants,
            num_warps=SELECTIVE.num_warps,
            num_stages=SELECTIVE.num_stages,
        )
