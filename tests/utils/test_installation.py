"""Where a package was installed from, and what that says about it."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from nanoserve.utils.installation import commit, install_command


def git(directory: Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    return subprocess.run(
        ["git", *identity, *words], cwd=directory, check=True, capture_output=True, text=True
    ).stdout


def write_package(directory: Path) -> None:
    (directory / "nanoserve").mkdir(parents=True)
    (directory / "triton_ops").mkdir()
    (directory / "nanoserve" / "engine.py").write_text("one\n")
    (directory / "triton_ops" / "kernel.py").write_text("two\n")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """With one commit, in a directory whose name a URL cannot hold as it is."""
    directory = tmp_path / "a clone"
    write_package(directory)
    (directory / "pyproject.toml").write_text("")
    git(directory, "init", "-q")
    git(directory, "add", ".")
    git(directory, "commit", "-q", "-m", "first")
    return directory


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Where the same files were copied to."""
    write_package(tmp_path / "site")
    return tmp_path / "site"


def record(site: Path, **direct_url: Any) -> None:
    """Files that pip writes beside an installed package."""
    information = site / "nanoserve-0.1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: nanoserve\nVersion: 0.1.0\n"
    )
    (information / "direct_url.json").write_text(json.dumps(direct_url))


def head(directory: Path) -> str:
    return git(directory, "rev-parse", "HEAD")[:12]


def test_a_checkout(clone: Path) -> None:
    assert commit(clone) == head(clone)
    assert install_command("plot", clone) == f"pip install -e '{clone}[plot]'"
    (clone / "nanoserve" / "engine.py").write_text("another\n")
    assert commit(clone) == head(clone) + "+changes"


def test_a_copy_from_a_clone(clone: Path, site: Path) -> None:
    record(site, url=clone.as_uri(), dir_info={})
    assert commit(site) == head(clone)
    assert install_command("plot", site) == f"pip install '{clone}[plot]'"
    assert git(clone, "status", "--porcelain") == ""


def test_a_copy_from_a_clone_that_has_moved_on(clone: Path, site: Path) -> None:
    record(site, url=clone.as_uri(), dir_info={})
    (clone / "triton_ops" / "kernel.py").write_text("better\n")
    assert commit(site) == head(clone)  # what is not committed there does not run here
    git(clone, "commit", "-q", "-a", "-m", "second")
    assert commit(site) == head(clone) + "+changes"


def test_from_the_address_of_a_repository(site: Path) -> None:
    record(
        site,
        url="https://example.com/nanoserve.git",
        vcs_info={"vcs": "git", "commit_id": "0123456789abcdef"},
    )
    assert commit(site) == "0123456789ab"
    assert install_command("server", site) == "pip install 'nanoserve[server]'"


@pytest.mark.parametrize("content", [None, "{", "[]", '{"url": "file:///nowhere"}'])
def test_from_nowhere_that_is_known(site: Path, content: str | None) -> None:
    if content is not None:
        record(site)
        (site / "nanoserve-0.1.0.dist-info" / "direct_url.json").write_text(content)
    assert commit(site) is None
    assert install_command("plot", site) == "pip install 'nanoserve[plot]'"
