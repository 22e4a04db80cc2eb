"""Chat templates: from a conversation to the one string a model was trained to continue."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nanoserve.errors import ModelError, UsageError
from nanoserve.processes.files import read_text
from nanoserve.text.template_sandbox import TemplateSandbox

RESERVED_ARGUMENTS = ("messages", "add_generation_prompt", "bos_token", "eos_token", "unk_token", "pad_token")
MAX_TEMPLATE_CHARACTERS = 1 << 19

_PROBES: tuple[tuple[str, ...], ...] = (("user",), ("system", "user", "assistant", "user"))
_BLOCK = re.compile(r"\{\{.*?\}\}|\{%.*?%\}", re.DOTALL)
_DUNDER = re.compile(r"__[a-zA-Z_]+__")
# A statement that only training code understands: the text between is the assistant's. For serving, `if true`.
_GENERATION = re.compile(r"(\{%[-+]?)\s*(end)?generation\s*([-+]?%\})")


class ChatTemplate:
    """One checked template, and where it came from."""

    notice: str | None = None
    """What a user should be told about the format, if anything."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str], origin: str) -> None:
        """`sources`: templates by name. Raises ModelError when one is malformed, hostile or never ends."""
        self._special_tokens = dict(special_tokens)
        self._texts = dict(sources)
        self._sandboxes: dict[str, TemplateSandbox] = {}
        self._origin = origin
        for source in sources.values():
            _check_source(source, origin)
        self._sandbox(self._default_name())

    def check(self) -> None:
        """Render probe conversations. Raises ModelError when the template fails or exceeds its limits."""
        for roles in _PROBES:
            probe = [{"role": role, "content": "Hello."} for role in roles]
            try:
                self.render(probe)
            except UsageError:
                continue  # refusing a conversation, say one with a system message, is a template's right

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt as text. `messages` and `arguments` are plain JSON, already checked.

        Raises UsageError when the template refuses the conversation, ModelError when it fails.
        """
        arguments = arguments or {}
        name = "tool_use" if arguments.get("tools") and "tool_use" in self._texts else self._default_name()
        context = {
            "tools": None,
            "documents": None,
            **self._special_tokens,
            **arguments,
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        return self._sandbox(name).render(context)

    @property
    def source(self) -> str:
        """The text of all templates."""
        return "".join(self._texts.values())

    def close(self) -> None:
        """End the processes in which the templates run."""
        for sandbox in self._sandboxes.values():
            sandbox.close()

    def _default_name(self) -> str:
        return "default" if "default" in self._texts else next(iter(self._texts))

    def _sandbox(self, name: str) -> TemplateSandbox:
        if name not in self._sandboxes:
            source = _GENERATION.sub(_replace_generation, self._texts[name])
            self._sandboxes[name] = TemplateSandbox(source, self._origin)
        return self._sandboxes[name]


class PlainConversation:
    """The format for models that bring no template: names and colons, which any language model has read."""

    notice = "this model has no chat template; using a plain 'User: ... Assistant:' format, answers may ramble"
    source = ""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as plain text; template arguments mean nothing here and are refused."""
        if arguments:
            raise UsageError(f"this model has no chat template that could use {', '.join(arguments)}")
        turns = [f"{message['role'].capitalize()}: {message['content']}\n" for message in messages]
        return "".join(turns) + ("Assistant:" if add_generation_prompt else "")

    def close(self) -> None:
        """Nothing to end."""


def load_chat_template(
    directory: Path, settings: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> ChatTemplate | PlainConversation:
    """A directory's chat_template.jinja, else the `chat_template` of its tokenizer_config.json, else the plain format.

    Raises ModelError naming the file when it is malformed.
    """
    file = directory / "chat_template.jinja"
    if file.exists():
        return ChatTemplate({"default": read_text(file)}, special_tokens, str(file))
    origin = directory / "tokenizer_config.json"
    sources = _named_sources(settings.get("chat_template"), origin)
    return ChatTemplate(sources, special_tokens, str(origin)) if sources else PlainConversation()


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
        raise ModelError(f"chat_template in {origin} must be text or a list of {{name, template}} objects")
    return value


def _check_source(source: str, origin: str) -> None:
    if len(source) > MAX_TEMPLATE_CHARACTERS:
        raise ModelError(f"the chat template in {origin} is longer than {MAX_TEMPLATE_CHARACTERS} characters")
    for block in _BLOCK.findall(source):
        found = _DUNDER.search(block)
        if found:
            raise ModelError(f"the chat template in {origin} reaches for {found.group()}; refusing to use it")


def _replace_generation(match: re.Match[str]) -> str:
    opening, end, closing = match.groups()
    return f"{opening} {'endif' if end else 'if true'} {closing}"
