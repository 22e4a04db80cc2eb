"""The tools of a chat request: how the model is told of them, and what its answer has to be when a call is required."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from nanoserve.server.http_bodies import ApiError
from nanoserve.server.schemas import ChatRequest, Function, Tool
from nanoserve.text.tool_calls import CallForm, ToolCallParser, call_form


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request does with its tools."""

    form: CallForm
    tools: Sequence[Tool]
    callable: Sequence[Function]
    """Those that the answer may call: all, or the one that is named."""
    required: bool
    parallel: bool

    def rendering(self) -> dict[str, Any]:
        """Settings of `Tokenizer.encode_chat`."""
        answer = self.form.opening if self.required else None
        return {"template_arguments": {"tools": msgspec.to_builtins(self.tools)}, "answer": answer}

    def parser(self) -> ToolCallParser:
        """A parser for one answer."""
        form = CallForm() if self.required else self.form
        return ToolCallParser(form, [one.name for one in self.callable], parallel=self.parallel)

    def call_schema(self) -> str:
        """The JSON schema of a call. Raises ApiError (400) for tools whose arguments are no object."""
        options = []
        for place, function in enumerate(self.callable):
            arguments = {"type": "object", **(function.parameters or {"properties": {}})}
            if arguments["type"] != "object":
                raise _wrong(f"the parameters of the tool {function.name} must have the type object", "tools")
            if not arguments.keys() & {"$ref", "allOf", "anyOf", "oneOf", "patternProperties"}:
                arguments.setdefault("additionalProperties", False)
            root = f'"$ref":"#/anyOf/{place}/properties/{self.form.key}'  # where references to "#" lead now
            moved = msgspec.json.encode(arguments).replace(b'"$ref":"#', root.encode())
            call = {"name": {"const": function.name}, self.form.key: msgspec.Raw(moved)}
            strict = {"required": [*call], "additionalProperties": False}
            options.append({"type": "object", "properties": call, **strict})
        return msgspec.json.encode({"anyOf": options}).decode()


def tool_use(asked: ChatRequest, template: str) -> ToolUse | None:
    """What a request does with its tools, or None; ``template`` is the text of the model's chat template.

    Raises ApiError (400) for tools and choices that do not fit, and UsageError for a template without tools.
    """
    tools, choice = [tool.function for tool in asked.tools or ()], asked.tool_choice or "auto"
    names = [tool.name for tool in tools]
    if len({*names}) < len(names):
        raise _wrong("two tools have the same name", "tools")
    if choice == "required" and not tools:
        raise _wrong("tool_choice required needs tools", "tool_choice")
    if isinstance(choice, Tool) and choice.function.name not in names:
        raise _wrong(f"tool_choice names {choice.function.name}, which is none of the tools", "tool_choice")
    if not tools or choice == "none":
        return None
    if asked.response_format is not None and asked.response_format.type != "text":
        raise _wrong("response_format does not go with tools: give one of them, or tool_choice none", "response_format")
    chosen = [tool for tool in tools if not isinstance(choice, Tool) or tool.name == choice.function.name]
    parallel = asked.parallel_tool_calls is not False
    return ToolUse(call_form(template), asked.tools or (), chosen, choice != "auto", parallel)


def _wrong(message: str, param: str) -> ApiError:
    return ApiError(400, message, code="invalid_value", param=param)
