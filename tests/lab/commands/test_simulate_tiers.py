"""``nanoserve simulate`` with host memory and a pair of layouts."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., tuple[int, str, str]]
SMALL = [
    "simulate",
    "--model",
    "qwen3-0.6b",
    "--hardware",
    "seesaw-l4",
    "--requests",
    "5",
    "--lengths",
    "30+4",
]
PAIR = ["--prefill-parallel", "P4", "--decode-parallel", "T4"]


def test_a_pair_of_layouts_and_host_memory(command: Run, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    code, out, _ = command(*SMALL, *PAIR, "--host-kv-memory", "2GiB", "--json", str(path))
    assert code == 0
    document = json.loads(path.read_text())
    first, second = document["settings"]["kv_blocks_of_layouts"]
    assert (
        f"P4 -> T4, decoupled metadata, {first:,d} -> {second:,d} KV blocks, 1,170 in host memory"
        in out
    )
    assert document["settings"]["host_blocks"] == 1170  # 16 tokens of 112 KiB
    assert document["rows"][0]["transitions"] == 0  # this policy never changes the layout
    assert "transitions" not in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (PAIR[:2], "give both --prefill-parallel and --decode-parallel, or neither"),
        (PAIR[2:], "give both --prefill-parallel and --decode-parallel, or neither"),
        ([*PAIR, "--pp", "2"], "replace --pp, --tp, --pp-split"),
        (
            [*PAIR[:3], "T2"],
            "--prefill-parallel P4 takes 4 devices and --decode-parallel T2 2: both run on the "
            "same",
        ),
        ([*PAIR[:3], "D2T2"], "data parallel layouts (D) are whole engines of their own"),
        ([*PAIR[:3], "4T"], "'4T' is no layout such as P4 (pipeline), T4 (tensor) or T2P2"),
        ([*PAIR[:3], "T2T2"], "the layout 'T2T2' names a degree twice"),
        ([*PAIR[:3], "T0P4"], "tensor_parallel must be at least 1, not 0"),
        (
            ["--prefill-parallel", "P3", "--decode-parallel", "T3"],
            "tensor parallelism of 3 does not divide",
        ),
        (["--host-kv-memory", "80"], "--host-kv-memory 80 has no unit: say 80GiB"),
        (
            ["--host-kv-memory", "0B"],
            "--host-kv-memory: a size must be at least one byte, not '0B'",
        ),
        (["--host-kv-memory", "nan"], "--host-kv-memory: 'nan' is not a size"),
        (
            ["--host-kv-memory", "1KiB"],
            "--host-kv-memory 1KiB does not hold one block of 16 tokens",
        ),
        (
            ["--host-kv-memory", "9999GiB"],
            "9999GiB is more than the 640 GiB that a node of seesaw-l4 has",
        ),
    ],
)
def test_what_makes_no_sense_is_one_line(command: Run, arguments: list[str], says: str) -> None:
    code, out, err = command(*SMALL, *arguments)
    assert (code, out) == (2, "")
    assert says in err
    assert len(err.splitlines()) == 1
