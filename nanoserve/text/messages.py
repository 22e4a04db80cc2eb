"""Checking conversations before anything else sees them."""

from collections.abc import Mapping, Sequence
from typing import Any

from nanoserve.errors import UsageError

ROLES = ("system", "user", "assistant", "tool")
# What OpenAI renamed `system` to; templates do not know the new name.
_ROLE_ALIASES = {"developer": "system"}
# More than any tool call needs, and few enough for every step behind the check that goes down with them.
MAX_NESTING = 64
_FIELDS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"})


def check_text(text: Any, name: str = "the prompt") -> str:
    """`text` itself. Raises UsageError unless it is a string of Unicode characters without NUL."""
    if not isinstance(text, str):
        raise UsageError(f"{name} must be text, not {type(text).__name__}")
    if "\0" in text:
        raise UsageError(f"{name} contains a NUL character; remove it")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        position = error.start
        raise UsageError(f"{name} is not valid Unicode: a lone surrogate at character {position}") from error
    return text


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """A conversation in the form templates expect: known roles, contents joined to plain text.

    Raises UsageError naming the message and the field that is wrong.
    """
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise UsageError("messages must be a list of {role, content} objects")
    if not messages:
        raise UsageError("messages is empty; give at least one message")
    return [_check_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _check_message(message: Any, name: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise UsageError(f"{name} must be an object with role and content, not {type(message).__name__}")
    role = message.get("role")
    role = _ROLE_ALIASES.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        raise UsageError(f"{name}.role must be one of {', '.join((*ROLES, *_ROLE_ALIASES))}, not {role!r:.40}")
    unknown = sorted(str(field) for field in set(message) - _FIELDS)
    if unknown:
        raise UsageError(f"{name} has unknown fields: {', '.join(unknown)[:80]}")
    checked = {field: _check_value(value, f"{name}.{field}") for field, value in message.items() if field != "content"}
    return {**checked, "role": role, "content": _check_content(message, f"{name}.content")}


def _check_content(message: Mapping[str, Any], name: str) -> str:
    content = message.get("content")
    if content is None and message.get("role") == "assistant" and message.get("tool_calls"):
        return ""
    if isinstance(content, str):
        return check_text(content, name)
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise UsageError(f"{name} must be text or a list of text parts, not {type(content).__name__}")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(part, Mapping) or kind != "text":
            raise UsageError(f"{name}[{index}] must have type 'text', not {kind!r:.40}; nanoserve reads text only")
        texts.append(check_text(part.get("text"), f"{name}[{index}].text"))
    return "\n".join(texts)


def _check_value(value: Any, name: str, levels: int = MAX_NESTING) -> Any:
    """Any JSON value with its strings checked; what JSON cannot say is refused, and what is nested too deeply."""
    if levels == 0:
        raise UsageError(f"{name:.80} is nested more than {MAX_NESTING} levels deep")
    if isinstance(value, str):
        return check_text(value, name)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {check_text(key, name): _check_value(item, f"{name}.{key}", levels - 1) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_check_value(item, f"{name}[{index}]", levels - 1) for index, item in enumerate(value)]
    raise UsageError(f"{name} must be plain JSON, not {type(value).__name__}")


def check_template_arguments(arguments: Mapping[str, Any] | None, reserved: Sequence[str]) -> dict[str, Any]:
    """Arguments for a chat template, such as {"enable_thinking": False}. Raises UsageError for reserved names."""
    arguments = arguments or {}
    for name in arguments:
        if name in reserved:
            raise UsageError(f"template argument {name!r} is set by nanoserve; choose another name")
    return {check_text(name): _check_value(value, f"template argument {name}") for name, value in arguments.items()}
