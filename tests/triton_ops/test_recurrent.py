"""Convolutions and the gated delta rule against their formulas in float64, one token after another,
over segments that are cut anywhere."""

import math
import platform
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.triton_ops.segments import (
    CUTS,
    DTYPES,
    MIXED,
    SLOTS,
    Row,
    Step,
    assert_close,
    assert_cuts_change_nothing,
    assert_nothing_changes,
    assert_rows_do_not_depend_on_others,
    make_step,
    only_written,
    poisoned,
)
from triton_ops import causal_convolution, gated_delta_rule

pytestmark = pytest.mark.usefixtures("implementation")

# ------------------------------------------------------------------------------------ convolutions


@dataclass
class ConvolutionCall:
    """The arguments of `causal_convolution`."""

    out: Tensor
    inputs: Tensor
    weight: Tensor
    bias: Tensor | None
    states: Tensor
    silu: bool = True

    def run(self, step: Step) -> None:
        causal_convolution(
            self.out, self.inputs, self.weight, self.bias, self.states, step.segments, self.silu
        )

    def part(self, tokens: range) -> "ConvolutionCall":
        """The call for some tokens, with the same states."""
        some = slice(tokens.start, tokens.stop)
        return replace(self, out=self.out[some], inputs=self.inputs[some])


def a_convolution(
    step: Step, channels: int, kernel_size: int, dtype: torch.dtype, *, bias: bool, seed: int = 1
) -> ConvolutionCall:
    generator = torch.Generator().manual_seed(seed)
    count = sum(len(tokens) for tokens in step.tokens)
    # the inputs are some columns of a projection
    inputs, weight, added, states = (
        torch.randn(*shape, generator=generator).to(dtype)
        for shape in (
            (count, 2 * channels + 3),
            (channels, kernel_size),
            (channels,),
            (SLOTS, channels, kernel_size - 1),
        )
    )
    return ConvolutionCall(
        torch.full((count, channels), torch.nan, dtype=dtype),
        inputs[:, 3 : 3 + channels],
        weight,
        added if bias else None,
        poisoned(states, step),
    )


def convolved(call: ConvolutionCall, inputs: Tensor, *, silu: bool) -> Tensor:
    """All positions of one sequence in float64: out[t] = sum over j of weight[j] inputs[t - K + 1 +
    j]. `inputs` has those before the first position."""
    kernel_size = call.weight.shape[1]
    result = []
    for place in range(kernel_size - 1, len(inputs)):
        seen = inputs[place - kernel_size + 1 : place + 1].double()
        total = (call.weight.double().T * seen).sum(0)
        total = total if call.bias is None else total + call.bias.double()
        result.append(total * total.sigmoid() if silu else total)
    return torch.stack(result)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("channels", "kernel_size", "bias", "silu"),
    [
        (8, 4, False, True),
        (129, 4, True, True),
        (300, 3, True, False),
        (12, 2, False, False),
        (33, 5, True, True),
        (7, 1, False, False),
    ],
)
def test_each_channel_sees_its_last_positions(
    *, dtype: torch.dtype, channels: int, kernel_size: int, bias: bool, silu: bool
) -> None:
    step = make_step(MIXED)
    call = a_convolution(step, channels, kernel_size, dtype, bias=bias)
    call.silu = silu
    before = call.states.clone()
    call.run(step)
    only_written(before, call.states, step)
    for tokens, source, written in zip(step.tokens, step.sources, step.written, strict=True):
        kept = before[source].T if source >= 0 else torch.zeros(kernel_size - 1, channels)
        inputs = torch.cat((kept.to(dtype), call.inputs[tokens.start : tokens.stop]))
        expected = convolved(call, inputs, silu=silu)
        found = call.out[tokens.start : tokens.stop]
        assert_close(found.double(), expected, dtype)
        last = inputs[len(inputs) - kernel_size + 1 :].T
        assert torch.equal(call.states[written[-1]], last), "the inputs themselves"


# -------------------------------------------------------------------------------- the delta rule


@dataclass
class DeltaCall:
    """The arguments of `gated_delta_rule`."""

    out: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    beta: Tensor
    states: Tensor

    def run(self, step: Step) -> None:
        gated_delta_rule(
            self.out,
            self.query,
            self.key,
            self.value,
            self.decay,
            self.beta,
            self.states,
            step.segments,
        )

    def part(self, tokens: range) -> "DeltaCall":
        """The call for some tokens, with the same states."""
        some = slice(tokens.start, tokens.stop)
        return DeltaCall(
            self.out[some],
            self.query[some],
            self.key[some],
            self.value[some],
            self.decay[some],
            self.beta[some],
            self.states,
        )


@dataclass(frozen=True)
class Heads:
    key_heads: int
    shared: int
    key_dim: int
    value_dim: int


def a_delta_call(
    step: Step, heads: Heads, dtype: torch.dtype = torch.float32, seed: int = 1
) -> DeltaCall:
    generator = torch.Generator().manual_seed(seed)
    count = sum(len(tokens) for tokens in step.tokens)
    value_heads = heads.key_heads * heads.shared
    # queries, keys and values lie side by side, as a convolution leaves them
    sizes = [
        heads.key_heads * heads.key_dim,
        heads.key_heads * heads.key_dim,
        value_heads * heads.value_dim,
    ]
    mixed = torch.randn(count, sum(sizes), generator=generator).to(dtype)
    query, key, value = torch.split(mixed, sizes, dim=1)
    decay = -torch.rand(count, value_heads, generator=generator).mul(4).exp().sub(0.9).mul(0.3)
    beta = torch.rand(count, value_heads, generator=generator)
    shape = (SLOTS, value_heads, heads.key_dim, heads.value_dim)
    return DeltaCall(
        torch.full((count, value_heads, heads.value_dim), torch.nan, dtype=dtype),
        torch.unflatten(query, 1, (heads.key_heads, heads.key_dim)),
        torch.unflatten(key, 1, (heads.key_heads, heads.key_dim)),
        torch.unflatten(value, 1, (value_heads, heads.value_dim)),
        decay,
        beta,
        poisoned(torch.randn(*shape, generator=generator), step),
    )


def recurrence(call: DeltaCall, state: Tensor) -> tuple[Tensor, Tensor]:
    """Equation 10 of arXiv 2412.06464 in float64: S_t = S_(t-1) alpha_t (I - beta_t k_t k_t^T) +
    beta_t v_t k_t^T, and o_t = S_t q_t. States are [heads, value_dim, key_dim] here."""
    shared = call.value.shape[1] // call.key.shape[1]
    query, key = (
        (given.double() / given.double().norm(dim=-1, keepdim=True)).repeat_interleave(shared, 1)
        for given in (call.query, call.key)
    )
    key_dim = key.shape[-1]
    value, alpha, beta = call.value.double(), call.decay.double().exp(), call.beta.double()
    outputs = []
    for t in range(len(value)):
        outer = torch.einsum("hk,hj->hkj", key[t], key[t])
        kept = torch.eye(key_dim, dtype=torch.float64) - beta[t, :, None, None] * outer
        written = torch.einsum("hv,hk->hvk", value[t], key[t])
        state = alpha[t, :, None, None] * (state @ kept) + beta[t, :, None, None] * written
        outputs.append(torch.einsum("hvk,hk->hv", state, query[t]) * key_dim**-0.5)
    return torch.stack(outputs), state


def close_to_recurrence(call: DeltaCall, before: Tensor, step: Step) -> None:
    dtype = call.out.dtype
    for tokens, source, written in zip(step.tokens, step.sources, step.written, strict=True):
        start = before[source] if source >= 0 else torch.zeros(before.shape[1:])
        part = call.part(tokens)
        expected, state = recurrence(part, start.double().mT)
        assert_close(part.out.double(), expected, dtype)
        found = call.states[written[-1]].double().mT
        torch.testing.assert_close(found, state, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "heads",
    [Heads(2, 1, 8, 8), Heads(1, 3, 12, 24), Heads(2, 3, 24, 12), Heads(1, 2, 20, 136)],
    ids=str,
)
def test_it_is_the_recurrence_over_segments_of_any_kind(dtype: torch.dtype, heads: Heads) -> None:
    step = make_step(MIXED)
    call = a_delta_call(step, heads, dtype)
    before = call.states.clone()
    call.run(step)
    only_written(before, call.states, step)
    close_to_recurrence(call, before, step)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_of_128(dtype: torch.dtype) -> None:
    step = make_step([Row(3, (1,)), Row(0, (64, 15), is_new=True), Row(9, (1,), in_place=True)])
    call = a_delta_call(step, Heads(1, 1, 128, 128), dtype)
    before = call.states.clone()
    call.run(step)
    close_to_recurrence(call, before, step)


def test_a_state_that_is_all_but_forgotten() -> None:
    """A factor of exp(-300) is 0 in float32, and the factors between later positions are not."""
    step = make_step([Row(0, (64,)), Row(10, (1,))])
    call = a_delta_call(step, Heads(1, 1, 8, 8))
    call.decay[::5] = -300.0
    before = call.states.clone()
    call.run(step)
    close_to_recurrence(call, before, step)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="others are not slow")
@pytest.mark.parametrize("length", [1, 2])
def test_no_number_below_the_normal_range_is_kept(implementation: str, length: int) -> None:
    """A core multiplies such numbers a hundred times more slowly. The caller's are left alone."""
    if implementation == "plain":
        pytest.skip("torch's own operators keep them")
    smallest = torch.finfo(torch.float32).smallest_normal
    step = make_step([Row(1, (length,))])
    call = a_delta_call(step, Heads(1, 2, 8, 24))
    call.states[:] = 1e-20
    call.decay[:] = -30.0 / length
    call.beta[:] = 0.0
    assert 1e-20 * math.exp(-45.0) < smallest < 1e-20 * math.exp(-30.0)
    call.run(step)
    assert bool((call.states[step.written[0][-1]] > smallest).all())
    call.states[:] = 1e-20
    call.decay[:] = -45.0 / length
    call.run(step)
    assert bool((call.states[step.written[0][-1]] == 0.0).all())
    assert float(torch.tensor([1e-39]) * 1.0) > 0.0


def test_a_step_without_segments_changes_nothing() -> None:
    step = make_step([])
    delta = a_delta_call(step, Heads(2, 1, 8, 8))
    convolution = a_convolution(step, 150, 4, torch.float32, bias=True)
    assert_nothing_changes(delta, step)
    assert_nothing_changes(convolution, step)


# --------------------------------------------------------------------------------- the same bits


@pytest.mark.parametrize("lengths", CUTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_a_prompt_that_is_cut_at_chunks_gives_the_same_bits(
    implementation: str, dtype: torch.dtype, lengths: tuple[int, ...]
) -> None:
    delta = partial(a_delta_call, heads=Heads(2, 2, 24, 40), dtype=dtype)
    convolution = partial(a_convolution, channels=150, kernel_size=4, dtype=dtype, bias=True)
    assert_cuts_change_nothing(implementation, delta, lengths)
    assert_cuts_change_nothing(implementation, convolution, lengths)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_a_row_does_not_depend_on_the_others(implementation: str, dtype: torch.dtype) -> None:
    for heads in (Heads(2, 3, 24, 40), Heads(1, 2, 128, 128)):
        delta = partial(a_delta_call, heads=heads, dtype=dtype)
        assert_rows_do_not_depend_on_others(implementation, delta)
    convolution = partial(a_convolution, channels=150, kernel_size=4, dtype=dtype, bias=True)
    assert_rows_do_not_depend_on_others(implementation, convolution)
