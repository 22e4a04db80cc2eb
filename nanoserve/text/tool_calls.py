"""Tool calls in the text of an answer, told apart while the text arrives.

A family of models writes its calls in a form of its own, which its chat template spells. In most forms a call is a JSON
object with a name and arguments, and a marker stands before it. The arguments are passed on piece by piece, just as the
model writes them.
"""

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from nanoserve.errors import UsageError
from nanoserve.text.reasoning import length_of_partial_tag


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a family of models writes a tool call."""

    marker: str = ""
    """Stands before a call, or before several."""
    end: str = ""
    """Stands after a call."""
    key: str = "arguments"
    """The field of the arguments."""
    bare: bool = False
    """An answer may begin with a call, without a marker."""
    name_in_line: bool = False
    """The name has a line of its own, and the arguments are the only JSON."""
    opening: str = ""
    """The beginning of an answer that has to be a call; the call's JSON object follows."""


_HERMES = CallForm("<tool_call>", end="</tool_call>", opening="<tool_call>\n")
_LLAMA = CallForm("<|python_tag|>", key="parameters", bare=True)
_MISTRAL = CallForm("[TOOL_CALLS]", opening="[TOOL_CALLS] [")
_GLM = CallForm(bare=True, name_in_line=True)
_FORMS: tuple[tuple[str, CallForm | None], ...] = (
    *(("<arg_key>", None), ("<function=", None), ("[ARGS]", None)),  # GLM-4.5, Qwen3-Coder, Mistral since 2025
    ("<tool_call>", _HERMES),
    ("[TOOL_CALLS]", _MISTRAL),
    *(("<|python_tag|>", _LLAMA), ('"parameters": ', _LLAMA)),
    ("<|observation|>", _GLM),
)
"""What a chat template spells, and the form that it shows; None for forms that are not read. The first one counts."""

_NAME_FIRST = re.compile(r'\{\s*"name"\s*:\s*"([\w-]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_NAME_IN_LINE = re.compile(r"([\w-]+)[ \t]*\n\s*(?=\{)")


def call_form(template: str) -> CallForm:
    """The form of tool calls that a chat template shows. Raises UsageError if it has none, or one that is not read."""
    sign, form = next(((sign, form) for sign, form in _FORMS if sign in template), ("", None))
    if "tools" not in template or not sign:
        raise UsageError(
            "the model's chat template takes no tools: leave tools out, or serve a model that was taught to"
        )
    if form is None:
        raise UsageError(
            f"the model writes tool calls with {sign}, a form that nanoserve does not read: leave tools out"
        )
    return form


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of a tool call. The first piece of a call has its name."""

    index: int
    name: str | None = None
    arguments: str = ""


Pieces = list[str | CallPiece]


class _Braces:
    """How many JSON objects are open, in text that arrives in pieces."""

    def __init__(self) -> None:
        self._open = 0
        self._in_string = False
        self._escaped = False

    def end(self, text: str, left: int = 0) -> int | None:
        """The number of characters of this piece until only `left` objects are open, or None if more stay open."""
        for position, character in enumerate(text, 1):
            if self._in_string:
                self._in_string = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character == '"':
                self._in_string = True
            elif character in "{}":
                self._open += 1 if character == "{" else -1
                if self._open == left and character == "}":
                    return position
        return None


class ToolCallParser:
    """Splits the text of an answer into ordinary text and pieces of tool calls.

    Only a call of a known tool counts; anything else is text. Blanks around calls are dropped.
    """

    def __init__(self, form: CallForm, names: Collection[str], *, only: bool = False, parallel: bool = True) -> None:
        """`only`: the answer is the JSON object of a call. Without `parallel`, what follows the first call is lost."""
        self._form = CallForm() if only else form
        self._names = names
        self._after_call = self._between if parallel else self._drop
        self._step = self._head if only or form.bare else self._text
        self._held = ""
        self._ended = False
        self._braces, self._scanned = _Braces(), 0  # of what is held, up to this character
        self.calls = 0

    def push(self, text: str, *, ended: bool = False) -> Pieces:
        """What is certain now, in order; with `ended` the rest too."""
        self._held += text
        self._ended = ended
        pieces: Pieces = []
        before = None
        while self._held and before != (self._step, self._held):
            before = (self._step, self._held)
            pieces += self._step()
        return [piece for piece in pieces if piece]

    def _text(self) -> Pieces:
        """Ordinary text up to a marker. What may become a marker is held back, with the blanks before it."""
        marker = self._form.marker
        if marker and marker in self._held:
            text, marker, rest = self._held.partition(marker)
            self._held, self._step = marker + rest, self._head
            return [text.rstrip()]
        text = self._held
        if not self._ended:
            text = text[: len(text) - length_of_partial_tag(text, marker)].rstrip()
        self._held = self._held[len(text) :]
        return [text]

    def _head(self) -> Pieces:
        """The name of a call, as soon as it is certain that this is one."""
        marker, held = self._form.marker, self._held.lstrip()
        body = held.removeprefix(marker).lstrip(" \t\r\n[")
        match = (_NAME_IN_LINE if self._form.name_in_line else _NAME_FIRST).match(body)
        if match and match[1] in self._names:
            self._braces.end(match[0][self._scanned :])
            return self._call(CallPiece(self.calls, match[1]), body[match.end() :], self._arguments)
        undecided = not body or marker.startswith(held)
        if self._form.name_in_line:
            undecided = not match and any(name.startswith(body.rstrip()) for name in self._names)
        elif body.startswith("{") and not match:  # the name may come later in the object
            end = self._braces.end(body[self._scanned :])
            undecided, end, self._scanned = end is None, self._scanned + (end or 0), len(body)
            name, arguments = ("", "") if undecided else _read_call(body[:end])
            if name in self._names:
                return self._call(CallPiece(self.calls, name, arguments), body[end:], self._after_call)
        if undecided and not self._ended:
            return []
        text = marker if marker and held.startswith(marker) else self._held[:1]
        self._held, self._step = self._held.partition(text)[2], self._text
        self._braces, self._scanned = _Braces(), 0
        return [text]

    def _call(self, piece: CallPiece, held: str, step: Callable[[], Pieces]) -> Pieces:
        self._held, self._step, self._scanned = held, step, 0
        self.calls += 1
        return [piece]

    def _arguments(self) -> Pieces:
        end = self._braces.end(self._held, left=0 if self._form.name_in_line else 1)
        piece = self._held[:end]
        self._held = self._held[len(piece) :]
        if end is not None:
            self._step = self._after_call if self._form.name_in_line else self._rest
        return [CallPiece(self.calls - 1, None, piece)]

    def _rest(self) -> Pieces:
        """What follows the arguments in the call's object, such as Mistral's id, is dropped."""
        end = self._braces.end(self._held)
        self._held = "" if end is None else self._held[end:]
        if end is not None:
            self._step = self._after_call
        return []

    def _between(self) -> Pieces:
        """After a call, another may follow, or text."""
        held = self._held = self._held.lstrip(" \t\r\n,;]")
        if self._form.end and held.startswith(self._form.end):
            self._held = held.removeprefix(self._form.end)
        elif held and not self._form.end.startswith(held):
            self._step = self._head if held.startswith("{") or self._form.name_in_line else self._text
        return []

    def _drop(self) -> Pieces:
        self._held = ""
        return []


def _read_call(text: str) -> tuple[str, str]:
    """The name and the arguments of a whole call; empty if it is none."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return "", ""
    name, arguments = call.get("name"), call.get("arguments", call.get("parameters"))
    is_call = isinstance(name, str) and isinstance(arguments, dict)
    return (name, json.dumps(arguments, ensure_ascii=False)) if is_call else ("", "")
