"""docs/explain.ipynb prints what is stored in it; python -m scripts.notebook docs/explain.ipynb
stores it anew."""

import json
from pathlib import Path

from scripts.notebook import executed

NOTEBOOK = Path(__file__).resolve().parent.parent / "docs" / "explain.ipynb"


def test_cells_print_what_is_stored() -> None:
    stored = json.loads(NOTEBOOK.read_text())
    for before, after in zip(stored["cells"], executed(stored)["cells"], strict=True):
        assert _printed(after) == _printed(before), "".join(before["source"])


def _printed(cell: dict[str, list[dict[str, list[str]]]]) -> str:
    return "".join(line for output in cell.get("outputs", ()) for line in output["text"])
