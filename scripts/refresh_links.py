"""Points the source links of the documents at the lines where their symbols are now.

A link such as [`Scheduler.schedule`](../nanoserve/scheduler/scheduler.py#L1) names its symbol; the line number
follows from the source. ``python scripts/refresh_links.py`` rewrites docs/*.md in place.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"\[`(?P<symbol>[\w.]+)`\]\((?P<path>[\w./]+\.py)#L(?P<line>\d+)\)")


def refreshed(document: Path) -> str:
    """The document's text with the line number of every source link corrected.

    Raises LookupError if a link's file or symbol does not exist any more.
    """

    def correct(match: re.Match[str]) -> str:
        source = (document.parent / match["path"]).resolve()
        if not source.is_file():
            raise LookupError(f"{document.name}: there is no {match['path']}")
        return f"[`{match['symbol']}`]({match['path']}#L{_line_of(source, match['symbol'])})"

    return _LINK.sub(correct, document.read_text())


def _line_of(source: Path, symbol: str) -> int:
    node: ast.AST = ast.parse(source.read_text())
    for name in symbol.split("."):
        found = next((each for each in getattr(node, "body", []) if name in _names(each)), None)
        if found is None:
            raise LookupError(f"{source.relative_to(ROOT)} has no {symbol}")
        node = found
    return node.lineno


def _names(node: ast.stmt) -> set[str | None]:
    """What a definition or an assignment names."""
    targets = getattr(node, "targets", [getattr(node, "target", node)])
    return {getattr(target, "id", getattr(target, "name", None)) for target in targets}


if __name__ == "__main__":
    for path in sorted((ROOT / "docs").glob("*.md")):
        path.write_text(refreshed(path))
