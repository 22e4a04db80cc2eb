"""Tool calls of Gemma 4: ``<|tool_call>call:NAME{KEY:VALUE,...}<tool_call|>``, with strings between
two ``<|"|>``."""

from dataclasses import dataclass
from typing import ClassVar

from nanoserve.text.answers.reader import AnswerReader, Steps, Tools, ignore, untouched
from nanoserve.text.answers.values import escaped, value_as_json

_CLOSING = {"{": "}", "[": "]"}
_LITERALS = frozenset({"number", "integer", "boolean", "null", "string"})


@dataclass(slots=True)
class _Open:
    """An object or a list that is being written."""

    closing: str
    before_next: str = ""


@dataclass(frozen=True, slots=True)
class GemmaCalls:
    """Keys have no quotes; numbers and words are JSON's. The arguments are passed on as JSON."""

    starts: ClassVar[tuple[str, ...]] = ("<|tool_call>",)
    markers: ClassVar[tuple[str, ...]] = ("<|tool_call>", "<tool_call|>", '<|"|>')
    opening: ClassVar[str] = ""
    key: ClassVar[str] = "arguments"
    bare: ClassVar[bool] = False

    def read(self, answer: AnswerReader, tag: str, tools: Tools) -> Steps[bool]:
        """Read a call as `ObjectCalls` does."""
        name, _ = yield from answer.name_after(tag, tools, ends=("{",), before="call:")
        if not name:
            return False
        answer.write("call", name)
        answer.write("arguments", "{")
        closing = answer.tag("<tool_call|>")
        yield from self._read_values(answer, closing)
        if (yield from answer.copy_until(ignore, closing)):
            answer.drop(closing)
            yield from answer.skip_blanks()
        return True

    def _read_values(self, answer: AnswerReader, end: str) -> Steps[None]:
        """Read an open object and its values up to its closing brace. If `end` comes first, close
        all open values."""
        quote = answer.tag('<|"|>')
        opened = [_Open("}")]
        while opened and (following := (yield from answer.peek())):
            inner = opened[-1]
            if (yield from answer.comes_next(end)):
                answer.held = end + answer.held
                answer.write("arguments", "".join(one.closing for one in reversed(opened)))
                return
            if following in ",]}":
                answer.take(1)
                if following == inner.closing:
                    answer.write("arguments", following)
                    opened.pop()
                continue
            key = ""
            if inner.closing == "}":
                key = yield from self._read_key(answer, quote)
            value = yield from answer.peek()
            if not value:
                return
            answer.write("arguments", inner.before_next + key)
            inner.before_next = ", "
            if value in _CLOSING:
                opened.append(_Open(_CLOSING[answer.take(1)]))
                answer.write("arguments", value)
            else:
                yield from self._read_scalar(answer, quote, end)

    def _read_key(self, answer: AnswerReader, quote: str) -> Steps[str]:
        """Read a key and the colon after it, as JSON has them; some models put a key between
        quotes."""
        texts: list[str] = []
        if (yield from answer.comes_next(quote)) and (
            yield from answer.copy_until(texts.append, quote)
        ):
            answer.drop(quote)
            yield from answer.comes_next(":")
        elif (yield from answer.copy_until(texts.append, ":")):
            answer.drop(":")
        return f'"{escaped("".join(texts).strip())}": '

    def _read_scalar(self, answer: AnswerReader, quote: str, end: str) -> Steps[None]:
        """Read a string, a number or a word."""
        if (yield from answer.comes_next(quote)):
            answer.write("arguments", '"')
            found = yield from answer.copy_until(
                lambda text: answer.write("arguments", escaped(text)),
                quote,
                trim=untouched,
                keep_partial_tag=False,
            )
            if found:
                answer.drop(quote)
                answer.write("arguments", '"')
            return
        texts: list[str] = []
        if (yield from answer.copy_until(texts.append, ",", "}", "]", end)):
            answer.write("arguments", value_as_json("".join(texts).strip(), _LITERALS))
