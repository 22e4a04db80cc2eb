"""Launches the programs of layers with a recurrent state.

Nothing here waits for the GPU: grids follow from the number of segments and from shapes, and the
programs read the table of segments on the device.
"""

import torch
import triton
from torch import Tensor

from triton_ops.gpu.configurations import UnsupportedByGpu
from triton_ops.gpu.devices import gpu_of
from triton_ops.gpu.kernels.recurrent import (
    convolve,
    prepare_chunks,
    scan_delta_rule,
    step_delta_rule,
)
from triton_ops.gpu.recurrent_constants import (
    CHUNK,
    CONVOLUTION,
    LARGEST_SCANNED_KEY_DIM,
    PREPARATION,
    STEP,
    convolution_constants,
    preparation_constants,
    scan_constants,
    scan_launch,
    step_constants,
)


def causal_convolution(
    out: Tensor,
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    segments: Tensor,
    silu: bool,  # noqa: FBT001 - as of the operator
) -> None:
    """`triton_ops.causal_convolution`. Raises UnsupportedByGpu."""
    num_segments, num_channels = segments.shape[0], inputs.shape[1]
    _check_contiguous(weight, segments, out[:1], inputs[:1], states[:1])
    if num_segments == 0:
        return
    constants = convolution_constants(
        weight.shape[1],
        single_tokens=inputs.shape[0] <= num_segments,
        has_bias=bias is not None,
        silu=silu,
    )
    with torch.cuda.device_of(inputs):  # type: ignore[no-untyped-call]
        convolve[(num_segments, triton.cdiv(num_channels, constants["CHANNELS"]))](
            out,
            inputs,
            weight,
            weight if bias is None else bias,
            states,
            segments,
            num_segments,
            num_channels,
            out.stride(0),
            inputs.stride(0),
            states.stride(0),
            **constants,
            num_warps=CONVOLUTION.num_warps,
            num_stages=CONVOLUTION.num_stages,
        )


def gated_delta_rule(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    segments: Tensor,
) -> None:
    """`triton_ops.gated_delta_rule`. Raises UnsupportedByGpu.

    Rows of more than one token are scanned in chunks; not in float32, whose exact products leave
    the matrix units idle and have more values than registers hold.
    """
    num_segments = segments.shape[0]
    _, num_value_heads, key_dim, value_dim = states.shape
    tensors = (out, query, key, value, decay, beta, states)
    _check_contiguous(segments, *(tensor[:1] for tensor in tensors))
    if num_segments == 0:
        return
    shape = (num_value_heads // key.shape[1], key_dim, value_dim)
    has_products = query.dtype != torch.float32 and key_dim <= LARGEST_SCANNED_KEY_DIM
    scans = has_products and query.shape[0] > num_segments
    stepping = step_constants(*shape, only_single=scans)
    with torch.cuda.device_of(states):  # type: ignore[no-untyped-call]
        step_delta_rule[
            (num_segments, num_value_heads, triton.cdiv(value_dim, stepping["COLUMNS"]))
        ](
            *tensors,
            segments,
            num_segments,
            *(tensor.stride(0) for tensor in tensors),
            **stepping,
            num_warps=STEP.num_warps,
            num_stages=STEP.num_stages,
        )
        if scans:
            _scan(tensors, segments, shape)


def _scan(tensors: tuple[Tensor, ...], segments: Tensor, shape: tuple[int, int, int]) -> None:
    """Compute rows of more than one token. `tensors`: arguments of the operator, in order; `shape`:
    as `scan_constants` takes it."""
    out, query, key, value, decay, beta, states = tensors
    num_tokens, num_segments, num_value_heads = key.shape[0], segments.shape[0], value.shape[1]
    prepared = key.new_empty((num_tokens, num_value_heads, 4, CHUNK))
    preparing = preparation_constants(shape[0], shape[1])
    chunks = num_tokens // CHUNK + 2 * num_segments  # at most: segments begin and end within some
    prepare_chunks[(chunks, num_value_heads, 2)](
        prepared,
        query,
        key,
        decay,
        beta,
        segments,
        num_segments,
        *(tensor.stride(0) for tensor in (prepared, query, key, decay, beta)),
        **preparing,
        num_warps=PREPARATION.num_warps,
        num_stages=PREPARATION.num_stages,
    )
    scanning = scan_constants(*shape)
    launch = scan_launch(gpu_of(key.device).generation)
    scanned = (out, query, key, value, decay, prepared, states)
    scan_delta_rule[(num_segments, num_value_heads, triton.cdiv(shape[2], scanning["COLUMNS"]))](
        *scanned,
        segments,
        num_segments,
        *(tensor.stride(0) for tensor in scanned),
        **scanning,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )


def _check_contiguous(*tensors: Tensor) -> None:
    """Raises UnsupportedByGpu for what the programs would read wrongly: of tensors with a stride of
    their own by token or slot, the first is given."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise UnsupportedByGpu(
            "layers with a state on a GPU take tensors whose tokens and slots are each contiguous"
        )
