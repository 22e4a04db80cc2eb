"""Rotation with the write into the cache, in plain torch and as the CPU has it, against its
arithmetic in float64."""

from dataclasses import replace

import pytest
import torch

import triton_ops
from tests.triton_ops.rotations import CASES, exact, expected

DTYPES = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float64: 1e-12}
"""Tolerances: bfloat16 is also rounded between the steps of the rotation."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("implementation")
def test_heads_are_normalized_rotated_and_written(name: str, dtype: torch.dtype) -> None:
    case = replace(CASES[name], dtype=dtype)
    given = case.arguments
    wanted = expected(case, given)
    triton_ops.rotate_and_write(**given, **case.options)  # type: ignore[arg-type]
    for argument, other in zip(("query", "key_cache", "value_cache"), wanted, strict=True):
        torch.testing.assert_close(
            exact(given[argument]), other, rtol=DTYPES[dtype], atol=DTYPES[dtype], equal_nan=True
        )
