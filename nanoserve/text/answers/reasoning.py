"""The tags between which a model reasons before it answers."""

from dataclasses import dataclass
from functools import partial

from nanoserve.text.answers.reader import AnswerReader, Steps


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningTags:
    """Reasoning between two tags, at the beginning of an answer; blanks beside the tags are
    dropped.

    A later opening tag is ordinary text, unless it is a token of its own.
    """

    openings: tuple[str, ...] = ("<think>",)
    closing: str = "</think>"
    around_answer: tuple[str, str] | None = None
    """The tags around the answer that follows the reasoning, if there are any."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The spellings that may be marker tokens. Gemma's opening is a token and a word."""
        return self.openings + (self.closing, "<|channel>")

    def opens(self, prompt: str) -> bool:
        """Whether a rendered prompt leaves the reasoning open, so that the answer begins inside
        it."""
        return prompt.rstrip().endswith(self.openings)

    def answer_opening(self, prompt: str) -> str:
        """The text that has to follow a rendered prompt so that the answer begins without any
        reasoning."""
        if not self.opens(prompt):
            return ""
        return f"\n{self.closing}\n\n"

    def read(self, answer: AnswerReader, *, starts_inside: bool) -> Steps[tuple[str, ...]]:
        """Read the reasoning if the answer begins with some. Returns the tags that end the text
        after it."""
        openings = [answer.tag(opening) for opening in self.openings]
        if not starts_inside and not (yield from answer.comes_next(*openings)):
            return ()
        yield from self.read_inside(answer)
        if self.around_answer is None:
            return ()
        opening, closing = self.around_answer
        yield from answer.comes_next(answer.tag(opening))
        yield from answer.skip_blanks()
        return (answer.tag(closing),)

    def read_inside(self, answer: AnswerReader) -> Steps[None]:
        """Read reasoning whose opening tag is read already."""
        closing = answer.tag(self.closing)
        yield from answer.skip_blanks()
        if (yield from answer.copy_until(partial(answer.write, "thinking"), closing)):
            answer.drop(closing)
            yield from answer.skip_blanks()


_GRANITE_PHRASES = ReasoningTags(
    openings=("Here is my thought process:", "Here's my thought process:"),
    closing="Here is my response:",
)
_REASONING = {
    "<|channel>thought": ReasoningTags(openings=("<|channel>thought",), closing="<channel|>"),
    "[THINK]": ReasoningTags(openings=("[THINK]",), closing="[/THINK]"),
    "<|START_THINKING|>": ReasoningTags(
        openings=("<|START_THINKING|>",), closing="<|END_THINKING|>"
    ),
    "my thought process:": _GRANITE_PHRASES,
    "<response>": ReasoningTags(around_answer=("<response>", "</response>")),
}
"""Tags by a string in the chat template; the first string that the template holds decides. In
order: Gemma 4, Mistral, Cohere, and Granite 3.2 and 3.3."""


def reasoning_tags(template: str) -> ReasoningTags:
    """Find the reasoning tags in a chat template. Without any, the default tags: some models reason
    although their template shows no tags."""
    return next((tags for sign, tags in _REASONING.items() if sign in template), ReasoningTags())
