"""The origin of this package: the checkout that holds it, a clone that it was installed from, or
neither."""

import subprocess
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec

# the directory that holds the packages: a checkout, or site-packages
PLACE = Path(__file__).resolve().parents[2]
_PACKAGES = ("nanoserve", "triton_ops")


def install_command(extra: str, place: Path = PLACE) -> str:
    """The command that installs the packages of an extra into the running environment."""
    source = _source(place)
    if source is None:
        return f"pip install 'nanoserve[{extra}]'"
    if source == place:
        return f"pip install -e '{source}[{extra}]'"
    return f"pip install '{source}[{extra}]'"


def commit(place: Path = PLACE) -> str | None:
    """The commit of the running code, followed by "+changes" if its files differ from it; None if
    it is unknown.

    For a copy that was installed from a clone, the clone's present commit is compared with the
    installed files.
    """
    source = _source(place)
    if source is None:
        recorded = _direct_url(place).get("vcs_info", {}).get("commit_id")
        if not isinstance(recorded, str):
            return None
        return recorded[:12]
    if not (source / ".git").exists():
        return None
    try:
        revision = _git(source, place, ["rev-parse", "--short=12", "HEAD"])
        changed = _git(source, place, ["diff", "--name-only", "HEAD", "--"] + list(_PACKAGES))
    except (OSError, subprocess.SubprocessError):
        return None
    if changed:
        return f"{revision}+changes"
    return revision


def _source(place: Path) -> Path | None:
    """The directory whose pyproject.toml describes this package, if it is on this machine."""
    if (place / "pyproject.toml").is_file():
        return place
    url = urlsplit(_direct_url(place).get("url", ""))
    source = Path(unquote(url.path))
    if url.scheme == "file" and (source / "pyproject.toml").is_file():
        return source
    return None


def _direct_url(place: Path) -> dict[str, Any]:
    """The source of the package as pip recorded it (PEP 610); empty for a package from an index."""
    for distribution in metadata.distributions(name="nanoserve", path=[str(place)]):
        with suppress(msgspec.MsgspecError):
            return msgspec.json.decode(
                distribution.read_text("direct_url.json") or "{}", type=dict[str, Any]
            )
    return {}


def _git(source: Path, place: Path, arguments: list[str]) -> str:
    """The output of a git command about the files of `place`, by the repository of `source`."""
    command = ["git", "--no-optional-locks"]  # reading a clone must not change it
    command += ["-C", str(place), f"--git-dir={source / '.git'}", f"--work-tree={place}"]
    command += arguments
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=10
    ).stdout.strip()
