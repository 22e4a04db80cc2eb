"""A mixture of experts: every way to compute it against the definition, in float64 and one token at
a time."""

import math
from collections.abc import Callable
from functools import partial
from typing import Literal

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.nn import functional

from nanoserve.config.model_parts import MoeConfig
from nanoserve.models.decoder import route
from triton_ops import sparse_experts
from triton_ops.experts import share_out
from triton_ops.gpu import experts as gpu

HIDDEN, INTERMEDIATE = 32, 16

Mixture = tuple[Tensor, ...]


def mixture(
    num_tokens: int, num_experts: int, per_token: int, dtype: torch.dtype, hidden: int = HIDDEN
) -> Mixture:
    """Tokens, weights, chosen experts (the last one by nobody) and the experts' matrices."""
    generator = torch.Generator().manual_seed(num_tokens)
    used = max(per_token, num_experts - 1)
    tokens = torch.randn(num_tokens, hidden, generator=generator)
    scores, chosen = torch.rand(num_tokens, used, generator=generator).topk(per_token)
    gate_up = torch.randn(num_experts, 2 * INTERMEDIATE, hidden, generator=generator) / hidden**0.5
    down = torch.randn(num_experts, hidden, INTERMEDIATE, generator=generator) / INTERMEDIATE**0.5
    return (
        tokens.to(dtype),
        scores / scores.sum(1, keepdim=True),
        chosen,
        gate_up.to(dtype),
        down.to(dtype),
    )


def biases(num_experts: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Large enough that gates and ups reach their bounds."""
    generator = torch.Generator().manual_seed(1)
    inside = torch.randn(num_experts, 2 * INTERMEDIATE, generator=generator) * 8
    return inside.to(dtype), torch.randn(num_experts, HIDDEN, generator=generator).to(dtype)


def definition_of_gpt_oss(
    hidden: Tensor, weights: Tensor, experts: Tensor, *matrices: Tensor
) -> Tensor:
    """Compute experts as the model card's code does, one number at a time."""
    gate_up, down, gate_up_bias, down_bias = (tensor.double() for tensor in matrices)
    rows = torch.zeros(hidden.shape).double()
    for token in range(len(hidden)):
        for weight, expert in zip(weights[token].double(), experts[token].tolist(), strict=True):
            inside = gate_up[expert] @ hidden[token].double() + gate_up_bias[expert]
            between = torch.zeros(INTERMEDIATE).double()
            for place in range(INTERMEDIATE):
                gate, up = (
                    min(float(inside[2 * place]), 7.0),
                    max(-7.0, min(float(inside[2 * place + 1]), 7.0)),
                )
                between[place] = (up + 1) * gate / (1 + math.exp(-1.702 * gate))
            rows[token] += weight * (down[expert] @ between + down_bias[expert])
    return rows


def definition(
    hidden: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    active: Callable[[Tensor], Tensor] = functional.silu,
) -> Tensor:
    rows = []
    for token, row_weights, row_experts in zip(
        hidden.double(), weights.double(), experts.tolist(), strict=True
    ):
        row = torch.zeros_like(token)
        for weight, expert in zip(row_weights, row_experts, strict=True):
            gate, up = (gate_up[expert].double() @ token).chunk(2)
            row += weight * (down[expert].double() @ (active(gate) * up))
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("compute", [sparse_experts, gpu.multiply_in_groups, gpu.sparse_experts])
@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)], ids=str
)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "per_token"), [(1, 2, 1), (3, 4, 2), (40, 8, 3), (7, 3, 3)]
)
def test_every_way_is_the_definition(
    num_tokens: int,
    num_experts: int,
    per_token: int,
    dtype: torch.dtype,
    error: float,
    compute: Callable[..., Tensor],
) -> None:
    inputs = mixture(num_tokens, num_experts, per_token, dtype)
    found = compute(*inputs)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), definition(*inputs), atol=error, rtol=error)


@pytest.mark.parametrize("compute", [sparse_experts, gpu.multiply_in_groups])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("num_groups", [1, 2])
def test_tokens_that_are_no_numbers_harm_no_other(
    scores: Literal["softmax", "sigmoid"], num_groups: int, compute: Callable[..., Tensor]
) -> None:
    """A captured mixed step routes its padding too, which may be NaN in part or all over."""
    hidden, _, _, gate_up, down = mixture(9, 4, 2, torch.float32)
    hidden[2, 5], hidden[4] = torch.nan, torch.nan
    is_number = ~hidden.isnan().any(1)
    moe = MoeConfig(
        *(4, 2, INTERMEDIATE),
        normalize_weights=True,
        sparse_layers=frozenset({0}),
        scores=scores,
        num_groups=num_groups,
    )
    weights, experts = route(hidden @ gate_up[:, 0].T, moe, None)
    assert ((experts >= 0) & (experts < 4)).all()
    found = compute(hidden, weights, experts, gate_up, down)
    numbers = (hidden[is_number], weights[is_number], experts[is_number], gate_up, down)
    torch.testing.assert_close(
        found[is_number].double(), definition(*numbers), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("compute", [sparse_experts, gpu.multiply_in_groups, gpu.sparse_experts])
def test_gates_may_open_by_gelu(compute: Callable[..., Tensor]) -> None:
    inputs = mixture(7, 4, 2, torch.float32)
    found = compute(*inputs, style="geglu")
    opened = partial(functional.gelu, approximate="tanh")
    expected = definition(*inputs, active=opened)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "compute", [torch.ops.nanoserve.sparse_experts, gpu.multiply_in_groups, share_out]
)
@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)], ids=str
)
def test_experts_of_gpt_oss(
    dtype: torch.dtype, error: float, compute: Callable[..., Tensor]
) -> None:
    inputs = (*mixture(5, 4, 2, dtype), *biases(4, dtype))
    found, wanted = compute(*inputs, "gpt_oss"), definition_of_gpt_oss(*inputs)
    torch.testing.assert_close(
        found.double(), wanted, atol=error * float(wanted.abs().max()), rtol=error
    )


def test_widths_that_the_grouped_product_does_not_take_are_computed_another_way() -> None:
    inputs = mixture(5, 4, 2, torch.bfloat16, hidden=20)
    with pytest.raises(RuntimeError, match="multiple of 16 bytes"):
        gpu.multiply_in_groups(*inputs)
    torch.testing.assert_close(
        gpu.sparse_experts(*inputs).double(), definition(*inputs), atol=3e-2, rtol=3e-2
    )


def test_sizes_of_groups_stay_on_the_gpu() -> None:
    """Fake tensors have no numbers: shapes that depend on some, as those for which one waits for a
    GPU, are refused."""
    inputs = mixture(6, 4, 2, torch.bfloat16)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in inputs]
        assert gpu.multiply_in_groups(*fakes).shape == (6, HIDDEN)
        with pytest.raises(DynamicOutputShapeException):
            share_out(*fakes)


# it imports torch's compiler; tests/executor/test_torch_compile.py compiles the operators quickly
@pytest.mark.slow
def test_torch_accepts_it_for_tracing() -> None:
    """Schema, fake kernel and functionalization are consistent, as torch.compile relies on."""
    torch.library.opcheck(
        torch.ops.nanoserve.sparse_experts.default, mixture(6, 4, 2, torch.float32)
    )
