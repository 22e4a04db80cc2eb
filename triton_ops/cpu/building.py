"""Compile a library into a cache folder. A program of its own, so that a chat can end while it is still at work.

Run as ``python building.py JOB``, JOB being a Job in JSON. It imports the standard library alone and starts at once.
"""

import fcntl
import hashlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

TIMEOUT = 900.0
"""Seconds that the compiler may take; far more than it does, even on a busy machine."""
_SHOWN_LINES = 5


@dataclass(frozen=True, slots=True)
class Job:
    """What to build and where to keep it.

    Attributes:
        key: of everything the result depends on; names its files.
        directory: where they are kept.
        compile: the command up to the output's name.
        link: the command up to the object's and the output's names.
        link_last: what follows them.
    """

    key: str
    directory: str
    compile: tuple[str, ...]
    link: tuple[str, ...]
    link_last: tuple[str, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Job":
        fields: dict[str, Any] = json.loads(text)
        for name in ("compile", "link", "link_last"):
            fields[name] = tuple(fields[name])
        return cls(**fields)

    @property
    def failure(self) -> Path:
        """Where the reason is written when the compiler fails."""
        return Path(self.directory) / f"{self.key}.failed"

    def whole_libraries(self) -> list[Path]:
        """The libraries in the folder that are as they were written: a name ends in the hash of the content."""
        found = sorted(Path(self.directory).glob(f"{self.key}-*.so"))
        return [path for path in found if path.stem.rpartition("-")[2] == content_hash(path)]


def content_hash(path: Path) -> str:
    """Of a file's bytes; empty if it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:32]
    except OSError:
        return ""


def run(job: Job) -> bool:
    """Build the library unless it is there; False, and the reason in `job.failure`, if that cannot be done.

    Several processes may do so at the same time: one builds, the others wait for it. Every file appears whole or not
    at all, because it is written under another name first.
    """
    directory = Path(job.directory)
    temporary = directory / f"{job.key}.{os.getpid()}"
    object_file, library = temporary.with_suffix(".o"), temporary.with_suffix(".new")
    with open(directory / f"{job.key}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if job.whole_libraries():
            return True
        try:
            _call([*job.compile, "-o", str(object_file)])
            _call([*job.link, str(object_file), "-o", str(library), *job.link_last])
            for damaged in directory.glob(f"{job.key}-*.so"):
                damaged.unlink()
            library.rename(directory / f"{job.key}-{content_hash(library)}.so")
        except (OSError, subprocess.SubprocessError) as error:
            library.write_text(_reason(error))
            library.rename(job.failure)
            return False
        finally:
            object_file.unlink(missing_ok=True)
            library.unlink(missing_ok=True)
        job.failure.unlink(missing_ok=True)
        return True


def _call(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, errors="replace", timeout=TIMEOUT)


def _reason(error: Exception) -> str:
    """One paragraph: the compiler's own errors, if it said any."""
    if not isinstance(error, subprocess.CalledProcessError):
        return str(error)
    said = [line for line in str(error.stderr).splitlines() if line.strip()]
    errors = [line for line in said if "error" in line.lower()] or said or [f"exit code {error.returncode}"]
    return "\n".join(errors[:_SHOWN_LINES])


if __name__ == "__main__":
    os.nice(19)  # whoever is chatting meanwhile goes first
    sys.exit(0 if run(Job.from_json(sys.argv[1])) else 1)
