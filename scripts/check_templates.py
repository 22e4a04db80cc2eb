"""Renders chat templates as nanoserve does and as transformers does, and compares the texts.

    python -m scripts.check_templates FOLDER [--keep]

FOLDER holds templates, `*.jinja`, of any public models. Each renders twelve conversations, with
tools and without, with thinking and without. transformers is given messages as templates expect
them, nanoserve as clients send them: arguments of calls as text, and null for a content that is
empty. `--keep` writes the digests of what transformers renders to template_digests.txt, beside this
script: a line for each template, with its own digest, that of its renderings, and its name. Without
it, what nanoserve renders must have the digest that is kept, if there is one. The exit code is 1 if
anything differs.
"""

import argparse
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from nanoserve.errors import ModelError, UsageError
from nanoserve.text.chat_template import ChatTemplate, check_messages

DIGESTS = Path(__file__).with_name("template_digests.txt")
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'Says <b>how</b> "warm" it is, in °C & words',
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {
                        "type": "string",
                        "description": "A city",
                        "enum": ["München", "Rome"],
                    },
                    "days": {"type": "integer", "default": 1},
                    "options": {
                        "type": "array",
                        "items": {"type": "object", "properties": {"a": {"type": "number"}}},
                    },
                },
                "required": ["place"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "noop",
            "description": "",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **others: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **others}


def called(name: str, arguments: Mapping[str, Any], identity: str) -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content: str, identity: str) -> dict[str, Any]:
    return {"role": "tool", "content": content, "name": "weather", "tool_call_id": identity}


ROME = called("weather", {"place": "Rome", "days": 2, "options": [{"a": 1.0}, None]}, "aaaaaaaa1")
MUNICH = called("weather", {"place": 'M"ü"nchen', "dry": True}, "aaaaaaaa2")
SYSTEM = {"role": "system", "content": " Be brief. "}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one message": [user("Hello  there \n")],
    "a system message": [SYSTEM, user("你好 🦊 <b>&amp;</b>")],
    "several turns": [
        user("\n\nOne"),
        assistant(" Two "),
        user("Three"),
        assistant("Four"),
        user("Five"),
    ],
    "reasoning in a field": [
        user("One"),
        assistant("Two", reasoning_content="hm,\nwell"),
        user("Three"),
    ],
    "reasoning in the text": [
        user("One"),
        assistant("<think>\nhm, \n\n</think>\n\n Two "),
        user("Three"),
    ],
    "an answer at the end": [user("One"), assistant("Two", reasoning_content="hm")],
    "a call and its result": [
        user("Warm?"),
        assistant("", tool_calls=[ROME]),
        result("31", "aaaaaaaa1"),
    ],
    "an answer after a call": [
        SYSTEM,
        user("Warm?"),
        assistant("", tool_calls=[ROME]),
        result('{"degrees": 31}', "aaaaaaaa1"),
        assistant("Warm.", reasoning_content="31 is warm"),
        user("Thanks"),
    ],
    "two calls at once": [
        user("Warm?"),
        assistant("", tool_calls=[ROME, MUNICH]),
        result("31", "aaaaaaaa1"),
        result("12", "aaaaaaaa2"),
        assistant("Rome is."),
        user("Sure?"),
    ],
    "a call with text": [
        user("Warm?"),
        assistant("I ask.", tool_calls=[called("noop", {}, "aaaaaaaa3")]),
        result("", "aaaaaaaa3"),
    ],
    "two users in a row": [user("a"), user("b")],
    "empty messages": [user(""), assistant(""), user(" ")],
}


class Case(NamedTuple):
    """One rendering: a conversation and what the template is told beside it."""

    messages: Sequence[Mapping[str, Any]]
    arguments: Mapping[str, Any]


class Comparison(NamedTuple):
    """Renderings of nanoserve and transformers in all cases; None where the template refuses or
    fails."""

    rendered: list[str | None]
    expected: list[str | None]
    refusals: list[str]  # nanoserve's own words

    @property
    def counts(self) -> Counter[str]:
        """How many renderings are the same, refused by both, refused by one alone, and
        different."""
        return Counter(map(_outcome, self.rendered, self.expected))


def _outcome(rendered: str | None, expected: str | None) -> str:
    if rendered == expected:
        return "refused" if rendered is None else "same"
    return "different" if rendered is not None and expected is not None else "refused by one"


def cases() -> Iterator[Case]:
    for messages, tools, thinking in product(CONVERSATIONS.values(), (None, TOOLS), (True, False)):
        arguments = {"tools": tools} if tools else {}
        yield Case(messages, {**arguments, "enable_thinking": thinking, "thinking": thinking})


def as_sent(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages as a client of the OpenAI API sends them."""
    sent = json.loads(json.dumps(messages))
    for message in sent:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
            message["content"] = message["content"] or None
    return sent


def compare(source: str) -> Comparison:
    """Render a template in all cases, on both sides."""
    # a date would change the digest every day
    source = source.replace("strftime_now(", "'26 Jul 2024'.format(")
    template = ChatTemplate({"default": source}, SPECIAL_TOKENS, "the file")
    rendered, refusals = list[str | None](), []
    for case in cases():
        try:
            rendered.append(
                template.render(check_messages(as_sent(case.messages)), arguments=case.arguments)
            )
        except (UsageError, ModelError) as error:
            rendered.append(None)
            refusals.append(str(error))
    template.close()
    return Comparison(rendered, [_expected(source, case) for case in cases()], refusals)


def _expected(source: str, case: Case) -> str | None:
    settings = {**SPECIAL_TOKENS, **case.arguments}
    try:
        (text,), _ = render_jinja_template(
            [case.messages], chat_template=source, add_generation_prompt=True, **settings
        )
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError):
        return None
    return text


def digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=16).hexdigest()


def read_digests() -> dict[str, str]:
    """The kept digests of renderings, by the templates' digests."""
    lines = DIGESTS.read_text().splitlines() if DIGESTS.exists() else []
    return dict(line.split()[:2] for line in lines)


def main() -> int:
    """Print the table; 0 if nothing differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    kept, lines, wrong = read_digests(), dict[str, str](), 0
    print(
        "| template | same | refused by both | differing | digest | why refused "
        "|\n|---|---|---|---|---|---|"
    )
    for path in sorted(options.folder.rglob("*.jinja")):
        name = str(path.relative_to(options.folder).with_suffix(""))
        source = path.read_text()
        key = digest(source)
        comparison = compare(source)
        counts = comparison.counts
        differing = counts["different"] + counts["refused by one"]
        state = "new"
        if key in kept:
            state = "kept" if kept[key] == digest(comparison.rendered) else "another"
        wrong += differing > 0 or state == "another"
        lines[key] = f"{key} {digest(comparison.expected)} {name}\n"
        why = "; ".join(
            sorted({refusal.partition(": ")[2][:100] for refusal in comparison.refusals})
        )
        print(
            f"| {name} | {counts['same']} | {counts['refused']} | {differing} | {state} | {why} |",
            flush=True,
        )
    print(f"\n{len(lines)} templates, {wrong} of them wrong")
    if options.keep and not wrong:
        DIGESTS.write_text("".join(lines.values()))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
