"""The documents say what is true: their links lead where they say."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "docs").glob("*.ipynb"), *ROOT.glob("*.md")])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_a_link_to_a_name_leads_to_the_file_that_defines_it(document: Path) -> None:
    """Links have no line numbers: a reader searches the file for the name, and no edit moves it."""
    text = document.read_text()
    assert not re.findall(r"\.py#L\d+", text), "link to the file; the text of the link names what to look for"
    for symbol, path in re.findall(r"\[`([\w.]+)`\]\(([\w./]+\.py)\)", text):
        assert defines((document.parent / path).resolve(), symbol), f"{path} does not define {symbol}"


def defines(source: Path, symbol: str) -> bool:
    node: ast.AST = ast.parse(source.read_text())
    for name in symbol.split("."):
        found = next((each for each in getattr(node, "body", []) if name in _names(each)), None)
        if found is None:
            return False
        node = found
    return True


def _names(node: ast.stmt) -> set[str | None]:
    """What a definition or an assignment names."""
    targets = getattr(node, "targets", [getattr(node, "target", node)])
    return {getattr(target, "id", getattr(target, "name", None)) for target in targets}


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


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_a_link_to_a_section_leads_to_a_heading(document: Path) -> None:
    for path, section in re.findall(r"\]\(((?:[\w./-]+\.md)?)#([^)\s]+)\)", document.read_text()):
        target = document.parent / path if path else document
        assert section in headings(target), f"{path}#{section}"


def headings(document: Path) -> set[str]:
    """The names that GitHub gives the headings of a page."""
    titles = re.findall(r"^#+ (.*)", document.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_tour_says_how_many_lines_the_core_has() -> None:
    core = [ROOT / "nanoserve/engine.py", ROOT / "nanoserve/kv.py", *(ROOT / "nanoserve/scheduler").rglob("*.py")]
    lines = sum(len(path.read_text().splitlines()) for path in core)
    (said,) = re.findall(r"about\s([\d,]+)\slines together", (ROOT / "docs/tour.md").read_text())
    assert abs(int(said.replace(",", "")) - lines) < 0.1 * lines, f"{lines} lines"
