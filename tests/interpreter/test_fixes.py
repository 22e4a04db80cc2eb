"""The interpreter computes what a GPU would, as far as the other tests here lean on it."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError


@triton.jit
def product(
    left_ptr, right_ptr, out_ptr, ROWS: tl.constexpr, DEPTH: tl.constexpr, COLUMNS: tl.constexpr
):
    rows, depth, columns = tl.arange(0, ROWS), tl.arange(0, DEPTH), tl.arange(0, COLUMNS)
    left = tl.load(left_ptr + rows[:, None] * DEPTH + depth[None, :])
    right = tl.load(right_ptr + depth[:, None] * COLUMNS + columns[None, :])
    accumulated = tl.zeros((ROWS, COLUMNS), tl.float32)
    accumulated = tl.dot(left, right, accumulated)
    tl.store(
        out_ptr + rows[:, None] * COLUMNS + columns[None, :],
        accumulated.to(out_ptr.dtype.element_ty),
    )


@triton.jit
def converted(source_ptr, target_ptr, COUNT: tl.constexpr):
    offsets = tl.arange(0, COUNT)
    tl.store(
        target_ptr + offsets,
        tl.load(source_ptr + offsets).to(tl.float32).to(target_ptr.dtype.element_ty),
    )


@triton.jit
def counted(bounds_ptr, out_ptr):
    total = tl.zeros((), tl.int32)
    for step in range(tl.load(bounds_ptr), tl.load(bounds_ptr + 1)):
        total += step
    tl.store(out_ptr, total)


@triton.jit
def added(source_ptr, target_ptr, COUNT: tl.constexpr):
    offsets = tl.arange(0, COUNT)
    values = tl.load(source_ptr + offsets)
    tl.store(target_ptr + offsets, values + values)


@triton.jit
def summed(source_ptr, target_ptr, COUNT: tl.constexpr):
    tl.store(target_ptr, tl.sum(tl.load(source_ptr + tl.arange(0, COUNT)), 0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_dot_is_torchs_product(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    left, right = (
        torch.randn(*shape, generator=generator).to(dtype) for shape in ((16, 64), (64, 32))
    )
    out = torch.full((16, 32), torch.nan, dtype=dtype)
    product[(1,)](left, right, out, 16, 64, 32)
    torch.testing.assert_close(out, (left.double() @ right.double()).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_store_rounds_as_torch_does(dtype: torch.dtype) -> None:
    values = torch.randn(1024, generator=torch.Generator().manual_seed(2))
    # ends in two ties
    values[:6] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, 1 + 2**-8, 1 + 3 * 2**-8])
    out = torch.empty(1024, dtype=dtype)
    converted[(1,)](values, out, 1024)
    torch.testing.assert_close(out, values.to(dtype), rtol=0, atol=0, equal_nan=True)
    back = torch.empty(1024)
    converted[(1,)](out, back, 1024)
    torch.testing.assert_close(back, out.float(), rtol=0, atol=0, equal_nan=True)


def test_loops_may_have_bounds_read_from_memory() -> None:
    out = torch.zeros(1, dtype=torch.int32)
    counted[(1,)](torch.tensor([3, 7], dtype=torch.int32), out)
    assert out.item() == 3 + 4 + 5 + 6


@pytest.mark.parametrize("kernel", [added, summed], ids=lambda kernel: kernel.__name__)
def test_arithmetic_on_bfloat16_is_refused_rather_than_wrong(kernel: triton.JITFunction) -> None:
    values = torch.ones(16, dtype=torch.bfloat16)
    with pytest.raises(InterpreterError, match="convert to float32 first"):
        kernel[(1,)](values, torch.empty_like(values), 16)
