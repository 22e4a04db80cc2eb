"""The operators of Mamba and Mamba-2 against their recurrences in float64, one token after another,
over segments that are cut anywhere."""

import math
import platform
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

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
from triton_ops import selective_scan, state_space_dual

pytestmark = pytest.mark.usefixtures("implementation")

IS_SLOW_BELOW_NORMAL = platform.machine() in ("x86_64", "AMD64")
"""Whether a processor takes far longer to multiply numbers below the normal range."""


# ------------------------------------------------------------------------------------ the duality


@dataclass
class DualCall:
    """The arguments of `state_space_dual`."""

    out: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    time_step: Tensor
    states: Tensor

    def run(self, step: Step) -> None:
        state_space_dual(
            self.out,
            self.query,
            self.key,
            self.value,
            self.decay,
            self.time_step,
            self.states,
            step.segments,
        )

    def part(self, tokens: range) -> "DualCall":
        """The call for some tokens, with the same states."""
        some = slice(tokens.start, tokens.stop)
        return DualCall(
            self.out[some],
            self.query[some],
            self.key[some],
            self.value[some],
            self.decay[some],
            self.time_step[some],
            self.states,
        )


@dataclass(frozen=True)
class Heads:
    groups: int
    shared: int
    """Heads of a group."""
    state_size: int
    head_dim: int


def a_dual_call(step: Step, heads: Heads, dtype: torch.dtype = torch.float32) -> DualCall:
    generator = torch.Generator().manual_seed(1)
    count, num_heads = sum(len(tokens) for tokens in step.tokens), heads.groups * heads.shared
    of_group, of_value = (heads.groups, heads.state_size), (num_heads, heads.head_dim)
    # values, keys and queries lie side by side, as a convolution leaves them
    sizes = [math.prod(of_value), math.prod(of_group), math.prod(of_group)]
    mixed = torch.randn(count, sum(sizes), generator=generator).to(dtype)
    value, key, query = torch.split(mixed, sizes, dim=1)
    time_step = functional.softplus(torch.randn(count, num_heads, generator=generator) - 1)
    shape = (SLOTS, num_heads, heads.state_size, heads.head_dim)
    return DualCall(
        torch.full((count, *of_value), torch.nan, dtype=dtype),
        torch.unflatten(query, 1, of_group),
        torch.unflatten(key, 1, of_group),
        torch.unflatten(value, 1, of_value),
        -time_step * torch.rand(num_heads, generator=generator).exp(),
        time_step,
        poisoned(torch.randn(*shape, generator=generator), step),
    )


def dual_recurrence(call: DualCall, state: Tensor) -> tuple[Tensor, Tensor]:
    """Section 2 of arXiv 2405.21060 in float64: S_t = exp(decay_t) S_(t-1) + dt_t k_t v_t^T, and
    o_t = S_t^T q_t."""
    shared = call.value.shape[1] // call.key.shape[1]
    query, key = (part.double().repeat_interleave(shared, 1) for part in (call.query, call.key))
    value, decay, time_step = call.value.double(), call.decay.double(), call.time_step.double()
    outputs = []
    for t in range(len(value)):
        added = torch.einsum("hk,hv->hkv", key[t], value[t]) * time_step[t, :, None, None]
        state = decay[t, :, None, None].exp() * state + added
        outputs.append(torch.einsum("hkv,hk->hv", state, query[t]))
    return torch.stack(outputs), state


# ------------------------------------------------------------------------------ the selective scan


@dataclass
class ScanCall:
    """The arguments of `selective_scan`."""

    out: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    time_step: Tensor
    rates: Tensor
    states: Tensor

    def run(self, step: Step) -> None:
        selective_scan(
            self.out,
            self.query,
            self.key,
            self.value,
            self.time_step,
            self.rates,
            self.states,
            step.segments,
        )

    def part(self, tokens: range) -> "ScanCall":
        """The call for some tokens, with the same states."""
        some = slice(tokens.start, tokens.stop)
        return replace(
            self,
            out=self.out[some],
            query=self.query[some],
            key=self.key[some],
            value=self.value[some],
            time_step=self.time_step[some],
        )


def a_scan_call(
    step: Step, channels: int, state_size: int, dtype: torch.dtype = torch.float32
) -> ScanCall:
    generator = torch.Generator().manual_seed(1)
    count = sum(len(tokens) for tokens in step.tokens)
    # keys and queries lie side by side, values beside gates
    projected = torch.randn(count, 3 + 2 * state_size, generator=generator).to(dtype)
    _, key, query = torch.split(projected, [3, state_size, state_size], dim=1)
    mixed = torch.randn(count, 2 * channels, generator=generator).to(dtype)
    time_step = torch.randn(count, channels, generator=generator) - 1
    states = torch.randn(SLOTS, channels, state_size, generator=generator)
    return ScanCall(
        torch.full((count, channels), torch.nan, dtype=dtype),
        query,
        key,
        mixed[:, :channels],
        functional.softplus(time_step),
        -torch.rand(channels, state_size, generator=generator).exp(),
        poisoned(states, step),
    )


def scan_recurrence(call: ScanCall, state: Tensor) -> tuple[Tensor, Tensor]:
    """Algorithm 2 of arXiv 2312.00752 in float64."""
    query, key, value = call.query.double(), call.key.double(), call.value.double()
    time_step, rates = call.time_step.double(), call.rates.double()
    outputs = []
    for t in range(len(value)):
        added = torch.outer(time_step[t] * value[t], key[t])
        state = (time_step[t, :, None] * rates).exp() * state + added
        outputs.append(state @ query[t])
    return torch.stack(outputs), state


# ------------------------------------------------------------------------------- both of them


StateSpaceCall = DualCall | ScanCall


def recurrence(call: StateSpaceCall, state: Tensor) -> tuple[Tensor, Tensor]:
    if isinstance(call, DualCall):
        return dual_recurrence(call, state)
    return scan_recurrence(call, state)


def run_and_compare(call: StateSpaceCall, step: Step) -> None:
    """Run a call and compare each row with its recurrence."""
    before = call.states.clone()
    call.run(step)
    only_written(before, call.states, step)
    for tokens, source, written in zip(step.tokens, step.sources, step.written, strict=True):
        start = before[source] if source >= 0 else torch.zeros(before.shape[1:])
        part = call.part(tokens)
        expected, state = recurrence(part, start.double())
        # Sums of as many products as a state has numbers, so it is the largest that counts.
        scale = expected.abs().max()
        assert_close(part.out.double() / scale, expected / scale, call.out.dtype)
        found = call.states[written[-1]].double()
        torch.testing.assert_close(found, state, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "heads",
    [Heads(1, 4, 5, 6), Heads(2, 2, 5, 6), Heads(4, 1, 5, 6), Heads(1, 10, 24, 12)],
    ids=str,
)
def test_the_duality_is_its_recurrence_over_segments_of_any_kind(
    dtype: torch.dtype, heads: Heads
) -> None:
    step = make_step(MIXED)
    run_and_compare(a_dual_call(step, heads, dtype), step)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [Heads(1, 2, 128, 64), Heads(1, 1, 20, 232)], ids=str)
def test_large_heads(dtype: torch.dtype, heads: Heads) -> None:
    step = make_step([Row(3, (1,)), Row(0, (64, 15), is_new=True), Row(9, (1,), in_place=True)])
    run_and_compare(a_dual_call(step, heads, dtype), step)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("channels", "state_size"), [(7, 5), (150, 16), (130, 33), (8, 8)], ids=str
)
def test_the_scan_is_its_recurrence_over_segments_of_any_kind(
    dtype: torch.dtype, channels: int, state_size: int
) -> None:
    step = make_step(MIXED)
    run_and_compare(a_scan_call(step, channels, state_size, dtype), step)


def test_a_state_that_is_all_but_forgotten() -> None:
    """A factor of exp(-300) is 0 in float32, and the factors between later positions are not."""
    step = make_step([Row(0, (64,)), Row(10, (1,))])
    dual = a_dual_call(step, Heads(1, 2, 5, 6))
    dual.decay[::5] = -300.0
    run_and_compare(dual, step)
    scan = a_scan_call(step, 7, 16)
    scan.time_step[::5] = 300.0
    scan.rates[:] = -1.0
    run_and_compare(scan, step)


def test_a_state_that_lasts() -> None:
    """Errors of a factor add up over as many positions as it lasts."""
    length = 2000
    step = make_step([Row(0, (length,), is_new=True)])
    call = a_scan_call(step, 16, 16)
    call.rates[:] = -torch.logspace(-6, -1, 16)
    call.key[:], call.value[:] = call.key.abs(), call.value.abs()
    call.run(step)
    _, state = scan_recurrence(call, torch.zeros(16, 16, dtype=torch.float64))
    found = call.states[step.written[0][-1]].double()
    torch.testing.assert_close(found, state, atol=0.0, rtol=1e-5)


@pytest.mark.skipif(not IS_SLOW_BELOW_NORMAL, reason="others are not slow")
@pytest.mark.parametrize("length", [1, 2])
def test_no_number_below_the_normal_range_is_kept(implementation: str, length: int) -> None:
    """A core multiplies such numbers a hundred times more slowly. The caller's are left alone."""
    if implementation == "plain":
        pytest.skip("torch's own operators keep them")
    smallest = torch.finfo(torch.float32).smallest_normal
    assert 1e-20 * math.exp(-45.0) < smallest < 1e-20 * math.exp(-30.0)
    step = make_step([Row(1, (length,))])
    dual, scan = a_dual_call(step, Heads(1, 2, 8, 24)), a_scan_call(step, 24, 16)
    dual.value.zero_()
    scan.value.zero_()
    scan.rates[:] = -1.0
    for logarithm, is_kept in ((30.0, True), (45.0, False)):
        dual.decay[:] = -logarithm / length
        scan.time_step[:] = logarithm / length
        for call in (dual, scan):
            call.states[:] = 1e-20
            call.run(step)
            found = call.states[step.written[0][-1]]
            assert bool((found > smallest).all()) if is_kept else bool((found == 0.0).all())
    assert float(torch.tensor([1e-39]) * 1.0) > 0.0


def test_a_step_without_segments_changes_nothing() -> None:
    step = make_step([])
    assert_nothing_changes(a_dual_call(step, Heads(1, 2, 8, 8)), step)
    assert_nothing_changes(a_scan_call(step, 8, 16), step)


@pytest.mark.parametrize("lengths", CUTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_a_prompt_that_is_cut_at_chunks_gives_the_same_bits(
    implementation: str, dtype: torch.dtype, lengths: tuple[int, ...]
) -> None:
    dual = partial(a_dual_call, heads=Heads(2, 3, 24, 40), dtype=dtype)
    scan = partial(a_scan_call, channels=150, state_size=16, dtype=dtype)
    assert_cuts_change_nothing(implementation, dual, lengths)
    assert_cuts_change_nothing(implementation, scan, lengths)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_a_row_does_not_depend_on_the_others(implementation: str, dtype: torch.dtype) -> None:
    if implementation == "plain" and dtype != torch.float32:
        pytest.skip("rounding to 16 bits makes a last bit of the smallest difference")
    for heads in (Heads(2, 3, 24, 40), Heads(1, 9, 128, 64)):
        dual = partial(a_dual_call, heads=heads, dtype=dtype)
        assert_rows_do_not_depend_on_others(implementation, dual)
    scan = partial(a_scan_call, channels=150, state_size=16, dtype=dtype)
    assert_rows_do_not_depend_on_others(implementation, scan)
