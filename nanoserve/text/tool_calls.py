"""Tool calls in the text of an answer, told apart while the text arrives.

A family of models writes its calls in a form of its own, which its chat template spells. In most forms a call is a JSON
object with a name and arguments, and a marker stands before it. The arguments are passed on as the model writes them.
"""

import json
import re
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from nanoserve.errors import UsageError
from nanoserve.text.reasoning import length_of_partial_tag


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """How a family of models writes a tool call: by default as a JSON object at the beginning of the answer."""

    marker: str = ""  # stands before a call, or before several
    bare: bool = True  # whether an answer may begin with a call that has no marker
    opening: str = ""  # the beginning of an answer that has to be a call; the JSON object follows
    key: str = "arguments"
    name_in_line: bool = False  # the name has a line of its own, and the arguments are the only JSON


_FORMS = {
    **dict.fromkeys(("<arg_key>", "<function=", "[ARGS]")),  # of GLM-4.5, Qwen3-Coder, Mistral since 2025: not read
    "<tool_call>": CallForm(marker="<tool_call>", bare=False, opening="<tool_call>\n"),
    "[TOOL_CALLS]": CallForm(marker="[TOOL_CALLS]", bare=False, opening="[TOOL_CALLS] ["),
    **dict.fromkeys(("<|python_tag|>", '"parameters": '), CallForm(marker="<|python_tag|>", key="parameters")),
    "<|observation|>": CallForm(name_in_line=True),
}
"""The forms by what a chat template spells: of Hermes and Qwen, Mistral, Llama 3, and GLM-4. The first one counts."""
_END = "</tool_call>"
_BETWEEN = " \t\r\n,;]"
_NAME_FIRST = re.compile(r'\{\s*"name"\s*:\s*"([\w-]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_NAME_IN_LINE = re.compile(r"([\w-]+)[ \t]*\n\s*(?=\{)")


def call_form(template: str) -> CallForm:
    """The form of tool calls that a chat template shows. Raises UsageError if it has none, or one that is not read."""
    sign = next((sign for sign in _FORMS if sign in template), "")
    if "tools" not in template or not sign:
        raise UsageError(
            "the model's chat template takes no tools: leave tools out, or serve a model that was taught to"
        )
    if (form := _FORMS[sign]) is None:
        raise UsageError(
            f"the model writes tool calls with {sign}, a form that nanoserve does not read: leave tools out"
        )
    return form


class _Braces:
    """Counts the JSON objects that are open, in text that arrives in pieces."""

    def __init__(self, text: str = "") -> None:
        self._open = 0
        self._in_string = self._escaped = False
        self.end(text, -1)

    def end(self, text: str, left: int) -> int | None:
        """The number of characters of this piece until only `left` objects are open, or None if more stay open."""
        for position, character in enumerate(text, 1):
            if self._in_string:
                self._in_string = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character == '"':
                self._in_string = True
            elif character in "{}":
                self._open += 1 if character == "{" else -1
                if character == "}" and self._open == left:
                    return position
        return None


class ToolCallParser:
    """Splits the text of an answer into ordinary text and tool calls.

    Only a call of a known tool counts; anything else is text. Blanks around calls are dropped, and without `parallel`
    the calls after the first.
    """

    def __init__(self, form: CallForm, names: Sequence[str], *, parallel: bool = True) -> None:
        self._form = form
        self._names = names
        self._parallel = parallel
        self._step: Callable[[], None] = self._head if form.bare else self._text
        self._held, self._braces = "", _Braces()
        self.calls = 0

    def push(self, text: str, *, ended: bool = False) -> tuple[str, list[dict[str, Any]]]:
        """The text and the parts of calls, in OpenAI's form, that are certain now; with `ended` the rest too."""
        self._held += text
        self._ended = ended
        self._shown, self._parts, before = "", dict[int, dict[str, Any]](), None
        while self._held and before != (self._step, self._held):
            before = (self._step, self._held)
            self._step()
        return self._shown, [part for index, part in self._parts.items() if self._parallel or index == 0]

    def _show(self, length: int, then: Callable[[], None]) -> None:
        self._shown += self._held[:length]
        self._held, self._step = self._held[length:], then

    def _text(self) -> None:
        """Ordinary text up to a marker. What may become a marker is held back, with the blanks before it."""
        marker, held = self._form.marker, self._held
        if marker and marker in held:
            self._show(len(held[: held.index(marker)].rstrip()), self._head)
        else:
            known = held[: len(held) - length_of_partial_tag(held, marker)].rstrip()
            self._show(len(held if self._ended else known), self._text)

    def _head(self) -> None:
        """The name of a call, as soon as it is certain that this is one."""
        marker, held = self._form.marker, self._held.lstrip()
        body = held.removeprefix(marker).lstrip(" \t\r\n[")
        undecided = not body or marker.startswith(held) or body.startswith("{")
        name, arguments, end = "", "", 0
        if self._form.name_in_line:
            undecided = any(one.startswith(body.rstrip()) for one in self._names)
        if match := (_NAME_IN_LINE if self._form.name_in_line else _NAME_FIRST).match(body):
            name, end, undecided = match[1], match.end(), False
        elif undecided and "}" in body:  # the name may come later in the object
            with suppress(ValueError, RecursionError):
                call, end = json.JSONDecoder().raw_decode(body)
                name, undecided = call.get("name"), False
                arguments = json.dumps(call.get("arguments", call.get("parameters")), ensure_ascii=False)
        if name in self._names and arguments[:1] in ("", "{"):
            function = {"name": name, "arguments": arguments}
            call = {"index": self.calls, "id": secrets.token_hex(5)[:9], "type": "function", "function": function}
            self._parts[self.calls] = call  # the id has nine characters because Mistral's templates insist on it
            self._held, self._braces = body[end:], _Braces(body[:end])
            self._step = self._between if arguments else self._arguments
            self.calls += 1
        elif not undecided or self._ended:
            known = marker if marker and held.startswith(marker) else held[:1]
            self._show(self._held.index(known) + len(known), self._text)

    def _arguments(self) -> None:
        end = self._braces.end(self._held, left=0 if self._form.name_in_line else 1)
        index = self.calls - 1
        part = self._parts.setdefault(index, {"index": index, "function": {"arguments": ""}})
        part["function"]["arguments"] += self._held[:end]
        self._skip(end, self._between if self._form.name_in_line else self._rest)

    def _rest(self) -> None:
        """What follows the arguments in the call's object, such as Mistral's id, is dropped."""
        self._skip(self._braces.end(self._held, left=0), self._between)

    def _skip(self, end: int | None, then: Callable[[], None]) -> None:
        self._held, self._step = ("", self._step) if end is None else (self._held[end:], then)

    def _between(self) -> None:
        """After a call, another may follow, or text."""
        self._held = self._held.lstrip(_BETWEEN).removeprefix(_END).lstrip(_BETWEEN)
        if not _END.startswith(self._held):
            self._step = self._head if self._held.startswith("{") or self._form.name_in_line else self._text
