"""The draft of a model that writes canvases, in the chat: a tiny random SDAR checkpoint."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanoserve import LLM
from nanoserve.commands.answers import LocalModel
from nanoserve.commands.chat_session import ChatSession
from nanoserve.request import SamplingParams
from tests.commands.screen import Screen
from tests.commands.test_terminal import Terminal, converse, watched
from tests.oracle.sdar import make_sdar_for_text

DENOISING = "static:steps=2"
SETTINGS = {"temperature": 0.0, "max_tokens": 100}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sdar")
    make_sdar_for_text(directory, 16)
    return directory


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    settings = {"dtype": "float32", "eager": True, "kv_cache_memory": 1 << 22}
    with LLM(str(checkpoint), denoising=DENOISING, **settings) as llm:
        yield llm


@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=str)
def test_drafts_settle_in_place(
    monkeypatch: pytest.MonkeyPatch, llm: LLM, size: tuple[int, int]
) -> None:
    """An answer of several rows at the bottom of the window, so that it scrolls. In the end there
    stands what stands there without drafts, also above the window."""
    ends = list[list[str]]()
    for drafts in (True, False):
        screen = watched(monkeypatch, *size)
        screen.write("\n" * (size[1] - 4))
        model = LocalModel("sdar", lambda *_: llm, print, 0, drafts=drafts)
        session = ChatSession(model, notify=print, settings=SETTINGS)
        converse(monkeypatch, session, "Once upon")
        assert screen.top > 0
        ends.append([line for line in screen.text.splitlines() if " tokens/s" not in line])
    assert ends[0] == ends[1]
    assert len(ends[0]) > 5


def test_a_draft_is_faint_on_a_terminal(checkpoint: Path, llm: LLM, tmp_path: Path) -> None:
    words = ["chat", "Once upon", "-m", str(checkpoint), "--temperature", "0", "--no-history"]
    words += ["--max-tokens", "60", "--denoising", DENOISING, "--dtype", "float32", "--eager"]
    terminal = Terminal(*words, "--kv-cache-memory", "4MiB", state=tmp_path, module="nanoserve")
    assert terminal.exit_code() == 0
    os.close(terminal.descriptor)
    faint = re.findall(r"\x1b\[2m([^\x1b]*)\x1b\[0m", terminal.shown)
    assert sum(" _" in text for text in faint) >= 3, "a draft for each canvas"
    screen = Screen(80, 24)
    screen.write(terminal.shown)
    params = SamplingParams(temperature=0.0, max_tokens=60)
    (answer,) = llm.chat([{"role": "user", "content": "Once upon"}], params)
    assert screen.text.split() == answer.outputs[0].text.split()
