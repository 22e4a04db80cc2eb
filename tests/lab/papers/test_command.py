"""``nanoserve bench paper``: what it prints and writes, and one line for what makes no sense."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from nanoserve.commands.main import main
from nanoserve.lab.papers.markdown import to_markdown, verdict

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
    code, out, _ = paper(
        "lecture", "--figure", "roofline", "--json", path, "--plot", tmp_path / "pictures"
    )
    assert code == 0
    assert "FLOP per byte" in out
    assert (tmp_path / "pictures" / "lecture-roofline.png").read_bytes().startswith(b"\x89PNG")
    document = json.loads(path.read_text())
    assert document["complete"]
    assert document["settings"]["paper"] == "lecture"
    assert [row["holds"] for row in document["rows"] if row["paper"] == "295"] == ["yes"]
    assert document["figure roofline"]["rows"]


def test_the_page_is_that_of_the_json(paper: Run, tmp_path: Path) -> None:
    kept, page = tmp_path / "report.json", tmp_path / "page.md"
    code, out, _ = paper(
        "lecture", "--figure", "kv", "--seeds", "1", "--json", kept, "--markdown", page
    )
    assert code == 0
    document = json.loads(kept.read_text())
    assert page.read_text() == to_markdown(document)
    assert out.splitlines()[-1] == document["verdict"] == verdict(document)


def test_a_page_that_cannot_be_written_costs_no_run(
    paper: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[str]()
    monkeypatch.setattr(
        "nanoserve.lab.papers.running.Runner.run", lambda self, jobs: made.append("ran")
    )
    page = tmp_path / "missing" / "page.md"
    code, out, error = paper("gllm", "--figure", "1", "--markdown", page)
    assert (code, out, made) == (1, "", [])
    assert error == f"nanoserve: cannot write {page}: No such file or directory\n"


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
