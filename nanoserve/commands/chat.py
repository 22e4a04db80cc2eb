"""``nanoserve chat``: a conversation on a terminal, or one answer where there is none."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from rich.console import Console

from nanoserve.commands.chat_commands import ChatCommands
from nanoserve.commands.chat_model import ChatModel, LocalModel, RemoteModel
from nanoserve.commands.chat_session import ChatSession, Piece, Steps
from nanoserve.commands.engine_options import SamplingOptions, ServerOptions, ServingOptions, check_utf8
from nanoserve.commands.failures import say
from nanoserve.commands.options import argument, option
from nanoserve.commands.printers import AnswerPrinter, MarkdownPrinter, PlainPrinter, visible
from nanoserve.commands.prompt import PROMPT, ChatPrompt, edit_text, history_path
from nanoserve.commands.terminal import StopOnInterrupt, is_terminal, read_stdin, remark, when_continued, without_echo
from nanoserve.commands.torchrun import on_all_machines
from nanoserve.commands.usage import envelope
from nanoserve.errors import NanoserveError, UsageError


class ChatOptions(ServerOptions, ServingOptions, SamplingOptions, panel="Chat", has_variables=True):
    """All options of the command."""

    message: str | None = argument(None, "Answer this and exit. What is piped in is added to it.")
    system: str | None = option(None, "System prompt, kept at the start of the context.", "-s", metavar="TEXT")
    json: bool = option(False, "One JSON object instead of text.")
    plain: bool = option(False, "Do not render markdown on a terminal.")
    hide_thinking: bool = option(False, "Do not show <think> blocks.")
    no_history: bool = option(False, "Keep no history of input lines.")


@on_all_machines
def run(options: ChatOptions) -> None:
    """The model runs in this process, or with --url behind any server that speaks OpenAI's API.

    [bold]Examples[/bold]

      nanoserve chat                                          the bundled model
      nanoserve chat --model ./Qwen3-0.6B --temperature 0.7   a model directory
      nanoserve chat "a story about a fox and a boat"         one answer
      cat notes.txt | nanoserve chat "Summarize:" --json      answer and timings
      nanoserve chat --url http://127.0.0.1:11434             ours, vLLM, ollama
    """
    settings = options.given()
    question = _question(options.message)
    if question is None and options.json:
        raise UsageError("--json answers one message: give it as an argument or on stdin")
    if options.system is not None:
        check_utf8(options.system, "the system prompt")
    with _opened(options, settings) as model:
        session = ChatSession(model, notify=say, system=options.system, settings=settings)
        if question is not None:
            return _answer_once(session, question, options)
        keep_history = not options.no_history
        return _Conversation(
            session, plain=options.plain, hide_thinking=options.hide_thinking, keep_history=keep_history
        ).run()


@contextmanager
def _opened(options: ChatOptions, settings: dict[str, Any]) -> Iterator[ChatModel]:
    """The model that answers: behind --url, or loaded here.

    A server is sent only two of the engine's options: the model, and the seed, which joins ``settings``.
    """
    if options.url is not None:
        client = options.client()
        if idle := options.without_effect_on_servers():
            say(f"with --url these have no effect: {', '.join(idle)}")
        if options.seed is not None:
            settings["seed"] = options.seed
        yield RemoteModel(client, options.model, say)
        return
    with options.open_llm() as llm:
        if llm.tokenizer.notice:
            say(llm.tokenizer.notice)
        yield LocalModel(llm, options.seed)


def _question(message: str | None) -> str | None:
    """What to answer, or None if there is a terminal to talk on.

    Raises:
        UsageError: if it is empty or not UTF-8.
    """
    if message is not None:
        check_utf8(message, "the message")
    piped = "" if sys.stdin is not None and sys.stdin.isatty() else read_stdin()
    if message is None and sys.stdin is not None and sys.stdin.isatty():
        return None
    question = "\n\n".join(part for part in (message, piped) if part and part.strip())
    if not question:
        raise UsageError("the message is empty")
    return question


def _answer_once(session: ChatSession, question: str, options: ChatOptions) -> None:
    if not options.json:
        printer = _printer(plain=options.plain, hide_thinking=options.hide_thinking)
        _show_answer(session, session.ask(question), printer, thinking=not options.hide_thinking)
        return
    for _ in session.ask(question):
        pass
    if (answer := session.last_answer) is not None:
        result = envelope(session.model.name, answer.text, answer.reasoning, answer.usage, answer.finish_reason)
        print(json.dumps(result, ensure_ascii=False))


class _Conversation:
    """The loop of an interactive chat: read, obey or answer, until the user leaves."""

    def __init__(self, session: ChatSession, *, plain: bool, hide_thinking: bool, keep_history: bool):
        self._session = session
        self._plain = plain
        self._commands = ChatCommands(session, edit=edit_text)
        self._commands.show_thinking = not hide_thinking
        self._prompt = ChatPrompt(history_path() if keep_history else None, self._commands.names)

    def run(self) -> None:
        remark(f"{self._session.model.name}. /help lists the commands, Ctrl-D leaves.")
        self._session.model.start_preparing()  # while the user reads and types
        leave = False
        while not leave:
            try:
                line = self._prompt.read()
            except KeyboardInterrupt:
                remark("(the line was cleared; Ctrl-D or /exit leaves)")
                continue
            except EOFError:
                return
            if line.startswith("/"):
                leave = self._obey(line)
            elif line.strip():
                self._answer(partial(self._session.ask, line.strip()))

    def _obey(self, line: str) -> bool:
        """Run a command; true if it says to leave."""
        outcome = self._commands.run(line)
        if outcome.text:
            remark(outcome.text)
        for turn in outcome.turns:  # as it stood on the terminal when it was new
            if turn.role == "user":
                remark(f"{PROMPT}{visible(turn.content)}")
            else:
                printer = _printer(plain=self._plain, hide_thinking=True)
                printer.answer(turn.content)
                printer.finish()
        if outcome.message is not None:
            self._answer(partial(self._session.ask, outcome.message))
        if outcome.regenerate:
            self._answer(self._session.regenerate)
        return outcome.leave

    def _answer(self, ask: Callable[[Steps], Iterator[Piece]]) -> None:
        """Show an answer; Ctrl-C ends it, and when it comes as the answer ends it ends nothing else."""
        thinking = self._commands.show_thinking
        printer = _printer(plain=self._plain, hide_thinking=not thinking)
        before = self._session.last_answer
        with StopOnInterrupt() as stop, without_echo(), when_continued(printer.lose_place):
            try:
                _show_answer(self._session, ask(stop.steps), printer, thinking=thinking)
            except NanoserveError as error:
                say(str(error))
                return
            answer = self._session.last_answer
            if answer is not None and answer is not before:
                remark(answer.usage.line(self._session.model.context, interrupted=answer.interrupted))


def _printer(*, plain: bool, hide_thinking: bool) -> AnswerPrinter:
    if plain or not is_terminal(sys.stdout):
        return PlainPrinter(sys.stdout, None if hide_thinking or not is_terminal(sys.stderr) else sys.stderr)
    return MarkdownPrinter(Console(file=sys.stdout))


def _show_answer(session: ChatSession, pieces: Iterator[Piece], printer: AnswerPrinter, *, thinking: bool) -> None:
    """Show an answer as it comes. A notice ends the text above it: the printer may not find its lines again."""

    def notify(notice: str) -> None:
        printer.finish()
        say(notice)

    session.notify = notify
    try:
        for piece in pieces:
            if not piece.thinking:
                printer.answer(piece.text)
            elif thinking:
                printer.thinking(piece.text)
    finally:
        printer.finish()
