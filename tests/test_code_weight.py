"""The code stays as light as it is: ceilings of `python -m scripts.code_weight`, to be lowered as its figures fall."""

import pytest

from scripts.code_weight import repeated_class_names, rooms, visits
from triton_ops.cpu import cpu_operators

MOST_LINES = 48_498
MOST_REPEATED_NAMES = 0
MOST_FILES_OF_THE_FIRST_TOKEN = 29
MOST_FILES_OF_A_LATER_TOKEN = 24


def test_nanoserve_has_no_more_lines_than_it_had() -> None:
    assert sum(room.lines for name, room in rooms().items() if name.startswith("nanoserve")) <= MOST_LINES


def test_no_more_class_names_are_used_twice() -> None:
    assert len(repeated_class_names()) <= MOST_REPEATED_NAMES, repeated_class_names()


def test_a_token_visits_no_more_files() -> None:
    if not cpu_operators().wait():  # plain torch stands in their place, in files of its own
        pytest.skip(f"nothing can be built: {cpu_operators().problem}")
    first, later, _ = visits()
    assert len(first.files) <= MOST_FILES_OF_THE_FIRST_TOKEN, first.files
    assert len(later.files) <= MOST_FILES_OF_A_LATER_TOKEN, later.files
