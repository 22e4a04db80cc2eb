"""Launches the product of few rows with what stands around it. Everything that is launched follows
from shapes alone."""

import torch
import triton
from torch import Tensor

from triton_ops.gpu.devices import gpu_of
from triton_ops.gpu.fused_linear_constants import NUM_WARPS, product_constants
from triton_ops.gpu.kernels.fused_linear import multiply_each_row


def fused_linear(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Tensor | None,
    residual: Tensor | None,
    *,
    eps: float,
    norm_adds_one: bool,
    activation: str,
) -> Tensor:
    """Compute `triton_ops.fused_linear`. Raises ValueError if shapes do not fit together, or if
    rows of numbers are not contiguous."""
    count, columns = rows.shape
    outputs = weight.shape[0]
    if activation:
        outputs //= 2
    wanted: list[tuple[Tensor, tuple[int, ...]]] = [
        (weight, (outputs * 2 if activation else outputs, columns))
    ]
    if bias is not None:
        wanted.append((bias, (weight.shape[0],)))
    if norm is not None:
        wanted.append((norm, (columns,)))
    if residual is not None:
        wanted.append((residual, (count, outputs)))
    for tensor, shape in wanted:
        if tensor.shape != shape or not tensor.is_contiguous() or tensor.dtype != rows.dtype:
            raise ValueError(
                f"rows {tuple(rows.shape)} of {rows.dtype} want a contiguous tensor {shape} of "
                f"that dtype, not {tuple(tensor.shape)} of {tensor.dtype}"
            )
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    constants = product_constants(columns, activation, norm_adds_one=norm_adds_one)
    out = rows.new_empty(count, outputs)
    with torch.cuda.device_of(rows):  # type: ignore[no-untyped-call]
        multiply_each_row[(count, triton.cdiv(outputs, constants["OUTPUTS"]))](
            out,
            rows,
            weight,
            bias,
            norm,
            residual,
            outputs,
            rows.stride(0),
            eps,
            **constants,
            **gpu_of(rows.device).dependent_launch,
            num_warps=NUM_WARPS,
        )
    return out
