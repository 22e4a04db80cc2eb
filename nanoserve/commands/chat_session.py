"""A conversation with a model, without any terminal: turns, settings, and dropping old turns from a
full context."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from nanoserve.commands.answers import ChatAnswer, ContextFull
from nanoserve.commands.conversations import Message, SavedTurns, new_log, read_lines
from nanoserve.commands.engine_options import sampling_params
from nanoserve.errors import NanoserveError, RuntimeFailure, UsageError, did_you_mean, shown
from nanoserve.request import SamplingParams
from nanoserve.text.answers.reader import Part, Piece
from nanoserve.utils.files import read_text, replace_file, unwritable_as_failure
from nanoserve.utils.sizes import format_size

if TYPE_CHECKING:
    from nanoserve.commands.answers import LocalModel
    from nanoserve.commands.remote_model import RemoteModel
    from nanoserve.text.answers.forms import AnswerParser

# the oldest turns make room until a quarter of the context is left for the answer
_ANSWER_SHARE = 4
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
# by /set
CHANGEABLE = ("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "stop", *_PENALTIES)

_MOST_FILE_BYTES = 16 << 20
"""Largest file of a message; no context holds a larger one."""

Steps = Callable[[Iterator[ChatAnswer]], Iterator[ChatAnswer]]


class Draft(NamedTuple):
    """Text that may still change, of the reasoning and of the answer. It takes the place of the
    last draft, and the next piece takes its own."""

    thinking: str
    answer: str


@dataclass(slots=True)
class ChatSession:
    """Turns and settings; whatever the model needs the caller's thread for is done while an answer
    is iterated."""

    model: "LocalModel | RemoteModel"
    # called with one line when something happens that the user should know
    notify: Callable[[str], None]
    system: str | None = None  # the system prompt, always kept
    # changes of the model's defaults, by /set and flags
    settings: dict[str, Any] = field(default_factory=dict)
    # user and assistant in alternation, a user's first
    turns: list[Message] = field(default_factory=list)
    # texts of files that go with the next message
    files: dict[Path, str] = field(default_factory=dict)
    last_answer: ChatAnswer | None = None  # also when it was interrupted
    answers: int = 0
    logs: Path | None = None  # the directory of conversations; None logs nothing
    _log: Path | None = field(default=None, init=False)  # the file of this conversation
    _dropped: int = field(default=0, init=False)  # turns that the log has before ours

    def send(self, text: str, steps: Steps = iter) -> Iterator[Piece | Draft]:
        """Ask with the text and the files that were added; they stay if there is no answer."""
        before = self.answers
        yield from self.ask("\n\n".join([text, *self.files.values()]), steps)
        if self.answers > before:
            self.files.clear()

    def ask(self, question: str, steps: Steps = iter) -> Iterator[Piece | Draft]:
        """Send a message and yield the answer; history changes when the answer has ended.

        ``steps`` goes through the model's steps and may end early: what there is of the answer is
        kept then. So it is if the model fails in the midst, with NanoserveError; without any answer
        the history is as before.
        """
        message = Message("user", question)
        self._make_room(message)
        while True:
            try:
                yield from self._answer(message, steps)
                return
            except ContextFull:  # of a server that does not count for us
                if not self.turns:
                    raise
                self._drop(2)
                self.notify("the server's context is full: the oldest turn was dropped")

    def _answer(self, message: Message, steps: Steps) -> Iterator[Piece | Draft]:
        conversation = self._for_model(self.turns + [message])
        parsed = _ParsedAnswer(self.model.answer_parser(conversation))
        last = failure = None
        try:
            with closing(self.model.stream(conversation, self.settings)) as stream:
                for piece in steps(stream):
                    if piece.draft:
                        yield parsed.draft(piece)
                        continue
                    last = piece
                    yield from parsed.push(piece)
        except NanoserveError as error:
            if last is None or not parsed.texts["answer"]:
                raise
            failure = error
        yield from parsed.end()
        if last is not None:
            answer, thinking = parsed.texts["answer"], parsed.texts["thinking"]
            last = self.last_answer = replace(last, text=answer, reasoning=thinking)
        self._conclude(message, last)
        if failure is not None:
            raise failure

    def regenerate(self, steps: Steps = iter) -> Iterator[Piece | Draft]:
        """Ask for the last answer again; the old one stays if there is no new one. Raises
        UsageError without one."""
        old = self.turns[-2:]
        question = self.undo()
        count = self.answers
        try:
            yield from self.ask(question, steps)
        finally:
            if self.answers == count:
                self.turns += old
                self._record(len(old))

    def undo(self) -> str:
        """Take back the last question and its answer; returns the question. Raises UsageError if
        there is none."""
        if not self.turns:
            raise UsageError("there is no answer yet")
        question, _answer = self.turns[-2:]
        self.turns = self.turns[:-2]
        self._record(0)
        return question.content

    def reset(self) -> None:
        self.turns, self.files, self.last_answer, self._log = [], {}, None, None

    def add_file(self, path: Path) -> int | None:
        """Have a text file go with the next message. Returns its number of tokens; None where
        nobody can tell. Raises UsageError, and adds nothing, for other files and for one that
        cannot fit into the context."""
        with suppress(OSError):  # the reading below says what is wrong
            if path.stat().st_size > _MOST_FILE_BYTES:
                most = format_size(_MOST_FILE_BYTES)
                raise UsageError(f"{path} is larger than {most}, for which no context has room")
        text = f"{path.name}:\n\n{read_text(path, UsageError)}"
        files = self.files | {path: text}
        try:
            tokens = self.model.count_text(text)
        except UsageError as error:  # far too long: it is not counted to its end
            raise UsageError(f"{path} cannot fit: {error}") from None
        context = self.model.context
        together = Message("user", "\n\n".join(files.values()))
        length = self.model.count_tokens(self._for_model([together]))
        if context is not None and length is not None and length >= context:
            raise UsageError(
                f"{path} cannot fit: the message would have {length:,} tokens, the context holds "
                f"{context:,}"
            )
        self.files = files
        return tokens

    def change(self, name: str, value: object) -> None:
        """Change one setting; None puts the default back. Raises UsageError for a wrong name or
        value."""
        if name not in CHANGEABLE:
            guess = did_you_mean(name, CHANGEABLE)
            raise UsageError(
                f"unknown setting {shown(name)}{guess}; there are {', '.join(CHANGEABLE)}"
            )
        settings = self.settings | {name: value}
        if value is None:
            del settings[name]
        self.sampling_params(settings)
        self.settings = settings

    def sampling_params(self, settings: dict[str, Any] | None = None) -> SamplingParams:
        """The model's defaults, or neutral ones, with settings over them, by default this
        session's, checked."""
        if settings is None:
            settings = self.settings
        return sampling_params(self.model.defaults or SamplingParams(), settings)

    def messages(self, turns: Sequence[Message] | None = None) -> list[Message]:
        """The system prompt and the turns, by default all of this conversation."""
        messages = list[Message]()
        if self.system:
            messages.append(Message("system", self.system))
        messages += self.turns if turns is None else turns
        return messages

    def save(self, path: Path) -> None:
        """Write messages and settings as JSON: the whole file or, with RuntimeFailure, nothing."""
        with unwritable_as_failure(path):
            # A new file would take the place of a device or pipe, which others use, and of a link.
            if path.exists() and not path.is_file():
                raise RuntimeFailure(f"cannot write {path}: it is no regular file")
            target = path.resolve()
        replace_file(target, self._line(0, 0).decode(), mode=0o600)

    def _line(self, first: int, position: int) -> bytes:
        """A line of a saved conversation, with the turns from ``first`` on."""
        return (
            msgspec.json.encode(
                SavedTurns(self.turns[first:], position, self.system, self.settings)
            )
            + b"\n"
        )

    def _record(self, new: int) -> None:
        """Log the newest turns; a new file begins with all. Turns that were taken back are
        overwritten on reading."""
        if self.logs is None or (new == 0 and self._log is None):
            return
        first = len(self.turns) - new
        try:
            if self._log is None:
                self._log, self._dropped, first = new_log(self.logs), 0, 0
            with self._log.open("ab") as file:
                file.write(self._line(first, self._dropped + first))
        except OSError as error:
            self.notify(
                f"the conversation is not logged: cannot write to {self.logs}: {error.strerror}"
            )
            self.logs = None

    def load(self, path: Path) -> None:
        """Take over a saved conversation and its settings. Raises UsageError, and stays as it was,
        for other files."""
        lines = read_lines(path)
        turns: list[Message] = []
        for line in lines:
            turns[line.position :] = line.messages
        settings = lines[-1].settings
        unknown = set(settings) - set(CHANGEABLE)
        if unknown:
            raise UsageError(f"{path} has unknown settings: {', '.join(sorted(unknown))}")
        SamplingParams.from_mapping(settings)
        if [turn.role for turn in turns] != ["user", "assistant"] * (len(turns) // 2):
            raise UsageError(
                f"{path} is not a saved chat: user and assistant must take turns, the user first"
            )
        self.reset()
        self.system, self.turns, self.settings = lines[-1].system, turns, settings

    def context_used(self) -> int | None:
        """Tokens of the conversation so far, as the model would see it; None where nobody can
        tell."""
        messages = self._for_model(self.turns)
        if not messages:
            return 0
        return self.model.count_tokens(messages, add_generation_prompt=False)

    def _for_model(self, turns: list[Message]) -> list[dict[str, str]]:
        return [
            {"role": message.role, "content": message.content} for message in self.messages(turns)
        ]

    def _make_room(self, message: Message) -> None:
        """Drop the oldest pairs of turns until question and answer fit; raise UsageError if none is
        left to drop."""
        context, length = (
            self.model.context,
            self.model.count_tokens(self._for_model(self.turns + [message])),
        )
        if context is None or length is None:
            return
        room = min(context // _ANSWER_SHARE, self.sampling_params().max_tokens or context)
        dropped = 0
        while length > context - room and 2 * dropped < len(self.turns):
            dropped += 1
            kept = self.turns[2 * dropped :] + [message]
            length = self.model.count_tokens(self._for_model(kept)) or 0
        if length >= context:
            raise UsageError(
                f"the message makes {length} tokens, the context holds {context}: shorten it"
            )
        if dropped:
            self._drop(2 * dropped)
            what = "turn was" if dropped == 1 else f"{dropped} turns were"
            self.notify(f"the context of {context} tokens is full: the oldest {what} dropped")

    def _drop(self, turns: int) -> None:
        """Forget the oldest turns, which stay in the log."""
        del self.turns[:turns]
        self._dropped += turns

    def _conclude(self, message: Message, answer: ChatAnswer | None) -> None:
        if answer is None or not answer.text:  # some templates refuse an answer without text
            self.notify(f"{_why_without_text(answer)}; the message was taken back")
            return
        self.turns += [
            message,
            Message("assistant", answer.text, interrupted=answer.finish_reason is None),
        ]
        self._record(2)
        self.answers += 1
        total, context = answer.usage.total_tokens, self.model.context
        if (
            answer.finish_reason == "length"
            and total is not None
            and context is not None
            and total >= context
        ):
            self.notify("the answer was cut where the context ends")


def _why_without_text(answer: ChatAnswer | None) -> str:
    if answer is None or answer.finish_reason is None:
        return "stopped before the answer began"
    if answer.finish_reason == "length" and answer.reasoning:
        return "the answer was cut off while the model reasoned"
    return "the answer has no text"


class _ParsedAnswer:
    """The pieces of an answer, and all of their text so far."""

    def __init__(self, parser: "AnswerParser") -> None:
        self._parser = parser
        self._read, self._marks = list[str](), list[tuple[int, int]]()
        self._length = 0  # characters of the texts that were read
        self.texts: dict[Part, str] = {"answer": "", "thinking": ""}

    def push(self, answer: ChatAnswer) -> Iterator[Piece]:
        self._marks += self._placed(answer)
        self._read.append(answer.text)
        self._length += len(answer.text)
        if answer.reasoning:
            yield from self._collected([("thinking", answer.reasoning)])
        yield from self._collected(self._parser.push(answer.text, answer.marks))

    def end(self) -> Iterator[Piece]:
        yield from self._collected(self._parser.push("", ended=True))

    def draft(self, draft: ChatAnswer) -> Draft:
        """Return what a draft would add to the text so far if the answer ended with it. A parser of
        its own reads all of it."""
        whole = "".join([*self._read, draft.text])
        marks = self._marks + self._placed(draft)
        texts: dict[Part, str] = {"answer": "", "thinking": ""}
        for part, text in self._parser.anew().push(whole, marks, ended=True):
            texts[part] += text
        return Draft(
            texts["thinking"][len(self.texts["thinking"]) :],
            texts["answer"][len(self.texts["answer"]) :],
        )

    def _placed(self, answer: ChatAnswer) -> list[tuple[int, int]]:
        """Return the marker tokens of the next text, with their places in the whole."""
        return [(self._length + place, token) for place, token in answer.marks]

    def _collected(self, pieces: list[Piece]) -> list[Piece]:
        for part, text in pieces:
            self.texts[part] += text
        return pieces
