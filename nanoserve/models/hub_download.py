"""Bringing a model from the Hugging Face hub into the hub's cache.

Large files are downloaded into `blobs/SHA256.incomplete`, and go on there after an interruption:
huggingface_hub 2.4 itself begins an interrupted file anew. No torch here.
"""

import fcntl
import hashlib
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from nanoserve.config.model_config import ModelConfig
from nanoserve.errors import ModelError, NanoserveError, first_line, one_line, shown
from nanoserve.models.hub_files import (
    CHECKING,
    DOWNLOADING,
    Announce,
    HubReference,
    ProgressCallback,
    chosen_files,
    model_path,
    storage_of,
)
from nanoserve.utils.files import replace_file
from nanoserve.utils.sizes import format_size

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SECONDS = 10.0
"""Limit for the hub to describe a repository."""
_CHUNK = 1 << 20
"""Bytes that are written at once: an interruption loses less than this."""


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository."""

    name: str
    size: int
    sha256: str | None
    """None for small files, which the hub keeps in git."""


def hub_page(repository: str) -> str:
    """The page where a repository's terms are read and accepted, which a mirror does not have."""
    return f"https://huggingface.co/{repository}"


def download(
    reference: HubReference,
    title: str,
    progress: ProgressCallback | None,
    announce: Announce | None,
) -> Path:
    """Download what is missing of a model, which messages call by its title, and return its
    directory or its (first) .gguf file. Raises ModelError in one line."""
    with _quiet_hub(), _hub_errors(reference, title):
        started = _Download(reference, title, progress or _no_progress, announce or _say_nothing)
        return started.run()


class _Download:
    """One download into the hub's cache, at one commit."""

    def __init__(
        self, reference: HubReference, title: str, progress: ProgressCallback, announce: Announce
    ) -> None:
        self._reference, self._title = reference, title
        self._progress, self._announce = progress, announce
        self._storage = storage_of(reference.repository)
        self._done = self._total = 0

    def run(self) -> Path:
        from huggingface_hub import HfApi

        repository = self._reference.repository
        info = HfApi().model_info(repository, files_metadata=True, timeout=_SECONDS)
        if _COMMIT.fullmatch(str(info.sha)) is None:
            raise ModelError(f"the hub states {shown(info.sha)} as the commit of {repository}")
        files = {file.name: file for file in _files(info)}
        chosen = [files[name] for name in chosen_files(list(files), self._reference)]
        snapshot = self._storage / "snapshots" / str(info.sha)
        missing = [file for file in chosen if not (snapshot / file.name).exists()]
        self._total = sum(file.size for file in missing)
        if missing:
            self._check_space(missing)
            self._announce(
                f"downloading {self._title}: {format_size(self._total)}, license "
                f"{_license(info)} ({hub_page(repository)})"
            )
        try:
            # weights come last
            for file in missing:
                if file.name.endswith(".safetensors"):
                    ModelConfig.from_directory(snapshot)  # what cannot be run is not downloaded
                self._fetch(file, str(info.sha))
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"{format_size(self._kept(missing))} of {format_size(self._total)} are kept; the "
                "same command goes on there"
            ) from None
        (self._storage / "refs").mkdir(parents=True, exist_ok=True)
        replace_file(self._storage / "refs" / "main", str(info.sha))
        return model_path(snapshot, [file.name for file in chosen])

    def _check_space(self, missing: Sequence[HubFile]) -> None:
        """Raise ModelError if the disk has no room for what is still to be downloaded."""
        needed = self._total - self._kept(missing)
        free = free_bytes(self._storage)
        if needed > free:
            raise ModelError(
                f"{self._title} needs {format_size(needed)} more, and {self._storage.parent} "
                f"has {format_size(free)} free; make room there, or set HF_HOME to a directory on "
                "another disk"
            )

    def _kept(self, missing: Sequence[HubFile]) -> int:
        """Bytes of the large files that an interrupted download has brought."""
        kept = 0
        for file in missing:
            partial = self._partial(file)
            if partial is None:
                continue
            for path in (partial, partial.with_suffix("")):
                if path.exists():
                    kept += path.stat().st_size
        return kept

    def _partial(self, file: HubFile) -> Path | None:
        if file.sha256 is None:
            return None
        return self._storage / "blobs" / f"{file.sha256}.incomplete"

    def _fetch(self, file: HubFile, commit: str) -> None:
        """Bring a file into the cache; huggingface_hub links what is there as a blob."""
        from huggingface_hub import HfApi

        partial = self._partial(file)
        if partial is not None and not partial.with_suffix("").exists():
            self._fetch_blob(file, partial, commit)
        HfApi().hf_hub_download(self._reference.repository, file.name, revision=commit)
        self._done += file.size
        self._progress(DOWNLOADING, self._done, self._total)

    def _fetch_blob(self, file: HubFile, partial: Path, commit: str) -> None:
        from huggingface_hub import HfApi, hf_hub_url, utils
        from huggingface_hub.file_download import http_get

        hub_utils: Any = utils  # it has no types for what it imports itself
        partial.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("ab") as opened:
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ModelError(
                    f"another process is downloading {self._title}; wait until it is done"
                ) from None
            if opened.tell() > file.size:
                opened.seek(0)
                opened.truncate()
            url = hf_hub_url(
                self._reference.repository,
                file.name,
                revision=commit,
                endpoint=HfApi().endpoint,
            )
            http_get(
                url,
                _CountedFile(opened, self._tell),  # type: ignore[arg-type]  # what is used of a file
                resume_size=opened.tell(),
                headers=hub_utils.build_hf_headers(),
                expected_size=file.size,
            )
        self._check(file, partial)
        partial.replace(partial.with_suffix(""))

    def _tell(self, position: int) -> None:
        self._progress(DOWNLOADING, self._done + position, self._total)

    def _check(self, file: HubFile, partial: Path) -> None:
        """Raise ModelError if the file is not the one that the hub has."""
        digest, done = hashlib.sha256(), 0
        with partial.open("rb") as opened:
            while chunk := opened.read(_CHUNK):
                digest.update(chunk)
                done += len(chunk)
                self._progress(CHECKING, done, file.size)
        if digest.hexdigest() != file.sha256:
            partial.unlink()
            raise ModelError(
                f"{file.name} of {self._reference.repository} arrived damaged and was removed; try "
                "again"
            )


class _CountedFile:
    """A file open for appending that tells how long it is after each write."""

    def __init__(self, file: BinaryIO, tell: Callable[[int], None]) -> None:
        self._file, self._tell = file, tell

    def write(self, data: bytes) -> int:
        written = self._file.write(data)
        self._file.flush()
        self._tell(self._file.tell())
        return written

    def seek(self, offset: int) -> int:
        return self._file.seek(offset)

    def tell(self) -> int:
        return self._file.tell()

    def truncate(self) -> int:
        return self._file.truncate()


def free_bytes(place: Path) -> int:
    """Bytes that can still be written below a directory, which need not exist yet."""
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def _files(info: Any) -> Iterator[HubFile]:
    """The files of a repository. Raises ModelError for a hash that is none: it becomes the name of
    a file."""
    for sibling in info.siblings or ():
        sha256 = None
        if sibling.lfs is not None:
            sha256 = sibling.lfs.sha256
            if _SHA256.fullmatch(str(sha256)) is None:
                raise ModelError(
                    f"the hub states {shown(sha256)} as the SHA-256 of {shown(sibling.rfilename)}"
                )
        yield HubFile(sibling.rfilename, sibling.size or 0, sha256)


def _license(info: Any) -> str:
    """The license as a model card states it. Other licenses have a name and mostly an address."""
    card = {}
    if info.card_data is not None:
        card = info.card_data.to_dict()
    told = str(card.get("license") or "not stated")
    if told == "other" and card.get("license_name"):
        told = str(card["license_name"])
        if card.get("license_link"):
            told += f", {card['license_link']}"
    return one_line(told, 200)


def _no_progress(stage: str, done: int, total: int) -> None:
    """Show nothing."""


def _say_nothing(text: str) -> None:
    """Say nothing."""


@contextmanager
def _quiet_hub() -> Iterator[None]:
    """Within the block, huggingface_hub draws no bars and logs no retries, and hands over a
    download in smaller pieces than its 10 MiB."""
    from huggingface_hub import constants, utils

    hub_utils: Any = utils  # it has no types for what it imports itself
    shows_bars = not hub_utils.are_progress_bars_disabled()
    verbosity, chunk = hub_utils.logging.get_verbosity(), constants.DOWNLOAD_CHUNK_SIZE
    hub_utils.disable_progress_bars()
    hub_utils.logging.set_verbosity_error()
    constants.DOWNLOAD_CHUNK_SIZE = _CHUNK
    try:
        yield
    finally:
        constants.DOWNLOAD_CHUNK_SIZE = chunk
        hub_utils.logging.set_verbosity(verbosity)
        if shows_bars:
            hub_utils.enable_progress_bars()


@contextmanager
def _hub_errors(reference: HubReference, title: str) -> Iterator[None]:
    """Raise ModelError for what the hub, the network or the disk refuses."""
    from huggingface_hub import constants, errors

    repository, page = reference.repository, hub_page(reference.repository)
    instead = "give the path of a directory that holds the model instead"
    try:
        yield
    except NanoserveError:
        raise
    except errors.GatedRepoError as error:
        token = "a token of your account from https://huggingface.co/settings/tokens"
        raise ModelError(
            f"{title} is gated: accept its terms at {page}, and set HF_TOKEN to {token}"
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ModelError(
            f"the hub has no model {shown(repository)} ({page}), or it is private and HF_TOKEN is "
            f"not set; {instead}"
        ) from error
    except errors.HfHubHTTPError as error:
        reason = first_line(error) or type(error).__name__
        raise ModelError(f"{title} cannot be downloaded: {reason}; {instead}") from error
    except OSError as error:
        reason = error.strerror or first_line(error) or type(error).__name__
        raise ModelError(f"{title} cannot be downloaded: {reason}; {instead}") from error
    except Exception as error:
        # HTTP libraries and proxies raise many kinds of errors, which mean the same to the user.
        reason = first_line(error) or type(error).__name__
        raise ModelError(
            f"{title} cannot be downloaded: {constants.ENDPOINT} cannot be reached ({reason}); "
            f"check the network and try again, or {instead}"
        ) from error
