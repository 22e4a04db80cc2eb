"""A model that answers behind a server that speaks OpenAI's API, with the interface of
`LocalModel`."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from http import HTTPStatus
from typing import Any, TypeVar

from nanoserve.commands.answers import (
    Answers,
    AnswerUsage,
    ChatAnswer,
    ContextFull,
    Conversation,
    Settings,
)
from nanoserve.commands.state_line import StateLine
from nanoserve.errors import UsageError, did_you_mean, shown
from nanoserve.request import RequestMetrics, SamplingParams
from nanoserve.server.client.connection import (
    NO_SUCH_PATH,
    ApiClient,
    ServerRefused,
    served_model,
    served_models,
)
from nanoserve.server.client.events import ChunkChoice, ServerUsage
from nanoserve.text.answers.forms import AnswerParser, answer_form
from nanoserve.utils.interrupts import prompt_interrupts
from nanoserve.utils.waiting import Waiting

T = TypeVar("T")
_LONGEST_WAIT_SECONDS = 1800  # large models load for minutes


class RemoteModels:
    """The models of a server. The first is ``wanted``, which need not be listed: some servers have
    more models than they list."""

    def __init__(
        self, client: ApiClient, wanted: str | None, notify: Callable[[str], None]
    ) -> None:
        self._client, self._wanted, self._notify = client, wanted, notify

    def first(self) -> "RemoteModel":
        with _connecting():
            return RemoteModel(self._client, self._wanted, self._notify)

    def open(self, name: str) -> "RemoteModel":
        with _connecting():
            names = [card.id for card in served_models(self._client)]
            if name in names:
                return RemoteModel(self._client, name, self._notify)
        guess = did_you_mean(name, names)
        raise UsageError(f"the server lists no model {shown(name)}{guess}; /models lists them")

    def listed(self) -> Iterable[tuple[str, str]]:
        for card in served_models(self._client):
            context = "" if card.max_model_len is None else f"context of {card.max_model_len:,}"
            yield card.name, context


class RemoteModel:
    """A model behind an OpenAI-compatible server; if none is named, the first that the server
    lists.

    ``notify`` gets a line if there are several to choose from, and when the server is waited for.
    Times are those that the user sees, the network included. Raises NanoserveError if the server
    cannot be reached or lists no model.
    """

    defaults: SamplingParams | None = None  # only the server knows them, and its seed
    seed: int | None = None
    can_switch_thinking = True  # nobody but the server knows its template

    def __init__(
        self,
        client: ApiClient,
        model: str | None,
        notify: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._client, self._notify, self._clock, self._sleep = client, notify, clock, sleep
        self._can_count = True
        self._waiting: Waiting | None = None
        self.thinking: bool | None = None  # None leaves it to the server whether the model reasons
        self._look_up(model)

    def start(
        self,
        failed: Callable[[BaseException], None] = lambda error: None,
        before: Callable[[], object] = lambda: None,
    ) -> None:
        """The server has opened the model."""
        before()

    @property
    def waiting(self) -> Waiting | None:
        """Tell what an answer waits for now, as far as this side knows."""
        return self._waiting

    def wait(self) -> None:
        """The server makes requests wait while it loads."""

    def close(self) -> None:
        """Nothing stays open."""

    def count_tokens(
        self, conversation: Conversation, *, add_generation_prompt: bool = True
    ) -> int | None:
        """By /tokenize, which ours and vLLM have."""
        if not self._can_count or self.context is None:
            return None
        return self._count(
            {"messages": conversation, "add_generation_prompt": add_generation_prompt}
        )

    def count_text(self, text: str) -> int | None:
        """Count the tokens of a text by itself."""
        if not self._can_count or self.context is None:
            return None
        return self._count({"prompt": text, "add_special_tokens": False})

    def _count(self, body: dict[str, Any]) -> int | None:
        path = f"{self._client.address.root}/tokenize"
        try:
            counted = self._client.ask(path, {"model": self._id} | body)
        except ServerRefused as error:
            self._can_count = error.status not in NO_SUCH_PATH
            return None
        if not isinstance(counted, dict) or not isinstance(counted.get("count"), int):
            return None
        return int(counted["count"])

    def again(self) -> "RemoteModel":
        """The model: a server has it open all the time."""
        return self

    def answer_parser(self, _: Conversation) -> AnswerParser:
        """A parser for an answer whose reasoning the server has told apart, or left between the
        usual tags."""
        return AnswerParser(answer_form(""), {})

    def stream(self, conversation: Conversation, settings: Settings) -> Answers:
        """Send only what the user has set; ask a server again that is loading and says when to come
        again."""
        body = {"model": self._id, "messages": conversation, "stream": True, **settings}
        body["stream_options"] = {"include_usage": True}
        # the names of Qwen, GLM and Gemma, and of Granite and DeepSeek
        if self.thinking is not None:
            body["chat_template_kwargs"] = {
                "enable_thinking": self.thinking,
                "thinking": self.thinking,
            }
        waited = 0
        self._waiting = Waiting("waiting for the server")
        while True:
            try:
                for delta in _interruptible(self._answer(body)):
                    if waited:  # a server that was loading did not know its context
                        waited = 0
                        self._look_up(self._id)
                    yield delta
                return
            except ServerRefused as error:
                if error.context_full:
                    raise ContextFull(str(error)) from None
                is_loading = (
                    error.status == HTTPStatus.SERVICE_UNAVAILABLE and error.retry_after is not None
                )
                if not is_loading or waited >= _LONGEST_WAIT_SECONDS:
                    raise
                if not waited:
                    self._notify(f"{error}: asking again until it answers, Ctrl-C gives up")
                self._waiting = Waiting("waiting until the server is ready")
                pause = max(1, error.retry_after or 0)
                with prompt_interrupts():
                    self._sleep(pause)
                waited += pause

    def _answer(self, body: dict[str, Any]) -> Answers:
        """Times are by our clock. Until the server tells how many tokens there are, chunks stand
        for them."""
        asked, counted = self._clock(), ServerUsage()
        times: list[float] = []  # of the chunks with text
        ended: float | None = None
        reason: str | None = None
        with closing(
            self._client.stream(f"{self._client.address.api}/chat/completions", body)
        ) as chunks:
            for chunk in chunks:
                choice = chunk.choices[0] if chunk.choices else ChunkChoice()
                has_text = bool(choice.answer or choice.thinking)
                if has_text:
                    times.append(self._clock())
                if choice.finish_reason:
                    reason, ended = choice.finish_reason, self._clock()
                elif not has_text and not chunk.usage:
                    continue
                counted = chunk.usage or counted
                tokens = (
                    len(times) if counted.completion_tokens is None else counted.completion_tokens
                )
                first = last = None
                if times:
                    first, last = times[0], times[-1]
                metrics = RequestMetrics(asked, None, first, last, ended, tokens)
                usage = AnswerUsage(counted.prompt_tokens, counted.cached_tokens, tokens, metrics)
                yield ChatAnswer(choice.answer, choice.thinking, usage, reason)

    def _look_up(self, model: str | None) -> None:
        card = served_model(self._client, model, self._notify)
        self._id, self.name, self.context = card.id, card.name, card.max_model_len


def _connecting() -> StateLine:
    return StateLine(lambda: Waiting("connecting"))


def _interruptible(stream: Iterator[T]) -> Iterator[T]:
    """The stream; Ctrl-C ends the wait for its next item, which may be long."""
    while True:
        with prompt_interrupts():
            item = next(stream, None)
        if item is None:
            return
        yield item
