"""gLLM, section 4.7: lines of code (table 1), beside those of this package by room."""

import ast
import io
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import nanoserve
from nanoserve.commands.tables import columns
from nanoserve.lab.charts import Chart, panel
from nanoserve.lab.papers.claims import claims
from nanoserve.lab.papers.framework import Finding, Run, Scale

ROOT = Path(nanoserve.__file__).parent.parent  # where the packages lie, installed or checked out
PACKAGES = ("nanoserve", "triton_ops")
LABORATORY = "nanoserve/lab"
"""The room that measures, simulates and draws. All others count as engine, commands and the cost
model among them."""
PAPER_LINES = {"gLLM": 3_874, "SGLang": 65_097, "vLLM": 226_874}
_ENGINE, _WHOLE = "the engine without its laboratory", "all of nanoserve"
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


class Room(NamedTuple):
    """The size of a folder of the package, or of the files beside the folders."""

    files: int
    lines: int
    """All lines of these files."""
    code: int  # lines that are not blank, a comment or a docstring


def sources() -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))


@cache
def rooms() -> Mapping[str, Room]:
    """The size of every room, by its path."""
    sizes: dict[str, list[Room]] = {}
    for path in sources():
        package, *inner = path.relative_to(ROOT).parts
        room = package
        if package == "nanoserve":
            room = f"nanoserve/{inner[0]}" if len(inner) > 1 else "nanoserve/*.py"
        source = path.read_text(encoding="utf-8")
        sizes.setdefault(room, []).append(Room(1, len(source.splitlines()), code_lines(source)))
    return {room: together(found) for room, found in sorted(sizes.items())}


def together(found: Iterable[Room]) -> Room:
    return Room(*map(sum, zip(*found, strict=True)))


def code_lines(source: str) -> int:
    """Count the lines of a Python source that are not blank, a comment or a docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


CODE_COLUMNS = columns(
    ("", "code_of"),
    (",d", "files", "lines", ("without comments, docstrings and blank lines", "code")),
)


def lines_of_code(scale: Scale, run: Run) -> Finding:
    """Table 1: lines of code of three systems, and of this one by room."""
    by_room = rooms()
    totals = {
        _ENGINE: together(size for room, size in by_room.items() if room != LABORATORY),
        _WHOLE: together(by_room.values()),
    }
    rows = [{"code_of": name, **size._asdict()} for name, size in {**by_room, **totals}.items()]
    rows += [
        {"code_of": f"{name} (paper)", "files": None, "lines": n, "code": None}
        for name, n in PAPER_LINES.items()
    ]
    bars = {
        **PAPER_LINES,
        "nanoserve,\nengine": totals[_ENGINE].code,
        "nanoserve,\nall": totals[_WHOLE].code,
    }
    chart = panel(
        "section 4.7", "", "lines of code", list(bars), {"": list(bars.values())}, kind="bar"
    )
    # lines without comments, docstrings and blank ones; the paper does not say how it counts
    ours = {
        "table 1 engine, gLLM": totals[_ENGINE].code,
        "table 1 engine, SGLang": totals[_ENGINE].code,
        "table 1 all, SGLang": totals[_WHOLE].code,
    }
    return Finding(claims("gllm", ours), Chart("gLLM, table 1: lines of code", [chart]), rows)
