"""The GPU's convolutions and delta rules against their definitions in float64, token by token: rows
of any lengths, cut anywhere, with NaN in every slot and token that must not be read."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from triton_ops import recurrent as operators
from triton_ops.gpu import recurrent as gpu
from triton_ops.gpu import recurrent_constants
from triton_ops.gpu.configurations import UnsupportedByGpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-4, torch.float16: 1e-5}
"""Tolerance, as a share of the largest number, beside the rounding of outputs."""


@pytest.fixture(autouse=True)
def poisoned_scratch() -> Iterator[None]:
    """Memory of torch.empty is NaN here: a matrix that is read but was never written shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@dataclass(frozen=True)
class Row:
    """A row's lengths of segments, the position of its first token, and whether it has a state
    before it."""

    lengths: tuple[int, ...]
    position: int = 0
    has_state: bool = True
    ends_in_place: bool = True
    """Whether its last state goes to the slot of its first one."""


MIXED = [
    Row((1,), 70),
    Row((3, 64, 9), 61),
    Row((1,), has_state=False, ends_in_place=False),
    Row((64, 6), has_state=False, ends_in_place=False),
    Row((1, 1), 63),
    Row((0,), 5, ends_in_place=False),
    Row((2,), 100),
]


def segments_of(rows: list[Row]) -> tuple[Tensor, list[int], int]:
    """A table of segments, the slots that hold states before it, and how many slots it needs."""
    table, sources, begin, free = [], [], 0, 1
    for row in rows:
        source = first = free if row.has_state else -1
        sources += [first] * row.has_state
        free += 1
        position = row.position
        for number, length in enumerate(row.lengths, 1):
            target, free = free, free + 1
            if number == len(row.lengths) and row.ends_in_place and row.has_state:
                target = first
            table.append([begin, begin + length, source, target, position])
            source, begin, position = target, begin + length, position + length
    return torch.tensor(table, dtype=torch.int32).reshape(-1, 5), sources, free


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def within(wide: int, tensor: Tensor) -> Tensor:
    """Put the numbers into a part of rows that are `wide` elements longer, and NaN besides."""
    flat = tensor.flatten(1)
    room = torch.full((len(tensor), flat.shape[1] + wide), torch.nan, dtype=tensor.dtype)
    room[:, wide // 2 : wide // 2 + flat.shape[1]] = flat
    return room[:, wide // 2 : wide // 2 + flat.shape[1]].view(tensor.shape)


def states_with(
    sources: list[int], slots: int, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    states = torch.full((slots, *shape), torch.nan, dtype=dtype)
    states[sources] = random(len(sources), *shape, seed=9).to(dtype)
    return within(6, states)


def check_close(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    scale = max(wanted.nan_to_num(0.0).abs().flatten().tolist(), default=0.0)
    rounding = torch.finfo(dtype).eps / 2
    if found.dtype == torch.float32:
        rounding = 0.0
    torch.testing.assert_close(
        found.double(), wanted, atol=TOLERANCES[dtype] * scale, rtol=rounding, equal_nan=True
    )


# the definitions


def convolved(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, segments: Tensor
) -> tuple[Tensor, Tensor]:
    inputs, weight, states = inputs.double(), weight.double(), states.double().clone()
    out = torch.full_like(inputs, torch.nan)
    for begin, end, source, target, _ in segments.tolist():
        last = torch.zeros_like(states[0]) if source < 0 else states[source].clone()
        for token in range(begin, end):
            last = torch.cat([last, inputs[token, :, None]], dim=1)
            out[token] = (last * weight).sum(1) + (0 if bias is None else bias.double())
            last = last[:, 1:]
        states[target] = last
    return out, states


def ruled(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    segments: Tensor,
) -> tuple[Tensor, Tensor]:
    """Equation 10 of arXiv 2412.06464, whose state is the transpose of ours."""
    query, key, value, states = query.double(), key.double(), value.double(), states.double()
    query = query / (query.square().sum(-1, keepdim=True) + 1e-6).sqrt() / query.shape[-1] ** 0.5
    key = key / (key.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    out, states = torch.full_like(value, torch.nan), states.clone()
    shared = value.shape[1] // key.shape[1]
    for begin, end, source, target, _ in segments.tolist():
        after = torch.zeros_like(states[0]) if source < 0 else states[source].clone()
        for token in range(begin, end):
            for head, state in enumerate(after):
                state *= decay[token, head].double().exp()
                unit = key[token, head // shared]
                rate = beta[token, head].double()
                state += rate * torch.outer(unit, value[token, head] - unit @ state)
                out[token, head] = query[token, head // shared] @ state
        states[target] = after
    return out, states


# the convolution


def check_convolution(
    rows: list[Row], channels: int, size: int, dtype: torch.dtype, *, has_bias: bool = False
) -> None:
    segments, sources, slots = segments_of(rows)
    tokens = int(segments[:, 1].max()) if len(segments) else 0
    inputs = within(10, random(tokens + 2, channels, seed=1).to(dtype))
    inputs[tokens:] = torch.nan  # of no segment
    weight = random(channels, size, seed=2).to(dtype)
    bias = random(channels, seed=3).to(dtype) if has_bias else None
    states = states_with(sources, slots, (channels, size - 1), dtype)
    wanted, wanted_states = convolved(inputs, weight, bias, states, segments)
    for silu in (False, True):
        out, found_states = torch.full_like(inputs, torch.nan), states.clone()
        gpu.causal_convolution(out, inputs, weight, bias, found_states, segments, silu)
        check_close(out, torch.nn.functional.silu(wanted) if silu else wanted, dtype)
        assert torch.equal(found_states.nan_to_num(99), wanted_states.to(dtype).nan_to_num(99))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("channels", "size", "features"), [(5, 4, {}), (130, 3, {"has_bias": True}), (3, 1, {})]
)
def test_convolutions_of_every_size(
    channels: int, size: int, features: dict[str, bool], dtype: torch.dtype
) -> None:
    rows = [Row((1,)), Row((3, 9), has_state=False), Row((1, 1, 2)), Row((0,), ends_in_place=False)]
    check_convolution(rows, channels, size, dtype, **features)


@st.composite
def any_rows(draw: st.DrawFn, lengths: list[int]) -> list[Row]:
    row = st.builds(
        Row,
        st.lists(st.sampled_from(lengths), min_size=1, max_size=3).map(tuple),
        st.integers(0, 130),
        st.booleans(),
        st.booleans(),
    )
    return draw(st.lists(row, min_size=0, max_size=3))


quickly = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@quickly
@given(rows=any_rows([0, 1, 2, 3, 9]), size=st.integers(1, 5))
def test_convolutions_of_any_rows(rows: list[Row], size: int) -> None:
    check_convolution(rows, 7, size, torch.float32)


# the delta rule


def rule_inputs(
    rows: list[Row], heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype
) -> dict[str, Tensor]:
    """`heads`: key heads, and value heads of each; `dims`: of keys and of values."""
    segments, sources, slots = segments_of(rows)
    tokens = int(segments[:, 1].max()) if len(segments) else 0
    (key_heads, shared), (key_dim, value_dim) = heads, dims
    value_heads = key_heads * shared
    tensors = {
        "query": random(tokens + 2, key_heads, key_dim, seed=1).to(dtype),
        "key": random(tokens + 2, key_heads, key_dim, seed=2).to(dtype),
        "value": random(tokens + 2, value_heads, value_dim, seed=3).to(dtype),
        "decay": -random(tokens + 2, value_heads, seed=4).abs() / 8,
        "beta": random(tokens + 2, value_heads, seed=5).sigmoid(),
    }
    tensors = {name: within(10, tensor) for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor[tokens:] = torch.nan  # of no segment
    shape = (value_heads, key_dim, value_dim)
    states = states_with(sources, slots, shape, torch.float32)
    return {**tensors, "states": states, "segments": segments}


def apply(inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    changed: dict[str, Any] = {**inputs, "states": inputs["states"].clone()}
    out = torch.full_like(inputs["value"], torch.nan)
    gpu.gated_delta_rule(out, **changed)
    return out, changed["states"]


def check_rule(inputs: dict[str, Tensor]) -> None:
    out, states = apply(inputs)
    wanted, wanted_states = ruled(**inputs)
    dtype = inputs["query"].dtype
    check_close(out, wanted, dtype)
    check_close(states, wanted_states, dtype)
    kept = sorted(set(range(len(states))) - set(inputs["segments"][:, 3].tolist()))
    assert torch.equal(states[kept].nan_to_num(99), inputs["states"][kept].nan_to_num(99))


@pytest.mark.parametrize(
    ("heads", "dims", "dtype"),
    [
        *(((1, 3), (12, 8), dtype) for dtype in DTYPES),
        ((2, 1), (8, 12), torch.bfloat16),
        ((1, 1), (24, 24), torch.float32),
        ((1, 2), (24, 24), torch.bfloat16),
        ((1, 1), (128, 40), torch.bfloat16),
        ((1, 1), (128, 40), torch.float32),
    ],
    ids=str,
)
def test_delta_rules_of_every_size(
    heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype
) -> None:
    check_rule(rule_inputs(MIXED, heads, dims, dtype))


@quickly
@given(rows=any_rows([0, 1, 1, 2, 63, 64, 65]), dtype=st.sampled_from(DTYPES))
def test_delta_rules_of_any_rows(rows: list[Row], dtype: torch.dtype) -> None:
    check_rule(rule_inputs(rows, (1, 1), (8, 8), dtype))


def test_more_rows_than_are_searched_at_once() -> None:
    rows = [Row((1,), number, ends_in_place=number % 2 == 0) for number in range(34)]
    check_rule(rule_inputs([*rows, Row((65, 2), 3)], (1, 1), (8, 8), torch.bfloat16))


def test_keys_longer_than_are_scanned() -> None:
    check_rule(rule_inputs([Row((1,)), Row((4, 3), 60)], (1, 1), (200, 8), torch.bfloat16))


@pytest.mark.parametrize("beta", [0.5, 1.0])
def test_a_repeated_token(beta: float) -> None:
    """Equal keys and no decay give the triangular system with the largest powers."""
    inputs = rule_inputs([Row((130,), 0)], (1, 1), (24, 24), torch.bfloat16)
    for name in ("query", "key", "value"):
        inputs[name][:] = inputs[name][:1].clone()
    inputs["decay"][:], inputs["beta"][:] = 0.0, beta
    check_rule(inputs)


def test_decays_that_forget_everything() -> None:
    inputs = rule_inputs([Row((130,), 7)], (1, 1), (24, 24), torch.bfloat16)
    inputs["decay"][::5] = -200.0
    check_rule(inputs)


def test_a_prompt_is_computed_in_the_same_way_however_it_is_cut() -> None:
    """To the bit, if the cuts lie at multiples of a chunk."""
    whole = rule_inputs([Row((150,), 10)], (1, 2), (24, 16), torch.bfloat16)
    cut = {**whole, "segments": segments_of([Row((54, 64, 32), 10)])[0]}
    room = torch.full((9, *whole["states"].shape[1:]), torch.nan)
    room[1] = whole["states"][1]
    cut["states"] = room
    (out, states), (cut_out, cut_states) = apply(whole), apply(cut)
    assert torch.equal(out[:150], cut_out[:150])
    assert torch.equal(states[1], cut_states[1])


def test_only_the_programs_that_have_work_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for unused in ("prepare_chunks", "scan_delta_rule"):
        monkeypatch.delattr(gpu, unused)
    single = rule_inputs([Row((1,)), Row((1,), 64)], (1, 1), (8, 8), torch.bfloat16)
    tokens = {name: single[name][:2] for name in ("query", "key", "value", "decay", "beta")}
    check_rule({**single, **tokens})
    check_rule(rule_inputs([Row((3,))], (1, 1), (8, 8), torch.float32))


def test_chunks_are_those_of_the_plain_operator() -> None:
    assert recurrent_constants.CHUNK == operators.CHUNK


def test_tensors_that_would_be_read_wrongly_are_refused() -> None:
    inputs = rule_inputs([Row((3,))], (2, 1), (8, 8), torch.float32)
    turned = inputs["key"].mT.contiguous().mT
    with pytest.raises(UnsupportedByGpu, match="contiguous"):
        apply({**inputs, "key": turned})
    channels = random(4, 6, seed=1).T
    segments, states = inputs["segments"], torch.zeros(4, 4, 2)
    with pytest.raises(UnsupportedByGpu, match="contiguous"):
        gpu.causal_convolution(
            torch.empty(6, 4), channels, torch.ones(4, 3), None, states, segments, silu=False
        )
