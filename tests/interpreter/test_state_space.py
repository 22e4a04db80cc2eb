"""The GPU's recurrence of Mamba-2 and selective scan of Mamba against their definitions in float64,
token by token: rows of any lengths, cut anywhere, with NaN in every slot and token that must not be
read."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.interpreter.test_recurrent import (
    DTYPES,
    MIXED,
    Row,
    any_rows,
    check_close,
    quickly,
    random,
    segments_of,
    states_with,
    within,
)
from triton_ops import recurrent as operators
from triton_ops.gpu import state_space as gpu
from triton_ops.gpu.configurations import UnsupportedByGpu

DUAL = ("query", "key", "value", "decay", "time_step")
SELECTIVE = ("query", "key", "value", "time_step")
SHORT = [
    Row((1,), 70),
    Row((3, 17, 9), 61),
    Row((1,), has_state=False, ends_in_place=False),
    Row((8, 6), has_state=False, ends_in_place=False),
    Row((1, 1), 63),
    Row((0,), 5, ends_in_place=False),
    Row((2,), 100),
]
"""Rows of every kind for a scan that loads 8 tokens at a time."""


@pytest.fixture(autouse=True)
def poisoned_scratch() -> Iterator[None]:
    """Memory of torch.empty is NaN here: a number that is read but was never written shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


# the definitions


def dual_recurrence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    time_step: Tensor,
    states: Tensor,
    segments: Tensor,
) -> tuple[Tensor, Tensor]:
    """Section 2 of arXiv 2405.21060, whose state is the transpose of ours."""
    query, key, value, states = query.double(), key.double(), value.double(), states.double()
    out, states = torch.full_like(value, torch.nan), states.clone()
    shared = value.shape[1] // key.shape[1]
    for begin, end, source, target, _ in segments.tolist():
        after = torch.zeros_like(states[0]) if source < 0 else states[source].clone()
        for token in range(begin, end):
            for head, state in enumerate(after):
                step = time_step[token, head].double()
                state *= decay[token, head].double().exp()
                state += step * torch.outer(key[token, head // shared], value[token, head])
                out[token, head] = query[token, head // shared] @ state
        states[target] = after
    return out, states


def selective_recurrence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    time_step: Tensor,
    rates: Tensor,
    states: Tensor,
    segments: Tensor,
) -> tuple[Tensor, Tensor]:
    """Section 3.2 of arXiv 2312.00752."""
    query, key, value, states = query.double(), key.double(), value.double(), states.double()
    out, states, rates = torch.full_like(value, torch.nan), states.clone(), rates.double()
    for begin, end, source, target, _ in segments.tolist():
        state = torch.zeros_like(states[0]) if source < 0 else states[source].clone()
        for token in range(begin, end):
            steps = time_step[token].double()
            state *= (steps[:, None] * rates).exp()
            state += torch.outer(steps * value[token], key[token])
            out[token] = state @ query[token]
        states[target] = state
    return out, states


# Mamba-2


def dual_inputs(
    rows: list[Row], heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype
) -> dict[str, Tensor]:
    """`heads`: groups, and heads of each; `dims`: of a query, and of a value."""
    segments, sources, slots = segments_of(rows)
    tokens = int(segments[:, 1].max()) if len(segments) else 0
    (groups, shared), (state_size, head_dim) = heads, dims
    num_heads = groups * shared
    tensors = {
        "query": random(tokens + 2, groups, state_size, seed=1).to(dtype),
        "key": random(tokens + 2, groups, state_size, seed=2).to(dtype),
        "value": random(tokens + 2, num_heads, head_dim, seed=3).to(dtype),
        "decay": -random(tokens + 2, num_heads, seed=4).abs() / 8,
        "time_step": random(tokens + 2, num_heads, seed=5).abs(),
    }
    tensors = {name: within(10, tensor) for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor[tokens:] = torch.nan  # of no segment
    states = states_with(sources, slots, (num_heads, state_size, head_dim), torch.float32)
    return {**tensors, "states": states, "segments": segments}


def apply_dual(inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    changed: dict[str, Any] = {**inputs, "states": inputs["states"].clone()}
    out = torch.full_like(inputs["value"], torch.nan)
    gpu.state_space_dual(out, **changed)
    return out, changed["states"]


def check_dual(inputs: dict[str, Tensor]) -> None:
    out, states = apply_dual(inputs)
    wanted, wanted_states = dual_recurrence(**inputs)
    dtype = inputs["query"].dtype
    check_close(out, wanted, dtype)
    check_close(states, wanted_states, dtype)
    check_kept(states, inputs)


def check_kept(states: Tensor, inputs: dict[str, Tensor]) -> None:
    """Slots that no segment writes are as they were."""
    kept = sorted(set(range(len(states))) - set(inputs["segments"][:, 3].tolist()))
    assert torch.equal(states[kept].nan_to_num(99), inputs["states"][kept].nan_to_num(99))


@pytest.mark.parametrize(
    ("heads", "dims", "dtype"),
    [
        *(((1, 3), (12, 8), dtype) for dtype in DTYPES),
        ((2, 1), (8, 20), torch.bfloat16),
        ((1, 2), (40, 80), torch.float16),
        ((1, 1), (128, 24), torch.bfloat16),
        ((1, 1), (200, 24), torch.float32),
        ((1, 1), (200, 24), torch.float16),
    ],
    ids=str,
)
def test_recurrences_of_mamba_2_of_every_size(
    heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype
) -> None:
    check_dual(dual_inputs(MIXED, heads, dims, dtype))


@quickly
@given(rows=any_rows([0, 1, 1, 2, 63, 64, 65]), dtype=st.sampled_from(DTYPES))
def test_recurrences_of_mamba_2_of_any_rows(rows: list[Row], dtype: torch.dtype) -> None:
    check_dual(dual_inputs(rows, (1, 1), (8, 8), dtype))


def test_states_longer_than_are_scanned() -> None:
    check_dual(dual_inputs([Row((1,)), Row((4, 3), 60)], (1, 1), (300, 8), torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_decays_that_forget_everything(dtype: torch.dtype) -> None:
    """Their sums over a chunk are in the thousands, and tell the decays between them apart."""
    inputs = dual_inputs([Row((130,), 7)], (1, 1), (24, 24), dtype)
    inputs["decay"][::5] = -200.0
    inputs["decay"][2::25] = -torch.inf
    check_dual(inputs)


@pytest.mark.parametrize(("query_size", "key_size"), [(50.0, 50.0), (100.0, 1e-4)])
def test_float16_does_not_run_out_of_exponents(query_size: float, key_size: float) -> None:
    """Products of 128 pairs of 50s, and states of them, are more than float16 has, and its numbers
    of a ten-thousandth have few bits."""
    inputs = dual_inputs([Row((70,), 3)], (1, 1), (128, 16), torch.float16)
    inputs["query"] *= query_size
    inputs["key"] *= key_size
    inputs["states"] *= key_size
    inputs["value"] /= 64.0  # the outputs themselves fit
    check_dual(inputs)


def test_float16_states_of_almost_nothing() -> None:
    """A state of numbers below the normal ones has no inverse."""
    inputs = dual_inputs([Row((64, 64, 20))], (1, 1), (16, 16), torch.float16)
    inputs["decay"][:] = -1.45
    inputs["time_step"][:] = 0.0
    check_dual(inputs)


def test_a_prompt_is_computed_in_the_same_way_however_it_is_cut() -> None:
    """To the bit, if the cuts lie at multiples of a chunk: in one step, or in one step each."""
    whole = dual_inputs([Row((150,), 10)], (1, 2), (24, 16), torch.bfloat16)
    out, states = apply_dual(whole)
    room = torch.full((9, *whole["states"].shape[1:]), torch.nan)
    room[1] = whole["states"][1]
    segments = segments_of([Row((54, 64, 32), 10)])[0]
    cut_out, cut_states = apply_dual({**whole, "states": room, "segments": segments})
    assert torch.equal(out[:150], cut_out[:150])
    assert torch.equal(states[1], cut_states[1])
    apart = whole["states"].clone()
    for begin, end in ((0, 54), (54, 118), (118, 150)):
        segment = torch.tensor([[begin, end, 1, 1, 10 + begin]], dtype=torch.int32)
        step_out, apart = apply_dual({**whole, "states": apart, "segments": segment})
        assert torch.equal(out[begin:end], step_out[begin:end])
    assert torch.equal(states[1], apart[1])


def test_only_the_programs_that_have_work_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for unused in ("attend_in_chunks", "scan_dual"):
        monkeypatch.delattr(gpu, unused)
    single = dual_inputs([Row((1,)), Row((1,), 64)], (1, 1), (8, 8), torch.bfloat16)
    check_dual({**single, **{name: single[name][:2] for name in DUAL}})
    check_dual(dual_inputs([Row((3,))], (1, 1), (8, 8), torch.float32))


# Mamba


def selective_inputs(
    rows: list[Row], channels: int, state_size: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    segments, sources, slots = segments_of(rows)
    tokens = int(segments[:, 1].max()) if len(segments) else 0
    tensors = {
        "query": random(tokens + 2, state_size, seed=1).to(dtype),
        "key": random(tokens + 2, state_size, seed=2).to(dtype),
        "value": random(tokens + 2, channels, seed=3).to(dtype),
        "time_step": random(tokens + 2, channels, seed=4).abs(),
    }
    tensors = {name: within(10, tensor) for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor[tokens:] = torch.nan  # of no segment
    rates = -random(channels, state_size, seed=5).abs()
    states = states_with(sources, slots, (channels, state_size), torch.float32)
    return {**tensors, "rates": rates, "states": states, "segments": segments}


def apply_selective(inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    changed: dict[str, Any] = {**inputs, "states": inputs["states"].clone()}
    out = torch.full_like(inputs["value"], torch.nan)
    gpu.selective_scan(out, **changed)
    return out, changed["states"]


def check_selective(inputs: dict[str, Tensor]) -> None:
    out, states = apply_selective(inputs)
    wanted, wanted_states = selective_recurrence(**inputs)
    dtype = inputs["query"].dtype
    check_close(out, wanted, dtype)
    check_close(states, wanted_states, torch.float32)
    check_kept(states, inputs)


@pytest.mark.parametrize(
    ("channels", "state_size", "dtype"),
    [
        *((21, 16, dtype) for dtype in DTYPES),
        (5, 3, torch.bfloat16),
        (3, 1, torch.float32),
        (2, 300, torch.float16),
    ],
    ids=str,
)
def test_selective_scans_of_every_size(channels: int, state_size: int, dtype: torch.dtype) -> None:
    check_selective(selective_inputs(SHORT, channels, state_size, dtype))


@quickly
@given(rows=any_rows([0, 1, 1, 2, 7, 8, 9]), dtype=st.sampled_from(DTYPES))
def test_selective_scans_of_any_rows(rows: list[Row], dtype: torch.dtype) -> None:
    check_selective(selective_inputs(rows, 7, 5, dtype))


def test_selective_scans_of_single_tokens() -> None:
    rows = [Row((1,)), Row((1,), has_state=False), Row((1,), 64, ends_in_place=False)]
    inputs = selective_inputs(rows, 7, 16, torch.bfloat16)
    check_selective({**inputs, **{name: inputs[name][:3] for name in SELECTIVE}})


def test_rates_that_forget_everything() -> None:
    inputs = selective_inputs([Row((20,))], 7, 5, torch.bfloat16)
    inputs["time_step"][::3] = 1e4
    check_selective(inputs)


def test_a_selective_scan_is_the_same_however_it_is_cut() -> None:
    """To the bit, wherever the cuts lie."""
    whole = selective_inputs([Row((40,), 3)], 7, 16, torch.bfloat16)
    room = torch.full((9, 7, 16), torch.nan)
    room[1] = whole["states"][1]
    segments = segments_of([Row((1, 12, 27), 3)])[0]
    out, states = apply_selective(whole)
    cut_out, cut_states = apply_selective({**whole, "states": room, "segments": segments})
    assert torch.equal(out[:40], cut_out[:40])
    assert torch.equal(states[1], cut_states[1])


def test_tensors_that_would_be_read_wrongly_are_refused() -> None:
    dual = dual_inputs([Row((3,))], (2, 1), (8, 8), torch.float32)
    with pytest.raises(UnsupportedByGpu, match="contiguous"):
        apply_dual({**dual, "key": dual["key"].mT.contiguous().mT})
    selective = selective_inputs([Row((3,))], 7, 5, torch.float32)
    with pytest.raises(UnsupportedByGpu, match="contiguous"):
        apply_selective({**selective, "rates": selective["rates"].T.contiguous().T})


def test_chunks_are_those_of_the_plain_operator() -> None:
    assert gpu.CHUNK == operators.CHUNK
