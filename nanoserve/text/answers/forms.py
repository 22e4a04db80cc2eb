"""The format of a model's answers, found from its chat template, and the parser of one answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from nanoserve.errors import UsageError
from nanoserve.text.answers.gemma_calls import GemmaCalls
from nanoserve.text.answers.harmony import HarmonyAnswers
from nanoserve.text.answers.json_calls import LineCalls, NamedCalls, ObjectCalls
from nanoserve.text.answers.reader import AnswerReader, Marks, Piece, Steps, Tools
from nanoserve.text.answers.reasoning import ReasoningTags, reasoning_tags
from nanoserve.text.answers.tagged_calls import KeyValueCalls, ParameterCalls


class CallForm(Protocol):
    """The format in which a family of models writes a tool call."""

    @property
    def starts(self) -> tuple[str, ...]:
        """The tags that may begin a call in a text."""

    @property
    def bare(self) -> bool:
        """Whether an answer may begin with a call that has no tag."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The spellings that may be marker tokens."""

    @property
    def opening(self) -> str:
        """The beginning of an answer that has to be a call; a JSON object with a name and arguments
        follows."""

    @property
    def key(self) -> str:
        """The name of the arguments in that object."""

    def read(self, answer: AnswerReader, tag: str, tools: Tools) -> Steps[bool]:
        """Read one or several calls after a tag. Returns False, and reads nothing, if no call of a
        known tool follows."""


class AnswerForm(Protocol):
    """The format in which a family of models writes an answer."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The spellings that may be marker tokens."""

    @property
    def call_opening(self) -> str:
        """The beginning of an answer that has to be a call; a JSON object with a name and arguments
        follows."""

    @property
    def call_key(self) -> str:
        """The name of the arguments in that object."""

    def check_calls(self) -> None:
        """Raise UsageError if the model shows no form of tool calls."""

    def opens_reasoning(self, prompt: str) -> bool:
        """Whether a rendered prompt leaves the reasoning open, so that the answer begins inside
        it."""

    def answer_opening(self, prompt: str) -> str:
        """The text that has to follow a rendered prompt so that the answer begins without any
        reasoning."""

    def read(self, answer: AnswerReader, tools: Tools, *, starts_inside: bool) -> Steps[None]:
        """Read a whole answer."""


@dataclass(frozen=True, slots=True)
class TaggedAnswers:
    """Reasoning between tags, if there is any, then text with tool calls in it. Blanks around calls
    are dropped."""

    reasoning: ReasoningTags | None
    calls: CallForm | None

    @property
    def markers(self) -> tuple[str, ...]:
        """The spellings that may be marker tokens."""
        markers: tuple[str, ...] = ()
        if self.reasoning is not None:
            markers += self.reasoning.markers
        if self.calls is not None:
            markers += self.calls.markers
        return markers

    @property
    def call_opening(self) -> str:
        """See `AnswerForm`."""
        if self.calls is None:
            return ""
        return self.calls.opening

    @property
    def call_key(self) -> str:
        """See `AnswerForm`."""
        if self.calls is None:
            return ""
        return self.calls.key

    def check_calls(self) -> None:
        """See `AnswerForm`."""
        if self.calls is None:
            raise UsageError(
                "the model's chat template takes no tools, or has calls in a form that nanoserve "
                "does not read: leave "
                "tools out, or serve a model whose calls are read"
            )

    def opens_reasoning(self, prompt: str) -> bool:
        """See `AnswerForm`."""
        return self.reasoning is not None and self.reasoning.opens(prompt)

    def answer_opening(self, prompt: str) -> str:
        """See `AnswerForm`."""
        if self.reasoning is None:
            return ""
        return self.reasoning.answer_opening(prompt)

    def read(self, answer: AnswerReader, tools: Tools, *, starts_inside: bool) -> Steps[None]:
        """See `AnswerForm`."""
        dropped: tuple[str, ...] = ()
        openings: list[str] = []
        if self.reasoning is not None:
            dropped = yield from self.reasoning.read(answer, starts_inside=starts_inside)
            openings = [
                answer.tag(opening)
                for opening in self.reasoning.openings
                if answer.is_token(opening)
            ]
        calls = None
        starts: list[str] = []
        if tools and self.calls is not None:
            calls = self.calls
            starts = [answer.tag(start) for start in calls.starts]
            if calls.bare:
                yield from calls.read(answer, "", tools)
        tags = starts + openings + list(dropped)
        write = partial(answer.write, "answer")
        while tag := (yield from answer.copy_until(write, *tags)):
            if tag in dropped:
                answer.drop(tag)
            elif self.reasoning is not None and tag in openings:
                answer.drop(tag)
                yield from self.reasoning.read_inside(answer)
            elif calls is None or not (yield from calls.read(answer, tag, tools)):
                answer.show(tag)


_HARMONY = ("<|channel|>", "<|message|>")
_LLAMA = ObjectCalls(starts=("<|python_tag|>",), key="parameters", bare=True)
_CALLS: dict[str, CallForm] = {
    "<arg_key>": KeyValueCalls(),
    "<function=": ParameterCalls(),
    "[ARGS]": NamedCalls(),
    "<|tool_call>": GemmaCalls(),
    "<|tool_call|>": ObjectCalls(
        starts=("<|tool_call|>",), end="<|/tool_call|>", opening="<|tool_call|>["
    ),
    "<|START_ACTION|>": ObjectCalls(
        starts=("<|START_ACTION|>",), end="<|END_ACTION|>", key="parameters"
    ),
    "<tool_call>": ObjectCalls(starts=("<tool_call>",), opening="<tool_call>\n"),
    "[TOOL_CALLS]": ObjectCalls(starts=("[TOOL_CALLS]",), opening="[TOOL_CALLS] ["),
    "<|python_tag|>": _LLAMA,
    '"parameters": ': _LLAMA,
    "<|observation|>": LineCalls(),
}
"""Format of tool calls by a string in the chat template; the first string that the template holds
decides. In order: GLM-4.5, Qwen3-Coder, Mistral since 2025, Gemma 4, Granite 3, Cohere, Hermes with
Qwen and Granite 4, Mistral, Llama 3 (two strings), and GLM-4."""

REQUIRED_CALL = TaggedAnswers(None, ObjectCalls(bare=True))
"""Format of an answer that a grammar forces to be a call: a JSON object alone."""
PLAIN = TaggedAnswers(None, None)
"""Format of an answer that a grammar forces to be JSON: it holds neither reasoning nor calls."""


def answer_form(template: str) -> AnswerForm:
    """Find the format of a model's answers from its chat template."""
    if all(sign in template for sign in _HARMONY):
        return HarmonyAnswers()
    calls = None
    if "tools" in template:
        calls = next((form for sign, form in _CALLS.items() if sign in template), None)
    return TaggedAnswers(reasoning_tags(template), calls)


class AnswerParser:
    """Splits one answer, as it arrives, into reasoning, text and tool calls.

    A call counts only if its tool is one of `tools`; any other call is text. The joined pieces do
    not depend on how the answer was cut.
    """

    def __init__(
        self,
        form: AnswerForm,
        markers: Mapping[int, str],
        tools: Tools | None = None,
        *,
        starts_inside: bool = False,
    ) -> None:
        """`markers`: the spellings of the form's marker tokens, by id. `starts_inside`: see
        `opens_reasoning`."""
        self._anew = partial(AnswerParser, form, markers, tools, starts_inside=starts_inside)
        self._reader = AnswerReader(markers)
        self._steps = form.read(self._reader, tools or {}, starts_inside=starts_inside)

    def anew(self) -> "AnswerParser":
        """Return a parser of this answer that has read nothing of it."""
        return self._anew()

    def push(self, text: str, marks: Marks = (), *, ended: bool = False) -> list[Piece]:
        """Add text and return the pieces that are certain now. With `ended`, the rest of the answer
        is returned too. `marks` are the marker tokens in the text."""
        self._reader.feed(text, marks, ended=ended)
        next(self._steps, None)
        return self._reader.take_pieces()
