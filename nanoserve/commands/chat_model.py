"""The model of a chat, in this process or behind a server that speaks OpenAI's API; the chat sees no difference."""

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from http import HTTPStatus
from typing import Any

import nanoserve
from nanoserve.client.connection import NO_SUCH_PATH, ApiClient, ServerRefused, served_model
from nanoserve.client.events import ChunkChoice, ServerUsage
from nanoserve.commands.engine_options import sampling_params
from nanoserve.commands.usage import AnswerUsage, ChatAnswer
from nanoserve.errors import RuntimeFailure
from nanoserve.request import RequestMetrics, SamplingParams
from nanoserve.text.reasoning import opens_reasoning

Conversation = Sequence[Mapping[str, str]]
Settings = Mapping[str, Any]
Answers = Generator[ChatAnswer, None, None]
"""What is new of an answer, each time; closing the generator ends the work on it."""

_LONGEST_WAIT_SECONDS = 1800  # large models load for minutes


class ContextFull(RuntimeFailure):
    """The conversation does not fit into the context; only a server of which no context is known finds out so late."""


class LocalModel:
    """An open LLM in this process; the user's ``seed`` is what the seeds of answers are drawn from."""

    def __init__(self, llm: "nanoserve.LLM", seed: int | None = None) -> None:
        self.llm = llm
        self.seed = seed
        self.name = llm.model_name
        self.defaults: SamplingParams | None = llm.default_sampling_params()

    @property
    def context(self) -> int | None:
        """The most tokens of prompt and answer together; None where that is not known."""
        return self.llm.max_model_len

    def start_preparing(self) -> None:
        """Begin with what makes answers faster, in the background."""
        self.llm.start_preparing()

    def count_tokens(self, conversation: Conversation, *, add_generation_prompt: bool = True) -> int | None:
        """How long the conversation is as the model sees it; None if nobody can tell."""
        return len(self.llm.tokenizer.encode_chat(conversation, add_generation_prompt=add_generation_prompt))

    def opens_reasoning(self, conversation: Conversation) -> bool:
        """Whether the answer to it begins inside a reasoning block."""
        return opens_reasoning(self.llm.tokenizer.render_chat(conversation))

    def stream(self, prompt: str | Conversation, settings: Settings) -> Answers:
        """Answer. Raises NanoserveError if there is no answer, or none any more."""
        tokens = 0
        params = sampling_params(self.llm.default_sampling_params(), settings)
        with closing(self.llm.stream(prompt, params)) as stream:
            for output in stream:
                sample = output.outputs[0]
                if sample.error is not None:
                    raise RuntimeFailure(sample.error)
                tokens += len(sample.token_ids)
                yield ChatAnswer(sample.text, "", AnswerUsage.of(output, tokens), sample.finish_reason)


class RemoteModel:
    """A model behind an OpenAI-compatible server; if none is named, the first that the server lists.

    ``notify`` gets a line if there are several to choose from, and when the server is waited for. Times are those that
    the user sees, the network included. Raises NanoserveError if the server cannot be reached or lists no model.
    """

    def __init__(
        self,
        client: ApiClient,
        model: str | None,
        notify: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._client, self._notify = client, notify
        self._clock, self._sleep = clock, sleep
        self._can_count = True
        self.defaults: SamplingParams | None = None
        self.seed: int | None = None  # of the server nobody knows it
        self._look_up(model)

    def start_preparing(self) -> None:
        """The server has done that."""

    def count_tokens(self, conversation: Conversation, *, add_generation_prompt: bool = True) -> int | None:
        """By /tokenize, which ours and vLLM have."""
        if not self._can_count or self.context is None:
            return None
        body = {"model": self._id, "messages": conversation, "add_generation_prompt": add_generation_prompt}
        try:
            counted = self._client.ask(f"{self._client.address.root}/tokenize", body)
        except ServerRefused as error:
            self._can_count = error.status not in NO_SUCH_PATH
            return None
        count = counted.get("count") if isinstance(counted, dict) else None
        return count if isinstance(count, int) else None

    def opens_reasoning(self, conversation: Conversation) -> bool:
        """Nobody but the server sees the prompt that it makes."""
        return False

    def stream(self, conversation: Conversation, settings: Settings) -> Answers:
        """Send only what the user has set; ask a server again that is loading and says when to come again."""
        body = {"model": self._id, "messages": conversation, "stream": True} | dict(settings)
        body["stream_options"] = {"include_usage": True}
        waited = 0
        while True:
            try:
                for delta in self._answer(body):
                    if waited:  # a server that was loading did not know its context
                        waited = 0
                        self._look_up(self._id)
                    yield delta
                return
            except ServerRefused as error:
                if error.context_full:
                    raise ContextFull(str(error)) from None
                waited += self._wait(error, waited)

    def _wait(self, error: ServerRefused, waited: int) -> int:
        """Wait the seconds that a loading server asks for, and return them; raise ``error`` for other refusals."""
        not_ready = error.status == HTTPStatus.SERVICE_UNAVAILABLE and error.retry_after is not None
        if not not_ready or waited >= _LONGEST_WAIT_SECONDS:
            raise error
        if not waited:
            self._notify(f"{error}: asking again until it answers, Ctrl-C gives up")
        pause = max(1, error.retry_after or 0)
        self._sleep(pause)
        return pause

    def _answer(self, body: dict[str, Any]) -> Answers:
        """Times are by our clock. Until the server tells how many tokens there are, chunks stand for them."""
        asked, received, counted = self._clock(), 0, ServerUsage()
        first: float | None = None
        last: float | None = None
        ended: float | None = None
        reason: str | None = None
        with closing(self._client.stream(f"{self._client.address.api}/chat/completions", body)) as chunks:
            for chunk in chunks:
                choice = chunk.choices[0] if chunk.choices else ChunkChoice()
                if has_text := bool(choice.answer or choice.thinking):
                    last = self._clock()
                    first = last if first is None else first
                    received += 1
                if choice.finish_reason:
                    reason, ended = choice.finish_reason, self._clock()
                elif not (has_text or chunk.usage):
                    continue
                counted = chunk.usage or counted
                tokens = received if counted.completion_tokens is None else counted.completion_tokens
                metrics = RequestMetrics(asked, None, first, last, ended, tokens)
                usage = AnswerUsage(counted.prompt_tokens, counted.cached_tokens, tokens, metrics)
                yield ChatAnswer(choice.answer, choice.thinking, usage, reason)

    def _look_up(self, model: str | None) -> None:
        """What the server says about the model."""
        card = served_model(self._client, model, self._notify)
        self._id, self.name, self.context = card.id, card.name, card.max_model_len


ChatModel = LocalModel | RemoteModel
