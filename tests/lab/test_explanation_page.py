"""The page of an explanation: it is self-contained, and no text of a prompt or of a model becomes
part of it."""

import re
from html.parser import HTMLParser

import msgspec
import pytest

from nanoserve.lab.charts import COLOURS
from nanoserve.lab.explanation import (
    ExplainedAnswer,
    ExplainedRow,
    ExplainedRun,
    ExplainedSequence,
    ExplainedStep,
    Explanation,
    explanation_page,
)

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!-- <script>",
    "]]></SCRIPT >",
    "<img src=x onerror=alert(1)>",
    "\u2028\u2029\u202e\x00",
    "EXPLANATION_JSON \\u003c/script> &lt; \" ' `${alert(1)}`",
]


class Scripts(HTMLParser):
    """The contents of the script elements, and the tags and attributes of the page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.contents, self.tags, self.attributes = list[str](), list[str](), list[str]()
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]
        if tag == "script":
            self.contents.append("")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.contents[-1] += data


def _explanation(text: str) -> Explanation:
    row = ExplainedRow(0, 0, 3, "prefill", sample=True, tokens=(text,))
    answers = (ExplainedAnswer(0, (text,)),)
    step = ExplainedStep(
        0, 0.0, {"free_blocks": 1}, {"decodes": 1}, 1, 2, bound=text, rows=(row,), answers=answers
    )
    return Explanation(
        text, (ExplainedRun(text, 16, 1, (ExplainedSequence(0, text, 3, text),), (step,)),)
    )


@pytest.mark.parametrize("text", HOSTILE)
def test_any_text_stays_data(text: str) -> None:
    explanation = _explanation(text)
    found, plain = (
        Scripts(explanation_page(explanation)),
        Scripts(explanation_page(_explanation("plain"))),
    )
    assert (found.tags, found.attributes) == (plain.tags, plain.attributes)
    assert msgspec.json.decode(found.contents[0], type=Explanation) == explanation
    assert found.contents[1:] == plain.contents[1:]
    assert "<" not in found.contents[0]


def test_the_page_loads_nothing_and_sets_no_html() -> None:
    page = explanation_page(_explanation("plain"))
    found = Scripts(page)
    assert len(found.contents) == 2
    assert not {"src", "href", "srcset", "data", "action"} & {*found.attributes}
    assert not {"link", "img", "iframe", "object", "base"} & {*found.tags}
    assert not re.search(
        r"https?:|url\(|@import|import\(|fetch\(|XMLHttp|WebSocket|eval\(|new Function", page
    )
    assert not re.search(r"(inner|outer)HTML|insertAdjacent|document\.write|setAttribute", page)
    assert "default-src 'none'" in page


def test_prompts_and_decodes_have_the_colours_of_the_charts() -> None:
    page = explanation_page(_explanation("plain"))
    assert f"--prefill: {COLOURS['prefill']}" in page
    assert f"--decode: {COLOURS['decode']}" in re.sub(r"\s+", " ", page)
