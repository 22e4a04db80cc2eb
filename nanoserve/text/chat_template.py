"""Check conversations, and render them with a chat template to the string that a model was trained
to continue."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import NoneType
from typing import Any, TypeAlias

from nanoserve.errors import ModelError, UsageError, shown
from nanoserve.utils.children import LimitedProcess
from nanoserve.utils.files import read_text

ROLES = ("system", "user", "assistant", "tool")
MAX_NESTING = 64
"""More levels than any tool call needs, and few enough for the recursive steps after the check."""
MAX_NAME = 80  # characters of the name of a place in an error
RESERVED_ARGUMENTS = (
    "messages",
    "add_generation_prompt",
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
)
MAX_TEMPLATE_CHARACTERS = 1 << 19
LONG_CONVERSATION = 256
"""A conversation of more messages may take seconds to render; see `_SECONDS_PER_MESSAGE`."""

# OpenAI's new name for `system`, which templates do not know
_ROLE_ALIASES = {"developer": "system"}
_PLAIN = (int, float, NoneType)  # bool too, which is an int
_FIELDS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"})

# Limits of one rendering. A long conversation takes a few milliseconds under most templates. Some
# look at all messages for each of them: 4,096 messages take three seconds there. What a template
# does with tools grows with their text.
_SECONDS = 0.5
_SECONDS_PER_MESSAGE = 2.5e-3
_SECONDS_PER_CHARACTER = 1e-6
_MAX_SECONDS = 12.0
_COMPILING_SECONDS_PER_CHARACTER = 1e-5
_MAX_CHARACTERS = 1 << 20
_MAX_GROWTH = 4

_PROBES: tuple[tuple[str, ...], ...] = (("user",), ("system", "user", "assistant", "user"))


_Place: TypeAlias = "str | tuple[_Place, str | int]"
"""The path of a value: a name, or the path of its container with the value's key or number in
it."""


def _spelled(place: _Place) -> str:
    """Spell a path. Only errors need the text, and building it for every deep value with long keys
    would cost more than the check itself."""
    parts: list[str] = []
    while not isinstance(place, str):
        place, part = place
        if isinstance(part, int):
            parts.append(f"[{part}]")
        else:
            parts.append(f".{part:.{MAX_NAME}}")
    parts.append(place)
    return "".join(reversed(parts))[:MAX_NAME]


def check_text(text: Any, place: _Place = "the prompt") -> str:
    """`text` itself. Raises UsageError unless it is a string of Unicode characters without NUL."""
    if not isinstance(text, str):
        raise UsageError(f"{_spelled(place)} must be text, not {type(text).__name__}")
    if "\0" in text:
        raise UsageError(f"{_spelled(place)} contains a NUL character; remove it")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        message = (
            f"{_spelled(place)} is not valid Unicode: a lone surrogate at character {error.start}"
        )
        raise UsageError(message) from error
    return text


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """A conversation in the form templates expect: known roles, contents joined to plain text.
    Raises UsageError naming the message and the field that is wrong."""
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise UsageError("messages must be a list of {role, content} objects")
    if not messages:
        raise UsageError("messages is empty; give at least one message")
    return [_check_message(message, ("messages", index)) for index, message in enumerate(messages)]


def _check_message(message: Any, place: _Place) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise UsageError(
            f"{_spelled(place)} must be an object with role and content, not "
            f"{type(message).__name__}"
        )
    message = {
        field: value for field, value in message.items() if value is not None
    }  # clients write absent fields as null
    role = message.get("role")
    if isinstance(role, str):
        role = _ROLE_ALIASES.get(role, role)
    if role not in ROLES:
        roles = ", ".join(ROLES + tuple(_ROLE_ALIASES))
        raise UsageError(f"{_spelled(place)}.role must be one of {roles}, not {shown(role)}")
    unknown = sorted(str(field) for field in set(message) - _FIELDS)
    if unknown:
        raise UsageError(f"{_spelled(place)} has unknown fields: {', '.join(unknown)[:80]}")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise UsageError(f"{_spelled(place)}.tool_calls must be a list of objects")
    if calls:
        message["tool_calls"] = [_with_arguments(call) for call in calls]
    checked = {
        field: _check_value(value, (place, field))
        for field, value in message.items()
        if field != "content"
    }
    checked["role"] = role
    checked["content"] = _check_content(message, (place, "content"))
    return checked


def _with_arguments(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Give a tool call its arguments as an object, as templates expect; OpenAI's clients send them
    as text. Text that is not an object, or is cut off, counts as no arguments."""
    function = call.get("function")
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    if not isinstance(arguments, Mapping):
        arguments = {}
    return {**call, "function": {**function, "arguments": arguments}}


def _check_content(message: Mapping[str, Any], place: _Place) -> str:
    content = message.get("content")
    if content is None and message.get("role") == "assistant":
        return ""  # an answer that has only tool calls, or was cut off while the model reasoned
    if isinstance(content, str):
        return check_text(content, place)
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise UsageError(
            f"{_spelled(place)} must be text or a list of text parts, not {type(content).__name__}"
        )
    texts = []
    for index, part in enumerate(content):
        kind = None
        if isinstance(part, Mapping):
            kind = part.get("type")
        if kind != "text":
            name = _spelled((place, index))
            raise UsageError(
                f"{name} must have type 'text', not {shown(kind)}; nanoserve reads text only"
            )
        texts.append(check_text(part.get("text"), ((place, index), "text")))
    return "\n".join(texts)


def _check_value(value: Any, place: _Place, levels: int = MAX_NESTING) -> Any:
    """Check the strings of a JSON value and return it. Raises UsageError for values that are not
    JSON, and for deep nesting."""
    if levels == 0:
        raise UsageError(f"{_spelled(place)} is nested more than {MAX_NESTING} levels deep")
    if isinstance(value, str):
        return check_text(value, place)
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Mapping):
        return {
            check_text(key, place): _check_value(item, (place, key), levels - 1)
            for key, item in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_check_value(item, (place, index), levels - 1) for index, item in enumerate(value)]
    raise UsageError(f"{_spelled(place)} must be plain JSON, not {type(value).__name__}")


def check_template_arguments(arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    """Arguments for a chat template, such as {"enable_thinking": False}. Raises UsageError for
    reserved names."""
    arguments = arguments or {}
    for name in arguments:
        if name in RESERVED_ARGUMENTS:
            raise UsageError(
                f"template argument {shown(name)} is set by nanoserve; choose another name"
            )
    return {
        check_text(name): _check_value(value, ("template arguments", name))
        for name, value in arguments.items()
    }


class ChatTemplate:
    """A model's checked templates. Each renders in a process of its own, with bounded memory and
    time."""

    notice: str | None = None  # what a user should know about the format, if anything

    def __init__(
        self, sources: Mapping[str, str], special_tokens: Mapping[str, str], origin: str
    ) -> None:
        """`sources`: templates by name. Raises ModelError for a template that is too long."""
        self._special_tokens = dict(special_tokens)
        self._texts = dict(sources)
        self._origin = origin
        if any(len(source) > MAX_TEMPLATE_CHARACTERS for source in sources.values()):
            raise ModelError(
                f"the chat template in {origin} is longer than {MAX_TEMPLATE_CHARACTERS} characters"
            )
        # Long conversations have a process of their own: renderings of seconds would delay those of
        # milliseconds.
        self._sandboxes = {
            (name, long): _make_sandbox(source)
            for name, source in sources.items()
            for long in (False, True)
        }
        self._sandboxes[self._default_name(), False].start()  # the others start when they are asked

    def check(self) -> None:
        """Render probe conversations. Raises ModelError when the template fails or exceeds its
        limits."""
        for roles in _PROBES:
            probe = [{"role": role, "content": "Hello."} for role in roles]
            try:
                self.render(probe)
            except UsageError:
                # a template may refuse a conversation, for example one with a system message
                continue

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt as text. `messages` and `arguments` are plain JSON, already checked. Raises
        UsageError with the template's own words when it refuses the conversation; ModelError when
        it is broken, or needs more time, memory or output than any conversation does."""
        arguments = arguments or {}
        name = self._default_name()
        if arguments.get("tools") and "tool_use" in self._texts:
            name = "tool_use"
        context: dict[str, Any] = {"tools": None, "documents": None}
        context |= self._special_tokens
        context |= arguments
        context["messages"] = [_with_thinking(message) for message in messages]
        context["add_generation_prompt"] = add_generation_prompt
        request = json.dumps({"context": context})
        seconds = (
            _SECONDS + _SECONDS_PER_MESSAGE * len(messages) + _SECONDS_PER_CHARACTER * len(request)
        )
        limits = {
            "max_characters": _MAX_CHARACTERS + _MAX_GROWTH * len(request),
            "seconds": min(seconds, _MAX_SECONDS),
        }
        sandbox = self._sandboxes[name, len(messages) > LONG_CONVERSATION]
        # The limits follow from the length of the text, so they are put into the text: two objects
        # become one.
        answer = sandbox.ask(
            request.removesuffix("}") + ", " + json.dumps(limits).removeprefix("{")
        )
        if answer is None:
            answer = {"error": "it needs more memory or time than a template may have"}
        if "refusal" in answer:
            raise UsageError(
                f"the model's chat template refuses these messages: {answer['refusal']}"
            )
        if "error" in answer:
            raise ModelError(f"the chat template in {self._origin} fails: {answer['error']}")
        text: str = answer["text"]
        return text

    @property
    def source(self) -> str:
        return "".join(self._texts.values())

    def close(self) -> None:
        """End the processes in which the templates run."""
        for sandbox in self._sandboxes.values():
            sandbox.close()

    def _default_name(self) -> str:
        if "default" in self._texts:
            return "default"
        return next(iter(self._texts))


class PlainConversation:
    """The format for models without a template: names and colons, which any language model has
    read."""

    notice = (
        "this model has no chat template; using a plain 'User: ... Assistant:' format, answers may "
        "ramble"
    )
    source = ""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as plain text. Raises UsageError for template arguments, which mean
        nothing here."""
        if arguments:
            raise UsageError(
                f"this model has no chat template that could use {', '.join(arguments)}"
            )
        turns = [f"{message['role'].capitalize()}: {message['content']}\n" for message in messages]
        if add_generation_prompt:
            turns.append("Assistant:")
        return "".join(turns)

    def close(self) -> None:
        """Do nothing: there is no process to end."""


def _with_thinking(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with its reasoning under both names that templates know; gpt-oss reads
    `thinking`."""
    if "reasoning_content" not in message:
        return message
    return {"thinking": message["reasoning_content"], **message}


def load_chat_template(
    directory: Path, settings: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> ChatTemplate | PlainConversation:
    """A directory's chat_template.jinja, else the `chat_template` of its tokenizer_config.json,
    else the plain format. Raises ModelError naming the file when it is malformed."""
    file = directory / "chat_template.jinja"
    if file.exists():
        return ChatTemplate({"default": read_text(file)}, special_tokens, str(file))
    origin = Path(settings.get("made_from", directory / "tokenizer_config.json"))
    sources = _named_sources(settings.get("chat_template"), origin)
    if not sources:
        return PlainConversation()
    return ChatTemplate(sources, special_tokens, str(origin))


def _named_sources(value: Any, origin: Path) -> dict[str, str]:
    if not value:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        value = {entry.get("name"): entry.get("template") for entry in value}
    if not isinstance(value, dict) or not all(
        isinstance(name, str) and isinstance(source, str) for name, source in value.items()
    ):
        raise ModelError(
            f"chat_template in {origin} must be text or a list of {{name, template}} objects"
        )
    return value


def _make_sandbox(source: str) -> LimitedProcess:
    seconds = _SECONDS + _COMPILING_SECONDS_PER_CHARACTER * len(source)
    greeting = {"template": source, "seconds": seconds}
    return LimitedProcess(
        "nanoserve.text.template_process", "the process of the chat template", greeting
    )
