"""Run a notebook's code cells in order, and store what they print: python -m scripts.notebook
docs/explain.ipynb

Cells are run as Python by themselves, without Jupyter; of their outputs, only printed text is kept.
"""

import json
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any


def executed(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with the outputs of its code cells, which share one namespace. What a cell
    raises is raised."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    cells = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            place = sum(one["cell_type"] == "code" for one in cells) + 1
            with redirect_stdout(StringIO()) as printed:
                exec(compile("".join(cell["source"]), f"cell {place}", "exec"), namespace)
            text = printed.getvalue().splitlines(keepends=True)
            outputs = [{"name": "stdout", "output_type": "stream", "text": text}] if text else []
            cell = cell | {"execution_count": place, "outputs": outputs}
        cells.append(cell)
    return notebook | {"cells": cells}


def main() -> None:
    for path in map(Path, sys.argv[1:]):
        notebook = executed(json.loads(path.read_text(encoding="utf-8")))
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
