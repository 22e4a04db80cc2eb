"""The GPU's products with packed matrices against float64: every format, few and many rows, columns
in parts."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.triton_ops.test_packed import CASES, matrix
from triton_ops import GroupQuantized, pack, round_to_nearest
from triton_ops.gpu import packed as gpu

TOLERANCES = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-5}
"""Tolerance, as a share of the largest number: results are rounded to 16 bits, for many rows weights as well."""


@pytest.fixture(autouse=True)
def poisoned_scratch() -> Iterator[None]:
    """Memory of torch.empty is NaN here: a part that is read but was never written shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def check(
    quantized: GroupQuantized, num_rows: int, dtype: torch.dtype, bias: Tensor | None = None
) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    rows = torch.randn(num_rows, quantized.codes.shape[1], generator=generator).to(dtype)
    outputs = len(quantized.codes)
    found = gpu.packed_linear(rows, pack(quantized), bias, outputs, *quantized.format)
    wanted = rows.double() @ quantized.dequantize().double().T + (
        0 if bias is None else bias.double()
    )
    assert found.dtype == dtype and found.shape == (num_rows, outputs)
    assert (found - wanted).abs().max() <= TOLERANCES[dtype] * wanted.abs().max()


MORE = {
    "int4 of bfloat16 scales": (4, 64, "zero", torch.bfloat16),
    "int8 with zeros": (8, 32, "zeros", torch.float32),
}


@pytest.mark.parametrize("name", [*CASES, *MORE])
@pytest.mark.parametrize(
    ("num_rows", "dtype"), [(1, torch.bfloat16), (3, torch.float16), (19, torch.float16)]
)
def test_every_format(name: str, num_rows: int, dtype: torch.dtype) -> None:
    form = CASES[name] if name in CASES else MORE[name]
    check(matrix(*form[:3], 40, *form[3:]), num_rows, dtype, bias=torch.randn(40).to(dtype))


@pytest.mark.parametrize(("num_rows", "outputs"), [(16, 64), (17, 65), (130, 150)])
@pytest.mark.parametrize(("bits", "group", "columns"), [(4, 32, 416), (8, 96, 1248)])
def test_tiles_and_parts_that_are_not_full(
    num_rows: int, outputs: int, bits: int, group: int, columns: int
) -> None:
    weight = torch.randn(outputs, columns, generator=torch.Generator().manual_seed(outputs))
    check(round_to_nearest(weight, bits, group), num_rows, torch.float16)


def test_rows_of_any_strides_and_no_rows() -> None:
    quantized = matrix(*CASES["int8 g64"], rows=40)
    wide = torch.randn(7, 3 * 512).half()
    found = gpu.packed_linear(wide[:, 512:1024], pack(quantized), None, 40, *quantized.format)
    wanted = gpu.packed_linear(
        wide[:, 512:1024].clone(), pack(quantized), None, 40, *quantized.format
    )
    assert torch.equal(found, wanted)
    assert gpu.packed_linear(
        wide[:0, :512], pack(quantized), None, 40, *quantized.format
    ).shape == (0, 40)


def test_rows_in_float32_are_multiplied_by_the_unpacked_matrix() -> None:
    check(matrix(*CASES["Q4_K"], rows=40), 2, torch.float32)
