"""A running request in the front end: it takes the engine's updates and yields text."""

import asyncio
import time
from collections.abc import AsyncIterator
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from nanoserve.engine.outputs import RequestTracker, TokenDecoder
from nanoserve.errors import NanoserveError
from nanoserve.request import Request, RequestOutput, Sequence, SequenceUpdate, Status
from nanoserve.server.messages import Add, SampleUpdate


class RequestStream:
    """A running request. The engine client adds updates; an endpoint reads the outputs."""

    def __init__(self, request: Request, tokenizer: TokenDecoder, news: asyncio.Event) -> None:
        self.request = request  # the request that the first engine was given
        self.request_id = request.request_id
        self.sent = False  # whether the current engine has it
        self.gaps: list[float] = []  # seconds from one token to the next, in all samples
        self.news = news  # set at each update; the streams of one reader share it
        self.tracker = RequestTracker(request, tokenizer)
        # Copies of the engine's sequences as of their last updates, by sample. Each is made with
        # the first, as prompts may be long and samples many.
        self._samples: dict[int, Sequence] = {}
        # by sample, in seconds of the monotonic clock
        self._last_token_times: dict[int, float] = {}
        self._ended: set[int] = set()
        self.failure: NanoserveError | None = None

    @property
    def finished(self) -> bool:
        return self.tracker.finished or self.failure is not None

    def take(self, update: SampleUpdate) -> bool:
        """Add an update; true if the sample's text met a stop string, so that the engine must end
        it."""
        if update.index in self._ended:
            return False
        if update.index not in self._samples:
            self._samples[update.index] = Sequence(
                update.index, self.request, update.index, list(self.request.prompt)
            )
        sample = self._samples[update.index]
        now = time.monotonic()
        sample.tokens += update.tokens
        sample.logprobs += update.logprobs
        if update.prompt_logprobs:
            sample.keep_prompt_logprobs(update.prompt_start, update.prompt_logprobs)
        if sample.first_scheduled_time is None:
            sample.first_scheduled_time = update.started
            sample.cached_tokens = update.cached_tokens
        if update.finish_reason is not None:
            sample.move_to(Status.FINISHED)
            sample.finish_reason = update.finish_reason
            sample.stop_token = update.stop_token
            sample.error = update.error
            sample.finished_time = now
        if update.tokens:
            if sample.first_token_time is None:
                sample.first_token_time = now
            else:
                self.gaps.append(now - self._last_token_times[update.index])
            self._last_token_times[update.index] = now
        met_stop_string = self.tracker.take(
            SequenceUpdate(self.request_id, update.index, update.tokens, sample), now
        )
        if met_stop_string or sample.finished:
            self._ended.add(update.index)
        self.news.set()
        return met_stop_string

    def fail(self, error: NanoserveError) -> None:
        """End the stream: the reader gets the updates so far, then the error."""
        if self.failure is None:
            self.failure = error
        self.news.set()

    def resumed(self) -> Add:
        """The command that makes a new engine continue the request where the last engine died."""
        if not self._samples:
            return Add(self.request)
        known = {index: tuple(sample.output_tokens) for index, sample in self._samples.items()}
        outputs = tuple(known.get(index, ()) for index in range(self.request.params.n))
        return Add(replace(self.request, resumed=outputs), tuple(sorted(self._ended)))

    def whole(self) -> RequestOutput:
        """Everything so far. Raises NanoserveError if the request failed."""
        if self.failure is not None:
            raise self.failure
        return self.tracker.whole()


async def deltas(streams: SequenceOf[RequestStream]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """Yield (place of the stream, its oldest unread update) until all have ended.

    Raises NanoserveError after the last update of a stream whose request failed.
    """
    news = streams[0].news
    while any(stream.tracker.has_news or not stream.tracker.finished for stream in streams):
        news.clear()
        for place, stream in enumerate(streams):
            if stream.tracker.has_news:
                news.set()  # there may be another update
                yield place, stream.tracker.delta()
            elif stream.failure is not None:
                raise stream.failure
        await news.wait()


async def wholes(streams: SequenceOf[RequestStream]) -> list[RequestOutput]:
    """The whole outputs, once all streams have ended; raises as ``deltas`` does."""
    news = streams[0].news
    while not all(stream.finished for stream in streams):
        news.clear()
        await news.wait()
    return [stream.whole() for stream in streams]
