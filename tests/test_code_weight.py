"""Ceilings on what a reader must read, as `python -m scripts.code_weight` counts it.

Lines are not counted: two plain lines beat one that must be decoded.
"""

import re

import pytest

from nanoserve.lab.papers.gllm.code_size import ROOT
from scripts.code_weight import Visit, repeated_class_names, visits
from tests.test_readme import core_files
from triton_ops.cpu import cpu_operators

MOST_REPEATED_NAMES = 0
MOST_FILES_OF_THE_FIRST_TOKEN = 27
MOST_FILES_OF_A_LATER_TOKEN = 23
MOST_FUNCTIONS_OF_A_LATER_TOKEN = 85
"""Named functions outside models/ and triton_ops/."""
MOST_FUNCTIONS_OF_OUTPUTS = 11
MOST_FUNCTIONS_OF_A_STEP = 28
"""Named functions of the runner, its inputs and its answers."""
MOST_LINES_OF_A_FUNCTION = 50


@pytest.fixture(scope="module")
def tokens() -> tuple[Visit, Visit]:
    """The visits of the first and of a later token."""
    if not cpu_operators().wait():  # plain torch stands in their place, in files of its own
        pytest.skip(f"nothing can be built: {cpu_operators().problem}")
    first, later, _ = visits()
    return first, later


def test_no_more_class_names_are_used_twice() -> None:
    assert len(repeated_class_names()) <= MOST_REPEATED_NAMES, repeated_class_names()


def test_a_token_visits_no_more_files(tokens: tuple[Visit, Visit]) -> None:
    first, later = tokens
    assert len(first.files) <= MOST_FILES_OF_THE_FIRST_TOKEN, first.files
    assert len(later.files) <= MOST_FILES_OF_A_LATER_TOKEN, later.files


def test_the_core_that_the_readme_names_is_what_a_token_visits(tokens: tuple[Visit, Visit]) -> None:
    deciding = ("nanoserve/request.py", "nanoserve/engine/engine.py", "nanoserve/scheduler/")
    visited = {path for visit in tokens for path in visit.files if path.startswith(deciding)}
    assert set(core_files()) - visited == {"nanoserve/scheduler/load.py"}, (
        "its types run no function of their own"
    )
    assert visited <= set(core_files())


def test_a_later_token_visits_no_more_functions_and_none_is_long(
    tokens: tuple[Visit, Visit],
) -> None:
    _, later = tokens
    functions = [function for function in later.functions if function.is_engine]
    assert len(functions) <= MOST_FUNCTIONS_OF_A_LATER_TOKEN, functions
    outputs = [function for function in functions if function.file == "nanoserve/engine/outputs.py"]
    assert 0 < len(outputs) <= MOST_FUNCTIONS_OF_OUTPUTS, outputs
    of_a_step = [function for function in functions if "/executor/step/" in function.file]
    assert 0 < len(of_a_step) <= MOST_FUNCTIONS_OF_A_STEP, of_a_step
    assert [
        function for function in later.functions if function.num_lines > MOST_LINES_OF_A_FUNCTION
    ] == []


def test_the_tour_begins_with_the_files_that_a_token_visits(tokens: tuple[Visit, Visit]) -> None:
    """Operators in triton_ops/ need not be listed."""
    tour = (ROOT / "docs/tour.md").read_text()
    section = tour.split("## The plain path")[1].split("\n## ")[0]
    listed = re.findall(r"\]\(\.\./([\w/]+\.py)\)", section)
    assert [path for path in listed if not (ROOT / path).exists()] == []
    assert len(listed) == len(set(listed)), "each file has one place in the order"
    visited = {file for visit in tokens for file in visit.files}
    assert set(listed) <= visited
    unlisted = visited - set(listed)
    assert {
        file for file in unlisted if not file.startswith(("nanoserve/models/", "triton_ops/"))
    } == set()
