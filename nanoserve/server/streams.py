"""One request as the front end follows it: the engine's updates come in, text goes out."""

import asyncio
import time
from collections.abc import AsyncIterator
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from nanoserve.errors import NanoserveError
from nanoserve.outputs import RequestTracker, TokenDecoder
from nanoserve.request import FinishReason, Request, RequestOutput, Sequence, SequenceUpdate, Status
from nanoserve.server.messages import Add, Ending, SampleUpdate


class RequestStream:
    """A running request. The engine client feeds it; whoever made the request reads it."""

    def __init__(self, request: Request, tokenizer: TokenDecoder, news: asyncio.Event) -> None:
        self.request = request  # as the first engine got it
        self.sent = False  # whether the engine that lives now has it
        self.gaps: list[float] = []  # seconds from each token to the next, of all samples
        # of each sample that has a token, in seconds of the monotonic clock.
        self.last_token_times: dict[int, float] = {}
        self._tracker = RequestTracker(request, tokenizer)
        # What the engine knows of its sequences, as far as it has told.
        self.samples = [Sequence(index, request, index, list(request.prompt)) for index in range(request.params.n)]
        self._ended: set[int] = set()
        self._failure: NanoserveError | None = None
        self.news = news  # set whenever something comes; streams that one reader follows share it

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def finished(self) -> bool:
        """Whether there is nothing more to come."""
        return self._tracker.finished or self._failure is not None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from the prefix cache."""
        return self.samples[0].cached_tokens

    def finish_reasons(self) -> list[str]:
        """Of each sample, for the books; a sample that was given up counts as aborted."""
        met_stop_string = FinishReason.STOP.value
        reasons = [sample.finish_reason for sample in self.samples]
        return [
            reason.value if reason else met_stop_string if index in self._ended else FinishReason.ABORT.value
            for index, reason in enumerate(reasons)
        ]

    def take(self, update: SampleUpdate) -> bool:
        """Add what an update brings; true if the sample's text met a stop string, so that the engine must end it."""
        if update.index in self._ended:
            return False
        sample, now = self.samples[update.index], time.monotonic()
        _bring_up_to_date(sample, update, now)
        if update.tokens:
            if update.index in self.last_token_times:
                self.gaps.append(now - self.last_token_times[update.index])
            self.last_token_times[update.index] = now
        news = SequenceUpdate(self.request_id, update.index, update.tokens, sample)
        met_stop_string = self._tracker.take(news, now)
        if met_stop_string or update.ending is not None:
            self._ended.add(update.index)
        self.news.set()
        return met_stop_string

    def fail(self, error: NanoserveError) -> None:
        """There will be no more updates; the reader gets what came so far, then the error."""
        self._failure = self._failure or error
        self.news.set()

    def resumed(self) -> Add:
        """The command with which another engine goes on where the last one died."""
        outputs = tuple(tuple(sample.output_tokens) for sample in self.samples)
        return Add(replace(self.request, resumed=outputs), tuple(sorted(self._ended)))

    def pending(self) -> RequestOutput | None:
        """What the oldest step brought that no call has told of, if anything.

        Raises:
            NanoserveError: once everything has been seen, if the request could not go on.
        """
        if self._tracker.has_news:
            return self._tracker.delta()
        if self._failure is not None:
            raise self._failure
        return None

    @property
    def exhausted(self) -> bool:
        """Whether ``pending`` has nothing more to say, now or later."""
        return self._tracker.finished and not self._tracker.has_news

    def whole(self) -> RequestOutput:
        """Everything so far.

        Raises:
            NanoserveError: if the request could not go on.
        """
        if self._failure is not None:
            raise self._failure
        return self._tracker.whole()


async def deltas(streams: SequenceOf[RequestStream]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """(place of the stream, what a step brought it), one after the other, until all have ended.

    Raises:
        NanoserveError: if one of them cannot go on.
    """
    news = streams[0].news
    while not all(stream.exhausted for stream in streams):
        news.clear()
        for place, stream in enumerate(streams):
            if (output := stream.pending()) is not None:
                news.set()  # there may be more of it
                yield place, output
        await news.wait()


async def wholes(streams: SequenceOf[RequestStream]) -> list[RequestOutput]:
    """The whole outputs, when all have ended; raises as ``deltas`` does."""
    news = streams[0].news
    while not all(stream.finished for stream in streams):
        news.clear()
        await news.wait()
    return [stream.whole() for stream in streams]


def _bring_up_to_date(sample: Sequence, update: SampleUpdate, now: float) -> None:
    sample.tokens += update.tokens
    sample.logprobs += update.logprobs
    if not sample.prompt_logprobs:
        sample.prompt_logprobs += update.prompt_logprobs
    if sample.first_scheduled_time is None:
        sample.first_scheduled_time = update.started
        sample.cached_tokens = update.cached_tokens
    if update.tokens and sample.first_token_time is None:
        sample.first_token_time = now
    if update.ending is not None:
        _end(sample, update.ending, now)


def _end(sample: Sequence, ending: Ending, now: float) -> None:
    sample.move_to(Status.FINISHED)
    sample.finish_reason, sample.stop_token, sample.error = ending.reason, ending.stop_token, ending.error
    sample.finished_time = now
