"""The tools of a chat request: how the model is told of them, and what its answer has to be when a call is required."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from nanoserve.server.http_bodies import ApiError
from nanoserve.server.schemas import ChatRequest, Function, NamedTool, schema_text
from nanoserve.text.tool_calls import CallForm, ToolCallParser, call_form

_NO_ARGUMENTS: dict[str, Any] = {"properties": {}}
_OTHER_SOURCES_OF_PROPERTIES = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request does with its tools."""

    form: CallForm
    tools: Sequence[dict[str, Any]]
    """For the chat template, as the client gave them."""
    callable: Sequence[Function]
    """Those of which the answer may be a call: all, or the one that is named."""
    required: bool
    parallel: bool

    def parser(self) -> ToolCallParser:
        """A parser for one answer."""
        names = {function.name for function in self.callable}
        return ToolCallParser(self.form, names, only=self.required, parallel=self.parallel)

    def call_schema(self) -> str:
        """The JSON schema of a call. Raises ApiError (400) for tools whose arguments are no object."""
        options = []
        for place, function in enumerate(self.callable):
            arguments = (function.parameters or _NO_ARGUMENTS) | {"type": "object"}
            if (function.parameters or {}).get("type", "object") != "object":
                message = f"the parameters of the tool {function.name} must have the type object"
                raise ApiError(400, message, code="invalid_value", param="tools")
            if not any(word in arguments for word in _OTHER_SOURCES_OF_PROPERTIES):
                arguments.setdefault("additionalProperties", False)
            arguments = _moved(arguments, f"#/anyOf/{place}/properties/{self.form.key}")
            properties = {"name": {"const": function.name}, self.form.key: arguments}
            option = {"type": "object", "properties": properties, "required": [*properties]}
            options.append(option | {"additionalProperties": False})
        return schema_text({"anyOf": options}, "tools")


def tool_use(asked: ChatRequest, template: str) -> ToolUse | None:
    """What a request does with its tools, or None; ``template`` is the text of the model's chat template.

    Raises ApiError (400) for tools and choices that do not fit, and UsageError for a template without tools.
    """
    functions = [tool.function for tool in asked.tools or ()]
    names = [function.name for function in functions]
    choice = asked.tool_choice or "auto"
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ApiError(400, f"two tools have the name {twice}", code="invalid_value", param="tools")
    if isinstance(choice, NamedTool):
        if choice.function.name not in names:
            message = f"tool_choice names {choice.function.name!r:.80}, which is none of the tools"
            raise ApiError(400, message, code="invalid_value", param="tool_choice")
    elif choice == "required" and not names:
        raise ApiError(400, "tool_choice required needs tools", code="invalid_value", param="tool_choice")
    if not names or choice == "none":
        return None
    if asked.response_format is not None and asked.response_format.type != "text":
        message = "response_format does not go with tools that may be called: use one of them, or tool_choice none"
        raise ApiError(400, message, code="invalid_value", param="response_format")
    return ToolUse(
        call_form(template),
        [{"type": "function", "function": msgspec.to_builtins(function)} for function in functions],
        [one for one in functions if not isinstance(choice, NamedTool) or one.name == choice.function.name],
        required=choice != "auto",
        parallel=asked.parallel_tool_calls is not False,
    )


def _moved(schema: Any, root: str) -> Any:
    """A JSON schema whose place within another one is `root`: its references lead there."""
    if isinstance(schema, list):
        return [_moved(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(value, root) for name, value in schema.items()}
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
        moved["$ref"] = root + reference[1:]
    return moved
