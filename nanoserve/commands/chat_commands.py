"""The slash commands of the chat. What begins with a slash never reaches the model."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoserve.commands.chat_session import CHANGEABLE, ChatSession, Message, did_you_mean
from nanoserve.errors import NanoserveError, UsageError


@dataclass(frozen=True, slots=True)
class CommandOutcome:
    """What the chat does next: show ``text`` and ``turns``, leave, send ``message``, or ask the last one again."""

    text: str = ""
    turns: Sequence[Message] = ()
    leave: bool = False
    message: str | None = None
    regenerate: bool = False


@dataclass(frozen=True, slots=True)
class _Command:
    run: Callable[[str], CommandOutcome]
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
        self._commands = self._table | {alias: self._table[name] for alias, name in _ALIASES.items()}

    @property
    def names(self) -> list[str]:
        """All commands with their slash, for completion."""
        return [f"/{name}" for name in self._commands]

    def run(self, line: str) -> CommandOutcome:
        """Run one line that begins with a slash; what goes wrong is the outcome's text."""
        name, *rest = line.removeprefix("/").split(maxsplit=1) or [""]
        command = self._commands.get(name)
        if command is None:
            guess = did_you_mean(f"/{name[:40]}", self.names)
            hint = "/help lists them, a space before the slash sends it as a message"
            return CommandOutcome(f"unknown command /{name[:40].strip()}{guess}; {hint}")
        try:
            return command.run("".join(rest).strip())
        except NanoserveError as error:
            return CommandOutcome(str(error))

    def _help(self, _: str) -> CommandOutcome:
        calls = {name: [f"/{name}"] for name in self._table}
        for alias, name in _ALIASES.items():
            calls[name].append(f"/{alias}")
        left = {name: f"{', '.join(calls[name])} {self._table[name].usage}".rstrip() for name in calls}
        width = max(map(len, left.values()))
        lines = [f"  {left[name]:<{width}}  {command.help}" for name, command in self._table.items()]
        lines.append('  """ begins and ends a message of several lines; a paste may have several lines, too')
        lines.append("  Ctrl-C stops an answer (what there is of it is kept), Ctrl-D leaves")
        return CommandOutcome("\n".join(lines))

    def _reset(self, _: str) -> CommandOutcome:
        self._session.reset()
        return CommandOutcome("the conversation is forgotten")

    def _system(self, text: str) -> CommandOutcome:
        self._session.system = text or None
        return CommandOutcome("system prompt set" if text else "no system prompt")

    def _set(self, argument: str) -> CommandOutcome:
        name, value = _name_and_value(argument)
        self._session.change(name, value)
        return CommandOutcome(self._setting(name))

    def _show(self, _: str) -> CommandOutcome:
        session = self._session
        used, most = session.context_used(), session.model.context
        tokens = "" if used is None else f"{used} of {most or 'unknown'} tokens, "
        turns = len(session.turns) // 2
        lines = [
            f"model    {session.model.name}",
            f"context  {tokens}{turns} {'turn' if turns == 1 else 'turns'}",
            f"system   {session.system or '(none)'}",
        ]
        return CommandOutcome("\n".join([*lines, *(f"  {self._setting(name)}" for name in CHANGEABLE)]))

    def _setting(self, name: str) -> str:
        """A setting, its value and who has set it, unless the user has."""
        session = self._session
        given = name in session.settings
        if not given and name == "seed" and session.model.seed is not None:
            return f"seed = (another for each answer, drawn from --seed {session.model.seed})"
        if not given and session.model.defaults is None:
            return f"{name} = (the server's default)"
        mark = "" if given else "  (the model's default)"
        return f"{name} = {_shown(getattr(session.sampling_params(), name))}{mark}"

    def _stats(self, _: str) -> CommandOutcome:
        answer = self._session.last_answer
        if answer is None:
            raise UsageError("there is no answer yet")
        return CommandOutcome(answer.usage.line(self._session.model.context, interrupted=answer.interrupted))

    def _think(self, argument: str) -> CommandOutcome:
        if argument not in ("on", "off"):
            raise UsageError("say /think on or /think off")
        self.show_thinking = argument == "on"
        return CommandOutcome(f"reasoning is {'shown' if self.show_thinking else 'hidden'}")

    def _save(self, argument: str) -> CommandOutcome:
        path = _path(argument, "/save")
        self._session.save(path)
        return CommandOutcome(f"saved {len(self._session.turns)} messages to {path}")

    def _load(self, argument: str) -> CommandOutcome:
        path = _path(argument, "/load")
        self._session.load(path)
        turns = self._session.turns
        return CommandOutcome(f"loaded {len(turns)} messages from {path}", turns=turns[-2:])

    def _regenerate(self, _: str) -> CommandOutcome:
        return CommandOutcome(regenerate=True)

    def _undo(self, _: str) -> CommandOutcome:
        question = self._session.undo()
        return CommandOutcome(f"took back: {question.splitlines()[0][:60]}")

    def _edit(self, _: str) -> CommandOutcome:
        turns = self._session.turns
        text = self._edit_text(turns[-2].content if turns else "").strip()
        return CommandOutcome(message=text) if text else CommandOutcome("nothing to send")

    def _exit(self, _: str) -> CommandOutcome:
        return CommandOutcome(leave=True)


_ALIASES = {"clear": "reset", "quit": "exit", "bye": "exit"}
"""What other chats call the same."""


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
    if not name:
        raise UsageError(f"say /set NAME=VALUE; the names are {', '.join(CHANGEABLE)}")
    if text.lower() in ("none", "default"):
        return name, None
    if name == "stop" and not text.startswith("["):
        return name, [text]
    try:
        return name, json.loads(text)
    except ValueError:
        if name == "stop":
            raise UsageError(f'stop takes a text or a JSON list of texts, as ["a", "b"], not {text:.60}') from None
        return name, text  # whoever checks it knows the values
