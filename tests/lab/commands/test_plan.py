"""``nanoserve plan``: what it prints and writes, and one line for what makes no sense."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., tuple[int, str, str]]
SMALL = [
    "plan",
    "--model",
    "qwen3-8b",
    "--hardware",
    "seesaw-a10",
    "--gpus",
    "2",
    "--lengths",
    "60+6",
]


def test_layouts_pairs_and_policies_are_ranked_by_throughput(command: Run, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    code, out, err = command(*SMALL, "--requests", "12", "--top", "2", "--json", str(path))
    assert code == 0
    assert "12 requests of 60+6, all at once; the best throughput first" in out
    assert "simulating T2 with sarathi, estimated" in err
    document = json.loads(path.read_text())
    assert document["complete"]
    rows = {(row["layout"], row["policy"]): row for row in document["rows"]}
    layouts = {layout for layout, _ in rows}
    assert {"P2->T2", "T2->P2"} <= layouts
    assert len(layouts) == 4
    assert {policy for layout, policy in rows if "->" not in layout} == {"sarathi", "throttling"}
    assert rows["P2->T2", "seesaw"]["transitions"] >= 1
    assert "transitions" in out
    assert len(rows["P2->T2", "seesaw"]["kv_blocks"]) == 2
    assert [one["name"] for one in document["left_out"]] == [
        {"P2", "T2", "D2"}.difference(layouts).pop()
    ]
    table = out[: out.index("left out")]
    best = max(rows.values(), key=lambda row: row["tokens_per_second"])
    first = min(table.index(f" {layout} ") for layout in layouts)
    assert table.index(f" {best['layout']} ") == first


def test_at_a_rate_they_are_ranked_by_latency(command: Run) -> None:
    code, out, _ = command(*SMALL, "--requests", "8", "--rate", "0.5", "--policy", "sarathi")
    assert code == 0
    assert "8 requests of 60+6, 0.5 a second; the best latency first" in out
    assert out.index(" T2 ") < out.index(" P2 ")
    assert "are for closed batches: without a rate" in out
    assert "transitions" not in out  # only pairs of layouts have them


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "llama-2-70b"], "44.4 GiB more than the 19.8 GiB that can be used"),
        (["--model", "llama-2-70b"], "what would fit: 7 devices (layout P7) or 4-bit weights"),
        (["--model", "gpt-9"], "unknown model 'gpt-9'"),
        (["--hardware", "abacus"], "unknown hardware 'abacus'"),
        (["--policy", "magic"], "unknown policy 'magic'; choose one of prefill-first"),
        (
            ["--lengths", "long"],
            "takes tokens in and out such as 512+128, or one of sharegpt-gllm, azure",
        ),
        (["--lengths", "300000+5"], "than the longest request"),
        (["--gpus", "1000000000"], "plans are for 4096 devices at most, not 1000000000"),
        (["--rate", "0"], "the request rate must be a number above 0, not 0"),
        (["--rate", "-1"], "the request rate must be a number above 0, not -1.0"),
    ],
)
def test_what_makes_no_sense_is_one_line(command: Run, arguments: list[str], says: str) -> None:
    code, out, err = command(*SMALL, *arguments)
    assert (code, out) == (2, "")
    assert says in err
    assert len(err.splitlines()) == 1
