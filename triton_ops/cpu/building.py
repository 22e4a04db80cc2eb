"""Build a library into a cache folder. A program of its own, so that a chat can end while it is
still at work.

Run as ``python building.py JOB [WORDS]``, JOB being a Job in JSON and WORDS as for `begin`. It
imports the standard library alone and starts at once.
"""

import atexit
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TIMEOUT = 900.0
"""Seconds that the compiler may take; far more than it does, even on a busy machine."""
IN_BACKGROUND = "background"
"""An argument of a builder that nobody waits for."""
TIED = "tied"
"""An argument of a builder that ends with its parent: when its stdin does."""
NICEST = 19
_GRACE_SECONDS = 2.0
"""How long a builder without a parent may take to remove what it has made."""
_SHOWN_LINES = 5
_REASON_LENGTH = 160
"""Characters of a reason that are shown; the file that keeps it has all."""
_PASSING = ("Killed", "No space left", "Cannot allocate memory")
"""Words of compilers on a machine that is short of memory or disk, which it may have another
time."""


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
        """Where the reason is written when the library cannot be built. Only what is in the key
        would change that, such as the compiler and the sources."""
        return Path(self.directory) / f"{self.key}.failed"

    @property
    def interruption(self) -> Path:
        """Where the reason is written when it was not built, for want of time or memory, but may be
        the next time."""
        return Path(self.directory) / f"{self.key}.interrupted"

    @property
    def reason(self) -> str:
        """Why there is no library, in one line."""
        for path in (self.failure, self.interruption):
            with suppress(OSError):
                said = " ".join(path.read_text(encoding="utf-8", errors="replace").split())
                shown = said if len(said) <= _REASON_LENGTH else f"{said[:_REASON_LENGTH]}..."
                return shown if path == self.failure else f"{shown}; the next start tries again"
        return "it was ended"

    def whole_libraries(self) -> list[Path]:
        """The libraries in the folder that are as they were written: a name ends in the hash of the
        content."""
        found = sorted(Path(self.directory).glob(f"{self.key}-*.so"))
        return [path for path in found if path.stem.rpartition("-")[2] == content_hash(path)]

    def fill(self, make: Callable[[Path], Path]) -> bool:
        """Build the library unless it is there; False, and the reason in `failure` or
        `interruption`, if that cannot be done.

        `make` is given a path without suffix for files of its own and returns the library. Files
        that only differ in suffix from the library are kept beside it; all others are removed.
        Several processes may do so at the same time: one builds, and the others wait for what
        becomes of it. Every file appears whole or not at all.
        """
        directory = Path(self.directory)
        temporary = directory / f"{self.key}.{os.getpid()}"
        before = self._last_attempt()
        with open(directory / f"{self.key}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self.whole_libraries():
                return True
            if self._last_attempt() != before:  # another process has tried meanwhile, in vain
                return False
            try:
                self._keep(make(temporary))
            except (CannotBuild, OSError, subprocess.SubprocessError) as error:
                reason = temporary.with_name(temporary.name + ".reason")
                reason.write_text(_reason(error))
                reason.rename(self.interruption if _may_pass(error) else self.failure)
                return False
            finally:
                # by this process, or one that was killed
                for left in directory.glob(f"{self.key}.[0-9]*"):
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
            self.failure.unlink(missing_ok=True)
            self.interruption.unlink(missing_ok=True)
            return True

    def _last_attempt(self) -> dict[str, int]:
        """Differs after each attempt in vain."""
        files = dict[str, int]()
        for path in (self.failure, self.interruption):
            with suppress(OSError):
                files[path.name] = path.stat().st_ino
        return files

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
    """Commands that build a library, and the shelf that keeps it."""

    compile: tuple[str, ...]
    """The command up to the output's name."""
    link: tuple[str, ...]
    """The command up to the object's and the output's names."""
    link_last: tuple[str, ...]
    """Arguments after the files' names."""

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
        object_file, library = (
            temporary.with_name(temporary.name + ".o"),
            temporary.with_name(temporary.name + ".so"),
        )
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
    subprocess.run(
        command, check=True, capture_output=True, text=True, errors="replace", timeout=TIMEOUT
    )


def _may_pass(error: Exception) -> bool:
    """Whether the same build may succeed another time: the compiler's own errors stay."""
    if isinstance(error, subprocess.CalledProcessError):
        return error.returncode < 0 or any(sign in str(error.stderr) for sign in _PASSING)
    if isinstance(error, CannotBuild):
        return any(sign in str(error) for sign in _PASSING)
    return True


def _reason(error: Exception) -> str:
    """One paragraph: the compiler's own errors, if it said any."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"it was not done after {error.timeout:g} s"
    if not isinstance(error, subprocess.CalledProcessError):
        return str(error)
    said = [line for line in str(error.stderr).splitlines() if line.strip()]
    errors = (
        [line for line in said if "error" in line.lower()]
        or said
        or [f"exit code {error.returncode}"]
    )
    return "\n".join(errors[:_SHOWN_LINES])


def begin(arguments: list[str]) -> None:
    """First thing in a builder that leads its process group: how urgent it is, that it ends with
    its parent, and that it cleans up and leaves no compiler when it is ended."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    atexit.register(_end_compilers)
    if IN_BACKGROUND in arguments:
        os.nice(NICEST)  # whoever is chatting meanwhile goes first
    if TIED in arguments:
        parent = os.dup(0)  # compilers must not read it
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        threading.Thread(target=_follow, args=(parent,), daemon=True).start()


def _follow(parent: int) -> None:
    """End this process, and its group, when the parent's end of a pipe closes."""
    while os.read(parent, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_SECONDS)
    if _leads_group():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _end_compilers() -> None:
    """A compiler that is killed, as after a time-out, leaves processes of its own."""
    if _leads_group():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)


def _leads_group() -> bool:
    return os.getpgrp() == os.getpid()


if __name__ == "__main__":
    begin(sys.argv)
    sys.exit(0 if Job.from_json(sys.argv[1]).run() else 1)
