"""Who answers a chat: a model in this process, or a server that speaks OpenAI's API. The chat sees no difference."""

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from nanoserve.commands.options import sampling_params
from nanoserve.commands.usage import Usage
from nanoserve.errors import RuntimeFailure

if TYPE_CHECKING:
    from nanoserve.client.connection import ApiClient
    from nanoserve.client.events import Chunk
    from nanoserve.llm import LLM
    from nanoserve.request import SamplingParams

Conversation = Sequence[Mapping[str, str]]
Settings = Mapping[str, Any]


class ContextFull(RuntimeFailure):
    """The conversation does not fit into the context; only a server of which no context is known finds out so late."""


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """What is new of an answer.

    Attributes:
        thinking: reasoning that was told apart already; ``text`` may hold more of it between tags.
        usage: of the answer so far.
        finish_reason: None while it goes on.
    """

    text: str
    thinking: str
    usage: Usage
    finish_reason: str | None


class ChatModel(Protocol):
    """What a chat asks of a model."""

    @property
    def name(self) -> str:
        """For people."""

    @property
    def context(self) -> int | None:
        """The most tokens of prompt and answer together; None where that is not known."""

    @property
    def defaults(self) -> "SamplingParams | None":
        """The sampling settings that hold where the user gave none; None where only a server knows them."""

    def start_preparing(self) -> None:
        """Begin with what makes answers faster, in the background."""

    def count_tokens(self, conversation: Conversation, *, add_generation_prompt: bool = True) -> int | None:
        """How long the conversation is as the model sees it; None if nobody can tell."""

    def opens_reasoning(self, conversation: Conversation) -> bool:
        """Whether the answer to it begins inside a reasoning block."""

    def stream(self, conversation: Conversation, settings: Settings) -> Generator[AnswerDelta, None, None]:
        """Answer; closing the generator ends the work on it.

        Raises:
            NanoserveError: if there is no answer, or none any more.
        """


class LocalModel:
    """An LLM in this process."""

    def __init__(self, llm: "LLM") -> None:
        self.llm = llm
        self.name = llm.model_name
        self.defaults: SamplingParams | None = llm.default_sampling_params()

    @property
    def context(self) -> int | None:
        return self.llm.max_model_len

    def start_preparing(self) -> None:
        self.llm.start_preparing()

    def count_tokens(self, conversation: Conversation, *, add_generation_prompt: bool = True) -> int | None:
        return len(self.llm.tokenizer.encode_chat(conversation, add_generation_prompt=add_generation_prompt))

    def opens_reasoning(self, conversation: Conversation) -> bool:
        from nanoserve.text.reasoning import opens_reasoning

        return opens_reasoning(self.llm.tokenizer.render_chat(conversation))

    def stream(self, conversation: Conversation, settings: Settings) -> Generator[AnswerDelta, None, None]:
        tokens = 0
        params = sampling_params(self.llm.default_sampling_params(), dict(settings))
        with closing(self.llm.stream(conversation, params)) as stream:
            for output in stream:
                sample = output.outputs[0]
                if sample.error is not None:
                    raise RuntimeFailure(sample.error)
                tokens += len(sample.token_ids)
                yield AnswerDelta(sample.text, "", Usage.of(output, tokens), sample.finish_reason)


class RemoteModel:
    """A model behind an OpenAI-compatible server.

    Args:
        client: of the server.
        model: its name there; None takes the first that the server lists.
        notify: called with a line if there are several to choose from.
        clock: seconds; the times of an answer are those that the user sees, the network included.

    Raises:
        NanoserveError: if the server cannot be reached, lets us not in, or lists no model.
    """

    def __init__(
        self,
        client: "ApiClient",
        model: str | None,
        notify: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from nanoserve.client.models import served_model

        self._client = client
        self._clock = clock
        self._api, self._root = client.address.api, client.address.root
        self._can_count = True
        self.defaults: SamplingParams | None = None
        card = served_model(client, model, notify)
        self._id, self.name, self.context = card.id, card.name, card.max_model_len

    def start_preparing(self) -> None:
        """The server has done that."""

    def count_tokens(self, conversation: Conversation, *, add_generation_prompt: bool = True) -> int | None:
        """By /tokenize, which ours and vLLM have."""
        from nanoserve.client.connection import ServerRefused
        from nanoserve.client.models import NO_SUCH_PATH

        if not self._can_count or self.context is None:
            return None
        body = {"model": self._id, "messages": conversation, "add_generation_prompt": add_generation_prompt}
        try:
            counted = self._client.post(f"{self._root}/tokenize", body)
        except ServerRefused as error:
            self._can_count = error.status not in NO_SUCH_PATH
            return None
        count = counted.get("count") if isinstance(counted, dict) else None
        return count if isinstance(count, int) else None

    def opens_reasoning(self, conversation: Conversation) -> bool:
        """Nobody but the server sees the prompt that it makes."""
        return False

    def stream(self, conversation: Conversation, settings: Settings) -> Generator[AnswerDelta, None, None]:
        """Only what the user has set is sent: servers differ in what they know."""
        from nanoserve.client.connection import ServerRefused

        body = {"model": self._id, "messages": conversation, "stream": True} | dict(settings)
        body["stream_options"] = {"include_usage": True}
        progress = _RemoteAnswer(self._clock)
        try:
            with closing(self._client.stream(f"{self._api}/chat/completions", body)) as chunks:
                for chunk in chunks:
                    if (delta := progress.take(chunk)) is not None:
                        yield delta
        except ServerRefused as error:
            raise ContextFull(str(error)) if error.context_full else error from None


class _RemoteAnswer:
    """Times and tokens of one answer, by our clock and the server's counting."""

    def __init__(self, clock: Callable[[], float]) -> None:
        from nanoserve.client.events import ServerUsage

        self._clock = clock
        self._asked = clock()
        self._first: float | None = None
        self._last: float | None = None
        self._ended: float | None = None
        self._chunks = 0
        self._reason: str | None = None
        self._counted = ServerUsage()

    def take(self, chunk: "Chunk") -> AnswerDelta | None:
        """What the chunk brings; None if that is nothing."""
        choice = chunk.choices[0] if chunk.choices else None
        text, thinking = (choice.answer, choice.thinking) if choice else ("", "")
        reason = choice.finish_reason if choice else None
        if text or thinking:
            self._last = self._clock()
            self._first = self._last if self._first is None else self._first
            self._chunks += 1
        if reason:
            self._reason, self._ended = reason, self._clock()
        if chunk.usage is not None:
            self._counted = chunk.usage
        if not (text or thinking or reason or chunk.usage):
            return None
        return AnswerDelta(text, thinking, self._usage(), self._reason)

    def _usage(self) -> Usage:
        """Until the server has told, chunks stand for tokens."""
        from nanoserve.request import RequestMetrics

        tokens = self._counted.completion_tokens
        tokens = self._chunks if tokens is None else tokens
        metrics = RequestMetrics(self._asked, None, self._first, self._last, self._ended, tokens)
        return Usage(self._counted.prompt_tokens, self._counted.cached_tokens, tokens, metrics)
