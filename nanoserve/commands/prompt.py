"""The chat's input line: editing, history in a private file, pastes and messages of several
lines."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from nanoserve.commands.terminal import remark
from nanoserve.errors import RuntimeFailure, shown
from nanoserve.utils.temporary import temporary_directory

PROMPT, CONTINUATION = ">>> ", "... "
BLOCK_QUOTES = '"""'


def state_directory() -> Path:
    """The directory of our state in the platform's place: XDG_STATE_HOME, or ~/.local/state;
    ~/Library on macOS."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "nanoserve"
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state, "nanoserve")


def private_file(path: Path) -> Path:
    """Make sure that a file exists and only its owner can read it. Raises OSError if that fails."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
    os.chmod(path, 0o600)
    return path


class ChatPrompt:
    """Reads messages from a terminal; the tabulator key completes ``commands``. Without a file,
    memory has history."""

    def __init__(self, history: Path | None, commands: Sequence[str]):
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.filters import Condition
        from prompt_toolkit.history import FileHistory, History, InMemoryHistory
        from prompt_toolkit.output import create_output

        kept: History = InMemoryHistory()
        if history is not None:
            try:
                kept = FileHistory(str(private_file(history)))
            except OSError as error:
                remark(f"no history is kept: cannot write {history}: {error.strerror}")
        self._session: PromptSession[str] = PromptSession(
            history=kept,
            completer=WordCompleter(list(commands), sentence=True),
            complete_while_typing=False,
            enable_open_in_editor=True,
            enable_suspend=True,
            multiline=Condition(self._is_open_block),
            prompt_continuation=CONTINUATION,
            output=create_output(sys.stdout if sys.stdout.isatty() else sys.stderr),
        )

    def _is_open_block(self) -> bool:
        """Whether three quotes have begun a message that no three quotes end, so that Enter begins
        another line of it."""
        text = self._session.default_buffer.text
        if not text.startswith(BLOCK_QUOTES):
            return False
        return not text.removeprefix(BLOCK_QUOTES).rstrip().endswith(BLOCK_QUOTES)

    def on_drawn(self, action: Callable[[], None]) -> None:
        """Call ``action`` whenever the prompt has been drawn."""
        self._session.app.after_render += lambda _: action()

    def fail(self, error: BaseException) -> None:
        """End `read` with this error if it reads; another thread may call this."""
        app = self._session.app

        def end() -> None:
            if app.is_running:
                app.exit(exception=error)

        if app.loop is not None:
            app.loop.call_soon_threadsafe(end)

    def read(self) -> str:
        """One message; three quotes begin and end one of several lines. Raises EOFError on Ctrl-D
        in an empty line."""
        text = self._session.prompt(PROMPT)
        if not text.startswith(BLOCK_QUOTES):
            return text
        # The space keeps a quoted message that begins with a slash from being taken for a command.
        quoted = text.removeprefix(BLOCK_QUOTES).rstrip().removesuffix(BLOCK_QUOTES)
        return " " + quoted.strip("\n")


def edit_text(text: str) -> str:
    """Open $VISUAL or $EDITOR on a text; returns what it is afterwards. Raises RuntimeFailure if
    that fails."""
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    with temporary_directory() as directory:
        path = directory / "message.txt"
        path.write_text(text, encoding="utf-8")
        try:
            subprocess.run([*shlex.split(editor), str(path)], check=True)
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            raise RuntimeFailure(f"the editor {shown(editor)} failed: {error}") from None
