"""Tool calls whose arguments are written as JSON: of Hermes and Qwen, Llama 3, Mistral, Granite,
Cohere and GLM-4.

The arguments are passed on as the model writes them.
"""

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from nanoserve.text.answers.reader import AnswerReader, Steps, Tools, ignore

_BETWEEN = " \t\r\n,;]"
_NAME_FIRST = re.compile(
    r'\{\s*"name"\s*:\s*"([\w-]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_NAME_IN_LINE = re.compile(r"([\w-]+)[ \t]*\n\s*(?=\{)")


class Braces:
    """Counts the JSON objects that are open, in text that arrives in pieces."""

    def __init__(self, text: str = "") -> None:
        self._open = 0
        self._in_string = False
        self._escaped = False
        self.end(text, -1)

    def end(self, text: str, left: int) -> int | None:
        """Count the characters of this piece up to the brace that leaves only `left` objects open.
        None if more objects stay open."""
        for position, character in enumerate(text, 1):
            if self._in_string:
                self._in_string = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character == '"':
                self._in_string = True
            elif character == "{":
                self._open += 1
            elif character == "}":
                self._open -= 1
                if self._open == left:
                    return position
        return None

    def copy(self, answer: AnswerReader, *, left: int, shown: bool = True) -> Steps[None]:
        """Read until only `left` objects are open, or the answer ends. If `shown`, pass the text on
        as arguments."""
        while True:
            end = self.end(answer.held, left)
            if end is None:
                text = answer.take(len(answer.held))
            else:
                text = answer.take(end)
            if shown:
                answer.write("arguments", text)
            if end is not None or answer.ended:
                return
            yield


class _Head(NamedTuple):
    """The beginning of a call, which tells for certain that it is a call."""

    name: str
    text: str  # of the call's object, up to the arguments
    arguments: str = ""  # complete arguments, if the name came after them


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectCalls:
    """A call is a JSON object with a name and arguments; a tag stands before it, or before several
    in a list."""

    starts: tuple[str, ...] = ()
    end: str = "</tool_call>"
    opening: str = ""
    """The beginning of an answer that has to be a call; the JSON object follows."""
    key: str = "arguments"
    bare: bool = False
    """Whether an answer may begin with a call that has no tag."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The spellings that may be marker tokens."""
        return self.starts + (self.end,)

    def read(self, answer: AnswerReader, tag: str, tools: Tools) -> Steps[bool]:
        """Read the calls after a tag. Returns False, and reads nothing, if no call of a known tool
        follows."""
        head = yield from self._head(answer, tag, tools)
        if head is None:
            return False
        while head is not None:
            answer.write("call", head.name)
            answer.write("arguments", head.arguments)
            braces = Braces(head.text)
            if not head.arguments:
                yield from braces.copy(answer, left=1)
                yield from braces.copy(answer, left=0, shown=False)  # such as Mistral's id
            yield from self._between(answer)
            if not answer.held.startswith("{"):
                return True
            head = yield from self._head(answer, "", tools)
        return True

    def _head(self, answer: AnswerReader, tag: str, tools: Tools) -> Steps[_Head | None]:
        """Read the beginning of a call. Returns None, and reads nothing, as soon as other text is
        certain."""
        while True:
            body = answer.after(tag).lstrip(" \t\r\n[")
            undecided = not body or body.startswith("{")
            head = None
            end = 0
            match = _NAME_FIRST.match(body)
            if match:
                head = _Head(match[1], match[0])
                end = match.end()
                undecided = False
            elif undecided and "}" in body:  # the name may come later in the object
                with suppress(ValueError, RecursionError):
                    call, end = json.JSONDecoder().raw_decode(body)
                    arguments = json.dumps(
                        call.get("arguments", call.get("parameters")), ensure_ascii=False
                    )
                    name = call.get("name", call.get("tool_name"))
                    head = _Head(str(name), body[:end], arguments)
                    undecided = False
            if head is not None and head.name in tools and head.arguments[:1] in ("", "{"):
                answer.held = body[end:]
                return head
            if not undecided or answer.ended:
                return None
            yield

    def _between(self, answer: AnswerReader) -> Steps[None]:
        """Drop closing tags and separators after a call. A model may close a call twice."""
        end = answer.tag(self.end)
        while True:
            answer.held = answer.held.lstrip(_BETWEEN)
            while answer.held.startswith(end):
                answer.held = answer.held.removeprefix(end).lstrip(_BETWEEN)
            if answer.ended or not end.startswith(answer.held):
                return
            yield


@dataclass(frozen=True, slots=True)
class LineCalls:
    """A call is the tool's name in a line of its own, then a JSON object; the answer begins with
    it."""

    starts: ClassVar[tuple[str, ...]] = ()
    markers: ClassVar[tuple[str, ...]] = ()
    opening: ClassVar[str] = ""
    key: ClassVar[str] = "arguments"
    bare: ClassVar[bool] = True

    def read(self, answer: AnswerReader, tag: str, tools: Tools) -> Steps[bool]:
        """Read calls as `ObjectCalls` does."""
        called = False
        while (name := (yield from self._name(answer, tools))) is not None:
            called = True
            answer.write("call", name)
            yield from Braces().copy(answer, left=0)
            yield from answer.skip_blanks()
        return called

    def _name(self, answer: AnswerReader, tools: Tools) -> Steps[str | None]:
        while True:
            body = answer.held.lstrip()
            match = _NAME_IN_LINE.match(body)
            if match and match[1] in tools:
                answer.held = body[match.end() :]
                return match[1]
            if answer.ended or match or not any(name.startswith(body.rstrip()) for name in tools):
                return None
            yield


@dataclass(frozen=True, slots=True)
class NamedCalls:
    """A call is a tag, the tool's name, perhaps an id, a second tag, and a JSON object."""

    starts: ClassVar[tuple[str, ...]] = ("[TOOL_CALLS]",)
    markers: ClassVar[tuple[str, ...]] = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
    opening: ClassVar[str] = ""
    key: ClassVar[str] = "arguments"
    bare: ClassVar[bool] = False

    def read(self, answer: AnswerReader, tag: str, tools: Tools) -> Steps[bool]:
        """Read a call as `ObjectCalls` does; the model's own id is dropped."""
        before_id = answer.tag("[CALL_ID]")
        arguments = answer.tag("[ARGS]")
        name, end = yield from answer.name_after(tag, tools, ends=(before_id, arguments))
        if not name:
            return False
        answer.write("call", name)
        if end == before_id and (yield from answer.copy_until(ignore, arguments)):
            answer.drop(arguments)
        if (yield from answer.peek()) == "{":
            yield from Braces().copy(answer, left=0)
            yield from answer.skip_blanks()
        return True
