"""Build a library into a cache folder. A program of its own, so that a chat can end while it is still at work.

Run as ``python building.py JOB``, JOB being a Job in JSON. It imports the standard library alone and starts at once.
"""

import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TIMEOUT = 900.0
"""Seconds that the compiler may take; far more than it does, even on a busy machine."""
IN_BACKGROUND = "background"
"""The last argument of a builder that nobody waits for."""
NICEST = 19
_SHOWN_LINES = 5


class CannotBuild(Exception):
    """Why there will be no library, in words that complete a notice."""


@dataclass(frozen=True, slots=True)
class Shelf:
    """The place of one library in a cache folder."""

    key: str
    """Hash of everything the library depends on; files are named by it."""
    directory: str
    """Where they are kept."""

    @property
    def failure(self) -> Path:
        """Where the reason is written when the library cannot be built."""
        return Path(self.directory) / f"{self.key}.failed"

    def whole_libraries(self) -> list[Path]:
        """The libraries in the folder that are as they were written: a name ends in the hash of the content."""
        found = sorted(Path(self.directory).glob(f"{self.key}-*.so"))
        return [path for path in found if path.stem.rpartition("-")[2] == content_hash(path)]

    def fill(self, make: Callable[[Path], Path]) -> bool:
        """Build the library unless it is there; False, and the reason in `failure`, if that cannot be done.

        `make` is given a path without suffix for files of its own and returns the library. Files that only differ in
        suffix from the library are kept beside it; all others are removed. Several processes may do so at the same
        time: one builds, the others wait for it. Every file appears whole or not at all.
        """
        directory = Path(self.directory)
        temporary = directory / f"{self.key}.{os.getpid()}"
        with open(directory / f"{self.key}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self.whole_libraries():
                return True
            try:
                self._keep(make(temporary))
            except (CannotBuild, OSError, subprocess.SubprocessError) as error:
                reason = temporary.with_name(temporary.name + ".reason")
                reason.write_text(_reason(error))
                reason.rename(self.failure)
                return False
            finally:
                for left in directory.glob(f"{self.key}.[0-9]*"):  # by this process, or one that was killed
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
            self.failure.unlink(missing_ok=True)
            return True

    def _keep(self, library: Path) -> None:
        directory, name = Path(self.directory), f"{self.key}-{content_hash(library)}"
        for damaged in directory.glob(f"{self.key}-*.so"):
            damaged.unlink()
        for companion in library.parent.glob(f"{library.stem}.*"):
            if companion != library:
                companion.rename(directory / f"{name}{companion.suffix}")
        library.rename(directory / f"{name}.so")  # last: with it the others are expected


@dataclass(frozen=True, slots=True)
class Job(Shelf):
    """What to compile and where to keep it."""

    compile: tuple[str, ...]
    """The command up to the output's name."""
    link: tuple[str, ...]
    """The command up to the object's and the output's names."""
    link_last: tuple[str, ...]
    """What follows them."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Job":
        fields: dict[str, Any] = json.loads(text)
        for name in ("compile", "link", "link_last"):
            fields[name] = tuple(fields[name])
        return cls(**fields)

    def run(self) -> bool:
        """Build the library unless it is there; see `fill`."""
        return self.fill(self._compile)

    def _compile(self, temporary: Path) -> Path:
        object_file, library = temporary.with_name(temporary.name + ".o"), temporary.with_name(temporary.name + ".so")
        _call([*self.compile, "-o", str(object_file)])
        _call([*self.link, str(object_file), "-o", str(library), *self.link_last])
        object_file.unlink()
        return library


def content_hash(path: Path) -> str:
    """Hash of a file's bytes; empty if it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:32]
    except OSError:
        return ""


def _call(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, errors="replace", timeout=TIMEOUT)


def _reason(error: Exception) -> str:
    """One paragraph: the compiler's own errors, if it said any."""
    if not isinstance(error, subprocess.CalledProcessError):
        return str(error)
    said = [line for line in str(error.stderr).splitlines() if line.strip()]
    errors = [line for line in said if "error" in line.lower()] or said or [f"exit code {error.returncode}"]
    return "\n".join(errors[:_SHOWN_LINES])


def begin(arguments: list[str]) -> None:
    """First thing in a builder: how urgent it is, and that it cleans up when it is ended."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if arguments[-1] == IN_BACKGROUND:
        os.nice(NICEST)  # whoever is chatting meanwhile goes first


if __name__ == "__main__":
    begin(sys.argv)
    sys.exit(0 if Job.from_json(sys.argv[1]).run() else 1)
