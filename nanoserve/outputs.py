"""From the engine's token updates to what a user reads: text, stop strings, log probabilities, times.

This is the half of the work that needs a tokenizer. It runs beside the engine (LLM) or in another process (a
server), never inside a step.
"""

from collections import deque
from collections.abc import Sequence as SequenceOf

from nanoserve.request import (
    CompletionOutput,
    FinishReason,
    Request,
    RequestMetrics,
    RequestOutput,
    Sequence,
    SequenceUpdate,
    TokenLogprob,
)
from nanoserve.text.detokenizer import Decoder, Detokenizer
from nanoserve.text.stop_strings import StopStrings

MOST_PIECES = 64
"""Deltas of a sample that wait for their reader; what comes after them is merged with the last one."""


class _Sample:
    """One sample of a request, as text."""

    def __init__(self, request: Request, index: int, tokenizer: Decoder) -> None:
        self.index = index
        self._params = request.params
        self._arrival_time = request.arrival_time
        self._detokenizer = Detokenizer(tokenizer, request.prompt)
        self._stops = StopStrings(request.params.stop)
        self._text: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._sequence: Sequence | None = None
        self._last_token_time: float | None = None
        self._shown_text = 0
        self._shown_tokens = 0
        self._pieces: deque[tuple[int, int, bool]] = deque()  # text, tokens and whether it ended, after each update
        self.stop_string: str | None = None
        self.finished = False

    def take(self, update: SequenceUpdate, now: float) -> None:
        """Add what an update brings; sets ``stop_string`` when the text meets one."""
        self._sequence = update.sequence
        if self.finished:
            return
        self._take(update, now)
        if update.new_tokens or self.finished:
            if len(self._pieces) == MOST_PIECES:
                self._pieces.pop()
            self._pieces.append((len(self._text), len(self._tokens), self.finished))

    def _take(self, update: SequenceUpdate, now: float) -> None:
        if update.new_tokens:
            self._last_token_time = now
        logprobs = update.sequence.logprobs
        for token in update.new_tokens:
            self._tokens.append(token)
            self._logprobs += logprobs[len(self._tokens) - 1 : len(self._tokens)]
            if not (update.finished and token == update.sequence.stop_token):
                self._show(self._detokenizer.push([token]))
            if self.stop_string is not None:
                self.finished = True
                return
        if update.finished:
            self._show(self._detokenizer.flush())
            if self.stop_string is None:
                self._text.append(self._stops.flush())
            self.finished = True

    def _show(self, text: str) -> None:
        if len(self._tokens) > self._params.min_tokens:
            text, self.stop_string = self._stops.push(text)
        self._text.append(text)

    def delta(self) -> CompletionOutput:
        """What the oldest update brought of which no delta has told."""
        text, tokens = self._shown_text, self._shown_tokens
        self._shown_text, self._shown_tokens, ended = self._pieces.popleft()
        new = slice(tokens, self._shown_tokens)
        return self._output(self._text[text : self._shown_text], self._tokens[new], self._logprobs[new], ended=ended)

    def whole(self) -> CompletionOutput:
        """All of it."""
        return self._output(self._text, self._tokens, self._logprobs, ended=self.finished)

    @property
    def has_news(self) -> bool:
        """Whether there is a delta to tell."""
        return bool(self._pieces)

    def _output(
        self, text: list[str], tokens: list[int], logprobs: list[TokenLogprob], *, ended: bool
    ) -> CompletionOutput:
        sequence = self._sequence if ended else None
        return CompletionOutput(
            index=self.index,
            text="".join(text),
            token_ids=tuple(tokens),
            logprobs=None if self._params.logprobs is None else tuple(logprobs),
            finish_reason=None if sequence is None else self._finish_reason(sequence),
            stop_reason=None if sequence is None else self.stop_string or sequence.stop_token,
            metrics=self._metrics(),
            error=None if sequence is None else sequence.error,
        )

    def _finish_reason(self, sequence: Sequence) -> str:
        if self.stop_string is not None or sequence.finish_reason is None:
            return FinishReason.STOP.value
        return sequence.finish_reason.value

    def _metrics(self) -> RequestMetrics:
        sequence = self._sequence
        return RequestMetrics(
            arrival_time=self._arrival_time,
            first_scheduled_time=sequence.first_scheduled_time if sequence else None,
            first_token_time=sequence.first_token_time if sequence else None,
            last_token_time=self._last_token_time,
            finished_time=sequence.finished_time if sequence else None,
            output_tokens=len(self._tokens),
        )

    @property
    def cached_tokens(self) -> int:
        return self._sequence.cached_tokens if self._sequence else 0

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob | None, ...] | None:
        if self._params.prompt_logprobs is None or self._sequence is None:
            return None
        return (None, *self._sequence.prompt_logprobs)


class RequestTracker:
    """Collects what becomes of one request."""

    def __init__(self, request: Request, tokenizer: Decoder, *, prompt: str | None = None) -> None:
        self.request = request
        self._prompt = prompt
        self._samples = [_Sample(request, index, tokenizer) for index in range(request.params.n)]

    @property
    def finished(self) -> bool:
        """Whether every sample has ended."""
        return all(sample.finished for sample in self._samples)

    def take(self, update: SequenceUpdate, now: float) -> bool:
        """Add what an update brings at ``now``, in seconds on the engine's clock.

        True if the sample met a stop string, so that the engine must end it.
        """
        sample = self._samples[update.index]
        sample.take(update, now)
        return sample.stop_string is not None and not update.finished

    def delta(self) -> RequestOutput:
        """What the oldest update brought that was not told yet, of each sample that has news."""
        outputs = [sample.delta() for sample in self._samples if sample.has_news]
        return self._output(outputs, finished=self.finished and not self.has_news)

    @property
    def has_news(self) -> bool:
        """Whether a delta would say anything."""
        return any(sample.has_news for sample in self._samples)

    def whole(self) -> RequestOutput:
        """Everything so far."""
        return self._output([sample.whole() for sample in self._samples], finished=self.finished)

    def _output(self, outputs: SequenceOf[CompletionOutput], *, finished: bool) -> RequestOutput:
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self._prompt,
            prompt_token_ids=self.request.prompt,
            outputs=outputs,
            finished=finished,
            cached_tokens=self._samples[0].cached_tokens,
            prompt_logprobs=self._samples[0].prompt_logprobs,
        )
