"""A linear layer that adds to what is there."""

from torch import Tensor
from torch.nn import functional

FEWEST_ROWS_IN_PLACE = 64
"""A product of few rows that also adds takes longer than the launch that it saves: 10 us instead of
7 for one row of Qwen3-0.6B on an H200 (`python -m scripts.gpu_checks step`, 26 November 2026)."""


def add_linear(total: Tensor, rows: Tensor, weight: Tensor) -> None:
    """`triton_ops.add_linear`. Many rows are one product of cuBLAS, which reads and writes the same
    memory; few rows are a product and a sum."""
    if len(rows) < FEWEST_ROWS_IN_PLACE:
        total += functional.linear(rows, weight)
    else:
        total.addmm_(rows, weight.t())
