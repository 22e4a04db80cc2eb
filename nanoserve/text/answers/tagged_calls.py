"""Tool calls that are written between tags, argument by argument: of Qwen3-Coder and GLM-4.5.

Their values have no quotes, so the schema of the tool says what they are. They are passed on as
JSON.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from nanoserve.text.answers.json_calls import Braces
from nanoserve.text.answers.reader import AnswerReader, Steps, Tools, ignore, untouched
from nanoserve.text.answers.values import escaped, types_of, value_as_json


class _Arguments:
    """Writes the arguments of one call as a JSON object, piece by piece."""

    def __init__(self, answer: AnswerReader, schema: object) -> None:
        self._answer = answer
        self._schema = schema
        self._next = "{"

    def value(self, key: str, closing: str, trim: Callable[[str], str]) -> Steps[bool]:
        """Read an argument's value and its closing tag. Returns False if the answer ends before the
        tag."""
        answer = self._answer
        answer.write("arguments", f'{self._next}"{escaped(key)}": ')
        self._next = ", "
        types = types_of(self._schema, key)
        if types == {"string"}:
            answer.write("arguments", '"')
            found = yield from answer.copy_until(
                self._write_string, closing, trim=trim, keep_partial_tag=False
            )
            rest = '"'
        else:
            texts: list[str] = []
            found = yield from answer.copy_until(texts.append, closing, trim=trim)
            rest = value_as_json("".join(texts), types)
        if not found:
            return False
        answer.write("arguments", rest)
        answer.drop(closing)
        return True

    def _write_string(self, text: str) -> None:
        self._answer.write("arguments", escaped(text))

    def end(self) -> None:
        """Close the object."""
        if self._next == "{":  # no argument has opened it
            self._answer.write("arguments", "{")
        self._answer.write("arguments", "}")


@dataclass(frozen=True, slots=True)
class ParameterCalls:
    """``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``; a line
    break belongs to each tag. Some models leave the outer tag out, and some write all arguments as
    one JSON object."""

    starts: ClassVar[tuple[str, ...]] = ("<tool_call>", "<function=")
    markers: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")
    opening: ClassVar[str] = ""
    key: ClassVar[str] = "arguments"
    bare: ClassVar[bool] = False

    def read(self, answer: AnswerReader, tag: str, tools: Tools) -> Steps[bool]:
        """Read a call as `ObjectCalls` does."""
        before = "<function="
        if tag == before:  # the model has left the outer tag out
            before = ""
        name, _ = yield from answer.name_after(tag, tools, ends=(">",), before=before)
        if not name:
            return False
        answer.write("call", name)
        closing = answer.tag("</tool_call>")
        if (yield from answer.peek()) == "{":
            yield from Braces().copy(answer, left=0)
            yield from answer.comes_next("</function>")
        else:
            yield from self._parameters(answer, tools[name], closing)
        yield from answer.comes_next(closing)
        yield from answer.skip_blanks()
        return True

    def _parameters(self, answer: AnswerReader, schema: object, closing: str) -> Steps[None]:
        """Read all parameters and the end of the function, or up to the end of the answer."""
        arguments = _Arguments(answer, schema)
        while found := (
            yield from answer.copy_until(ignore, "<parameter=", "</function>", closing)
        ):
            answer.drop(found)
            if found != "<parameter=":
                arguments.end()
                return
            keys: list[str] = []
            if not (yield from answer.copy_until(keys.append, ">")):
                return
            answer.drop(">")
            yield from self._skip_line_break(answer)
            if not (yield from arguments.value("".join(keys), "</parameter>", _without_line_break)):
                return

    def _skip_line_break(self, answer: AnswerReader) -> Steps[None]:
        while not answer.held and not answer.ended:
            yield
        answer.held = answer.held.removeprefix("\n")


def _without_line_break(text: str) -> str:
    return text.removesuffix("\n")


@dataclass(frozen=True, slots=True)
class KeyValueCalls:
    """``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>``, in lines
    or in one."""

    starts: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    markers: ClassVar[tuple[str, ...]] = (
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    )
    opening: ClassVar[str] = ""
    key: ClassVar[str] = "arguments"
    bare: ClassVar[bool] = False

    def read(self, answer: AnswerReader, tag: str, tools: Tools) -> Steps[bool]:
        """Read a call as `ObjectCalls` does."""
        key_opening = answer.tag("<arg_key>")
        key_closing = answer.tag("</arg_key>")
        value_opening = answer.tag("<arg_value>")
        value_closing = answer.tag("</arg_value>")
        closing = answer.tag("</tool_call>")
        name, found = yield from answer.name_after(tag, tools, ends=(key_opening, closing))
        if not name:
            return False
        answer.write("call", name)
        arguments = _Arguments(answer, tools[name])
        while found == key_opening:
            keys: list[str] = []
            if not (yield from answer.copy_until(keys.append, key_closing)):
                return True
            answer.drop(key_closing)
            if not (yield from answer.copy_until(ignore, value_opening)):
                return True
            answer.drop(value_opening)
            if not (yield from arguments.value("".join(keys).strip(), value_closing, untouched)):
                return True
            found = yield from answer.copy_until(ignore, key_opening, closing)
            if found:
                answer.drop(found)
        if found:
            arguments.end()
            yield from answer.skip_blanks()
        return True
