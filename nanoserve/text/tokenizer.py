"""Tokenizers: text to token ids and back, for prompts and for conversations."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nanoserve.errors import ModelError, NanoserveError, UsageError, shown
from nanoserve.text.answers.forms import AnswerForm, AnswerParser, answer_form
from nanoserve.text.answers.reader import Tools
from nanoserve.text.answers.settings import ThinkingSwitch, thinking_switch, with_reasoning
from nanoserve.text.backends import (
    Backend,
    ControlTokens,
    Piece,
    SentencePieceBackend,
    TokenizersBackend,
    choose_mark,
)
from nanoserve.text.chat_template import (
    ChatTemplate,
    PlainConversation,
    check_messages,
    check_template_arguments,
    check_text,
    load_chat_template,
)
from nanoserve.utils.files import (
    read_json_object,
    read_optional_json_object,
    unreadable_as_model_error,
)

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")

MAX_CONTROL_CHARACTERS = 256  # in the spelling of a token that structures a prompt

# more than ordinary text has, so that a text within its limit is rarely encoded twice
_CHARACTERS_PER_TOKEN = 8


class PromptTooLong(UsageError):
    """A prompt has far more tokens than the limit."""


class Tokenizer:
    """One interface over the tokenizing libraries. Text from users never becomes a control token.
    In a conversation it never becomes a token that structures the prompt either."""

    def __init__(
        self,
        backend: Backend,
        template: ChatTemplate | PlainConversation,
        named_tokens: Mapping[str, str],
    ) -> None:
        self._backend = backend
        self._template = template
        self.answer_form: AnswerForm = answer_form(template.source)
        self.markers = {
            backend.control_ids[spelling]: spelling
            for spelling in self.answer_form.markers
            if spelling in backend.control_ids
        }
        """The control tokens that the model's answers are read by: ids and spellings."""
        self._control = ControlTokens(backend.control_ids)
        self._markup = ControlTokens(backend.markup_ids)
        readable = backend.markup_ids.keys() - backend.control_ids.keys()
        self._readable = ControlTokens(
            {spelling: backend.markup_ids[spelling] for spelling in readable}
        )
        self.vocab_size = backend.vocab_size  # one more than the largest token id
        self.special_ids = frozenset(backend.control_ids.values())  # which `decode` leaves out
        self.decode = backend.decode
        self.is_byte = backend.is_byte
        self.token_bytes = backend.token_bytes
        self.bos_token_id = self._named_id(named_tokens, "bos_token")
        self.eos_token_id = self._named_id(named_tokens, "eos_token")
        self._turn_end = self._find_turn_end()

    def _named_id(self, named_tokens: Mapping[str, str], name: str) -> int | None:
        spelling = named_tokens.get(name)
        if spelling is None:
            return None
        return self._backend.token_id(spelling)

    def end_tokens(self, configured: Sequence[int]) -> tuple[int, ...]:
        """The tokens that end an answer: the configured tokens, EOS, and the control token that the
        chat template writes after an assistant's message. Model files often lack the last token,
        because their configuration may date from before the model was trained to chat."""
        ends = list(configured)
        for token in (self.eos_token_id, self._turn_end):
            if token is not None:
                ends.append(token)
        return tuple(dict.fromkeys(ends))

    def _find_turn_end(self) -> int | None:
        """Find the control token that the template writes straight after an assistant's last
        message."""
        if not self.has_chat_template:
            return None
        mark = choose_mark([self._template.source])
        messages = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": mark}]
        try:
            rendered = self._template.render(messages, add_generation_prompt=False)
        except NanoserveError:  # a template may refuse any conversation
            return None
        _, said, rest = rendered.rpartition(mark)
        following = self._markup.split(rest.lstrip())
        if (
            said
            and following
            and isinstance(following[0], int)
            and following[0] in self.special_ids
        ):
            return following[0]
        return None

    def encode(
        self, text: str, *, add_special_tokens: bool = True, limit: int | None = None
    ) -> list[int]:
        """Token ids of a text typed by a user: spellings of special tokens in it are ordinary text.

        Added tokens that are not special, such as `<think>`, are recognized: the author of a raw
        prompt chooses its format. `add_special_tokens` adds the tokens that the model expects
        around it, usually BOS. Raises UsageError for text with NUL or lone surrogates, and
        PromptTooLong early for text with far more tokens than `limit`.
        """
        pieces = self._readable.split(check_text(text))
        self._check_length(pieces, limit)
        return self._backend.encode(pieces, add_special_tokens=add_special_tokens)

    def _check_length(self, pieces: Sequence[Piece], limit: int | None) -> None:
        """Raise PromptTooLong if a beginning of the pieces has more than twice `limit` tokens. The
        characters per token have no bound, as tokenizers drop characters and join unknown ones. So
        ever longer beginnings are tokenized. Cutting changes at most the last words of a beginning,
        which adds far fewer tokens than the limit."""
        if limit is None:
            return
        length = limit
        # Of a text that may become much longer, shorter beginnings have as many tokens.
        if self._backend.growth <= _CHARACTERS_PER_TOKEN:
            length *= _CHARACTERS_PER_TOKEN
        whole = sum(map(_length, pieces))
        while length < whole:
            beginning = _beginning(pieces, length)
            if len(self._backend.encode(beginning, add_special_tokens=False)) > 2 * limit:
                raise PromptTooLong(f"the prompt has more than {limit} tokens")
            length *= 4

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template_arguments: Mapping[str, Any] | None = None,
        limit: int | None = None,
        answer: str | None = None,
    ) -> list[int]:
        """Token ids of a conversation in the model's own chat format. With `answer`, the answer
        begins with this text; reasoning that the template opens is closed before it.

        Tokens that structure the prompt, flagged special or not, come only from the template: their
        spellings in messages, tool descriptions, tool calls and other arguments are ordinary text.
        The `content` of assistants is the model's own. There, spellings that are not special, such
        as `<think>` or `<tool_call>`, become tokens again, so that an answer is encoded as the
        model wrote it. Put no other text there.

        Raises UsageError when the messages are malformed or the template refuses them, ModelError
        when the template fails, and PromptTooLong as `encode` does.
        """
        checked = check_messages(messages)
        arguments = check_template_arguments(template_arguments)
        mark = choose_mark(
            [json.dumps([checked, arguments], ensure_ascii=False), self._template.source]
        )
        rendered = self._template.render(
            [self._mark(message, mark) for message in checked],
            add_generation_prompt=add_generation_prompt,
            arguments=self._markup.mark_all(arguments, mark),
        )
        if answer is not None:
            rendered += self.answer_form.answer_opening(rendered) + answer
        pieces: list[Piece] = []
        for piece in self._markup.split(rendered):
            if isinstance(piece, int):
                pieces.append(piece)
                continue
            text = piece.replace(mark, "")
            if text:
                pieces.append(text)
        self._check_length(pieces, limit)
        # A template writes BOS itself; for the plain format the tokenizer adds it.
        return self._backend.encode(pieces, add_special_tokens=not self.has_chat_template)

    def answer_parser(self, prompt: Sequence[int], tools: Tools | None = None) -> AnswerParser:
        """A parser for one answer to this prompt, which may call these tools."""
        # blanks may follow the tag that opens reasoning
        end = self.decode(prompt[-16:], skip_special_tokens=False)
        inside = self.answer_form.opens_reasoning(end)
        return AnswerParser(self.answer_form, self.markers, tools, starts_inside=inside)

    def _mark(self, message: Mapping[str, Any], mark: str) -> dict[str, Any]:
        marked: dict[str, Any] = self._markup.mark_all(message, mark)
        if message["role"] == "assistant":
            marked["content"] = self._control.mark(message["content"], mark)
        marked["role"] = message["role"]
        if "reasoning_content" in marked:
            return with_reasoning(marked, self._template.source)
        return marked

    @property
    def thinking_switch(self) -> ThinkingSwitch | None:
        """The template arguments that switch the model's reasoning on and off, if its chat template
        has some."""
        return thinking_switch(self._template.source)

    @property
    def has_chat_template(self) -> bool:
        """Whether the model brought a chat template of its own."""
        return isinstance(self._template, ChatTemplate)

    @property
    def notice(self) -> str | None:
        """A line about the prompt format for a user who chats, if there is anything to know."""
        return self._template.notice

    def close(self) -> None:
        """End the process in which the chat template runs."""
        self._template.close()


def _length(piece: Piece) -> int:
    """The characters of a piece; a control token counts as one."""
    if isinstance(piece, str):
        return len(piece)
    return 1


def _beginning(pieces: Sequence[Piece], length: int) -> list[Piece]:
    """The first `length` characters of the pieces."""
    beginning: list[Piece] = []
    for piece in pieces:
        if length <= 0:
            break
        if isinstance(piece, str):
            beginning.append(piece[:length])
        else:
            beginning.append(piece)
        length -= _length(piece)
    return beginning


@unreadable_as_model_error()
def load_tokenizer(directory: str | Path) -> Tokenizer:
    """The tokenizer of a model directory: tokenizer.json, else tokenizer.model, with their settings
    and chat template. Raises ModelError naming the file that is missing, broken or hostile."""
    directory = Path(directory)
    settings, named_tokens = _read_settings(directory)
    # The template's process starts while the tokenizer loads.
    template = load_chat_template(directory, settings, named_tokens)
    try:
        backend = load_backend(directory, template.source)
        if isinstance(template, ChatTemplate):
            template.check()
    except BaseException:
        template.close()
        raise
    return Tokenizer(backend, template, named_tokens)


def load_backend(directory: Path, template: str = "") -> Backend:
    """The vocabulary of a model directory, whose chat template has this text; raises as
    `load_tokenizer` does."""
    backend = _read_backend(directory, template)
    longest = max(backend.markup_ids, key=len, default="")
    if len(longest) > MAX_CONTROL_CHARACTERS:
        raise ModelError(
            f"{directory}: the token {shown(longest)} is longer than {MAX_CONTROL_CHARACTERS} "
            "characters"
        )
    return backend


def _read_backend(directory: Path, template: str) -> Backend:
    settings, named_tokens = _read_settings(directory)
    try:
        if (directory / "tokenizer.json").is_file():
            special = list(named_tokens.values())
            for token in settings.get("additional_special_tokens") or ():
                spelling = _spelling(token)
                if spelling is not None:
                    special.append(spelling)
            return TokenizersBackend(directory / "tokenizer.json", settings, special, template)
        if (directory / "tokenizer.model").is_file():
            added = read_optional_json_object(directory / "added_tokens.json")
            return SentencePieceBackend(
                directory / "tokenizer.model", settings, named_tokens, added, template
            )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        path = directory / "tokenizer_config.json"
        raise ModelError(f"the added tokens in {path} are malformed: {shown(error)}") from error
    raise ModelError(f"no tokenizer in {directory}: it needs a tokenizer.json or a tokenizer.model")


def _read_settings(directory: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """tokenizer_config.json, and the spellings of bos_token and the like."""
    settings = read_optional_json_object(directory / "tokenizer_config.json")
    special = read_optional_json_object(directory / "special_tokens_map.json") | settings
    spellings = {name: _spelling(special.get(name)) for name in _NAMED_TOKENS}
    return settings, {
        name: spelling for name, spelling in spellings.items() if spelling is not None
    }


def _spelling(token: Any) -> str | None:
    """The spelling of a token that is written as text or as an object with a `content`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    if isinstance(token, str):
        return token
    return None


@unreadable_as_model_error()
def has_same_tokens(directory: Path, other: Path) -> bool:
    """Whether two model directories give every token the same id; what else their tokenizers do may
    differ."""
    tables = [directory / "tokenizer.json", other / "tokenizer.json"]
    if all(table.exists() for table in tables):
        first, second = [_tokens_of(read_json_object(table)) for table in tables]
        return first == second
    models = [directory / "tokenizer.model", other / "tokenizer.model"]
    if not all(model.exists() for model in models):
        return False
    return models[0].read_bytes() == models[1].read_bytes()


def _tokens_of(table: Mapping[str, Any]) -> tuple[Any, dict[str, int]]:
    """The vocabulary in a tokenizer.json, and the ids of the tokens that it adds."""
    added = {token["content"]: token["id"] for token in table.get("added_tokens", ())}
    return table["model"]["vocab"], added
