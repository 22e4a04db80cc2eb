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

    Raises:
        LookupError: if a link's file or symbol does not exist any more.
    """

    def correct(match: re.Match[str]) -> str:
        source = (document.parent / match["path"]).resolve()
        if not source.is_file():
            raise LookupError(f"{document.name}: there is no {match['path']}")
        line = _line_of(source, match["symbol"])
        return f"[`{match['symbol']}`]({match['path']}#L{line})"

    return _LINK.sub(correct, document.read_text())


def _line_of(source: Path, symbol: str) -> int:
    body: list[ast.stmt] = ast.parse(source.read_text()).body
    line = 0
    for name in symbol.split("."):
        found = next((node for node in body if name in _names(node)), None)
        if found is None:
            raise LookupError(f"{source.relative_to(ROOT)} has no {symbol}")
        body, line = getattr(found, "body", []), found.lineno
    return line


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return []


if __name__ == "__main__":
    for path in sorted((ROOT / "docs").glob("*.md")):
        path.write_text(refreshed(path))
