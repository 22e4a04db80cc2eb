"""The input line and its history file."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit.application import Application, create_app_session
from prompt_toolkit.history import FileHistory
from prompt_toolkit.input import create_pipe_input

from nanoserve.commands.prompt import ChatPrompt, edit_text, private_file, state_directory
from nanoserve.errors import RuntimeFailure

ROOT = Path(__file__).parent.parent.parent
PASTE_BEGINS, PASTE_ENDS, ENTER, CONTROL_C, CONTROL_D, CONTROL_Z = (
    "\x1b[200~",
    "\x1b[201~",
    "\r",
    "\x03",
    "\x04",
    "\x1a",
)


@pytest.fixture
def keys() -> Iterator[Any]:
    with create_pipe_input() as pipe, create_app_session(input=pipe):
        yield pipe


def test_lines_pastes_and_blocks(keys: Any) -> None:
    prompt = ChatPrompt(None, ["/help"])
    keys.send_text("hello" + ENTER)
    assert prompt.read() == "hello"
    keys.send_text(f"{PASTE_BEGINS}one\ntwo\n/exit\n{PASTE_ENDS}{ENTER}")
    assert prompt.read() == "one\ntwo\n/exit\n"
    for line in ('"""', "/not a command", "", 'two"""'):
        keys.send_text(line + ENTER)
    assert prompt.read() == " /not a command\n\ntwo"
    keys.send_text('"""one line"""' + ENTER)
    assert prompt.read() == " one line"


def test_a_message_of_several_lines_is_one_entry_of_the_history(keys: Any, tmp_path: Path) -> None:
    path = tmp_path / "history"
    prompt = ChatPrompt(path, [])
    for line in ('"""one', "", 'two"""'):
        keys.send_text(line + ENTER)
    assert prompt.read() == " one\n\ntwo"
    keys.send_text(f"{PASTE_BEGINS}three\nfour{PASTE_ENDS}{ENTER}")
    assert prompt.read() == "three\nfour"
    entries = list(FileHistory(str(path)).load_history_strings())
    assert entries == ["three\nfour", '"""one\n\ntwo"""']
    keys.send_text("\x1b[A\x1b[A\x1b[A" + ENTER)  # up, over the two lines of the newest
    assert ChatPrompt(path, []).read() == " one\n\ntwo"


def test_control_keys(keys: Any) -> None:
    prompt = ChatPrompt(None, [])
    keys.send_text("half a li" + CONTROL_C)
    with pytest.raises(KeyboardInterrupt):
        prompt.read()
    keys.send_text(CONTROL_D)
    with pytest.raises(EOFError):
        prompt.read()


def test_control_z_suspends_and_keeps_the_line(keys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    suspended = []
    monkeypatch.setattr(
        Application,
        "suspend_to_background",
        lambda app, *_: suspended.append(app.current_buffer.text),
    )
    keys.send_text("half a line" + CONTROL_Z + " and the rest" + ENTER)
    assert ChatPrompt(None, []).read() == "half a line and the rest"
    assert suspended == ["half a line"]


def test_history_is_private_and_comes_back(keys: Any, tmp_path: Path) -> None:
    path = tmp_path / "state" / "nanoserve" / "history"
    keys.send_text("a secret" + ENTER)
    assert ChatPrompt(path, []).read() == "a secret"
    assert "a secret" in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    keys.send_text("\x1b[A" + ENTER)  # the key "up"
    assert ChatPrompt(path, []).read() == "a secret"
    os.chmod(path, 0o644)
    assert stat.S_IMODE(private_file(path).stat().st_mode) == 0o600


def test_a_history_that_cannot_be_kept_is_no_failure(
    keys: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    prompt = ChatPrompt(tmp_path / "file" / "history", [])
    assert "no history is kept" in capsys.readouterr().err
    keys.send_text("hello" + ENTER)
    assert prompt.read() == "hello"


@pytest.mark.skipif(sys.platform != "linux", reason="where Linux keeps state")
def test_where_the_history_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert state_directory() == tmp_path / "nanoserve"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert state_directory() == tmp_path / ".local" / "state" / "nanoserve"


def test_the_editor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setenv("EDITOR", "sed -i s/a/b/")
    assert edit_text("a\n") == "b\n"
    for broken in ("false", "/no/such/editor", "'"):
        monkeypatch.setenv("EDITOR", broken)
        with pytest.raises(RuntimeFailure, match="failed"):
            edit_text("a")


def test_the_prompt_appears_before_what_it_does_not_need() -> None:
    """Modules that draw answers, read weights and speak with servers are loaded later. The table of
    named models is read before, for the line that names one."""
    program = (
        "import sys\n"
        "from nanoserve.commands import main, prompt\n"
        "def end(*_):\n"
        "    print(*sys.modules)\n"
        "    raise SystemExit\n"
        "prompt.ChatPrompt.read = end\n"
        "main.main(['chat', '--no-history'])\n"
    )
    controller, terminal = os.openpty()
    settings = {"COLUMNS": "80", "TERM": "xterm"}
    ran = subprocess.run(
        [sys.executable, "-c", program],
        stdin=terminal,
        stdout=subprocess.PIPE,
        stderr=terminal,
        text=True,
        cwd=ROOT,
        env=os.environ | settings,
    )
    os.close(controller)
    os.close(terminal)
    loaded = set(ran.stdout.split())
    assert {"nanoserve.commands.chat", "prompt_toolkit"} <= loaded
    late = {"torch", "numpy", "tokenizers", "huggingface_hub", "rich", "http.client"}
    late |= {"nanoserve.llm", "nanoserve.commands.printers", "nanoserve.text.answers.forms"}
    assert not late & loaded
