"""The operators of Mamba and Mamba-2, against their recurrences in float64."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from triton_ops import reference_operators, selective_scan, state_space_dual
from triton_ops.recurrent import CHUNK

LENGTH = 2 * CHUNK + 37
SLOTS = 5


@pytest.fixture(autouse=True)
def plain() -> Iterator[None]:
    with reference_operators():
        yield


def whole_prompt(source: int = -1) -> Tensor:
    return torch.tensor([[0, LENGTH, source, 1, 0]], dtype=torch.int32)


def cut_prompt() -> Tensor:
    """The prompt in segments of one row, which are cut at multiples of CHUNK."""
    cuts = [0, CHUNK, 2 * CHUNK, LENGTH]
    rows = [[begin, end, 2, 2, begin] for begin, end in pairwise(cuts)]
    rows[0][2] = -1
    return torch.tensor(rows, dtype=torch.int32)


def token_by_token() -> Tensor:
    """Decode steps of one row each, which the caller runs one after another."""
    rows = [[token, token + 1, 3 if token else -1, 3, token] for token in range(LENGTH)]
    return torch.tensor(rows, dtype=torch.int32)


def dual_inputs(groups: int = 2) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    heads, head_dim, state_size = 4, 6, 5
    query = torch.randn(LENGTH, groups, state_size)
    key = torch.randn(LENGTH, groups, state_size)
    value = torch.randn(LENGTH, heads, head_dim)
    time_step = functional.softplus(torch.randn(LENGTH, heads) - 1)
    decay = -time_step * torch.rand(heads).exp()
    return query, key, value, decay, time_step


def dual_recurrence(inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """The outputs and the last state, [heads, state_size, head_dim], in float64."""
    query, key, value, decay, time_step = (part.double() for part in inputs)
    shared = value.shape[1] // query.shape[1]
    state = torch.zeros(value.shape[1], query.shape[2], value.shape[2], dtype=torch.float64)
    outputs = []
    for token in range(LENGTH):
        for head in range(value.shape[1]):
            added = torch.outer(key[token, head // shared], value[token, head])
            state[head] *= decay[token, head].exp()
            state[head] += time_step[token, head] * added
        of_heads = [query[token, head // shared] @ state[head] for head in range(value.shape[1])]
        outputs.append(torch.stack(of_heads))
    return torch.stack(outputs), state


def run_dual(inputs: tuple[Tensor, ...], segments: Tensor) -> tuple[Tensor, Tensor]:
    query, _, value, *_ = inputs
    states = torch.full((SLOTS, value.shape[1], query.shape[2], value.shape[2]), torch.nan)
    out = torch.empty_like(value)
    state_space_dual(out, *inputs, states, segments)
    return out, states


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_state_space_dual_is_its_recurrence(groups: int) -> None:
    inputs = dual_inputs(groups)
    expected, last = dual_recurrence(inputs)
    out, states = run_dual(inputs, whole_prompt())
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states[1].double(), last, atol=1e-5, rtol=1e-5)


def test_state_space_dual_does_not_depend_on_cuts_at_multiples() -> None:
    inputs = dual_inputs()
    whole, states = run_dual(inputs, whole_prompt())
    cut, cut_states = run_dual(inputs, cut_prompt())
    assert torch.equal(whole, cut)
    assert torch.equal(states[1], cut_states[2])


def test_state_space_dual_step_by_step() -> None:
    inputs = dual_inputs()
    expected, last = dual_recurrence(inputs)
    states = torch.full((SLOTS, 4, 5, 6), torch.nan)
    out = torch.empty_like(inputs[2])
    for segment in token_by_token():
        state_space_dual(out, *inputs, states, segment[None])
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states[3].double(), last, atol=1e-5, rtol=1e-5)


def selective_inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    channels, state_size = 7, 5
    query = torch.randn(LENGTH, state_size)
    key = torch.randn(LENGTH, state_size)
    value = torch.randn(LENGTH, channels)
    time_step = functional.softplus(torch.randn(LENGTH, channels) - 1)
    rates = -torch.rand(channels, state_size).exp()
    return query, key, value, time_step, rates


def selective_recurrence(inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """The outputs and the last state, [channels, state_size], in float64."""
    query, key, value, time_step, rates = (part.double() for part in inputs)
    state = torch.zeros_like(rates)
    outputs = []
    for token in range(LENGTH):
        for channel in range(value.shape[1]):
            step = time_step[token, channel]
            state[channel] *= (step * rates[channel]).exp()
            state[channel] += step * key[token] * value[token, channel]
        outputs.append(state @ query[token])
    return torch.stack(outputs), state


@pytest.mark.parametrize("segments", [whole_prompt(), cut_prompt()], ids=["whole", "cut"])
def test_selective_scan_is_its_recurrence(segments: Tensor) -> None:
    inputs = selective_inputs()
    expected, last = selective_recurrence(inputs)
    states = torch.full((SLOTS, 7, 5), torch.nan)
    out = torch.empty_like(inputs[2])
    selective_scan(out, *inputs, states, segments)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states[segments[-1, 3]].double(), last, atol=1e-5, rtol=1e-5)


def test_selective_scan_step_by_step() -> None:
    inputs = selective_inputs()
    expected, _ = selective_recurrence(inputs)
    states = torch.full((SLOTS, 7, 5), torch.nan)
    out = torch.empty_like(inputs[2])
    for segment in token_by_token():
        selective_scan(out, *inputs, states, segment[None])
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
