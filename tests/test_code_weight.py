"""Ceilings on what a reader must read, as `python -m scripts.code_weight` counts it.

Lines are not counted: two plain lines beat one that must be decoded.
"""

import pytest

from scripts.code_weight import Visit, repeated_class_names, visits
from tests.test_readme import core_files
from triton_ops.cpu import cpu_operators

MOST_REPEATED_NAMES = 0
MOST_FILES_OF_THE_FIRST_TOKEN = 29
MOST_FILES_OF_A_LATER_TOKEN = 24


def test_no_more_class_names_are_used_twice() -> None:
    assert len(repeated_class_names()) <= MOST_REPEATED_NAMES, repeated_class_names()


@pytest.fixture(scope="module")
def tokens() -> tuple[Visit, Visit]:
    """Visits of the first and of a later token."""
    if not cpu_operators().wait():  # plain torch stands in their place, in files of its own
        pytest.skip(f"nothing can be built: {cpu_operators().problem}")
    first, later, _ = visits()
    return first, later


def test_a_token_visits_no_more_files(tokens: tuple[Visit, Visit]) -> None:
    first, later = tokens
    assert len(first.files) <= MOST_FILES_OF_THE_FIRST_TOKEN, first.files
    assert len(later.files) <= MOST_FILES_OF_A_LATER_TOKEN, later.files


def test_the_core_that_the_readme_names_is_what_a_token_visits(tokens: tuple[Visit, Visit]) -> None:
    deciding = ("nanoserve/request.py", "nanoserve/engine/engine.py", "nanoserve/scheduler/")
    visited = {path for visit in tokens for path in visit.files if path.startswith(deciding)}
    assert set(core_files()) - visited == {"nanoserve/scheduler/load.py"}, "its types run no function of their own"
    assert visited <= set(core_files())
