"""The routes compute the same thing, and what is counted and formed from their times is right."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from nanoserve.lab.benchmarks import operators
from nanoserve.lab.benchmarks.machine import ForeignLoad
from nanoserve.lab.benchmarks.operators import (
    OURS,
    OperatorCase,
    OperatorRound,
    Route,
    measure_case,
    samples,
    summarize,
)
from nanoserve.lab.benchmarks.rounds import Repeating


@pytest.fixture(autouse=True)
def little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "COLD_BYTES", 1)
    monkeypatch.setattr(operators, "_TURN_SECONDS", 0.0)


def results(case: OperatorCase) -> dict[str, Tensor]:
    found = {}
    for name, route in case.routes.items():
        with route.context():
            result = route.call()
        assert isinstance(result, Tensor)
        found[name] = result.double()
    return found


@pytest.mark.parametrize("context", [32, 21])
def test_every_way_to_attend_gives_the_same(context: int) -> None:
    case = next(operators.attention_cases(2, context, torch.bfloat16))
    ours, *others = results(case).values()
    assert list(case.routes) == [OURS, "gather + SDPA", "plain torch"]
    for other in others:
        torch.testing.assert_close(other, ours, atol=2e-2, rtol=2e-2)
    # keys and values of two sequences, 16 bits each
    assert case.num_bytes == 2 * (2 * context * 8 * 128) * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_both_ways_to_attend_over_a_prompt_give_the_same(dtype: torch.dtype) -> None:
    case = operators.prompt_case(21, dtype)
    ours, stock = results(case).values()
    assert list(case.routes) == [OURS, "SDPA"]
    torch.testing.assert_close(stock, ours, atol=2e-2, rtol=2e-2)
    # Keys and values, queries and results once; two products of 128 columns for each of 21 * 22 / 2
    # pairs and 16 heads.
    assert case.num_bytes == 21 * (2 * 8 + 2 * 16) * 128 * dtype.itemsize
    assert case.operations == 21 * 11 * 16 * (2 * 2 * 128)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_host_tier_gives_what_its_operator_gives(dtype: torch.dtype) -> None:
    cases = operators.attention_cases(2, 21, dtype)
    next(cases)
    case = next(cases)
    handed_over, alone = results(case).values()
    cases.close()
    assert torch.equal(handed_over, alone)
    assert case.num_bytes == 2 * (2 * 21 * 8 * 128) * dtype.itemsize


@pytest.mark.parametrize(
    ("lengths", "work"), [([1, 1, 1], "3 rows"), ([70], "a prompt of 70")], ids=str
)
def test_both_implementations_of_recurrent_layers_give_the_same(
    lengths: list[int], work: str
) -> None:
    convolution, delta = operators.recurrent_cases(lengths, torch.bfloat16)
    assert [convolution.name, delta.name] == [
        f"convolution of {work}",
        f"gated delta rule of {work}",
    ]
    for case in (convolution, delta):
        ours, plain = results(case).values()
        assert list(case.routes) == [OURS, "plain torch"]
        torch.testing.assert_close(plain, ours, atol=2e-2, rtol=2e-2)
    tokens, rows = sum(lengths), len(lengths)
    # 3 * 16 heads of 128 channels: inputs, results and three kept inputs, and kernels of 4
    assert convolution.num_bytes == 6144 * 2 * (2 * tokens + 2 * 3 * rows + 4)
    # matrices of 128 x 128 in float32 for 16 heads, read and written; queries, keys, values, results
    assert delta.num_bytes == 2 * rows * 16 * 128 * 128 * 4 + tokens * 4 * 16 * 128 * 2
    assert delta.operations == tokens * 16 * (3 * 2 * 128 * 128)


@pytest.mark.parametrize(
    ("lengths", "work"), [([1, 1, 1], "3 rows"), ([70], "a prompt of 70")], ids=str
)
def test_both_implementations_of_state_spaces_give_the_same(lengths: list[int], work: str) -> None:
    dual = operators.dual_case(lengths, torch.bfloat16)
    scan = operators.scan_case(lengths, torch.bfloat16)
    assert [dual.name, scan.name] == [f"state-space duality of {work}", f"selective scan of {work}"]
    for case in (dual, scan):
        ours, plain = results(case).values()
        assert list(case.routes) == [OURS, "plain torch"]
        torch.testing.assert_close(plain, ours, atol=0.1, rtol=2e-2)
    tokens, rows = sum(lengths), len(lengths)
    # matrices of 128 x 64 in float32 for 48 heads, read and written; values and results of 3,072
    # channels, a query and a key
    assert dual.num_bytes == 2 * rows * 48 * 128 * 64 * 4 + tokens * (2 * 3072 + 2 * 128) * 2
    assert dual.operations == tokens * 48 * (2 * 2 * 128 * 64)
    # 16 numbers of 3,072 channels, read and written, and as many rates; time steps, values, results
    assert scan.num_bytes == (2 * rows + 1) * 3072 * 16 * 4 + tokens * 3072 * (4 + 2 * 2)
    assert scan.operations == tokens * 3072 * (3 * 2 * 16)


def test_every_way_to_multiply_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "_matrices", lambda: [("gate_up", 96, 64), ("head", 200, 64)])
    cases = list(operators.linear_cases([3, 100], torch.bfloat16))
    assert [case.name for case in cases] == [
        "gate_up 96 x 64, 3 rows",
        "gate_up 96 x 64, 100 rows",
        "head 200 x 64, 3 rows",
    ]
    ours, *others = results(cases[0]).values()
    for other in others:
        torch.testing.assert_close(other, ours, atol=0.2, rtol=2e-2)
    assert (cases[0].num_bytes, cases[0].operations) == (96 * 64 * 2, 2 * 3 * 96 * 64)


def test_packed_products_are_those_of_the_same_weights_in_16_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(operators, "_matrices", lambda: [("gate_up", 96, 64), ("head", 200, 64)])
    cases = list(operators.packed_cases([3, 100], torch.bfloat16))
    assert [case.name for case in cases] == [
        "gate_up 96 x 64 in int4, 3 rows",
        "gate_up 96 x 64 in int4, 100 rows",
        "gate_up 96 x 64 in int8, 3 rows",
        "gate_up 96 x 64 in int8, 100 rows",
    ]
    for case in cases:
        assert list(case.routes) == [OURS, "linear operator", "F.linear bfloat16"]
        ours, *others = results(case).values()
        for other in others:
            torch.testing.assert_close(other, ours, atol=0.4, rtol=2e-2)
    # A scale of 16 bits for each 32 columns, and 4 or 8 bits for each weight.
    assert [case.num_bytes for case in cases[::2]] == [96 * (64 // 2 + 2 * 2), 96 * (64 + 2 * 2)]
    assert cases[1].operations == 2 * 100 * 96 * 64


def test_sampling_draws_what_sorting_keeps() -> None:
    """Both give tokens of the vocabulary, and the log probabilities are equal."""
    cases = list(operators.sampling_cases([2, 17]))
    assert [case.name.partition(", ")[0] for case in cases] == ["sampling 2 x 151936"] * 4
    for case in cases[:3]:
        for route in case.routes.values():
            tokens = route.call()
            assert isinstance(tokens, Tensor)
            assert tokens.numel() == 2
            assert tokens.min() >= 0
            assert tokens.max() < 151936
    ours, sorting = (route.call() for route in cases[3].routes.values())
    torch.testing.assert_close(ours[3], sorting.values)  # type: ignore[index, attr-defined]
    assert torch.equal(ours[2], sorting.indices)  # type: ignore[index, attr-defined]
    assert cases[0].num_bytes == 2 * 151936 * 4


def test_the_matrices_are_those_of_the_decoder() -> None:
    sizes = {name: (columns, depth) for name, columns, depth in operators._matrices()}
    assert sizes["gate_up"] == (6144, 1024)
    assert sizes["qkv"] == (4096, 1024)
    assert sizes["head"] == (151936, 1024)


def test_calls_do_not_find_their_memory_in_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "COLD_BYTES", 5000)
    places = [tensor.data_ptr() for tensor in operators._copies(torch.ones(256))]
    assert len(places) == len(set(places)) == 5


def test_routes_take_turns_and_a_round_has_its_own_floor(tmp_path: Path) -> None:
    log: list[str] = []
    routes = {name: Route(lambda name=name: log.append(name)) for name in (OURS, "other")}  # type: ignore[misc]
    case = OperatorCase("work", num_bytes=4000, operations=1000, routes=routes)
    bandwidths: Iterator[float] = iter([1e9, 3e9, 2e9, 2e9])
    machine: dict[str, Any] = {
        "probe": lambda: next(bandwidths),
        "foreign": ForeignLoad(proc=tmp_path),
        "peak": 1e12,
    }
    done = list(measure_case(case, rounds=1, repeating=Repeating(), **machine))
    assert [one.counts for one in done] == [False, True]
    assert done[0].floor_us == pytest.approx(2.0)  # 4 kB at 2 GB/s
    first_round = log[4 : 4 + 2 * operators._TURNS]
    assert first_round[:4] == [OURS, "other", "other", OURS]
    assert first_round.count(OURS) == operators._TURNS


def a_round(number: int, ours: float, other: float) -> OperatorRound:
    return OperatorRound(
        case="work",
        number=number,
        bandwidth_before=10.0,
        bandwidth_after=10.0,
        foreign_cores=0.0,
        num_bytes=10**6,
        operations=2 * 10**6,
        floor_us=100.0,
        routes_us={OURS: ours, "other": other},
    )


def test_shares_rates_and_ratios() -> None:
    ours, other = summarize([a_round(1, 200, 600), a_round(2, 200, 800), a_round(3, 400, 800)])
    assert (ours["route"], ours["us"], ours["rounds"], ours["state"]) == (OURS, 200, 3, "10 GB/s")
    assert ours["gb_per_s"] == pytest.approx(5.0)
    assert ours["gflops"] == pytest.approx(10.0)
    assert ours["of_floor"] == pytest.approx(0.5)
    assert ours["ours_is_faster"] is None
    assert (other["ours_is_faster"], other["low"], other["high"]) == (3.0, 2.0, 4.0)


def test_samples_are_the_shares_of_the_rounds_that_count() -> None:
    drifted = msgspec.structs.replace(a_round(2, 200, 600), bandwidth_after=20.0)
    assert samples([a_round(1, 200, 600), drifted, a_round(3, 400, 600)]) == {
        "work": {"of_floor": [0.5, 0.25]}
    }


def test_a_round_in_which_a_route_beats_the_floor_tells_no_share() -> None:
    """The machine was looked at while it was busy: 100 us is not the least time, as some route took
    90."""
    ours, other = summarize([a_round(1, 125, 90), a_round(2, 200, 600)])
    assert (ours["of_floor"], other["of_floor"]) == (0.5, pytest.approx(1 / 6))
    ours, other = summarize([a_round(1, 125, 90)])
    assert (ours["of_floor"], other["of_floor"]) == (None, None)
    assert samples([a_round(1, 90, 125), a_round(2, 200, 600)]) == {"work": {"of_floor": [0.5]}}
