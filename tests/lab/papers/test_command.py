"""``nanoserve bench paper``: what it prints and writes, and one line for what makes no sense."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from nanoserve.commands.main import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def paper(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs ``nanoserve bench paper ARGUMENTS`` here; returns exit code, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        code = main(["bench", "paper", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_the_lecture_is_written_as_table_and_json(paper: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "report.json"
    code, out, _ = paper("lecture", "--figure", "roofline", "--json", path, "--plot", tmp_path / "pictures")
    assert code == 0
    assert "FLOP per byte" in out
    assert (tmp_path / "pictures" / "lecture-roofline.png").read_bytes().startswith(b"\x89PNG")
    document = json.loads(path.read_text())
    assert document["complete"]
    assert document["settings"]["paper"] == "lecture"
    assert [row["holds"] for row in document["rows"] if row["paper"] == "295"] == ["yes"]
    assert document["figure roofline"]["rows"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["magic"], "unknown paper 'magic'; choose one of gllm, seesaw, apex, lecture, adaptive"),
        (["gllm", "--figure", "99"], "has no figure '99' here; choose one of "),
        (["gllm", "--seeds", "0"], "Invalid value for '--seeds'"),
    ],
)
def test_what_makes_no_sense_is_one_line(paper: Run, arguments: list[str], says: str) -> None:
    code, out, error = paper(*arguments)
    assert (code, out) == (2, "")
    assert says in error
    assert error.count("\n") == 1
