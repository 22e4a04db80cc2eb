"""Write a model directory: weights in several files, their index, and what a tokenizer needs.

config.json is the last file. A directory without it is not read, so one that is only half written
is never mistaken for a model.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from nanoserve.models.loading import INDEX_NAME
from nanoserve.utils.files import replace_file, unwritable_as_failure
from nanoserve.utils.interrupts import deferred_interrupts

_COPIED = (".json", ".model", ".jinja", ".txt")
"""Endings of the files of tokenizers and settings, which are copied."""


def file_names(directory: Path, count: int) -> list[Path]:
    """The files of a checkpoint of so many files."""
    return [
        directory / f"model-{place:05}-of-{count:05}.safetensors" for place in range(1, count + 1)
    ]


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a file of weights, which is there whole or not at all. Raises RuntimeFailure."""
    content = save(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, metadata={"format": "pt"}
    )
    with deferred_interrupts():
        replace_file(path, content)


def copy_other_files(source: Path, output: Path) -> None:
    """Copy the files of the tokenizer and of settings. Raises RuntimeFailure."""
    for path in sorted(source.iterdir()):
        if (
            path.suffix in _COPIED
            and path.name not in ("config.json", INDEX_NAME)
            and path.is_file()
        ):
            copy = output / path.name
            with unwritable_as_failure(copy):
                replace_file(copy, path.read_bytes())


def write_index(output: Path, files: Sequence[Path]) -> None:
    """Write which of these files, which are there, has which tensor. Raises RuntimeFailure."""
    weight_map: dict[str, str] = {}
    size = 0
    for path in files:
        header = _header(path)
        weight_map |= dict.fromkeys(header, path.name)
        size += max(found["data_offsets"][1] for found in header.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    replace_file(output / INDEX_NAME, json.dumps(index, indent=1))


def write_config(output: Path, config: Mapping[str, Any]) -> None:
    """Write config.json. Raises RuntimeFailure."""
    replace_file(output / "config.json", json.dumps(config, indent=1))


def _header(path: Path) -> dict[str, Any]:
    """The descriptions of the tensors of a safetensors file, by name."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(length))
    del header["__metadata__"]
    return header
