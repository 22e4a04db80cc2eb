"""The GPU's product of few rows, with its norm, activation and residual, against float64."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from triton_ops.gpu.fused_linear import fused_linear
from triton_ops.gpu.kernels import fused_linear as kernels

TOLERANCES = {torch.bfloat16: 5e-3, torch.float16: 7e-4, torch.float32: 2e-6}
"""Tolerance, as a share of the largest number: a result is rounded once."""


@pytest.fixture(autouse=True)
def poisoned_results() -> Iterator[None]:
    """Memory of torch.empty is NaN here: a number that was never written shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(
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
    result = rows.double()
    if norm is not None:
        result = result / (result.square().mean(-1, keepdim=True) + eps).sqrt()
        result = result * (norm.double() + int(norm_adds_one))
    result = result @ weight.double().T
    if bias is not None:
        result = result + bias.double()
    if activation:
        gate, up = result.chunk(2, dim=-1)
        active = functional.silu(gate)
        if activation == "gelu":
            active = functional.gelu(gate, approximate="tanh")
        result = active * up
    if residual is not None:
        result = result + residual.double()
    return result


def check(
    dtype: torch.dtype,
    *,
    count: int = 1,
    outputs: int = 24,
    columns: int = 48,
    bias: bool = False,
    norm: bool = False,
    residual: bool = False,
    norm_adds_one: bool = False,
    activation: str = "",
    row_stride: int | None = None,
) -> None:
    products = 2 * outputs if activation else outputs
    wide = torch.full((count, row_stride or columns), torch.nan, dtype=dtype)
    rows = wide[:, :columns].copy_(random(count, columns, dtype=dtype, seed=1))
    tensors = (
        random(products, columns, dtype=dtype, seed=2),
        random(products, dtype=dtype, seed=3) if bias else None,
        random(columns, dtype=dtype, seed=4) if norm else None,
        random(count, outputs, dtype=dtype, seed=5) if residual else None,
    )
    settings: dict[str, Any] = {
        "eps": 1e-3,
        "norm_adds_one": norm_adds_one,
        "activation": activation,
    }
    found = fused_linear(rows, *tensors, **settings)
    wanted = exact(rows, *tensors, **settings)
    assert found.dtype == dtype and found.shape == (count, outputs)
    assert (found - wanted).abs().max() <= TOLERANCES[dtype] * wanted.abs().max()


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"norm": True, "bias": True},
        {"norm": True, "norm_adds_one": True, "activation": "gelu"},
        {"norm": True, "bias": True, "activation": "silu"},
        {"residual": True},
        {"residual": True, "bias": True, "norm": True, "activation": "silu"},
    ],
)
def test_parts_around_a_product(dtype: torch.dtype, parts: dict[str, Any]) -> None:
    check(dtype, **parts)


@pytest.mark.parametrize(
    ("count", "outputs", "columns"), [(1, 1, 16), (2, 67, 1040), (3, 5, 2048), (1, 7, 4112)]
)
def test_tiles_that_are_not_full(count: int, outputs: int, columns: int) -> None:
    sizes: dict[str, Any] = {"count": count, "outputs": outputs, "columns": columns}
    check(torch.float32, **sizes, norm=True, activation="silu", residual=True)
    check(torch.bfloat16, **sizes, norm=True, bias=True)


def test_rows_that_lie_apart() -> None:
    check(torch.float32, count=3, row_stride=80, norm=True, residual=True)


def test_what_the_grid_before_computes_is_read_after_the_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows and residual are NaN until the program waits."""
    rows, residual = random(1, 40, dtype=torch.float32, seed=1), torch.ones(1, 1)
    weight, norm = random(2, 40, dtype=torch.float32, seed=2), torch.ones(40)
    late_rows, late_residual = (
        torch.full_like(rows, torch.nan),
        torch.full_like(residual, torch.nan),
    )

    def wait(dependent: object) -> None:
        late_rows.copy_(rows)
        late_residual.copy_(residual)

    monkeypatch.setattr(kernels, "wait_for_previous_grid", wait)
    settings: dict[str, Any] = {"eps": 1e-6, "norm_adds_one": False, "activation": "silu"}
    found = fused_linear(late_rows, weight, None, norm, late_residual, **settings)
    wanted = exact(rows, weight, None, norm, residual, **settings)
    torch.testing.assert_close(found, wanted.float())


def test_tensors_that_do_not_fit_are_refused() -> None:
    rows, weight = torch.ones(1, 16), torch.ones(8, 16)
    settings: dict[str, Any] = {"eps": 1e-6, "norm_adds_one": False, "activation": ""}
    refused: list[tuple[Any, ...]] = [
        (torch.ones(8, 32), None, None, None),
        (weight.bfloat16(), None, None, None),
        (torch.ones(16, 8).T, None, None, None),
        (weight, torch.ones(16), None, None),
        (weight, None, torch.ones(8), None),
        (weight, None, None, torch.ones(1, 16)),
    ]
    for tensors in refused:
        with pytest.raises(ValueError, match="want a contiguous tensor"):
            fused_linear(rows, *tensors, **settings)
