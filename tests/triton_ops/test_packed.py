"""Packed integer matrices: the layout there and back, and products against float64."""

import pytest
import torch
from torch import Tensor

from triton_ops import GroupQuantized, pack, packed_linear, packed_rows, reference_operators, unpack
from triton_ops.cpu import cpu_operators
from triton_ops.packed import multiply_unpacked

COLUMNS = 512


def matrix(bits: int, group: int, offset: str, rows: int, dtype: torch.dtype = torch.float16) -> GroupQuantized:
    """Random codes of all values, with numbers of that kind: "zero", "zeros", "minimums" or "super"."""
    generator = torch.Generator().manual_seed(bits * group + rows)
    codes = torch.randint(0, 1 << bits, (rows, COLUMNS), generator=generator, dtype=torch.uint8)
    codes = codes.view(torch.int8) if bits == 8 else codes
    groups = (rows, COLUMNS // group)
    small = lambda *size: (torch.rand(size, generator=generator) * 0.1 + 0.01).half()  # noqa: E731
    if offset == "super":
        sub = torch.randint(-32, 32, groups, generator=generator, dtype=torch.int8)
        supers = small(rows, COLUMNS // 256)
        if group == 16:
            return GroupQuantized(codes, bits, sub, super_scales=supers, zero=32)
        low = torch.randint(0, 64, groups, generator=generator, dtype=torch.uint8)
        return GroupQuantized(codes, bits, sub, super_scales=supers, minimums=low, super_minimums=small(rows, 2))
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
    "Q6_K": (6, 16, "super"),
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
def test_products_in_16_bits_round_their_inputs_to_8(quantized: GroupQuantized, rows: int, dtype: torch.dtype) -> None:
    cpu_operators().wait()
    inputs = torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(rows)).to(dtype)
    found = packed_linear(inputs, pack(quantized), None, 40, quantized.format)
    wanted = rounded(inputs) @ quantized.dequantize().double().T
    assert (found - wanted).abs().max() <= 0.01 * wanted.abs().max()


def test_rows_are_those_of_the_matrix(quantized: GroupQuantized) -> None:
    indices = torch.tensor([39, 0, 17, 17, 15, 16])
    assert torch.equal(packed_rows(pack(quantized), indices, quantized.format), quantized.dequantize()[indices])


@pytest.mark.parametrize("name", ["Q5_0", "Q6_K", "int4 g128"])
def test_everything_stays_on_the_device_of_its_inputs(name: str) -> None:
    """The meta device computes nothing, but it refuses tensors of another device, as a GPU does."""
    quantized = matrix(*CASES[name], rows=40)
    packed = pack(quantized).to("meta")
    assert pack(unpack(packed, 40, quantized.format)).device.type == "meta"
    assert packed_rows(packed, torch.arange(3, device="meta"), quantized.format).device.type == "meta"
    rows = torch.empty(3, COLUMNS, device="meta")
    assert multiply_unpacked(rows, packed, None, 40, *quantized.format).device.type == "meta"


def test_a_row_does_not_depend_on_how_many_there_are(quantized: GroupQuantized) -> None:
    """Few rows and tiles have the same arithmetic, bit for bit, over a depth that no slice divides."""
    cpu_operators().wait()
    if quantized.super_scales is None:
        quantized = quantized.columns(range(384))
    weights, depth = pack(quantized), quantized.codes.shape[1]
    inputs = torch.randn(70, depth, generator=torch.Generator().manual_seed(0)).bfloat16()
    bias = torch.randn(40).bfloat16()
    whole = packed_linear(inputs, weights, bias, 40, quantized.format)
    wanted = rounded(inputs) @ quantized.dequantize().double().T + bias
    assert (whole - wanted).abs().max() <= 0.01 * wanted.abs().max()
    for count in (1, 2, 3, 4, 5, 7, 8, 22, 69):
        first, last = (
            packed_linear(part, weights, bias, 40, quantized.format) for part in (inputs[:count], inputs[-count:])
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
