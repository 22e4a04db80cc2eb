"""Models by name on the command line, from a hub on loopback that HF_ENDPOINT names."""

import hashlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanoserve import LLM, SamplingParams
from nanoserve.commands import chat
from nanoserve.commands.main import main
from nanoserve.lab.benchmarks.peers.weights import gguf_file
from nanoserve.models import hub as hub_module
from nanoserve.models.hub import named_models, resolve_model
from tests.commands.conftest import ROOT
from tests.fakes.loopback_hub import LoopbackHub, Repository, loopback_hub

STORYTELLER = ROOT / "nanoserve" / "assets" / "storyteller"
LARGE = b"large" * 1_000_000
"""A file of which 3 MB are sent before the download stops."""
PARTIAL = f"{hashlib.sha256(LARGE).hexdigest()}.incomplete"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    with loopback_hub() as served:
        served.use(monkeypatch, tmp_path)
        yield served


@pytest.fixture
def stalled(hub: LoopbackHub) -> LoopbackHub:
    hub.repositories["owner/big"] = Repository(
        {
            "config.json": (STORYTELLER / "config.json").read_bytes(),
            "tokenizer.json": b"{}",
            "model.safetensors": LARGE,
        }
    )
    hub.stall_after = 3_000_000
    return hub


def pull(hub: LoopbackHub, home: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "nanoserve", "pull", "owner/big"],
        env=hub.environment(home) | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=home,
    )


def wait_for_partial(home: Path) -> Path:
    """The file that is being downloaded, once some of it is written."""
    partial = home / "hub" / "models--owner--big" / "blobs" / PARTIAL
    deadline = time.monotonic() + 240
    while not partial.exists() or partial.stat().st_size < 2 << 20:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return partial


def test_a_pull_that_was_killed_goes_on_where_it_was(stalled: LoopbackHub, tmp_path: Path) -> None:
    process = pull(stalled, tmp_path)
    partial = wait_for_partial(tmp_path)
    process.kill()
    process.communicate()
    kept = partial.stat().st_size
    assert 2 << 20 <= kept <= 3_000_000 and LARGE.startswith(partial.read_bytes())
    stalled.stall_after = None
    stalled.goes_on.set()
    process = pull(stalled, tmp_path)
    out, error = process.communicate()
    assert process.returncode == 0, error
    assert out == "owner/big is on this machine: nanoserve run owner/big\n"
    assert error.startswith("downloading owner/big: 4.8 MiB, license apache-2.0 (https://")
    assert stalled.ranges == [0, kept]
    (weights,) = (tmp_path / "hub").glob("models--owner--big/snapshots/*/model.safetensors")
    assert weights.read_bytes() == LARGE and not partial.exists()


def test_ctrl_c_ends_a_pull_with_one_line(stalled: LoopbackHub, tmp_path: Path) -> None:
    process = pull(stalled, tmp_path)
    partial = wait_for_partial(tmp_path)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate()
    assert (process.returncode, out) == (130, "")
    lines = error.splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("nanoserve: interrupted: ")
    assert lines[1].endswith(" of 4.8 MiB are kept; the same command goes on there")
    assert partial.stat().st_size >= 2 << 20


def test_models_from_the_hub_answer_as_their_files_do(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    hub.repositories["tiny/storyteller"] = Repository(
        {file.name: file.read_bytes() for file in STORYTELLER.iterdir()}
    )
    written = gguf_file(resolve_model(None), "float32", None).read_bytes()
    hub.repositories["tiny/storyteller-GGUF"] = Repository(
        {"tiny-F32.gguf": written, "mmproj-F32.gguf": b"0" * 2000}
    )
    hub.repositories["some/other"] = Repository({"README.md": b""})
    prompt, params = "Once upon a time", SamplingParams(temperature=0, max_tokens=8)
    answers = set()
    for name in (None, "tiny/storyteller", "tiny/storyteller-GGUF:F32"):
        with LLM(name, dtype="float32", eager=True) as llm:
            assert llm.model_name == (name or "storyteller")
            answers.add(llm.generate(prompt, params)[0].outputs[0].text)
    assert len(answers) == 1


@pytest.mark.parametrize("name", ["qwen3:0.6b", "owner/model:Q4_K_M"])
def test_run_takes_a_model_and_a_message(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[chat.ChatOptions] = []
    monkeypatch.setattr(chat, "run", given.append)
    assert main(["run", name, "hello", "--temperature", "0"]) == 0
    (options,) = given
    assert (options.model, options.message, options.temperature) == (name, "hello", 0)
    assert main(["run"]) == 2


def test_models_lists_what_is_here_and_what_can_be_had(
    hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.repositories["Qwen/Qwen3-0.6B-GGUF"] = Repository({"Qwen3-0.6B-Q8_0.gguf": LARGE})
    with pytest.raises(hub_module.ModelError):  # it is none, which is seen when it is here
        resolve_model("qwen3:0.6b")
    monkeypatch.setattr("nanoserve.commands.models.available_host_memory", lambda: 8 << 30)
    assert main(["models"]) == 0
    here, _, rest = capsys.readouterr().out.partition("\n\n")
    assert [line.split("  ")[-2:] for line in here.splitlines()] == [
        ["storyteller", "(bundled, the default)"],
        ["storyteller-diffusion", "(bundled)"],
        ["qwen3:0.6b", "(hub cache)"],
    ]
    title, _, *rows = rest.splitlines()
    assert title == "nanoserve run NAME downloads one of these; 8.0 GiB of memory are free:"
    assert {row.split()[4] for row in rows} == named_models().keys() - {"qwen3:0.6b"}
    # 3.43 GiB by the published sizes of Qwen3-4B: half of 8 GiB has room for it, not for 8B
    assert [row.split()[4] for row in rows if row.endswith("fits best")] == ["qwen3:4b"]
    large = {row.split()[4] for row in rows if row.endswith("too large for this machine")}
    assert {"qwen3:14b", "qwen3:32b"} <= large and "qwen3:8b" not in large
    assert all(len(row) <= 80 for row in rows)


def test_a_first_start_names_the_model_that_fits_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "available_host_memory", lambda: 8 << 30)
    assert chat._hint() == "Tells stories only. A real model: nanoserve run qwen3:4b (2.4 GiB)"
    monkeypatch.setattr(chat, "available_host_memory", lambda: 1 << 20)
    assert chat._hint() == "Tells stories only."


SMOLLM2 = ["smollm2:135m", "smollm2:360m", "smollm2:1.7b"]


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (["run", "sm"], ["smart", "smollm2", *SMOLLM2, "smollm3", "smollm3:3b"]),
        # bash takes a colon for a word, and replaces only what comes after it
        (["run", "smollm2", ":"], ["135m", "360m", "1.7b"]),
        (["run", "smollm2", ":", "1"], ["135m", "1.7b"]),
        (["chat", "-m", "smollm2", ":", "3"], ["360m"]),
        (["chat", "-m", "smollm2:3"], ["smollm2:360m"]),
    ],
)
def test_the_shell_completes_names(words: list[str], completed: list[str], tmp_path: Path) -> None:
    (tmp_path / "config" / "nanoserve").mkdir(parents=True)
    (tmp_path / "config" / "nanoserve" / "aliases.json").write_text('{"smart": "qwen3:8b"}')
    ran = subprocess.run(
        [sys.executable, "-c", "from nanoserve.commands.main import run; run()"],
        env={
            "_NANOSERVE_COMPLETE": "complete_bash",
            "COMP_WORDS": " ".join(["nanoserve", *words]),
            "COMP_CWORD": str(len(words)),
            "PYTHONPATH": str(ROOT),
            "HF_HOME": str(tmp_path),
            "XDG_CONFIG_HOME": str(tmp_path / "config"),
        },
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    assert ran.stdout.split() == completed
