"""The documents say what is true: their links lead where they say."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanoserve.commands.main import BENCHMARKS, COMMANDS, main

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").glob("*.ipynb"), *ROOT.glob("*.md")])


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
    core = [
        ROOT / "nanoserve/engine/engine.py",
        ROOT / "nanoserve/scheduler/kv.py",
        *(ROOT / "nanoserve/scheduler").rglob("*.py"),
    ]
    lines = sum(len(path.read_text().splitlines()) for path in core)
    (said,) = re.findall(r"about\s([\d,]+)\slines together", (ROOT / "docs/tour.md").read_text())
    assert abs(int(said.replace(",", "")) - lines) < 0.1 * lines, f"{lines} lines"


@pytest.mark.parametrize("document", [path for path in DOCUMENTS if path.suffix == ".md"], ids=lambda path: path.name)
def test_commands_take_the_options_that_are_written(document: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line in commands(document.read_text()):
        words = line.split()
        name = tuple(words[:2] if words[0] == "bench" and words[1:] and words[1] in BENCHMARKS else words[:1])
        assert name[0] in (*COMMANDS, "bench"), line
        for option in re.findall(r"(?<!\S)--?[a-z][a-z-]*", line):
            assert option in options(name, capsys), f"{option} of: nanoserve {line}"


def commands(text: str) -> Iterator[str]:
    """Find the words after the program's name in blocks of code and code within text, up to a pipe or an ellipsis."""
    fence = re.compile(r"^```\w*\n(.*?)^```", re.DOTALL | re.MULTILINE)
    lines = [line for block in fence.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    rest = fence.sub("", text)
    lines += re.findall(r"^    (nanoserve .*)", rest, re.MULTILINE)
    lines += re.findall(r"`((?:[^`\n]|\n(?!\n))+)`", rest)
    for line in lines:
        found = re.match(r"(?:\$ )?(?:\.venv/bin/)?nanoserve ([a-z][^|&;#…]*)", " ".join(line.split()))
        if found is not None:
            yield found[1]


def test_commands_are_found_in_all_kinds_of_code() -> None:
    text = "`nanoserve chat\n-m a`, `x`\n\n    nanoserve plan\n\n"
    text += "```console\n$ nanoserve simulate \\\n  --pp 4 | head\n```\n"
    assert [line.strip() for line in commands(text)] == ["simulate --pp 4", "plan", "chat -m a"]


_SHOWN: dict[tuple[str, ...], set[str]] = {}


def options(name: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> set[str]:
    """The options in a command's help."""
    if name not in _SHOWN:
        assert main([*name, "--help"]) == 0
        _SHOWN[name] = set(re.findall(r"--?[a-z][a-z-]*", capsys.readouterr().out))
    return _SHOWN[name]
