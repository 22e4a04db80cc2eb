"""The program that normalizes, rotates and writes heads, against its arithmetic in float64."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import triton_ops
from tests.triton_ops.rotations import BLOCK_SIZE, CASES, NUM_BLOCKS, Case, exact, expected
from triton_ops import reference_operators
from triton_ops.gpu import rotary as gpu

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Two roundings of a norm and one of the rotation, of numbers up to about 4."""


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_heads_are_normalized_rotated_and_written(name: str, dtype: torch.dtype) -> None:
    case = replace(CASES[name], dtype=dtype)
    given = case.arguments
    wanted = expected(case, given)
    gpu.rotate_and_write(**given, **case.options)  # type: ignore[arg-type]
    found = given["query"], given["key_cache"], given["value_cache"]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(
            exact(one), other, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype], equal_nan=True
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("norm", ["rms", "rms_plus_one"])
def test_numbers_are_rounded_where_the_norm_rounds_them(norm: str, dtype: torch.dtype) -> None:
    """With no rotation the numbers of the plain operator come back bit for bit, but for those that
    are as near to the next number."""
    case = Case(head_dim=128, rotary_dim=128, norm=norm, dtype=dtype)
    found, wanted = case.arguments, case.arguments
    for given in (found, wanted):
        _filled(given["cos"], 1.0)
        _filled(given["sin"], 0.0)
    gpu.rotate_and_write(**found, **case.options)  # type: ignore[arg-type]
    with reference_operators():
        triton_ops.rotate_and_write(**wanted, **case.options)  # type: ignore[arg-type]
    different = exact(found["query"]) != exact(wanted["query"])
    assert different.double().mean() < 0.001


def _filled(tensor: Tensor | None, number: float) -> None:
    assert tensor is not None
    tensor.fill_(number)


def test_caches_may_be_parts_of_larger_ones() -> None:
    """Heads of two ranks in one tensor, and blocks of keys and values side by side."""
    case = Case()
    given = case.arguments
    wanted = expected(case, given)
    both = torch.full((NUM_BLOCKS, 2, BLOCK_SIZE, 4, 64), torch.nan)
    key_cache, value_cache = both[..., 1:3, :].permute(1, 0, 3, 2, 4).unbind()
    given = {**given, "key_cache": key_cache, "value_cache": value_cache}
    gpu.rotate_and_write(**given, **case.options)  # type: ignore[arg-type]
    for one, other in zip((key_cache, value_cache), wanted[1:], strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert both[..., ::3, :].isnan().all()


def test_no_tokens_are_no_work() -> None:
    case = Case()
    given = case.arguments
    for name in ("query", "projected", "cos", "sin", "slot_mapping"):
        tensor = given[name]
        assert tensor is not None
        given[name] = tensor[:0]
    gpu.rotate_and_write(**given, **case.options)  # type: ignore[arg-type]
    assert exact(given["key_cache"]).isnan().all()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("projected", lambda rows: rows[:, :-64], "projected rows"),
        ("projected", lambda rows: rows[:-1], "projected rows"),
        ("cos", lambda angles: angles[:-1], "angles"),
        ("sin", lambda angles: angles[..., :-1], "angles"),
        ("key_cache", lambda cache: cache[..., :-1], "caches"),
        ("value_cache", lambda cache: cache[..., :0], "caches"),
        ("key_norm", lambda weight: weight[:-1], "weights"),
        ("slot_mapping", lambda slots: slots[:-1], "slots"),
        ("query_norm", lambda weight: weight.repeat(2)[::2], "contiguous"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(name: str, change: object, message: str) -> None:
    case = Case(norm="rms")
    given = case.arguments
    given[name] = change(given[name])  # type: ignore[operator]
    with pytest.raises(ValueError, match=message):
        gpu.rotate_and_write(**given, **case.options)  # type: ignore[arg-type]
