"""``nanoserve explain``: its sources, its outputs, and one line for what makes no sense."""

from collections.abc import Callable
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.data_structures import Size
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output.vt100 import Vt100_Output

from nanoserve.commands.main import main
from nanoserve.lab.commands import explain_view
from nanoserve.lab.explanation import Explanation

Run = Callable[..., tuple[int, str, str]]
SIMULATED = [
    "explain",
    "--simulate",
    "-m",
    "qwen3-0.6b",
    "--pp",
    "2",
    "--requests",
    "3",
    "--lengths",
    "40+4",
]


def test_two_policies_are_compared_and_written(command: Run, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    code, out, _ = command(
        *SIMULATED, "--policy", "sarathi,throttling:iterations=2", "--json", str(path)
    )
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
        (
            ["--simulate", "--lengths", "500000+5", "--num-blocks", "10"],
            "use more KV blocks (--num-blocks)",
        ),
        (["--file", "missing.txt"], "cannot read missing.txt"),
        (["--simulate", "--samples", "2"], "--samples has no effect"),
        (["--simulate", "--temperature", "1"], "--temperature has no effect"),
        (["--scenario", "gllm-7", "-m", "qwen3-0.6b"], "--model has no effect"),
        (["--recorded", "run.json", "--policy", "sarathi"], "--policy has no effect"),
        (["a", "--requests", "2"], "--requests has no effect"),
        (["--file", "prompts.txt", "--hardware", "h100"], "--hardware has no effect"),
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


def test_nothing_in_a_file_steers_the_terminal(command: Run, tmp_path: Path) -> None:
    path, hostile = tmp_path / "run.json", "\x1b]0;title\x07\x1b[2J\x9b1m[bold]"
    text = command(*SIMULATED, "--json", "-")[1].replace(
        "equation 3", msgspec.json.encode(hostile).decode()[1:-1]
    )
    explanation = msgspec.json.decode(text, type=Explanation)
    (run,) = explanation.runs
    path.write_bytes(
        msgspec.json.encode(Explanation(hostile, (msgspec.structs.replace(run, policy=hostile),)))
    )
    code, out, _ = command("explain", "--recorded", str(path))
    assert code == 0
    assert out.startswith("]0;title[2J1m[bold]\n]0;title[2J1m[bold]: step 0")
    assert "because ]0;title" in out
    assert "\x1b" not in out


def test_an_option_that_a_variable_sets_need_not_count(
    command: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANOSERVE_TEMPERATURE", "0.5")
    assert command(*SIMULATED)[0] == 0


def test_keys_go_from_step_to_step(command: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    explanation = msgspec.json.decode(command(*SIMULATED, "--json", "-")[1], type=Explanation)
    last = len(explanation.runs[0].steps) - 1
    right, left, down, end, home = "\x1b[C", "\x1b[D", "\x1b[B", "\x1b[F", "\x1b[H"
    seen: list[int] = []
    drawn = explain_view._side_by_side
    monkeypatch.setattr(
        explain_view, "_side_by_side", lambda *step: seen.append(step[1]) or drawn(*step)
    )
    for keys, shown in (
        (right + right + left, 1),
        (end + right, last),
        (left, 0),
        (end + home + right + down, 1),
    ):
        screen = StringIO()
        output = Vt100_Output(screen, lambda: Size(rows=24, columns=80), term="xterm")
        with create_pipe_input() as typed, create_app_session(input=typed, output=output):
            typed.send_text(keys + "q")
            explain_view.show_steps(explanation)
        assert explanation.title in screen.getvalue()
        assert seen[-1] == shown


def test_samples_of_a_prompt_share_its_blocks_and_copy_the_last(
    capfd: pytest.CaptureFixture[str],
) -> None:
    prompt = "Once upon a time there was a little dog who liked to run"
    options = [
        "--samples",
        "2",
        "--max-tokens",
        "4",
        "--block-size",
        "8",
        "--eager",
        "--kv-cache-memory",
        "4MiB",
    ]
    assert main(["explain", prompt, *options, "--json", "-"]) == 0
    (run,) = msgspec.json.decode(capfd.readouterr().out, type=Explanation).runs
    first, second = run.steps[:2]
    assert [one.request for one in run.sequences] == ["request-0/0", "request-0/1"]
    assert prompt[:40] in run.sequences[0].prompt
    assert prompt[:12] in "".join(first.rows[0].tokens)
    assert [(row.sequence, row.count) for row in first.rows] == [
        (0, run.sequences[0].prompt_tokens)
    ]
    (table,) = first.tables
    assert second.shared == table.blocks[:-1]
    assert [copy.source for copy in second.copies] == [table.blocks[-1]]
    texts = {
        key: [one.tokens for step in run.steps for one in step.answers if one.sequence == key]
        for key in (0, 1)
    }
    assert [len(answers) for answers in texts.values()] == [4, 4]
    assert texts[0] != texts[1]
