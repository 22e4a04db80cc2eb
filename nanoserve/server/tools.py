"""The tools of a chat request, and the JSON schema of an answer that must call one of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from nanoserve.server.http_bodies import ApiError
from nanoserve.server.schemas import ChatRequest, Function, Tool, wants_json
from nanoserve.text.answers.forms import AnswerForm


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The use that a request makes of its tools."""

    form: AnswerForm
    tools: Sequence[Tool]
    callable: Sequence[Function]
    """The functions that the answer may call: all, or the function that `tool_choice` names."""
    required: bool

    @property
    def opening(self) -> str | None:
        """The text with which the answer has to begin if a call is required."""
        if not self.required:
            return None
        return self.form.call_opening

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """The JSON schemas of the arguments, by the names of the tools that may be called."""
        return {one.name: one.parameters or {} for one in self.callable}

    def call_schema(self) -> str:
        """The JSON schema of a call. Raises ApiError (400) for tools whose arguments are no
        object."""
        options = []
        for place, function in enumerate(self.callable):
            arguments = {"type": "object", **(function.parameters or {"properties": {}})}
            if arguments["type"] != "object":
                raise _wrong(
                    f"the parameters of the tool {function.name} must have the type object", "tools"
                )
            if not arguments.keys() & {"$ref", "allOf", "anyOf", "oneOf", "patternProperties"}:
                arguments.setdefault("additionalProperties", False)
            # where references to "#" lead now
            root = f'"$ref":"#/anyOf/{place}/properties/{self.form.call_key}'
            moved = msgspec.json.encode(arguments).replace(b'"$ref":"#', root.encode())
            call = {"name": {"const": function.name}, self.form.call_key: msgspec.Raw(moved)}
            options.append(
                {
                    "type": "object",
                    "properties": call,
                    "required": list(call),
                    "additionalProperties": False,
                }
            )
        return msgspec.json.encode({"anyOf": options}).decode()


def tool_use(asked: ChatRequest, form: AnswerForm) -> ToolUse | None:
    """The use that a request makes of its tools, or None; ``form`` is that of the model's answers.

    Raises ApiError (400) for tools and choices that do not fit, and UsageError for a form without
    calls.
    """
    tools = [tool.function for tool in asked.tools or ()]
    choice = asked.tool_choice or "auto"
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise _wrong("two tools have the same name", "tools")
    if choice == "required" and not tools:
        raise _wrong("tool_choice required needs tools", "tool_choice")
    if isinstance(choice, Tool) and choice.function.name not in names:
        raise _wrong(
            f"tool_choice names {choice.function.name}, which is none of the tools", "tool_choice"
        )
    if not tools or choice == "none":
        return None
    if wants_json(asked):
        raise _wrong(
            "response_format does not go with tools: give one of them, or tool_choice none",
            "response_format",
        )
    chosen = tools
    if isinstance(choice, Tool):
        chosen = [tool for tool in tools if tool.name == choice.function.name]
    form.check_calls()
    return ToolUse(form, asked.tools or (), chosen, choice != "auto")


def _wrong(message: str, param: str) -> ApiError:
    return ApiError(400, message, code="invalid_value", param=param)
