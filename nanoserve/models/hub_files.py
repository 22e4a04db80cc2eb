"""The models of a hub repository: what names one, which files belong to it, and where the hub's
cache has it. No torch and no network."""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from nanoserve.errors import ModelError, shown
from nanoserve.utils.files import read_optional_json_object

ProgressCallback = Callable[[str, int, int], None]
"""Called with (stage, done, total)."""
Announce = Callable[[str], None]
"""Called with a line for the user."""

DOWNLOADING = "downloading"
"""The stage of a download, whose amounts are bytes."""
CHECKING = "checking"
"""The stage that compares what was downloaded with the hub's hash; its amounts are bytes."""

# Only safetensors and never code: nothing that is downloaded is unpickled or run.
ALLOWED_FILES = ("*.json", "*.safetensors", "tokenizer.model", "*.jinja")
# Copies of the weights in other layouts, which some repositories hold as well.
IGNORED_FILES = ("*/*", "consolidated*")

USUAL_QUANTIZATION = "Q4_K_M"
"""The quantization of a GGUF repository that is meant if none is named."""
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
_QUANTIZATION = re.compile(
    r"[-.]((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|BF16|F16|F32|FP16|MXFP4\w*))$", re.IGNORECASE
)
_HUB = re.compile(r"(?:https?://)?(?:hf\.co|huggingface\.co)/")
_REFERENCE = re.compile(
    r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::(?P<selector>[^:\s]+))?/?"
)
_NO_WEIGHTS = re.compile(r"mmproj|imatrix", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class HubReference:
    """A model of a hub repository: all of it, or some of its GGUF files."""

    repository: str
    selector: str | None = None
    """A quantization such as Q4_K_M, or the name of a .gguf file. None for safetensors, or for a
    repository's usual quantization."""

    def __str__(self) -> str:
        if self.selector is None:
            return self.repository
        return f"{self.repository}:{self.selector}"


def parse_reference(name: str) -> HubReference | None:
    """The repository that `owner/name`, `owner/name:Q4_K_M`, `owner/name:file.gguf` or the address
    of a page of the hub names. None if it has no such form."""
    found = _REFERENCE.fullmatch(_HUB.sub("", name, count=1))
    if found is None:
        return None
    return HubReference(found["repository"], found["selector"])


def group_gguf(names: Iterable[str]) -> dict[str, list[str]]:
    """The GGUF files of each model, by the name that all its parts share. What has no weights of
    a language model is left out."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.lower().endswith(".gguf") and not _NO_WEIGHTS.search(name.rpartition("/")[2]):
            models.setdefault(_without_part(name), []).append(name)
    return models


def _chosen_gguf(names: Iterable[str], reference: HubReference) -> list[str]:
    """The GGUF files that the reference means, all parts of a model that is split, in order. Empty
    if there is no GGUF file. Raises ModelError, naming those that there are, if it is none of
    them."""
    models = group_gguf(names)
    if not models:
        return []
    selector = reference.selector
    if selector is not None and selector.lower().endswith(".gguf"):
        wanted = [base for base in models if _is_called(models[base], selector)]
    else:
        wanted = _of_quantization(models, selector or USUAL_QUANTIZATION)
        if selector is None and len(models) == 1:
            wanted = list(models)
    if not wanted:
        choices = sorted({quantization_of(base) or base for base in models})
        missing = selector or USUAL_QUANTIZATION
        raise ModelError(
            f"{reference.repository} has no {shown(missing)}; give one of its files as "
            f"{reference.repository}:NAME, where NAME is {', '.join(choices)}"
        )
    return models[wanted[0]]


def _without_part(name: str) -> str:
    """The name that all parts of a model share, without .gguf."""
    return _PART.sub("", name).removesuffix(".gguf")


def _is_called(parts: Sequence[str], selector: str) -> bool:
    return any(selector in (part, part.rpartition("/")[2]) for part in parts)


def quantization_of(name: str) -> str:
    """The quantization at the end of a GGUF file's name, in capitals; empty if there is none."""
    found = _QUANTIZATION.search(_without_part(name))
    if found is None:
        return ""
    return found[1].upper()


def _of_quantization(models: Iterable[str], quantization: str) -> list[str]:
    """The models of this quantization; where there is none, those that mix it with others, whose
    names have a UD- before it."""
    wanted = quantization.upper()
    exact = [base for base in models if quantization_of(base) == wanted]
    return exact or [base for base in models if quantization_of(base) == f"UD-{wanted}"]


def _safetensors_files(names: Iterable[str]) -> list[str]:
    """The files of a safetensors model, weights last; empty if there are no weights."""
    found = [
        name
        for name in names
        if any(fnmatch(name, allowed) for allowed in ALLOWED_FILES)
        and not any(fnmatch(name, ignored) for ignored in IGNORED_FILES)
    ]
    if not any(name.endswith(".safetensors") for name in found):
        return []
    return sorted(found, key=lambda name: (name.endswith(".safetensors"), name))


def chosen_files(names: Sequence[str], reference: HubReference) -> list[str]:
    """The files of the model that the reference means: those of safetensors if there are some and
    no GGUF file is asked for. Raises ModelError if there are no weights of either kind."""
    chosen: list[str] = []
    if reference.selector is None:
        chosen = _safetensors_files(names)
    if not chosen:
        chosen = _chosen_gguf(names, reference)
    if not chosen:
        kind = "no *.safetensors and no *.gguf weights"
        if reference.selector is not None:
            kind = "no *.gguf weights"
        raise ModelError(
            f"{reference.repository} has {kind}, and nanoserve reads no other kind; choose another "
            "model"
        )
    return chosen


def model_path(snapshot: Path, files: Sequence[str]) -> Path:
    if files[0].lower().endswith(".gguf"):
        return snapshot / files[0]
    return snapshot


def storage_of(repository: str) -> Path:
    """Where the hub's cache keeps a repository: blobs, snapshots of commits, and refs."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}"


def find_cached(reference: HubReference) -> Path | None:
    """The model in the cache, or None if it or a part of it is missing there."""
    storage = storage_of(reference.repository)
    try:
        commit = (storage / "refs" / "main").read_text().strip()
    except OSError:
        return None
    snapshot = storage / "snapshots" / commit
    names = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.exists()]
    try:
        files = chosen_files(names, reference)
    except ModelError:
        return None
    if files[0].lower().endswith(".gguf"):
        is_whole = _has_all_parts(files)
    else:
        is_whole = _has_all_safetensors(snapshot, files)
    if not is_whole:
        return None
    return model_path(snapshot, files)


def _has_all_parts(files: Sequence[str]) -> bool:
    part = _PART.search(files[0])
    return part is None or len(files) == int(part[2])


def _has_all_safetensors(snapshot: Path, files: Sequence[str]) -> bool:
    """Whether configuration, tokenizer and all weights are there, by the index of the weights."""
    needed = {"config.json"}
    index = read_optional_json_object(snapshot / "model.safetensors.index.json")
    shards = index.get("weight_map")
    if isinstance(shards, dict):
        needed.update(shard for shard in shards.values() if isinstance(shard, str))
    has_tokenizer = "tokenizer.json" in files or "tokenizer.model" in files
    return has_tokenizer and needed <= set(files)


def told_offline() -> bool:
    """Whether HF_HUB_OFFLINE is set."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
