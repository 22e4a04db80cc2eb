"""Input of a chat template beside the messages: a switch for reasoning, and the reasoning of
earlier answers."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_BLOCK = re.compile(r"\{%.*?%\}|\{\{.*?\}\}", re.DOTALL)
_QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
_NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class ThinkingSwitch:
    """Arguments of a chat template that switch a model's reasoning on and off."""

    on: Mapping[str, Any]
    off: Mapping[str, Any]


def thinking_switch(template: str) -> ThinkingSwitch | None:
    """Find the switch for reasoning among the variables of a chat template.

    If the template only has levels of effort, reasoning is switched off by the lowest level.
    """
    variables = _variables(template)
    for name in ("enable_thinking", "thinking"):
        if name in variables:
            return ThinkingSwitch({name: True}, {name: False})
    if "reasoning_effort" in variables:
        lowest = "low"
        if "'none'" in template or '"none"' in template:
            lowest = "none"
        return ThinkingSwitch({}, {"reasoning_effort": lowest})
    return None


def _variables(template: str) -> set[str]:
    """The variables that a template uses; names of attributes and quoted words are none."""
    return {
        name
        for block in _BLOCK.findall(template)
        for name in _NAME.findall(_QUOTED.sub("''", block))
    }


def with_reasoning(message: dict[str, Any], template: str) -> dict[str, Any]:
    """Put a message's reasoning where a chat template looks for it: in a chunk of the content, or
    in a field.

    `ChatTemplate` gives the field both names that templates know.
    """
    reasoning = message["reasoning_content"]
    if not reasoning or message["role"] != "assistant" or "reasoning_content" in template:
        return message
    content = message["content"]
    without = {name: value for name, value in message.items() if name != "reasoning_content"}
    if ".thinking" in template:
        # gpt-oss's template refuses reasoning beside text in a message with calls.
        if content and message.get("tool_calls"):
            return without
        return message
    if "['thinking']" in template:
        chunks = [{"type": "thinking", "thinking": reasoning}]
        if content:
            chunks.append({"type": "text", "text": content})
        return without | {"content": chunks}
    return without
