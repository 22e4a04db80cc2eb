"""``nanoserve chat``: a conversation on a terminal, or one answer where there is none."""

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoserve.commands.chat_models import LocalModels, ModelSource
from nanoserve.commands.chat_session import CHANGEABLE, ChatSession, Draft, Steps
from nanoserve.commands.conversations import find, is_name, kept
from nanoserve.commands.engine_options import (
    SamplingOptions,
    ServerOptions,
    WorkersOptions,
    check_utf8,
)
from nanoserve.commands.options import Options, argument, option
from nanoserve.commands.prompt import PROMPT, ChatPrompt, edit_text, state_directory
from nanoserve.commands.state_line import StateLine
from nanoserve.commands.terminal import (
    StopOnInterrupt,
    is_terminal,
    read_stdin,
    remark,
    say,
    visible,
    when_continued,
    without_echo,
)
from nanoserve.commands.torchrun import on_all_machines
from nanoserve.errors import NanoserveError, UsageError, did_you_mean
from nanoserve.models.hub import best_named_model
from nanoserve.text.answers.reader import Piece
from nanoserve.utils.interrupts import prompt_interrupts
from nanoserve.utils.sizes import available_host_memory, format_size
from nanoserve.utils.waiting import Waiting

if TYPE_CHECKING:
    from nanoserve.commands.printers import AnswerPrinter


class TalkOptions(Options, panel="Chat", has_variables=True):
    """Options of `chat` and `run` beside those of the model."""

    message: str | None = argument(
        None,
        "Answer this and exit. Piped input is added to it. With --continue, it may be the name of "
        "a conversation.",
    )
    system: str | None = option(
        None, "System prompt, kept at the start of the context.", "-s", metavar="TEXT"
    )
    json: bool = option(False, "One JSON object instead of text.")
    plain: bool = option(False, "Do not render markdown on a terminal.")
    thinking: str | None = option(
        None, "Whether the model reasons, if it has a switch.", choices=("on", "off")
    )
    hide_thinking: bool = option(False, "Do not show reasoning.")
    continue_: bool = option(
        False, "Continue the last conversation, or the one that is named.", variables=()
    )
    no_history: bool = option(False, "Log no conversations and no input lines.")


class ChatOptions(TalkOptions, ServerOptions, WorkersOptions, SamplingOptions):
    """All options of the command."""


@on_all_machines
def run(options: ChatOptions) -> None:
    """The model runs in this process, or with --url behind any server that speaks OpenAI's API.

    [bold]Examples[/bold]

      nanoserve chat                                          the bundled model
      nanoserve chat --model ./Qwen3-0.6B --temperature 0.7   a model directory
      nanoserve chat "a story about a fox and a boat"         one answer
      cat notes.txt | nanoserve chat "Summarize:" --json      answer and timings
      nanoserve chat --url http://127.0.0.1:11434             ours, vLLM, ollama
      nanoserve chat --continue 20261127-084012               a conversation again
    """
    name, message = None, options.message
    if options.continue_ and message is not None and is_name(message):
        name, message = message, None
    settings, question = options.given(), _question(message)
    if question is None and options.json:
        raise UsageError("--json answers one message: give it as an argument or on stdin")
    if options.system is not None:
        check_utf8(options.system, "the system prompt")
    notify: Callable[[str], None] = say
    if question is None:
        notify = notice
    source = _models(options, notify)
    model = source.first()
    if options.url is not None and options.seed is not None:
        settings["seed"] = options.seed
    if options.thinking is not None:
        model.thinking = options.thinking == "on"
    session = ChatSession(model, notify=notify, system=options.system, settings=settings)
    try:
        logs = state_directory() / "conversations"
        if not options.no_history:
            session.logs = logs
        if options.continue_:
            session.load(find(logs, name))
            session.settings = session.settings | settings
            if options.system:
                session.system = options.system
        if question is None:
            return Conversation(session, options, source).run()
        _answer_once(session, options, question)
    finally:
        session.model.close()


def _models(options: ChatOptions, notify: Callable[[str], None]) -> ModelSource:
    if options.url is None:
        return LocalModels(options, notify)
    from nanoserve.commands.remote_model import RemoteModels

    return RemoteModels(options.client(options), options.model, notify)


def _answer_once(session: ChatSession, options: ChatOptions, question: str) -> None:
    # nothing goes on after Ctrl-C, so nothing waits for the end of a step or of an import
    with prompt_interrupts(), StateLine(lambda: session.model.waiting) as line:
        session.model.start()
        pieces = session.ask(question)
        if options.json:
            for _ in pieces:
                line.change(lambda: Waiting("answering"))
        else:
            hide_thinking = options.hide_thinking or options.thinking == "off"
            printer = _printer(plain=options.plain, hide_thinking=hide_thinking)
            _show_answer(session, pieces, printer, line)
    if options.json and session.last_answer is not None:
        print(session.last_answer.json(session.model.name))


def _question(message: str | None) -> str | None:
    """The message to answer, or None if there is a terminal to talk on. Raises UsageError for no
    text and no UTF-8."""
    if message is not None:
        check_utf8(message, "the message")
    watched = sys.stdin is not None and sys.stdin.isatty()
    if message is None and watched:
        return None
    parts = [message or ""]
    if not watched:
        parts.append(read_stdin())
    question = "\n\n".join(part for part in parts if part.strip())
    if not question:
        raise UsageError("the message is empty")
    return question


_WITHOUT_MODEL = ("/exit", "/quit", "/bye", "/help", "/model", "/conversations")
_ALIASES = {"clear": "reset", "quit": "exit", "bye": "exit"}  # names in other chats
_LISTED = 20
"""Conversations that are listed, the newest ones."""
_LINES_OF_OLD = 8
"""Lines of an earlier message that are shown when its conversation goes on."""
_BEGINNING = 44
"""Characters of a conversation's first message in the list."""


class _WarningsAsNotices(logging.Handler):
    """Tells the engine's warnings as notices, without the program's name before them."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell(record.getMessage().removeprefix("nanoserve: "))


def notice(text: str) -> None:
    """Say something beside the answers; it may quote what steers a terminal."""
    remark(visible(text))


def _hint() -> str:
    """A line for those who talk with the bundled model: which one fits this machine best."""
    best = best_named_model(available_host_memory())
    if best is None:
        return "Tells stories only."
    return (
        f"Tells stories only. A real model: nanoserve run {best.name} "
        f"({format_size(best.file_bytes)})"
    )


class Conversation:
    """An interactive chat: lines that begin with a slash are commands, the others go to the
    model."""

    def __init__(self, session: ChatSession, options: ChatOptions, source: ModelSource):
        self._session, self._options, self._source = session, options, source
        self._thinking = not options.hide_thinking and options.thinking != "off"
        self._has_ended = False
        self._entered = time.monotonic()  # when the line that is obeyed or answered was sent
        self._waited: float | None = None  # from then to the last answer's first token
        self._is_reading = False
        self._held: list[str] = []  # notices that would stand in the line that is typed
        self._table: dict[str, tuple[Callable[[str], str | None], str, str]] = {
            "help": (self._help, "", "this list"),
            "reset": (self._reset, "", "forget the conversation, keep system prompt and settings"),
            "system": (self._system, "[TEXT]", "set the system prompt; without text, remove it"),
            "set": (
                self._set,
                "NAME=VALUE",
                f"change a setting ({', '.join(CHANGEABLE)}); 'none' undoes it",
            ),
            "model": (self._model, "[NAME]", "go on with another model; alone, name this one"),
            "models": (self._models, "", "the models that there are"),
            "show": (self._show, "", "model, system prompt and settings"),
            "stats": (self._stats, "", "tokens and times of the last answer"),
            "think": (
                self._think,
                "[on|off]",
                "let the model reason or not; alone, show its last reasoning",
            ),
            "file": (self._file, "FILE", "send a text file with the next message"),
            "save": (self._save, "FILE", "write the conversation and settings as JSON"),
            "load": (self._load, "FILE|NAME", "go on with a saved or kept conversation"),
            "conversations": (self._conversations, "", "the names of the kept conversations"),
            "regen": (
                lambda _: self._answer(session.regenerate),
                "",
                "answer the last message again",
            ),
            "undo": (self._undo, "", "take back the last message and its answer"),
            "edit": (self._edit, "", "write a message in $EDITOR, beginning with the last one"),
            "exit": (self._exit, "", "leave (Ctrl-D does, too)"),
        }

    @property
    def names(self) -> list[str]:
        return [f"/{name}" for name in self._table | _ALIASES]

    def run(self) -> None:
        history = None if self._options.no_history else state_directory() / "history"
        prompt = ChatPrompt(history, self.names)
        remark(f"{self._session.model.name}. /help lists the commands, Ctrl-D leaves.")
        if self._options.model is None and self._options.url is None:
            remark(_hint())
        self._show_last()
        prompt.on_drawn(partial(self._prepare_answers, prompt))
        logger, handler = logging.getLogger("nanoserve"), _WarningsAsNotices(self._tell)
        logger.addHandler(handler)
        try:
            while not self._has_ended:
                try:
                    line = self._read(prompt)
                except KeyboardInterrupt:
                    notice("the line was cleared; Ctrl-D or /exit leaves")
                    continue
                except EOFError:
                    return
                self._take(line)
        finally:
            logger.removeHandler(handler)

    def _read(self, prompt: ChatPrompt) -> str:
        self._is_reading = True
        try:
            line = prompt.read()
            self._entered = time.monotonic()
            return line
        finally:
            self._is_reading = False
            for text in self._held:
                notice(text)
            self._held.clear()

    def _tell(self, text: str) -> None:
        """Say something that comes up beside the answers, perhaps while a line is typed."""
        if self._is_reading:
            self._held.append(text)
        else:
            self._session.notify(text)

    def _take(self, line: str) -> None:
        """Obey or answer a line."""
        if not line.startswith(_WITHOUT_MODEL):
            self._wait_for_model()
        if line.startswith("/"):
            self.obey(line)
        elif line.strip():
            self._answer(partial(self._session.send, line.strip()))

    def _prepare_answers(self, prompt: ChatPrompt) -> None:
        """Load what an answer needs, while the user reads and types."""
        self._session.model.start(prompt.fail, _printer_class)

    def _wait_for_model(self) -> None:
        model = self._session.model
        with without_echo(), StateLine(lambda: model.waiting, self._entered):
            model.wait()

    def obey(self, line: str) -> None:
        """Run one line that begins with a slash, and show its result."""
        words = line.removeprefix("/").strip()
        name = words.split(maxsplit=1)[0] if words else ""
        argument = words.removeprefix(name).strip()
        try:
            if f"/{name}" not in self.names:
                guess = did_you_mean(f"/{name[:40]}", self.names)
                hint = "/help lists them, a space before the slash sends it as a message"
                raise UsageError(f"unknown command /{name[:40].strip()}{guess}; {hint}")
            command, _usage, _help = self._table[_ALIASES.get(name, name)]
            text = command(argument)
        except NanoserveError as error:
            text = str(error)
        if text is not None:
            notice(text)

    def _help(self, argument: str) -> str:
        rows = {}
        for name, (_, usage, help) in self._table.items():
            calls = [f"/{name}"] + [
                f"/{alias}" for alias, command in _ALIASES.items() if command == name
            ]
            rows[f"{', '.join(calls)} {usage}".rstrip()] = help
        width = max(map(len, rows))
        lines = [f"  {call:<{width}}  {help}" for call, help in rows.items()]
        lines.append(
            '  """ begins and ends a message of several lines; a paste may have several lines, too'
        )
        lines.append("  Ctrl-C stops an answer (what there is of it is kept), Ctrl-D leaves")
        return "\n".join(lines)

    def _reset(self, _: str) -> str:
        self._session.reset()
        return "the conversation is forgotten"

    def _system(self, text: str) -> str:
        if not text:
            self._session.system = None
            return "no system prompt"
        self._session.system = text
        return "system prompt set"

    def _set(self, argument: str) -> str:
        name, value = _name_and_value(argument)
        self._session.change(name, value)
        return self._setting(name)

    def _show(self, _: str) -> str:
        session, turns = self._session, len(self._session.turns) // 2
        used, most = session.context_used(), session.model.context
        context = "1 turn" if turns == 1 else f"{turns} turns"
        if used is not None:
            context = f"{used} of {most or 'unknown'} tokens, {context}"
        lines = [
            f"model    {session.model.name}",
            f"context  {context}",
            f"system   {session.system or '(none)'}",
        ]
        lines += [f"  {self._setting(name)}" for name in CHANGEABLE]
        return "\n".join(lines)

    def _setting(self, name: str) -> str:
        """A setting, its value and who has set it, unless the user has."""
        session = self._session
        given = name in session.settings
        if not given and name == "seed" and session.model.seed is not None:
            return f"seed = (another for each answer, drawn from --seed {session.model.seed})"
        if not given and session.model.defaults is None:
            return f"{name} = (the server's default)"
        value = getattr(session.sampling_params(), name)
        # as ``/set`` would take it
        shown = "none" if value is None else json.dumps(value, ensure_ascii=False)
        if given:
            return f"{name} = {shown}"
        return f"{name} = {shown}  (the model's default)"

    def _stats(self, _: str) -> str:
        if self._session.last_answer is None:
            raise UsageError("there is no answer yet")
        return self._session.last_answer.details(self._waited, self._session.model.context)

    def _model(self, name: str) -> str:
        """Go on with another model. One model is in memory at a time, so this one is closed before
        the other is loaded, and is loaded again if that fails."""
        session, before = self._session, self._session.model
        if not name:
            return f"this is {before.name}; /models lists others"
        try:
            model = self._source.open(name)  # which may be downloaded
        except KeyboardInterrupt:
            return f"stopped; this is still {before.name}"
        model.thinking = before.thinking
        before.close()
        session.model = model
        model.start()
        try:
            self._wait_for_model()
        except (NanoserveError, KeyboardInterrupt) as error:
            model.close()
            session.model = before.again()
            reason = str(error) or "stopped"
            return f"{reason}; this is still {before.name}"
        return f"this is {model.name}; the conversation goes on"

    def _models(self, _: str) -> str:
        rows = list(self._source.listed())
        width = max((len(name) for name, _ in rows), default=0)
        lines = []
        for name, about in rows:
            mark = "*" if name == self._session.model.name else " "
            lines.append(f"{mark} {name:<{width}}  {about}".rstrip())
        return "\n".join(lines) or "there are none"

    def _think(self, argument: str) -> str:
        """Set the template's own switch; reasoning that a model without one writes is at least not
        shown."""
        if not argument:
            return self._last_reasoning()
        if argument not in ("on", "off"):
            raise UsageError("say /think on or /think off")
        model = self._session.model
        model.thinking = self._thinking = argument == "on"
        if model.can_switch_thinking:
            return f"reasoning is {argument}"
        shown = "shown" if self._thinking else "hidden"
        return f"reasoning is {shown}: the model's chat template has no switch for it"

    def _last_reasoning(self) -> str:
        answer = self._session.last_answer
        if answer is None or not answer.reasoning:
            raise UsageError("the last answer has no reasoning")
        return answer.reasoning

    def _save(self, argument: str) -> str:
        path = _path(argument, "/save")
        self._session.save(path)
        return f"saved {len(self._session.turns)} messages to {path}"

    def _file(self, argument: str) -> str:
        path = _path(argument, "/file")
        tokens = self._session.add_file(path)
        about = "" if tokens is None else f", {tokens:,} tokens,"
        others = [f"{each}" for each in self._session.files if each != path]
        with_others = f", and so do {', '.join(others)}" if others else ""
        return f"{path}{about} goes with the next message{with_others}"

    def _conversations(self, _: str) -> str:
        lines = []
        for name, messages, first in kept(state_directory() / "conversations", _LISTED):
            beginning = " ".join(first.split())
            if len(beginning) > _BEGINNING:
                beginning = beginning[:_BEGINNING] + "…"
            lines.append(f"{name}  {messages:>3} messages  {beginning}")
        if not lines:
            return "no conversation is kept"
        return "\n".join([*lines, "/load NAME goes on with one, and so does chat --continue NAME"])

    def _load(self, argument: str) -> None:
        path = _path(argument, "/load")
        if is_name(argument) and not path.exists():
            path = find(state_directory() / "conversations", argument)
        self._session.load(path)
        remark(f"loaded {len(self._session.turns)} messages from {path}")
        self._show_last()

    def _show_last(self) -> None:
        """Show the last turn as it stood on the terminal when it was new."""
        turns = self._session.turns[-2:]
        if turns:
            lines = visible(turns[0].content).splitlines()
            if len(lines) > _LINES_OF_OLD:
                lines = [*lines[:_LINES_OF_OLD], f"… {len(lines) - _LINES_OF_OLD} more lines"]
            remark(PROMPT + "\n".join(lines))
            printer = _printer(plain=self._options.plain, hide_thinking=True)
            printer.answer(turns[1].content)
            printer.finish()

    def _undo(self, _: str) -> str:
        question = " ".join(self._session.undo().split())
        return f"took back: {question[:60]}"

    def _edit(self, _: str) -> str | None:
        turns = self._session.turns
        text = edit_text(turns[-2].content if turns else "").strip()
        if not text:
            return "nothing to send"
        self._answer(partial(self._session.ask, text))
        return None

    def _exit(self, _: str) -> None:
        self._has_ended = True

    def _answer(self, ask: Callable[[Steps], Iterator[Piece | Draft]]) -> None:
        """Show an answer; Ctrl-C ends it, and when it comes as the answer ends it ends nothing
        else."""
        printer = _printer(plain=self._options.plain, hide_thinking=not self._thinking)
        before = self._session.last_answer
        with (
            StopOnInterrupt() as stop,
            without_echo(),
            when_continued(printer.lose_place),
            StateLine(partial(self._waiting, stop), self._entered) as line,
        ):
            try:
                began = _show_answer(self._session, ask(stop.steps), printer, line)
            except NanoserveError as error:
                notice(str(error))
                return
            answer = self._session.last_answer
            if answer is None or answer is before:
                return
            self._waited = None
            if began is not None:
                self._waited = began - self._entered
            remark(answer.line(self._waited))

    def _waiting(self, stop: StopOnInterrupt) -> Waiting | None:
        if stop.requested:
            return Waiting("stopping")
        return self._session.model.waiting


def _path(argument: str, command: str) -> Path:
    if not argument:
        raise UsageError(f"name a file: {command} FILE")
    return Path(argument).expanduser()


def _name_and_value(argument: str) -> tuple[str, Any]:
    """``temperature=0.7``, ``temperature 0.7``, ``stop=THE END``, ``stop=["a", "b"]``,
    ``seed=none``."""
    separator = "=" if "=" in argument else " "
    name, _, text = argument.partition(separator)
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
            raise UsageError(
                f'stop takes a text or a JSON list of texts, as ["a", "b"], not {text:.60}'
            ) from None
        return name, text  # whoever checks it knows the values


def _printer_class() -> "type[AnswerPrinter]":
    """The class with its module, which imports rich: the prompt appears before."""
    from nanoserve.commands.printers import AnswerPrinter

    return AnswerPrinter


def _printer(*, plain: bool, hide_thinking: bool) -> "AnswerPrinter":
    from rich.console import Console

    markdown = not plain and is_terminal(sys.stdout)
    thoughts_file, thoughts = sys.stdout if markdown else sys.stderr, None
    if is_terminal(thoughts_file) and not hide_thinking:
        thoughts = Console(file=thoughts_file)
    return _printer_class()(Console(file=sys.stdout), thoughts, markdown=markdown)


def _show_answer(
    session: ChatSession,
    pieces: Iterator[Piece | Draft],
    printer: "AnswerPrinter",
    line: StateLine,
) -> float | None:
    """Show an answer as it comes, and take the state line away before; returns the time of its
    first piece that is no draft. A notice ends the text above it: the printer may not find its
    lines again."""
    tell, began = session.notify, None

    def notify(text: str) -> None:
        printer.finish()
        tell(text)

    session.notify = notify
    shows = {"answer": printer.answer, "thinking": printer.thinking}
    try:
        for piece in pieces:
            if isinstance(piece, Draft):
                if piece.answer or (piece.thinking and printer.shows_thoughts):
                    line.end()
                printer.draft(*piece)
                continue
            part, text = piece
            if began is None:
                began = time.monotonic()
            if part == "thinking" and not printer.shows_thoughts:
                line.change(lambda: Waiting("thinking"))
            else:
                line.end()
            shows[part](text)
    finally:
        session.notify = tell
        line.end()
        printer.finish()
    return began
