"""The product of a row with a weight matrix, together with what stands before and behind it in a
layer.

Such a product takes as long as its weights take to arrive, and a launch costs about as much as some
megabytes of weights. So the norm before it, and the activation or the sum behind it, are part of
the same program. No tensor core is used: each weight is multiplied with one number only.
"""

import triton
import triton.language as tl

from triton_ops.gpu.kernels.dependent import wait_for_previous_grid

NO_ACTIVATION = tl.constexpr(0)
SILU = tl.constexpr(1)
GELU_TANH = tl.constexpr(2)


@triton.jit
def _inverse_root_mean_square(row, eps, COLUMNS: tl.constexpr, STEP: tl.constexpr):
    """Return one over the root mean square of a row of COLUMNS numbers, float32."""
    squares = tl.zeros([STEP], tl.float32)
    for first in tl.static_range(0, COLUMNS, STEP):
        column = first + tl.arange(0, STEP)
        values = tl.load(row + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
        squares += values * values
    return tl.rsqrt(tl.sum(squares) / COLUMNS + eps)


@triton.jit
def _activate(gate, ACTIVATION: tl.constexpr):
    """Apply SiLU to a float32 number, or GELU by its approximation with tanh: both are the number
    times a sigmoid."""
    inside = gate
    if ACTIVATION == GELU_TANH:
        inside = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # sqrt(8 / pi)
    return gate / (1.0 + tl.exp(-inside))


@triton.jit
def multiply_each_row(
    out,
    rows,
    weight,
    bias,
    norm,
    residual,
    num_outputs,
    row_stride,
    eps,
    COLUMNS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    STEP: tl.constexpr,
    NORM_ADDS_ONE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute OUTPUTS numbers of one row of `out` [R, num_outputs] in float32, and round them once.
    Grid: (R, cdiv(num_outputs, OUTPUTS)). Programs with the same weights start one after another,
    so all but the first find them in the L2 cache.

    rows [R, COLUMNS], with `row_stride` from one to the next; weight [num_outputs, COLUMNS], or
    twice as many rows with an ACTIVATION: first the gates, then the numbers that they multiply;
    bias, as long as the weight; norm [COLUMNS]; residual [R, num_outputs]. Each of the last three
    may be None. Weights do not change, so the first of them are loaded before the grid that
    computes the rows has ended.
    """
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = output < num_outputs
    column = tl.arange(0, STEP)
    weights = weight + output.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    up_weights = weights + tl.cast(num_outputs, tl.int64) * COLUMNS
    is_weight = is_output[:, None] & (column < COLUMNS)[None, :]
    tile = tl.load(weights, mask=is_weight, other=0.0)
    if ACTIVATION != NO_ACTIVATION:
        up_tile = tl.load(up_weights, mask=is_weight, other=0.0)
    wait_for_previous_grid(DEPENDENT)

    row = rows + tl.program_id(0).to(tl.int64) * row_stride
    if norm is not None:
        scale = _inverse_root_mean_square(row, eps, COLUMNS, STEP)
    products = tl.zeros([OUTPUTS, STEP], tl.float32)
    up_products = tl.zeros([OUTPUTS, STEP], tl.float32)
    for first in tl.static_range(0, COLUMNS, STEP):
        is_column = first + column < COLUMNS
        values = tl.load(row + first + column, mask=is_column, other=0.0).to(tl.float32)
        if norm is not None:
            factor = tl.load(norm + first + column, mask=is_column, other=0.0).to(tl.float32)
            if NORM_ADDS_ONE:
                factor += 1.0
            values *= scale * factor
        products += tile.to(tl.float32) * values[None, :]
        if ACTIVATION != NO_ACTIVATION:
            up_products += up_tile.to(tl.float32) * values[None, :]
        if first + STEP < COLUMNS:
            is_weight = is_output[:, None] & (first + STEP + column < COLUMNS)[None, :]
            tile = tl.load(weights + first + STEP, mask=is_weight, other=0.0)
            if ACTIVATION != NO_ACTIVATION:
                up_tile = tl.load(up_weights + first + STEP, mask=is_weight, other=0.0)

    result = tl.sum(products, axis=1)
    if bias is not None:
        result += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)
    if ACTIVATION != NO_ACTIVATION:
        up = tl.sum(up_products, axis=1)
        if bias is not None:
            up += tl.load(bias + num_outputs + output, mask=is_output, other=0.0).to(tl.float32)
        result = _activate(result, ACTIVATION) * up
    place = tl.program_id(0).to(tl.int64) * num_outputs + output
    if residual is not None:
        result += tl.load(residual + place, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=is_output)
