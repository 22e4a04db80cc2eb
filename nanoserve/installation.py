"""Where this package comes from: a checkout it lies in, a clone it was installed from, or neither. No torch."""

import json
import os
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

PLACE = Path(__file__).resolve().parents[1]
"""The directory with the packages: that of a checkout, or site-packages."""
_PACKAGES = ("nanoserve", "triton_ops")


def install_command(extra: str, place: Path = PLACE) -> str:
    """What installs the packages of an extra into the environment that this package runs in."""
    source = _source(place)
    if source is None:
        return f"pip install 'nanoserve[{extra}]'"
    return f"pip install {'-e ' if source == place else ''}'{source}[{extra}]'"


def commit(place: Path = PLACE) -> str | None:
    """The commit of the code that runs, with "+changes" behind it if any of its files differ; None if it is unknown.

    Of a copy that was installed from a clone, this is the clone's present commit, and its files are the installed ones.
    """
    source = _source(place)
    if source is None:
        recorded = _direct_url(place).get("vcs_info", {}).get("commit_id")
        return recorded[:12] if isinstance(recorded, str) else None
    if not (source / ".git").exists():
        return None
    tree = (f"--git-dir={source / '.git'}", f"--work-tree={place}")
    try:
        revision = _git(place, *tree, "rev-parse", "--short=12", "HEAD")
        changed = _git(place, *tree, "diff", "--name-only", "HEAD", "--", *_PACKAGES)
    except (OSError, subprocess.SubprocessError):
        return None
    return revision + ("+changes" if changed else "")


def _source(place: Path) -> Path | None:
    """The directory whose pyproject.toml describes this package, if it is on this machine."""
    if (place / "pyproject.toml").is_file():
        return place
    url = urlsplit(_direct_url(place).get("url", ""))
    source = Path(unquote(url.path))
    return source if url.scheme == "file" and (source / "pyproject.toml").is_file() else None


def _direct_url(place: Path) -> dict[str, Any]:
    """What pip wrote down about where it found the package (PEP 610); empty for one from an index."""
    for distribution in metadata.distributions(name="nanoserve", path=[str(place)]):
        try:
            found = json.loads(distribution.read_text("direct_url.json") or "{}")
        except ValueError:
            continue
        return found if isinstance(found, dict) else {}
    return {}


def _git(place: Path, *arguments: str) -> str:
    words = ["git", "-C", str(place), *arguments]
    unlocked = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}  # to look at a clone changes nothing in it
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=10, env=unlocked).stdout.strip()
