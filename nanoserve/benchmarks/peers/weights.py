"""The same weights for every engine: a decoder written as safetensors for transformers and as GGUF for llama.cpp.

What was written for a dummy model is kept in the user's cache directory: its weights are always the same.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import torch

from nanoserve.benchmarks.machine import cache_directory
from nanoserve.config import ModelConfig
from nanoserve.errors import RuntimeFailure
from nanoserve.models.dtypes import DTYPES, format_name, resolve_dtype
from nanoserve.models.dummy import DUMMY_SEED, make_dummy_model, save_dummy_checkpoint
from nanoserve.models.hub import DUMMY_PREFIX, ResolvedModel, dummy_config, dummy_shape
from nanoserve.models.loading import load_model
from nanoserve.processes.temporary import choose_directory, make_directory, remove_directory

_FILES = 2
"""Version of the file format in the cache's names; raise it to make peers' files be rewritten."""


def checkpoint_directory(model: ResolvedModel, dtype: str) -> Path:
    """A directory that transformers reads: the model's own, or for a dummy one that is written here.

    Raises:
        RuntimeFailure: if it cannot be written.
    """
    if model.directory is not None:
        return model.directory
    return _kept(_dummy_key(model.name, dtype), lambda target: save_dummy_checkpoint(model.name, DTYPES[dtype], target))


def gguf_file(model: ResolvedModel, dtype: str) -> Path:
    """A GGUF file of the model's weights in this number format.

    Raises:
        UsageError: for a family that has no place in a GGUF file here.
        RuntimeFailure: if it cannot be written.
    """
    from nanoserve.benchmarks.peers.gguf_writer import check_exportable, write_gguf

    check_exportable(model_config(model))

    directory, name = model.directory, model.name

    def write(target: Path) -> None:
        found = make_dummy_model(name, dtype) if directory is None else load_model(directory, dtype)
        write_gguf(*found, target / "model.gguf")

    if directory is None:
        return _kept(_dummy_key(name, dtype) + "-gguf", write) / "model.gguf"
    stamp = max(file.stat().st_mtime_ns for file in directory.iterdir())
    return _kept(f"{directory.name}-{stamp:x}-{dtype}-gguf", write) / "model.gguf"


def _dummy_key(name: str, dtype: str) -> str:
    """The shape is part of it: a config.json may change under the same name."""
    shape = json.dumps(dummy_shape(name) | {"torch_dtype": dtype}, sort_keys=True).encode()
    digest = hashlib.blake2s(shape, digest_size=6).hexdigest()
    plain = Path(name).name.removeprefix(DUMMY_PREFIX).removesuffix(".json")
    return f"dummy-{plain}-{dtype}-seed{DUMMY_SEED}-files{_FILES}-{digest}"


def _kept(key: str, write: Callable[[Path], None]) -> Path:
    """The cache's directory of that key, written if it is not there; half-written ones never show."""
    target = cache_directory() / "weights" / key
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        make_directory(draft := choose_directory(target.parent))
        try:
            write(draft)
            draft.replace(target)
        finally:
            remove_directory(draft)
    except OSError as error:
        raise RuntimeFailure(f"cannot write weights for the peers to {target}: {error.strerror or error}") from error
    return target


def model_config(model: ResolvedModel) -> ModelConfig:
    """The shape of a model, without its weights."""
    return dummy_config(model.name) if model.directory is None else ModelConfig.from_directory(model.directory)


def dtype_name(dtype: str, config: ModelConfig) -> str:
    """The number format that ``--dtype`` means for this model on this CPU, as torch calls it.

    Raises:
        UsageError: for an unknown name.
    """
    return format_name(resolve_dtype(dtype, torch.device("cpu"), config.dtype))
