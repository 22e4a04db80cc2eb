"""Harmony, the answer format of gpt-oss: a sequence of messages, each with a header that names its
channel.

``<|channel|>analysis<|message|>`` begins reasoning and ``<|channel|>final<|message|>`` the answer;
``<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>`` begins a tool call.
``<|end|>`` ends a message, and ``<|start|>assistant`` begins another one. The first of them begins
in the prompt.
"""

import re
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from nanoserve.text.answers.reader import AnswerReader, Part, Steps, Tools, untouched

_START = "<|start|>"
_CHANNEL = "<|channel|>"
_MESSAGE = "<|message|>"
_CONSTRAIN = "<|constrain|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"\bto=functions\.([\w-]+)")
_BETWEEN_MESSAGES = "\n\n"


@dataclass(frozen=True, slots=True)
class HarmonyAnswers:
    """Answers in Harmony, with reasoning and calls."""

    markers: ClassVar[tuple[str, ...]] = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN) + _ENDS
    call_opening: ClassVar[str] = ""
    call_key: ClassVar[str] = "arguments"

    def check_calls(self) -> None:
        """Do nothing: every model that writes Harmony writes calls."""

    def opens_reasoning(self, prompt: str) -> bool:
        """Whether a rendered prompt leaves the reasoning open, so that the answer begins inside
        it."""
        return prompt.endswith(f"{_CHANNEL}analysis{_MESSAGE}")

    def answer_opening(self, prompt: str) -> str:
        """The text that has to follow a rendered prompt so that the answer begins without any
        reasoning."""
        opening = f"{_CHANNEL}final{_MESSAGE}"
        if prompt.endswith(_MESSAGE):  # the message that the prompt begins has to end first
            opening = f"{_ENDS[0]}{_START}assistant{opening}"
        return opening

    def read(self, answer: AnswerReader, tools: Tools, *, starts_inside: bool) -> Steps[None]:
        """Read the messages of an answer."""
        parts = set[Part]()
        if starts_inside:
            parts.add("thinking")
            yield from self._body(answer, "thinking")
        while (yield from answer.peek()):
            yield from self._message(answer, tools, parts)

    def _message(self, answer: AnswerReader, tools: Tools, parts: set[Part]) -> Steps[None]:
        """Read a header and its message. Text in place of a header belongs to the answer."""
        ends = [answer.tag(end) for end in _ENDS]
        if (yield from answer.comes_next(*ends)):
            return
        begun = yield from answer.comes_next(answer.tag(_START), answer.tag(_CHANNEL), "to=")
        if not begun:
            yield from self._next_of("answer", answer, parts)
            return
        header: list[str] = [begun]
        end_of_header = answer.tag(_MESSAGE)
        found = yield from answer.copy_until(header.append, end_of_header, *ends)
        if not found:
            return
        answer.drop(found)
        if found != end_of_header:
            return
        head = "".join(header)
        call = _RECIPIENT.search(head)
        if call and call[1] in tools:
            answer.write("call", call[1])
            yield from self._body(answer, "arguments")
        elif f"{answer.tag(_CHANNEL)}analysis" in head:
            yield from self._next_of("thinking", answer, parts)
        else:
            yield from self._next_of("answer", answer, parts)

    def _next_of(self, part: Part, answer: AnswerReader, parts: set[Part]) -> Steps[None]:
        """Read a message of this part, after a separator if the part has had messages before."""
        if part in parts:
            answer.write(part, _BETWEEN_MESSAGES)
        parts.add(part)
        yield from self._body(answer, part)

    def _body(self, answer: AnswerReader, part: Part) -> Steps[None]:
        """Read a message up to its end tag, or up to the next message's header if there is no end
        tag."""
        ends = [answer.tag(end) for end in _ENDS]
        tags = ends + [answer.tag(_START), answer.tag(_CHANNEL)]
        found = yield from answer.copy_until(partial(answer.write, part), *tags, trim=untouched)
        if found in ends:
            answer.drop(found)
