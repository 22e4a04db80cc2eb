"""The documents say what is true: their links lead where they say."""

import ast
import json
import re
import tomllib
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from nanoserve.commands.main import BENCHMARKS, COMMANDS, main

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted(
    [*(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").glob("*.ipynb"), *ROOT.glob("*.md")]
)
HEADLINES = ROOT / "docs/benchmarks.md"
RESULTS = ROOT / "docs/results"
NOTEBOOKS = sorted(RESULTS.glob("*-????-??-??.md"))


def name_of(document: Path) -> str:
    return str(document.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_a_link_to_a_name_leads_to_the_file_that_defines_it(document: Path) -> None:
    """Links have no line numbers: a reader searches the file for the name, and no edit moves it."""
    text = document.read_text()
    assert not re.findall(r"\.py#L\d+", text), (
        "link to the file; the text of the link names what to look for"
    )
    for symbol, path in re.findall(r"\[`([\w.]+)`\]\(([\w./]+\.py)\)", text):
        assert defines((document.parent / path).resolve(), symbol), (
            f"{path} does not define {symbol}"
        )


def defines(source: Path, symbol: str) -> bool:
    node: ast.AST = ast.parse(source.read_text())
    for name in symbol.split("."):
        found = next((each for each in getattr(node, "body", []) if name in _names(each)), None)
        if found is None:
            return False
        node = found
    return True


def _names(node: ast.stmt) -> set[str | None]:
    """Names of a definition or an assignment."""
    targets = getattr(node, "targets", [getattr(node, "target", node)])
    return {getattr(target, "id", getattr(target, "name", None)) for target in targets}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_relative_link_leads_to_a_file(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), target


def test_the_readme_has_exactly_two_commands() -> None:
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert [len(block.strip().splitlines()) for block in blocks] == [1, 1]
    assert "nanoserve chat" in blocks[0]
    assert "pytest" in blocks[1]


@pytest.mark.parametrize(
    "document", [path for path in DOCUMENTS if path.parent != RESULTS], ids=lambda path: path.name
)
def test_paths_in_the_repository_exist(document: Path) -> None:
    """Paths that are written out, in text and in commands; one with capitals, as GPU-DATE.json,
    stands for many.

    Results keep the paths of their day.
    """
    paths = r"(?<![\w./~(-])((?:nanoserve|triton_ops|tests|scripts|docs|\.ci)/[\w./-]*\w)"
    for path in re.findall(paths, document.read_text()):
        assert (ROOT / path).exists() or "DATE" in path, path


def test_contributing_is_short_and_its_names_are_where_it_says() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert len(text.splitlines()) <= 120
    named = re.findall(r"`(\w+)`\s+in\s+`([\w./]+\.py)`", text)
    assert ("POLICIES", "nanoserve/scheduler/policies/__init__.py") in named
    for symbol, path in named:
        assert defines(ROOT / path, symbol), f"{path} does not define {symbol}"


def test_the_dockerfile_builds_and_runs_what_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    lines = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    parts = {name: [rest for each, rest in steps if each == name] for name, _ in steps}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = [
        name.rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]
    ]
    copied = [name for words in parts["COPY"] for name in words.split()[:-1]]
    about = project["project"]
    assert sorted(copied) == sorted(
        ["pyproject.toml", about["readme"], *about["license-files"], *packages]
    )
    assert all((ROOT / name).exists() for name in copied)
    (extra,) = re.findall(r"'\.\[(\w+)\]'", " ".join(parts["RUN"]))
    assert extra in about["optional-dependencies"]
    assert parts["FROM"] == [f"python:{about['requires-python'].removeprefix('>=')}-slim"]
    assert [json.loads(words) for words in parts["ENTRYPOINT"]] == [[*about["scripts"]]]
    (command,) = (json.loads(words) for words in parts["CMD"])
    assert {word for word in command if word.startswith("--")} <= options((command[0],), capsys)
    assert parts["EXPOSE"] == [command[command.index("--port") + 1]]
    (user,) = parts["USER"]
    page = (ROOT / "docs/server.md").read_text()
    assert f"/home/{user}/.cache" in page and f"`{' '.join(command)}`" in page


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_a_link_to_a_section_leads_to_a_heading(document: Path) -> None:
    for path, section in re.findall(r"\]\(((?:[\w./-]+\.md)?)#([^)\s]+)\)", document.read_text()):
        target = document.parent / path if path else document
        assert section in headings(target), f"{path}#{section}"


def headings(document: Path) -> set[str]:
    """The names that GitHub gives the headings of a page."""
    return {
        anchor(title) for title in re.findall(r"^#+ (.*)", document.read_text(), flags=re.MULTILINE)
    }


def anchor(title: str) -> str:
    """The name that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def test_the_headlines_are_a_short_page() -> None:
    assert len(HEADLINES.read_text().splitlines()) <= 200


def test_every_file_of_the_results_is_in_the_table_of_contents() -> None:
    listed = re.findall(
        r"^\| \[[^\]]*\]\(([^)]*)\) \|", (RESULTS / "README.md").read_text(), flags=re.MULTILINE
    )
    assert sorted(listed) == sorted(
        path.name for path in RESULTS.iterdir() if path.name != "README.md"
    )


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=name_of)
def test_a_notebook_is_of_the_day_that_its_name_says(notebook: Path) -> None:
    title = notebook.read_text().splitlines()[0]
    day = datetime.strptime(title.rpartition(", ")[2], "%d %B %Y")
    assert notebook.stem.endswith(f"-{day:%Y-%m-%d}")


def headline_rows() -> list[tuple[str, str]]:
    """Find the rows of tables that have a column of results: the cell of the result, and the whole
    row."""
    rows, column = [], -1
    for line in HEADLINES.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        heads = [index for index, cell in enumerate(cells) if cell in ("result", "measured")]
        if not line.startswith("|"):
            column = -1
        elif heads:
            column = heads[0]
        elif column >= 0 and not line.startswith("|---"):
            rows.append((cells[column], line))
    return rows


def test_headlines_are_found_in_four_tables() -> None:
    assert (
        len(headline_rows()) == len(re.findall(r"\]\(results/[\w.-]+#", HEADLINES.read_text())) > 30
    )


@pytest.mark.parametrize(("result", "row"), headline_rows())
def test_the_figures_of_a_headline_stand_in_the_notebook_that_it_links_to(
    result: str, row: str
) -> None:
    """A figure and the spread behind it stand together: in one row of a table, or in one
    paragraph."""
    ((path, section),) = re.findall(r"\]\((results/[\w.-]+)#([\w-]+)\)", row)
    places = [
        set(numbers(place))
        for place in rows_and_paragraphs(section_of(HEADLINES.parent / path, section))
    ]
    figures = re.findall(r"\d[\d.,]*(?: \([^)]*\))?", result.replace("**", ""))
    assert figures
    for figure in figures:
        assert any(place.issuperset(numbers(figure)) for place in places), figure


def numbers(text: str) -> list[str]:
    return re.findall(r"\d+(?:[.,]\d+)*", text)


def section_of(document: Path, name: str) -> str:
    """Return what stands below a heading, up to the next one that is as high."""
    level, lines = 0, []
    for line in document.read_text().splitlines():
        marks, _, title = line.partition(" ")
        if marks and not marks.strip("#"):
            if level and len(marks) <= level:
                break
            if anchor(title) == name:
                level = len(marks)
        if level:
            lines.append(line)
    return "\n".join(lines)


def rows_and_paragraphs(text: str) -> Iterator[str]:
    for paragraph in text.split("\n\n"):
        yield from paragraph.splitlines() if paragraph.startswith("|") else [paragraph]


def test_a_headline_has_the_day_of_its_notebook() -> None:
    links = re.findall(
        r"\[[^\]]*?, (\d+ [A-Z]\w+)\]\(results/[\w-]*?(\d{4}-\d\d-\d\d)\.md", HEADLINES.read_text()
    )
    assert links
    for day, date in links:
        assert datetime.strptime(f"{day} {date[:4]}", "%d %B %Y") == datetime.fromisoformat(date)


def test_the_tour_says_how_many_lines_the_core_has() -> None:
    core = [ROOT / "nanoserve/engine/engine.py", *(ROOT / "nanoserve/scheduler").rglob("*.py")]
    lines = sum(len(path.read_text().splitlines()) for path in core)
    (said,) = re.findall(r"about\s([\d,]+)\slines together", (ROOT / "docs/tour.md").read_text())
    assert abs(int(said.replace(",", "")) - lines) < 0.1 * lines, f"{lines} lines"


def test_the_page_of_costs_names_all_hardware() -> None:
    tables = tomllib.loads((ROOT / "nanoserve/costs/hardware.toml").read_text())
    page = (ROOT / "docs/costs.md").read_text()
    listed = page[page.index("| `--hardware` |") :].partition("\n\n")[0]
    assert {*tables["devices"], *tables["machines"]} == set(re.findall(r"`([a-z][\w-]*)`", listed))


@pytest.mark.parametrize(
    "document", [path for path in DOCUMENTS if path.suffix == ".md"], ids=name_of
)
def test_commands_take_the_options_that_are_written(
    document: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for line in commands(document.read_text()):
        words = line.split()
        name = tuple(
            words[:2] if words[0] == "bench" and words[1:] and words[1] in BENCHMARKS else words[:1]
        )
        assert name[0] in (*COMMANDS, "bench"), line
        for option in re.findall(r"(?<!\S)--?[a-z][a-z-]*", line):
            assert option in options(name, capsys), f"{option} of: nanoserve {line}"


def commands(text: str) -> Iterator[str]:
    """Find the words after the program's name in blocks of code and code within text, up to a pipe
    or an ellipsis."""
    fence = re.compile(r"^```\w*\n(.*?)^```", re.DOTALL | re.MULTILINE)
    lines = [
        line for block in fence.findall(text) for line in block.replace("\\\n", " ").splitlines()
    ]
    rest = fence.sub("", text)
    lines += re.findall(r"^    (nanoserve .*)", rest, re.MULTILINE)
    lines += re.findall(r"`((?:[^`\n]|\n(?!\n))+)`", rest)
    for line in lines:
        found = re.match(
            r"(?:\$ )?(?:\.venv/bin/)?nanoserve ([a-z][^|&;#…]*)", " ".join(line.split())
        )
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
