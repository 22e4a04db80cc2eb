"""Layouts by name."""

import pytest

from nanoserve.errors import UsageError
from nanoserve.layout import ParallelLayout


@pytest.mark.parametrize("name", ["P4", "T4", "T2P2", "D2T2P4", "T1", "T10P12"])
def test_a_layout_is_read_as_it_is_written(name: str) -> None:
    assert ParallelLayout.parse(name).name == name


def test_letters_come_in_any_order_and_size() -> None:
    assert ParallelLayout.parse("p2t4") == ParallelLayout(tensor_parallel=4, pipeline_parallel=2)


@pytest.mark.parametrize("name", ["", "4", "P", "X4", "P4 T2", "P-4", "P4P2", "P0", "P99999"])
def test_what_is_no_layout_is_refused(name: str) -> None:
    with pytest.raises(UsageError):
        ParallelLayout.parse(name)
