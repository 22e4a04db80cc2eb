"""Ceilings on what a reader must read, as `python -m scripts.code_weight` counts it.

Lines are not counted: two plain lines beat one that must be decoded.
"""

import pytest

from scripts.code_weight import repeated_class_names, visits
from triton_ops.cpu import cpu_operators

MOST_REPEATED_NAMES = 0
MOST_FILES_OF_THE_FIRST_TOKEN = 29
MOST_FILES_OF_A_LATER_TOKEN = 24


def test_no_more_class_names_are_used_twice() -> None:
    assert len(repeated_class_names()) <= MOST_REPEATED_NAMES, repeated_class_names()


def test_a_token_visits_no_more_files() -> None:
    if not cpu_operators().wait():  # plain torch stands in their place, in files of its own
        pytest.skip(f"nothing can be built: {cpu_operators().problem}")
    first, later, _ = visits()
    assert len(first.files) <= MOST_FILES_OF_THE_FIRST_TOKEN, first.files
    assert len(later.files) <= MOST_FILES_OF_A_LATER_TOKEN, later.files
