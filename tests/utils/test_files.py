"""Files of results when the disk is full: nothing half written is there, no temporary file, and the
file is named."""

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from nanoserve.commands.batch_files import PromptRow, ResultFile
from nanoserve.errors import RuntimeFailure
from nanoserve.lab.benchmarks.report import Report
from nanoserve.lab.charts import Bars, Chart, draw
from nanoserve.utils.files import replace_file


@contextmanager
def full_disk(limit: int = 10) -> Iterator[None]:
    """Limit this process, which is to start no other meanwhile: files may not grow beyond
    so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _draw(path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(Chart("a title", [Bars(x="bytes", names=["one"], parts={"": [1.0]}, texts=["1"])]), path)


def _report(path: Path) -> None:
    with patch("nanoserve.lab.benchmarks.report.describe_run", return_value={}):  # it asks git
        Report("latency", {}, path)


@pytest.mark.parametrize("write", [lambda path: replace_file(path, "x" * 100), _report, _draw])
@pytest.mark.parametrize("before", [None, b"older"])
def test_a_file_that_cannot_be_written_leaves_the_old_one_or_none(
    write: Callable[[Path], object], before: bytes | None, tmp_path: Path
) -> None:
    path = tmp_path / "result"
    if before is not None:
        path.write_bytes(before)
    with full_disk(), pytest.raises(RuntimeFailure, match=f"^cannot write {path}: File too large$"):
        write(path)
    assert {found.name: found.read_bytes() for found in tmp_path.iterdir()} == (
        {} if before is None else {"result": before}
    )


@pytest.mark.skipif(
    not os.path.exists("/dev/full"), reason="there is no device that is always full"
)
def test_a_device_is_not_replaced_by_a_file() -> None:
    with pytest.raises(RuntimeFailure, match=r"^cannot write /dev/full: No space left on device$"):
        replace_file(Path("/dev/full"), "text")
    assert not Path("/dev/full").is_file()


def test_a_batch_names_the_file_that_a_row_has_no_room_in(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    refused = pytest.raises(RuntimeFailure, match=f"^cannot write {path}: File too large$")
    with full_disk(30), refused, ResultFile(path) as results:
        results.write({"index": 0, "text": "a"})
        results.write({"index": 1, "text": "b"})
    with ResultFile(path) as results:
        assert results.holds(PromptRow(0, None)) and not results.holds(PromptRow(1, None))


def test_a_batch_names_the_file_that_it_cannot_go_on_with(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(row := b'{"index":0,"text":"a"}')  # cut off just before the line break
    with (
        full_disk(len(row)),
        pytest.raises(RuntimeFailure, match=f"^cannot write {path}: File too large$"),
    ):
        ResultFile(path)
