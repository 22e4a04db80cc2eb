"""The documents say what is true: their links lead where they say."""

import re
from pathlib import Path

import pytest

from scripts.refresh_links import ROOT, refreshed

DOCUMENTS = sorted([*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_source_links_point_at_their_symbols(document: Path) -> None:
    assert refreshed(document) == document.read_text(), "run python scripts/refresh_links.py"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_relative_link_leads_to_a_file(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), target


def test_the_readme_has_exactly_two_commands() -> None:
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert [len(block.strip().splitlines()) for block in blocks] == [1, 1]
    assert "nanoserve chat" in blocks[0]
    assert "pytest" in blocks[1]
