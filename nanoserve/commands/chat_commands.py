"""The slash commands of the chat. What begins with a slash never reaches the model."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoserve.commands.chat_session import CHANGEABLE, ChatSession
from nanoserve.errors import NanoserveError, UsageError


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the chat does next: show ``text``, leave, send ``message``, or ask for the last answer again."""

    text: str = ""
    leave: bool = False
    message: str | None = None
    regenerate: bool = False


@dataclass(frozen=True, slots=True)
class _Command:
    run: Callable[[str], Outcome]
    usage: str
    help: str


class ChatCommands:
    """Runs command lines on a session.

    Args:
        session: the conversation they change.
        edit: opens an editor on a text and returns the new text.
    """

    def __init__(self, session: ChatSession, edit: Callable[[str], str]):
        self._session = session
        self._edit_text = edit
        self.show_thinking = True
        self._table = {
            "help": _Command(self._help, "", "this list"),
            "reset": _Command(self._reset, "", "forget the conversation, keep system prompt and settings"),
            "system": _Command(self._system, "[TEXT]", "set the system prompt; without text, remove it"),
            "set": _Command(self._set, "NAME=VALUE", f"change a setting ({', '.join(CHANGEABLE)}); 'none' undoes it"),
            "show": _Command(self._show, "", "model, system prompt and settings"),
            "stats": _Command(self._stats, "", "tokens and times of the last answer"),
            "think": _Command(self._think, "on|off", "show or hide the model's reasoning"),
            "save": _Command(self._save, "FILE", "write the conversation and settings as JSON"),
            "load": _Command(self._load, "FILE", "go on with a saved conversation"),
            "regen": _Command(self._regenerate, "", "answer the last message again"),
            "undo": _Command(self._undo, "", "take back the last message and its answer"),
            "edit": _Command(self._edit, "", "write a message in $EDITOR, beginning with the last one"),
            "exit": _Command(self._exit, "", "leave (Ctrl-D does, too)"),
        }

    @property
    def names(self) -> list[str]:
        """All commands with their slash, for completion."""
        return [f"/{name}" for name in self._table]

    def run(self, line: str) -> Outcome:
        """Run one line that begins with a slash; what goes wrong is the outcome's text."""
        name, *rest = line.removeprefix("/").split(maxsplit=1) or [""]
        command = self._table.get(name)
        if command is None:
            known = f"unknown command /{name[:40].strip()}; /help lists them"
            return Outcome(f"{known} (a space before the slash sends it as a message)")
        try:
            return command.run("".join(rest).strip())
        except NanoserveError as error:
            return Outcome(str(error))

    def _help(self, _: str) -> Outcome:
        left = {name: f"/{name} {command.usage}".rstrip() for name, command in self._table.items()}
        width = max(map(len, left.values()))
        lines = [f"  {left[name]:<{width}}  {command.help}" for name, command in self._table.items()]
        lines.append('  """ begins and ends a message of several lines; a paste may have several lines, too')
        lines.append("  Ctrl-C stops an answer (what there is of it is kept), Ctrl-D leaves")
        return Outcome("\n".join(lines))

    def _reset(self, _: str) -> Outcome:
        self._session.reset()
        return Outcome("the conversation is forgotten")

    def _system(self, text: str) -> Outcome:
        self._session.system = text or None
        return Outcome("system prompt set" if text else "no system prompt")

    def _set(self, argument: str) -> Outcome:
        name, value = _name_and_value(argument)
        self._session.change(name, value)
        return Outcome(self._setting(name))

    def _show(self, _: str) -> Outcome:
        session = self._session
        used, most = session.context_used(), session.model.context
        tokens = "" if used is None else f"{used} of {most or 'unknown'} tokens, "
        lines = [
            f"model    {session.model.name}",
            f"context  {tokens}{len(session.turns) // 2} turns",
            f"system   {session.system or '(none)'}",
        ]
        for name in CHANGEABLE:
            mark = "" if name in session.settings or session.model.defaults is None else "  (the model's default)"
            lines.append(f"  {self._setting(name)}{mark}")
        return Outcome("\n".join(lines))

    def _setting(self, name: str) -> str:
        """A setting and its value."""
        session = self._session
        if name not in session.settings and session.model.defaults is None:
            return f"{name} = (the server's default)"
        return f"{name} = {_shown(getattr(session.sampling_params(), name))}"

    def _stats(self, _: str) -> Outcome:
        answer = self._session.last_answer
        if answer is None:
            raise UsageError("there is no answer yet")
        return Outcome(answer.usage.line(self._session.model.context, interrupted=answer.interrupted))

    def _think(self, argument: str) -> Outcome:
        if argument not in ("on", "off"):
            raise UsageError("say /think on or /think off")
        self.show_thinking = argument == "on"
        return Outcome(f"reasoning is {'shown' if self.show_thinking else 'hidden'}")

    def _save(self, argument: str) -> Outcome:
        path = _path(argument, "/save")
        self._session.save(path)
        return Outcome(f"saved {len(self._session.turns)} messages to {path}")

    def _load(self, argument: str) -> Outcome:
        path = _path(argument, "/load")
        self._session.load(path)
        return Outcome(f"loaded {len(self._session.turns)} messages from {path}")

    def _regenerate(self, _: str) -> Outcome:
        return Outcome(regenerate=True)

    def _undo(self, _: str) -> Outcome:
        question = self._session.undo()
        return Outcome(f"took back: {question.splitlines()[0][:60]}")

    def _edit(self, _: str) -> Outcome:
        turns = self._session.turns
        text = self._edit_text(turns[-2].content if turns else "").strip()
        return Outcome(message=text) if text else Outcome("nothing to send")

    def _exit(self, _: str) -> Outcome:
        return Outcome(leave=True)


def _path(argument: str, command: str) -> Path:
    if not argument:
        raise UsageError(f"name a file: {command} FILE")
    return Path(argument).expanduser()


def _shown(value: object) -> str:
    """As ``/set`` would take it."""
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def _name_and_value(argument: str) -> tuple[str, Any]:
    """``temperature=0.7``, ``temperature 0.7``, ``stop=THE END``, ``stop=["a", "b"]``, ``seed=none``."""
    name, equals, text = argument.partition("=")
    if not equals:
        name, _, text = argument.partition(" ")
    name, text = name.strip().replace("-", "_"), text.strip()
    if not name or not text:
        raise UsageError(f"say /set NAME=VALUE; the names are {', '.join(CHANGEABLE)}")
    if text.lower() in ("none", "default"):
        return name, None
    if name == "stop" and not text.startswith("["):
        return name, [text]
    try:
        return name, json.loads(text)
    except ValueError:
        raise UsageError(f"{text!r} is no value for {name}") from None
