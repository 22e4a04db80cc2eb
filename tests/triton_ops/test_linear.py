"""The linear operator against a float64 product, for every number of rows at which it changes its
ways."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from triton_ops import add_linear, linear
from triton_ops.cpu.toolchain import processor
from triton_ops.gpu import linear as gpu

pytestmark = pytest.mark.usefixtures("implementation")

ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 6, 7, 8, 13, 20, 21, 48, 49, 80, 96, 100])
@pytest.mark.parametrize(
    ("depth", "columns"), [(64, 96), (200, 70), (7, 1), (513, 33), (544, 101), (1120, 50)]
)
def test_it_is_the_product(dtype: torch.dtype, rows: int, depth: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    row, weight, bias = (
        torch.randn(*shape, generator=generator).to(dtype)
        for shape in ((rows, depth), (columns, depth), (columns,))
    )
    for added in (bias, None):
        expected = row.double() @ weight.double().T + (0 if added is None else added.double())
        found = linear(row, weight, added)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, atol=1e-3, rtol=1.01 * ROUNDING[dtype])


def in_place(total: Tensor, rows: Tensor, weight: Tensor) -> None:
    """Call the GPU's implementation, which torch can compute on a CPU too."""
    gpu.add_linear(total, rows, weight)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("add", [add_linear, in_place], ids=["own", "GPU's"])
@pytest.mark.parametrize("num_rows", [0, 1, 5, 96])
def test_a_product_is_added_in_place(
    num_rows: int, add: Callable[[Tensor, Tensor, Tensor], None], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    rows, weight, total = (
        torch.randn(*shape, generator=generator).to(dtype)
        for shape in ((num_rows, 200), (70, 200), (num_rows, 70))
    )
    product = rows.double() @ weight.double().T
    expected = total.double() + product
    most = 2.01 * ROUNDING[dtype] * (total.double().abs() + product.abs() + expected.abs())
    memory = total.data_ptr()
    add(total, rows, weight)
    assert total.data_ptr() == memory and total.dtype == dtype
    assert ((total.double() - expected).abs() <= most + 1e-3 * (dtype == torch.float32)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("depth", "columns"), [(64, 200), (544, 101), (200, 70), (7, 1), (1120, 50)]
)
def test_few_rows_do_not_depend_on_one_another(
    implementation: str, dtype: torch.dtype, depth: int, columns: int
) -> None:
    if implementation == "plain":
        pytest.skip("torch's product promises nothing")
    torch_goes_first = dtype == torch.bfloat16 and "bf16" in processor()
    rows, weight = torch.randn(20, depth).to(dtype), torch.randn(columns, depth).to(dtype)
    alone = torch.cat([linear(row[None], weight) for row in rows])
    for count in (2, 3, 4) if torch_goes_first else (2, 3, 4, 5, 7, 8, 9, 16, 20):
        assert torch.equal(linear(rows[:count], weight), alone[:count]), count


@pytest.mark.parametrize("depth", [200, 1120])
def test_no_number_of_rows_changes_one_in_batch_invariant_mode(
    implementation: str, depth: int
) -> None:
    if implementation == "plain":
        pytest.skip("torch's product promises nothing")
    rows, weight = torch.randn(101, depth).bfloat16(), torch.randn(50, depth).bfloat16()
    torch.ops.nanoserve.set_batch_invariant(True)
    try:
        whole = linear(rows, weight)
        for count in (1, 4, 5, 12, 13, 96, 97):
            assert torch.equal(linear(rows[-count:], weight), whole[-count:]), count
    finally:
        torch.ops.nanoserve.set_batch_invariant(False)
    torch.testing.assert_close(
        whole.double(), rows.double() @ weight.double().T, atol=1e-3, rtol=1.01 * 2**-8
    )


def test_leading_dimensions_and_strides_are_kept() -> None:
    wide = torch.randn(2, 3, 64).bfloat16()
    weight = torch.randn(5, 32).bfloat16()
    found = linear(wide[..., ::2], weight)
    assert found.shape == (2, 3, 5)
    torch.testing.assert_close(
        found.float(), wide[..., ::2].float() @ weight.float().T, atol=1e-2, rtol=1e-2
    )


# it imports torch's compiler; tests/executor/test_torch_compile.py compiles the operators quickly
@pytest.mark.slow
def test_torch_accepts_it_for_tracing() -> None:
    arguments = (
        torch.randn(3, 8).bfloat16(),
        torch.randn(4, 8).bfloat16(),
        torch.randn(4).bfloat16(),
    )
    torch.library.opcheck(torch.ops.nanoserve.linear.default, arguments)
