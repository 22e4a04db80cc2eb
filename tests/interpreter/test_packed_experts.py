"""The GPU's experts with packed matrices against float64: every format and gating, pairs by
themselves and in groups, columns in parts."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.interpreter.test_packed import MORE, TOLERANCES
from tests.triton_ops.test_packed import CASES, matrix
from triton_ops import GroupQuantized, pack, round_to_nearest
from triton_ops.experts import share_out_packed
from triton_ops.gpu import packed_experts as gpu
from triton_ops.gpu.experts import most_captured_tokens
from triton_ops.gpu.packed_constants import most_tokens_of_experts, tile_of_experts

Biases = tuple[Tensor, Tensor] | None
INNER = 512
"""Columns of `down`: `tests.triton_ops.test_packed.matrix` makes so many."""


class Experts(NamedTuple):
    """Matrices of gate_up and down, one for each expert, and their biases."""

    gate_up: list[GroupQuantized]
    down: list[GroupQuantized]
    inner: int
    style: str = "swiglu"
    biases: Biases = None

    def packed(self, chosen: Tensor) -> tuple[Any, ...]:
        """The last arguments of the operator. The bytes of experts that nobody chose are such that
        their scales are not numbers."""
        both = []
        for matrices in (self.gate_up, self.down):
            bytes_of_all = torch.stack([pack(one) for one in matrices])
            for expert in range(len(matrices)):
                if not (chosen == expert).any():
                    bytes_of_all[expert] = 255
            both.append(bytes_of_all)
        forms = [list(matrices[0].format) for matrices in (self.gate_up, self.down)]
        return (*both, self.inner, *forms, *(self.biases or (None, None)), self.style)


@pytest.fixture(autouse=True)
def poisoned_scratch() -> Iterator[None]:
    """Memory of torch.empty is NaN here: a row that is read but was never written shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def silu(number: Tensor) -> Tensor:
    return number / (1 + (-number).exp())


def gelu(number: Tensor) -> Tensor:
    return number / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (number + 0.044715 * number**3)))


def bounded(inside: Tensor) -> Tensor:
    """Gate as the code of gpt-oss does: arXiv 2508.10925."""
    gate, up = inside[0::2].clamp(max=7.0), inside[1::2].clamp(-7.0, 7.0)
    return (up + 1) * gate / (1 + (-1.702 * gate).exp())


def halves(inside: Tensor, active: Callable[[Tensor], Tensor]) -> Tensor:
    half = len(inside) // 2
    return active(inside[:half]) * inside[half:]


GATING: MappingProxyType[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "swiglu": partial(halves, active=silu),
        "geglu": partial(halves, active=gelu),
        "relu2": lambda inside: inside.clamp(min=0) ** 2,
        "gpt_oss": bounded,
    }
)


def definition(hidden: Tensor, weights: Tensor, chosen: Tensor, experts: Experts) -> Tensor:
    """Each pair of a token and an expert in float64."""
    both = (experts.gate_up, experts.down)
    gate_up, down = ([one.dequantize().double() for one in matrices] for matrices in both)
    out = torch.zeros(hidden.shape, dtype=torch.float64)
    for token, of_token in enumerate(chosen.tolist()):
        for weight, expert in zip(weights[token].double(), of_token, strict=True):
            inside = gate_up[expert] @ hidden[token].double()
            if experts.biases is not None:
                inside = inside + experts.biases[0][expert].double()
            said = down[expert] @ GATING[experts.style](inside)
            if experts.biases is not None:
                said = said + experts.biases[1][expert].double()
            out[token] += weight * said
    return out


def routed(num_tokens: int, per_token: int, used: int, columns: int) -> tuple[Tensor, ...]:
    """Tokens, weights and the experts of each token, which are among the first `used`."""
    generator = torch.Generator().manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, columns, generator=generator)
    scores, chosen = torch.rand(num_tokens, used, generator=generator).topk(per_token)
    return hidden, scores / scores.sum(1, keepdim=True), chosen


def check(hidden: Tensor, weights: Tensor, chosen: Tensor, experts: Experts) -> None:
    """The tolerance is that of three roundings: of what is inside, what gates give, and the sum."""
    found = gpu.sparse_packed_experts(hidden, weights, chosen, *experts.packed(chosen))
    wanted = definition(hidden, weights, chosen, experts)
    assert found.dtype == hidden.dtype and found.shape == hidden.shape
    assert (found - wanted).abs().max() <= 3 * TOLERANCES[hidden.dtype] * wanted.abs().max()


def random_matrix(rows: int, columns: int, seed: int, bits: int, group: int) -> GroupQuantized:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) / columns**0.5
    return round_to_nearest(weight, bits, group)


def experts_of(
    count: int, columns: int, inner: int, style: str = "swiglu", biases: Biases = None
) -> Experts:
    """Matrices of 4 bits inside, and of 8 bits in `down`."""
    rows = inner if style == "relu2" else 2 * inner
    gate_up = [random_matrix(rows, columns, seed, 4, 32) for seed in range(count)]
    down = [random_matrix(columns, inner, 100 + seed, 8, 32) for seed in range(count)]
    return Experts(gate_up, down, inner, style, biases)


@pytest.mark.parametrize("name", [*CASES, *MORE])
@pytest.mark.parametrize(
    ("num_tokens", "dtype"), [(1, torch.bfloat16), (3, torch.float16), (40, torch.float16)]
)
def test_every_format(name: str, num_tokens: int, dtype: torch.dtype) -> None:
    """One token, tiles of 16 rows, and tiles of 32."""
    form = CASES[name] if name in CASES else MORE[name]
    whole = matrix(*form[:3], 4 * 64, *form[3:])
    down = [whole.rows(torch.arange(64 * expert, 64 * (expert + 1))) for expert in range(4)]
    gate_up = [random_matrix(INNER, 64, expert, 8, 32) for expert in range(4)]
    hidden, weights, chosen = routed(num_tokens, 2, used=3, columns=64)
    check(hidden.to(dtype), weights, chosen, Experts(gate_up, down, INNER, "relu2"))


@pytest.mark.parametrize("style", GATING)
@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_every_gating_with_and_without_biases(style: str, num_tokens: int) -> None:
    """Pairs of one token and of two by themselves, of five in tiles. Biases are so large that gates
    and ups reach their bounds."""
    hidden, weights, chosen = routed(num_tokens, 2, used=4, columns=96)
    experts = experts_of(8, 96, 64, style)
    check(hidden.bfloat16(), weights, chosen, experts)
    generator = torch.Generator().manual_seed(1)
    inside = torch.randn(8, len(experts.gate_up[0].codes), generator=generator) * 8
    outside = torch.randn(8, 96, generator=generator)
    with_biases = experts._replace(biases=(inside.half(), outside.half()))
    check(hidden.half(), weights, chosen, with_biases)


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_columns_in_parts(num_tokens: int) -> None:
    """Experts of so many columns and so few rows that one program for each tile would leave a GPU
    idle; a bias is added once."""
    hidden, weights, chosen = routed(num_tokens, 1, used=1, columns=2080)
    inside, outside = torch.randn(2, 64).half(), torch.randn(2, 2080).half()
    experts = experts_of(2, 2080, 32, "gpt_oss", (inside, outside))
    check(hidden.half(), weights, chosen, experts)
    check(hidden.bfloat16(), weights, chosen, experts._replace(biases=None, style="swiglu"))


def test_more_rows_of_an_expert_than_a_tile_has() -> None:
    """All tokens choose the same two of 64 experts: 21 rows of each are a tile of 16 and one of
    5."""
    hidden, weights, _ = routed(21, 2, used=8, columns=64)
    chosen = torch.tensor([[5, 62]]).repeat(21, 1)
    assert tile_of_experts(21, 2, 64).rows == 16  # type: ignore[union-attr]
    check(hidden.half(), weights, chosen, experts_of(64, 64, 32))


def test_pairs_of_the_same_expert_by_themselves() -> None:
    hidden, weights, chosen = routed(8, 2, used=2, columns=64)
    assert tile_of_experts(8, 2, 32).rows == 1  # type: ignore[union-attr]
    check(hidden.half(), weights, chosen, experts_of(32, 64, 32))


@pytest.mark.parametrize("num_tokens", [2, 6])
def test_rows_of_any_strides(num_tokens: int) -> None:
    hidden, weights, chosen = routed(num_tokens, 2, used=4, columns=3 * 64)
    check(hidden.half()[:, 64:128], weights, chosen, experts_of(8, 64, 32))


class NothingWaits(TorchDispatchMode):
    """Refuses operations for which a GPU's host waits: what they return, or its shape, depends on
    numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waiting = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
        if waiting & {*func.tags}:
            raise AssertionError(f"{func} waits")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("num_tokens", [1, 2, 16, 64])
def test_nothing_waits_up_to_the_most_tokens(num_tokens: int) -> None:
    """With more tokens than 32 for each expert on average, and in float32, it still waits."""
    hidden, weights, chosen = routed(num_tokens, 2, used=4, columns=32)
    packed = experts_of(4, 32, 32).packed(chosen)
    assert most_captured_tokens(torch.float16, 4, 2) == 64
    with NothingWaits():
        gpu.sparse_packed_experts(hidden.half(), weights, chosen, *packed)
    waiting = (share_out_packed, hidden.half()), (gpu.sparse_packed_experts, hidden)
    for compute, rows in waiting:
        with NothingWaits(), pytest.raises(AssertionError, match="bincount"):
            compute(rows, weights, chosen, *packed)
    assert most_captured_tokens(torch.float32, 4, 2) == 0


def test_more_tokens_and_float32_are_computed_by_unpacked_matrices() -> None:
    experts = experts_of(4, 64, 32)
    hidden, weights, chosen = routed(65, 2, used=3, columns=64)
    check(hidden.half(), weights, chosen, experts)
    packed = experts.packed(chosen)
    with NothingWaits(), pytest.raises(AssertionError, match="bincount"):
        gpu.sparse_packed_experts(hidden.half(), weights, chosen, *packed)
    check(hidden[:2], weights[:2], chosen[:2], experts)


@pytest.mark.parametrize(
    ("num_tokens", "per_token", "num_experts", "rows"),
    [
        pytest.param(1, 8, 8, 1, id="one token"),
        pytest.param(8, 8, 128, 1, id="half as many pairs as experts"),
        pytest.param(9, 8, 128, 16, id="more pairs"),
        pytest.param(256, 8, 128, 16, id="16 rows an expert"),
        pytest.param(257, 8, 128, 32, id="more rows"),
        pytest.param(512, 8, 128, 32, id="32 rows an expert"),
        pytest.param(513, 8, 128, None, id="still more rows"),
    ],
)
def test_tiles_follow_from_shapes(
    num_tokens: int, per_token: int, num_experts: int, rows: int | None
) -> None:
    tile = tile_of_experts(num_tokens, per_token, num_experts)
    assert (tile and tile.rows) == rows
    is_in_tiles = num_tokens <= most_tokens_of_experts(num_experts, per_token)
    assert is_in_tiles == (rows is not None)
