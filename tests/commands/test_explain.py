"""``nanoserve explain``: its sources, its outputs, and one line for what makes no sense."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from nanoserve.record.explanation import Explanation

Run = Callable[..., tuple[int, str, str]]
SIMULATED = ["explain", "--simulate", "-m", "qwen3-0.6b", "--pp", "2", "--requests", "3", "--lengths", "40+4"]


def test_two_policies_are_compared_and_written(command: Run, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    code, out, _ = command(*SIMULATED, "--policy", "sarathi,throttling:iterations=2", "--json", str(path))
    assert (code, out) == (0, "")
    explanation = msgspec.json.decode(path.read_bytes(), type=Explanation)
    assert [run.policy for run in explanation.runs] == ["sarathi", "throttling:iterations=2"]
    for run in explanation.runs:
        assert [one.prompt_tokens for one in run.sequences] == [40] * 3
        assert sum(row.count for step in run.steps for row in step.rows) == 3 * (40 + 3)
        assert sum(len(answer.tokens) for step in run.steps for answer in step.answers) == 3 * 4
        assert all(len(step.spans) == 2 for step in run.steps)
    _, out, _ = command("explain", "--recorded", str(path))
    assert out == command(*SIMULATED, "--policy", "sarathi,throttling:iterations=2")[1]
    assert "prefill 0: positions 0-39" in out


def test_a_page_is_written_beside_json(command: Run, tmp_path: Path) -> None:
    page = tmp_path / "run.html"
    code, out, err = command(*SIMULATED, "--html", str(page), "--json", "-")
    assert code == 0
    assert out.strip() in page.read_text().replace("\\u003c", "<")
    assert err == f"{page} holds {len(msgspec.json.decode(out)['runs'][0]['steps'])} steps\n"
    code, _, err = command(*SIMULATED, "--html", str(tmp_path / "none" / "run.html"))
    assert (code, len(err.splitlines())) == (1, 1)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give one of these: prompts, --file"),
        (["a", "--simulate"], "give one of these"),
        (["--recorded", "missing.json"], "cannot read missing.json"),
        (["--scenario", "gllm-9"], "'gllm-9' is not one of gllm-7"),
        (["--simulate", "--policy", "magic"], "unknown policy 'magic'"),
        (["--simulate", "--lengths", "500000+5", "--num-blocks", "10"], "use more or larger devices"),
        (["--file", "missing.txt"], "cannot read missing.txt"),
    ],
)
def test_what_makes_no_sense_is_one_line(command: Run, arguments: list[str], says: str) -> None:
    code, out, err = command("explain", *arguments)
    assert (code, out) == (2, "")
    assert says in err
    assert len(err.splitlines()) == 1


def test_a_file_of_another_kind_is_refused(command: Run, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    for content in ("{}", "[" * 100_000, '{"title": 1, "runs": []}', "\ud800"):
        path.write_text(content, errors="surrogatepass")
        code, _, err = command("explain", "--recorded", str(path))
        assert (code, len(err.splitlines())) == (2, 1)
        assert "is not what explain --json writes" in err
