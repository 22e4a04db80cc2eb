"""Where this package comes from: the checkout that holds it, a clone that it was installed from, or neither."""

import subprocess
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec

PLACE = Path(__file__).resolve().parents[2]  # the directory that holds the packages: a checkout, or site-packages
_PACKAGES = ("nanoserve", "triton_ops")


def install_command(extra: str, place: Path = PLACE) -> str:
    """The command that installs the packages of an extra into the running environment."""
    source = _source(place)
    if source is None:
        return f"pip install 'nanoserve[{extra}]'"
    return f"pip install {'-e ' if source == place else ''}'{source}[{extra}]'"


def commit(place: Path = PLACE) -> str | None:
    """The commit of the running code, followed by "+changes" if its files differ from it; None if it is unknown.

    For a copy that was installed from a clone, the clone's present commit is compared with the installed files.
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
    """The source of the package as pip recorded it (PEP 610); empty for a package from an index."""
    for distribution in metadata.distributions(name="nanoserve", path=[str(place)]):
        with suppress(msgspec.MsgspecError):
            return msgspec.json.decode(distribution.read_text("direct_url.json") or "{}", type=dict[str, Any])
    return {}


def _git(place: Path, *arguments: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(place), *arguments]  # reading a clone must not change it
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
