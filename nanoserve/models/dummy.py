"""Models with random weights of a real shape: as fast and as large as real models, with meaningless
answers."""

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanoserve.config.model_config import ModelConfig
from nanoserve.errors import RuntimeFailure
from nanoserve.models.decoder import INITIAL_STANDARD_DEVIATION, Decoder, TensorParallelGroup
from nanoserve.models.dtypes import format_name, resolve_dtype
from nanoserve.models.hub import dummy_config, dummy_shape
from nanoserve.models.loading import (
    CPU,
    INDEX_NAME,
    SINGLE_NAME,
    Progress,
    empty_decoder,
    place,
)
from nanoserve.models.packed import MatrixForm, pack_decoder, region_of, rounded_forms
from nanoserve.models.shards import Shard
from nanoserve.models.tensor_parts import TensorPart
from nanoserve.models.weights import shard_parts, tensor_parts
from nanoserve.utils.sizes import format_size
from triton_ops import PackedFormat, pack, round_to_nearest

DUMMY_SEED = 1
"""Identifies the weights of dummy models, also in caches. Change it when they are drawn in another
way."""

# A uniform distribution of this half-width has the standard deviation of a fresh decoder; it is
# drawn much faster than a normal one, which matters for billions of weights.
_HALF_WIDTH = INITIAL_STANDARD_DEVIATION * math.sqrt(3.0)

_STORED_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}

_FILE_BYTES = 256 << 20
"""Size of a written file, unless one tensor is larger. This process holds no more of a model while
it writes."""


def make_dummy_model(
    spec: str,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
    *,
    shard: Shard | None = None,
    group: TensorParallelGroup | None = None,
    quantization: str | None = None,
) -> tuple[Decoder, ModelConfig]:
    """A decoder with random weights, ready for inference, and the whole model's config.

    The weights are always the same on a kind of device; a shard holds slices of them. `spec` is the
    name of a published model or the path of a config.json; the other arguments are as in
    `load_model`. Raises ModelError.
    """
    device = torch.device(device)
    config = dummy_config(spec).rounded(quantization, on_gpu=device.type == "cuda")
    decoder = empty_decoder(
        config, resolve_dtype(dtype, device, config.dtype), CPU, shard=shard, group=group
    )
    parts = list(shard_parts(tensor_parts(config), config, decoder.shard))
    formats: dict[str, PackedFormat] = {}
    if quantization is not None:
        formats = rounded_forms(tensor_parts(config), config)
        forms = {name: MatrixForm(found, None) for name, found in formats.items()}
        pack_decoder(decoder, parts, forms)
    place(decoder, device)
    generator = torch.Generator(device)
    total, done = _numbers(parts), 0
    for name, of_tensor in groupby(parts, key=attrgetter("name")):
        filling = [(part, region_of(decoder, part)) for part in of_tensor]
        form = formats.get(name)
        if form is None:
            _draw(filling, generator)
        else:
            _draw_rounded(filling, generator, form, decoder.dtype)
        done += _numbers([part for part, _ in filling])
        if progress is not None:
            progress(done, total)
    return decoder, config


def save_dummy_checkpoint(
    spec: str,
    dtype: torch.dtype,
    directory: Path,
    *,
    make_file: Callable[[Path], None] = Path.touch,
    free: int | None = None,
) -> None:
    """Write the model that `make_dummy_model` makes on a CPU as a checkpoint, in the number format
    of its runs.

    The directory exists; `make_file` makes each file of weights, empty; the files may take `free`
    bytes, by default the free space of the file system. Raises ModelError if `spec` is not a model;
    RuntimeFailure if it cannot be written.
    """
    config = dummy_config(spec)
    files = list(_tensors_by_file(config, dtype))
    sizes = [_numbers(parts) for parts in files]
    needed = sum(sizes) * dtype.itemsize
    if free is None:
        free = shutil.disk_usage(directory).free
    if needed > free:
        raise RuntimeFailure(
            f"{directory}: the weights of {spec} take {format_size(needed)}, but only "
            f"{format_size(free)} are free"
        )
    names = [SINGLE_NAME]
    if len(files) > 1:
        names = [
            f"model-{number:05}-of-{len(files):05}.safetensors"
            for number in range(1, len(files) + 1)
        ]
    generator = torch.Generator("cpu")
    memory = torch.empty(max(sizes), dtype=dtype, device="cpu")
    weight_map: dict[str, str] = {}
    try:
        for parts, size, name in zip(files, sizes, names, strict=True):
            numbers = memory[:size]
            runs = torch.split(numbers, [part.size for part in parts])
            for part, run in zip(parts, runs, strict=True):
                _draw([(part, run.view(part.shape))], generator)
                weight_map[part.name] = name
            make_file(directory / name)
            _write_file(directory / name, parts, dtype, numbers)
        if len(files) > 1:
            # transformers wants both
            index = {"metadata": {"total_size": needed}, "weight_map": weight_map}
            (directory / INDEX_NAME).write_text(json.dumps(index), encoding="utf-8")
        shape = dummy_shape(spec)
        shape["dtype"] = format_name(dtype)
        shape["torch_dtype"] = format_name(dtype)  # the key before transformers 5
        (directory / "config.json").write_text(json.dumps(shape, indent=1), encoding="utf-8")
    except OSError as error:
        raise RuntimeFailure(
            f"{directory}: the weights of {spec} cannot be written ({error})"
        ) from error


def _write_file(path: Path, parts: list[TensorPart], dtype: torch.dtype, numbers: Tensor) -> None:
    """Write the format of safetensors: the header's length, the header, and the numbers of all
    tensors in order. The library itself would replace the existing file by another one."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for part in parts:
        begin = end
        end += part.size * dtype.itemsize
        header[part.name] = {
            "dtype": _STORED_NAMES[dtype],
            "shape": part.shape,
            "data_offsets": (begin, end),
        }
    words = json.dumps(header).encode()
    words += b" " * (-len(words) % 8)  # align the numbers
    length = len(words).to_bytes(8, "little")
    with path.open("r+b") as file:
        file.write(length + words)
        file.write(numbers.view(torch.uint8).numpy().data)


def _tensors_by_file(config: ModelConfig, dtype: torch.dtype) -> Iterator[list[TensorPart]]:
    parts: list[TensorPart] = []
    num_bytes = 0
    for _, of_tensor in groupby(tensor_parts(config), key=attrgetter("name")):
        part = replace(next(of_tensor), rows=None)
        own_bytes = part.size * dtype.itemsize
        if parts and num_bytes + own_bytes > _FILE_BYTES:
            yield parts
            parts = []
            num_bytes = 0
        parts.append(part)
        num_bytes += own_bytes
    yield parts


def _numbers(parts: list[TensorPart]) -> int:
    return sum(part.size for part in parts)


_Filling = Sequence[tuple[TensorPart, Tensor]]
"""Parts of one tensor, and the region that each fills."""


def _draw(filling: _Filling, generator: torch.Generator) -> None:
    """Fill regions with their parts of a tensor. The whole tensor is drawn, from random numbers of
    its own."""
    part, region = filling[0]
    if len(part.shape) == 1 or part.parameter.endswith(".log_decay"):
        value = 1.0  # norms, and rates of decay
        if part.name.endswith(".bias"):
            value = 0.0
        for _, vector in filling:
            vector.fill_(value)
        return
    digest = hashlib.blake2s(f"{DUMMY_SEED} {part.name}".encode(), digest_size=4).digest()
    generator.manual_seed(int.from_bytes(digest, "little"))
    if region.shape == part.shape:
        region.uniform_(-_HALF_WIDTH, _HALF_WIDTH, generator=generator)
    else:
        whole = region.new_empty(part.shape)
        whole.uniform_(-_HALF_WIDTH, _HALF_WIDTH, generator=generator)
        for taken, filled in filling:
            filled.copy_(whole[taken.source])


def _draw_rounded(
    filling: _Filling,
    generator: torch.Generator,
    form: PackedFormat,
    dtype: torch.dtype,
) -> None:
    """Fill regions with their parts of a matrix that is drawn in this dtype and rounded."""
    first, first_region = filling[0]
    numbers = torch.empty(first.shape, dtype=dtype, device=first_region.device)
    _draw([(replace(first, rows=None, columns=None), numbers)], generator)
    for part, region in filling:
        matrix = round_to_nearest(numbers[part.source[0]], form.bits, form.group)
        if part.columns is not None:
            matrix = matrix.columns(part.columns)
        if region.is_floating_point():
            region.copy_(matrix.dequantize())
        else:
            region.copy_(pack(matrix))
