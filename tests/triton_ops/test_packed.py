"""Packed integer matrices: the layout there and back, and products against float64."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from triton_ops import GroupQuantized, pack, packed_linear, packed_rows, reference_operators, unpack
from triton_ops.cpu import cpu_operators
from triton_ops.packed import multiply_unpacked

COLUMNS = 512


def matrix(
    bits: int, group: int, offset: str, rows: int, dtype: torch.dtype = torch.float16
) -> GroupQuantized:
    """Random codes of all values, with numbers of that kind: "zero", "zeros", "minimums", "super
    zero" or "super"."""
    generator = torch.Generator().manual_seed(bits * group + rows)
    codes = torch.randint(0, 1 << bits, (rows, COLUMNS), generator=generator, dtype=torch.uint8)
    codes = codes.view(torch.int8) if bits == 8 else codes
    groups = (rows, COLUMNS // group)
    small = lambda *size: (torch.rand(size, generator=generator) * 0.1 + 0.01).half()  # noqa: E731
    if offset.startswith("super"):
        sub = torch.randint(-32, 32, groups, generator=generator, dtype=torch.int8)
        supers = small(rows, COLUMNS // 256)
        if offset == "super zero":
            return GroupQuantized(codes, bits, sub, super_scales=supers, zero=32)
        low = torch.randint(0, 64, groups, generator=generator, dtype=torch.uint8)
        return GroupQuantized(
            codes, bits, sub, super_scales=supers, minimums=low, super_minimums=small(rows, 2)
        )
    scales = small(*groups).to(dtype)
    if offset == "zeros":
        zeros = torch.randint(0, 16, groups, generator=generator, dtype=torch.uint8)
        return GroupQuantized(codes, bits, scales, zeros=zeros)
    if offset == "minimums":
        return GroupQuantized(codes, bits, scales, minimums=small(*groups))
    return GroupQuantized(codes, bits, scales, zero=0 if bits == 8 else 1 << bits - 1)


CASES = {
    "Q4_0": (4, 32, "zero"),
    "Q4_1": (4, 32, "minimums"),
    "Q5_0": (5, 32, "zero"),
    "Q8_0": (8, 32, "zero"),
    "Q4_K": (4, 32, "super"),
    "Q5_K": (5, 32, "super"),
    "Q6_K": (6, 16, "super zero"),
    "Q2_K": (6, 16, "super"),
    "int4 g128": (4, 128, "zeros"),
    "int8 g64": (8, 64, "zero"),
}


@pytest.fixture(params=CASES, ids=lambda name: name.replace(" ", "-"))
def quantized(request: pytest.FixtureRequest) -> GroupQuantized:
    return matrix(*CASES[request.param], rows=40)


def test_unpacking_undoes_packing(quantized: GroupQuantized) -> None:
    found = unpack(pack(quantized), 40, quantized.format)
    for field in ("codes", "scales", "super_scales", "zeros", "minimums", "super_minimums"):
        wanted = getattr(quantized, field)
        assert wanted is None or torch.equal(getattr(found, field), wanted)


@pytest.mark.parametrize("rows", [1, 3, 9])
def test_products_in_float32_are_exact(quantized: GroupQuantized, rows: int) -> None:
    cpu_operators().wait()
    inputs = torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(rows))
    bias = torch.randn(40)
    found = packed_linear(inputs, pack(quantized), bias, 40, quantized.format)
    wanted = inputs.double() @ quantized.dequantize().double().T + bias
    assert (found - wanted).abs().max() <= 2e-5 * wanted.abs().max()
    with reference_operators():
        plain = packed_linear(inputs, pack(quantized), bias, 40, quantized.format)
    assert (plain - wanted).abs().max() <= 2e-5 * wanted.abs().max()


def rounded(inputs: Tensor) -> Tensor:
    """Inputs rounded to 8 bits with a scale for 32 columns."""
    groups = inputs.double().view(len(inputs), -1, 32)
    scales = groups.abs().amax(-1, keepdim=True) / 127
    return ((groups / scales).round() * scales).view(inputs.shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 7])
def test_products_in_16_bits_round_their_inputs_to_8(
    quantized: GroupQuantized, rows: int, dtype: torch.dtype
) -> None:
    cpu_operators().wait()
    inputs = torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(rows)).to(dtype)
    found = packed_linear(inputs, pack(quantized), None, 40, quantized.format)
    wanted = rounded(inputs) @ quantized.dequantize().double().T
    assert (found - wanted).abs().max() <= 0.01 * wanted.abs().max()


def test_rows_are_those_of_the_matrix(quantized: GroupQuantized) -> None:
    indices = torch.tensor([39, 0, 17, 17, 15, 16])
    assert torch.equal(
        packed_rows(pack(quantized), indices, quantized.format), quantized.dequantize()[indices]
    )


@pytest.mark.parametrize("name", ["Q5_0", "Q6_K", "int4 g128"])
def test_everything_stays_on_the_device_of_its_inputs(name: str) -> None:
    """The meta device computes nothing, but it refuses tensors of another device, as a GPU does."""
    quantized = matrix(*CASES[name], rows=40)
    packed = pack(quantized).to("meta")
    assert pack(unpack(packed, 40, quantized.format)).device.type == "meta"
    assert (
        packed_rows(packed, torch.arange(3, device="meta"), quantized.format).device.type == "meta"
    )
    rows = torch.empty(3, COLUMNS, device="meta")
    assert multiply_unpacked(rows, packed, None, 40, *quantized.format).device.type == "meta"


@contextmanager
def operators_set(*, batch_invariant: bool = False, tiles: bool = True) -> Iterator[None]:
    """Have the C++ operators in these modes, then in their usual ones."""
    cpu_operators().wait()
    torch.ops.nanoserve.set_batch_invariant(batch_invariant)
    torch.ops.nanoserve.allow_tiles(tiles)
    try:
        yield
    finally:
        torch.ops.nanoserve.set_batch_invariant(False)
        torch.ops.nanoserve.allow_tiles(True)


@pytest.fixture(params=["tiles", "vectors"])
def tiles(request: pytest.FixtureRequest) -> bool:
    """Whether the processor's tiles are used. Where it has none there is one way only."""
    cpu_operators().wait()
    if request.param == "tiles" and not torch.ops.nanoserve.has_tiles():
        pytest.skip("this processor has no tiles, or the system keeps them")
    return str(request.param) == "tiles"


def test_a_row_does_not_depend_on_how_many_there_are(
    quantized: GroupQuantized, *, tiles: bool
) -> None:
    """Few rows and tiles have the same arithmetic, bit for bit, over a depth that no slice
    divides."""
    with operators_set(batch_invariant=True, tiles=tiles):
        check_that_rows_are_independent(quantized)


def check_that_rows_are_independent(quantized: GroupQuantized) -> None:
    if quantized.super_scales is None:
        quantized = quantized.columns(range(384))
    weights, depth = pack(quantized), quantized.codes.shape[1]
    inputs = torch.randn(70, depth, generator=torch.Generator().manual_seed(0)).bfloat16()
    bias = torch.randn(40).bfloat16()
    whole = packed_linear(inputs, weights, bias, 40, quantized.format)
    wanted = rounded(inputs) @ quantized.dequantize().double().T + bias
    assert (whole - wanted).abs().max() <= 0.01 * wanted.abs().max()
    for count in (1, 2, 3, 4, 5, 7, 8, 12, 13, 22, 33, 69):
        first, last = (
            packed_linear(part, weights, bias, 40, quantized.format)
            for part in (inputs[:count], inputs[-count:])
        )
        assert torch.equal(first, whole[:count])
        assert torch.equal(last, whole[-count:])


def test_many_weights_are_shared_among_threads() -> None:
    cpu_operators().wait()
    quantized = matrix(4, 32, "minimums", rows=1000)
    inputs = torch.randn(24, COLUMNS, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = packed_linear(inputs, pack(quantized), None, 1000, quantized.format)
    wanted = rounded(inputs) @ quantized.dequantize().double().T
    assert (found - wanted).abs().max() <= 0.01 * wanted.abs().max()


@st.composite
def products(draw: st.DrawFn) -> tuple[GroupQuantized, Tensor, Tensor | None]:
    """A matrix of any format, inputs in 16 bits, and a bias or none."""
    columns = draw(st.integers(1, 150))
    quantized = matrix(*CASES[draw(st.sampled_from(sorted(CASES)))], rows=columns)
    depth = draw(st.integers(1, COLUMNS // quantized.format.span)) * quantized.format.span
    quantized = quantized.columns(range(depth))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16]))
    generator = torch.Generator().manual_seed(columns)
    inputs = torch.randn(draw(st.integers(1, 600)), depth, generator=generator).to(dtype)
    return (
        quantized,
        inputs,
        torch.randn(columns, generator=generator).to(dtype) if draw(st.booleans()) else None,
    )


def root_mean_square(numbers: Tensor) -> float:
    return float(numbers.double().pow(2).mean().sqrt())


@given(products())
def test_tiles_of_many_rows_err_as_a_product_in_bfloat16(
    product: tuple[GroupQuantized, Tensor, Tensor | None],
) -> None:
    """Each weight is rounded to bfloat16 once, and so is an input in float16. Few rows round their
    inputs to 8 bits."""
    quantized, inputs, bias = product
    with operators_set():
        found = packed_linear(inputs, pack(quantized), bias, len(quantized.codes), quantized.format)
        if not torch.ops.nanoserve.has_tiles() or len(inputs) <= 32:
            return
    weight = quantized.dequantize().double()
    added = 0 if bias is None else bias.double()
    wanted = inputs.double() @ weight.T + added
    roundings, nearest = (1, 2**-8) if inputs.dtype == torch.bfloat16 else (2, 2**-11)
    terms = inputs.double().abs() @ weight.abs().T
    bound = (roundings * 2**-8 + 2**-16) * terms + nearest * wanted.abs()
    assert ((found - wanted).abs() <= 1.01 * bound).all()
    dense = functional.linear(
        inputs.bfloat16(), weight.bfloat16(), None if bias is None else bias.bfloat16()
    ).double()
    assert root_mean_square(found - wanted) <= 1.05 * root_mean_square(dense - wanted)


@given(products())
def test_sums_of_bytes_have_the_same_bits_in_tiles_and_in_vectors(
    product: tuple[GroupQuantized, Tensor, Tensor | None],
) -> None:
    quantized, inputs, bias = product
    weights, columns = pack(quantized), len(quantized.codes)
    with operators_set(tiles=False):
        vectors = packed_linear(inputs, weights, bias, columns, quantized.format)
    with operators_set(batch_invariant=True):
        tiles = packed_linear(inputs, weights, bias, columns, quantized.format)
    assert torch.equal(tiles, vectors)
    weight, exact = quantized.dequantize().double(), rounded(inputs)
    wanted = exact @ weight.T + (0 if bias is None else bias.double())
    nearest = 2**-8 if inputs.dtype == torch.bfloat16 else 2**-11
    assert (
        (vectors - wanted).abs() <= nearest * wanted.abs() + 0.01 * (exact.abs() @ weight.abs().T)
    ).all()
