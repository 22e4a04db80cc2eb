"""What a user reads, made from the engine's token updates with a tokenizer: text, stop strings, log probabilities,
times. It runs beside the engine (LLM) or in another process (a server), never inside a step."""

from collections import deque
from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from functools import lru_cache
from typing import Protocol

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

MAX_DELTAS = 64  # deltas of a sample that may wait for their reader. Later updates are merged into the last one

_REPLACEMENT = "\ufffd"
_PROMPT_WINDOW = 6
"""Prompt tokens that tell how the first generated token joins the prompt: with a blank or without."""


class TokenDecoder(Protocol):
    """The part of a Tokenizer that detokenizing needs; see `nanoserve.text.backends.Backend`."""

    special_ids: frozenset[int]
    vocab_size: int

    @property
    def markers(self) -> Collection[int]: ...

    def decode(self, token_ids: SequenceOf[int], *, skip_special_tokens: bool = True) -> str: ...

    def is_byte(self, token_id: int) -> bool: ...


class Detokenizer:
    """Turns a growing list of token ids into text that never ends in half a character.

    All pushes and the flush, joined, equal the text of all ids decoded at once. The text of a token depends only on
    its neighbours. So each push decodes a short window: the ids of the last complete text, then the new ones. The text
    beyond the known part of the window is new. Time per token does not grow with the output.
    """

    def __init__(self, tokenizer: TokenDecoder, prompt_ids: SequenceOf[int] = ()) -> None:
        """`prompt_ids`: what the output continues; without them it is decoded as the beginning of a text."""
        self._tokenizer = tokenizer
        self._window = self._readable(prompt_ids[-4 * _PROMPT_WINDOW :])[-_PROMPT_WINDOW:]
        self._known_ids = len(self._window)
        # Half a character at the end of the prompt is completed by the output.
        self._emitted = len(tokenizer.decode(self._window).rstrip(_REPLACEMENT))

    def push(self, token_ids: SequenceOf[int]) -> str:
        """The text that these ids complete; empty while a character is incomplete."""
        new = self._readable(token_ids)
        if not new:
            return ""
        self._window += new
        # A run of byte tokens is decoded as a whole, and its text is known only when the run has ended.
        if self._tokenizer.is_byte(self._window[-1]):
            return ""
        text = self._tokenizer.decode(self._window)
        complete = text.removesuffix(_REPLACEMENT)
        fresh = complete[self._emitted :]
        self._emitted += len(fresh)
        if fresh and complete == text:
            self._window = self._window[self._known_ids :]
            self._known_ids = len(self._window)
            self._emitted = len(self._tokenizer.decode(self._window))
        return fresh

    def flush(self) -> str:
        """The rest, at the end of the output; bytes that never became a character read as U+FFFD."""
        text = self._tokenizer.decode(self._window)
        fresh = text[self._emitted :]
        self._emitted = len(text)
        return fresh

    def cut(self) -> str:
        """The text before a marker token, as `flush`. What follows does not complete a character before it."""
        fresh = self.flush()
        if self._tokenizer.decode(self._window).endswith(_REPLACEMENT):
            self._window, self._emitted = [], 0
        self._known_ids = len(self._window)
        return fresh

    def _readable(self, token_ids: SequenceOf[int]) -> list[int]:
        """The ids that have a text: no control tokens, no rows that only pad the embedding."""
        skipped, vocab_size = self._tokenizer.special_ids, self._tokenizer.vocab_size
        return [token for token in token_ids if token not in skipped and token < vocab_size]


class _StopString:
    """A stop string that texts are searched for as they grow, each character once (Knuth, Morris, Pratt 1977)."""

    def __init__(self, text: str) -> None:
        self.text = text
        # By the length of a beginning: the longest shorter beginning that it ends with.
        self._shorter = [0, 0]
        for last in text[1:-1]:
            length = self._shorter[-1]
            while length and text[length] != last:
                length = self._shorter[length]
            self._shorter.append(length + 1 if text[length] == last else 0)

    def advance(self, matched: int, new: str) -> tuple[int, int | None]:
        """Read the ``new`` end of a text that ended with the first ``matched`` characters. Returns with how many it
        ends now, and how many of the new ones complete the string, if they do."""
        text, place = self.text, 0
        while place < len(new):
            if not matched and (place := new.find(text[0], place)) < 0:
                return 0, None
            while matched and text[matched] != new[place]:
                matched = self._shorter[matched]
            if text[matched] == new[place]:
                matched += 1
            place += 1
            if matched == len(text):
                return matched, place
        return matched, None


_stop_string = lru_cache(256)(_StopString)
"""The samples of a request share its stop strings, and so do the requests for its prompts."""


class StopStrings:
    """Passes text on until a stop string appears, without it; holds back an end that may be the beginning of one.

    The first one to be complete wins; if several are complete at once, the one that began first wins. There may be no
    stop strings, but no empty ones, which SamplingParams refuses.
    """

    def __init__(self, stops: SequenceOf[str]) -> None:
        self._stops = [_stop_string(stop) for stop in stops]
        self._matched = [0] * len(stops)  # of each, how many characters the text ends with
        self._held = ""
        self._stopped: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that is safe to show, the stop string that was met or None). After a match all text is dropped."""
        if self._stopped is not None:
            return "", self._stopped
        ends: dict[str, int] = {}
        for number, stop in enumerate(self._stops):
            self._matched[number], end = stop.advance(self._matched[number], text)
            if end is not None:
                ends[stop.text] = len(self._held) + end
        known = self._held + text
        if ends:
            self._held, self._stopped = "", min(ends, key=lambda stop: (ends[stop], -len(stop)))
            return known[: ends[self._stopped] - len(self._stopped)], self._stopped
        cut = len(known) - max(self._matched, default=0)
        self._held = known[cut:]
        return known[:cut], None

    def flush(self) -> str:
        """The text that was held back, where the text ends or a marker stands: it was no stop string after all."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held


class _Sample:
    """One sample of a request, as text."""

    def __init__(self, request: Request, index: int, tokenizer: TokenDecoder) -> None:
        self.index = index
        self._params = request.params
        self._arrival_time = request.arrival_time
        self._markers = tokenizer.markers
        self._detokenizer = Detokenizer(tokenizer, request.prompt)
        self._stops = StopStrings(request.params.stop)
        self._text: list[str] = []
        self._marks: list[tuple[int, int]] = []  # the number of pieces of text before a marker token, and its id
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._sequence: Sequence | None = None
        self._last_token_time: float | None = None
        self._shown_text = 0
        self._shown_tokens = 0
        self._deltas: deque[tuple[int, int, bool]] = deque()  # pieces of text, tokens, and whether it ended, by update
        self.stop_string: str | None = None
        self.finished = False

    def take(self, update: SequenceUpdate, now: float) -> None:
        """Add an update; sets ``stop_string`` when the text meets one."""
        self._sequence = update.sequence
        if self.finished:
            return
        self._take(update, now)
        if update.new_tokens or self.finished:
            if len(self._deltas) == MAX_DELTAS:
                self._deltas.pop()
            self._deltas.append((len(self._text), len(self._tokens), self.finished))

    def _take(self, update: SequenceUpdate, now: float) -> None:
        if update.new_tokens:
            self._last_token_time = now
        logprobs = update.sequence.logprobs
        for token in update.new_tokens:
            self._tokens.append(token)
            self._logprobs += logprobs[len(self._tokens) - 1 : len(self._tokens)]
            if token in self._markers:
                self._mark(token)
            elif not (update.finished and token == update.sequence.stop_token):
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

    def _mark(self, token: int) -> None:
        """Note a marker token after all text before it; no stop string reaches over it."""
        self._show(self._detokenizer.cut())
        if self.stop_string is None:
            self._text.append(self._stops.flush())
            self._marks.append((len(self._text), token))

    def delta(self) -> CompletionOutput:
        """The oldest update that no delta has returned yet."""
        text, tokens = self._shown_text, self._shown_tokens
        self._shown_text, self._shown_tokens, ended = self._deltas.popleft()
        new = slice(tokens, self._shown_tokens)
        pieces = slice(text, self._shown_text)
        return self._output(pieces, self._tokens[new], self._logprobs[new], ended=ended)

    def whole(self) -> CompletionOutput:
        pieces = slice(0, len(self._text))
        return self._output(pieces, self._tokens, self._logprobs, ended=self.finished)

    @property
    def has_news(self) -> bool:
        return bool(self._deltas)

    def _output(
        self, pieces: slice, tokens: list[int], logprobs: list[TokenLogprob], *, ended: bool
    ) -> CompletionOutput:
        begun, sequence = self._sequence, self._sequence if ended else None
        reason = None
        if sequence is not None:
            reason = FinishReason.STOP if self.stop_string is not None else sequence.finish_reason or FinishReason.STOP
        metrics = RequestMetrics(
            arrival_time=self._arrival_time,
            first_scheduled_time=begun.first_scheduled_time if begun else None,
            first_token_time=begun.first_token_time if begun else None,
            last_token_time=self._last_token_time,
            finished_time=begun.finished_time if begun else None,
            output_tokens=len(self._tokens),
        )
        return CompletionOutput(
            index=self.index,
            text="".join(self._text[pieces]),
            token_ids=tuple(tokens),
            logprobs=None if self._params.logprobs is None else tuple(logprobs),
            finish_reason=None if reason is None else reason.value,
            stop_reason=None if sequence is None else self.stop_string or sequence.stop_token,
            metrics=metrics,
            error=None if sequence is None else sequence.error,
            marks=tuple(
                (sum(map(len, self._text[pieces.start : before])), token)
                for before, token in self._marks
                if pieces.start < before <= pieces.stop
            ),
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
    """Collects the output of one request, sample by sample."""

    def __init__(self, request: Request, tokenizer: TokenDecoder, *, prompt: str | None = None) -> None:
        self.request = request
        self._prompt = prompt
        self._samples = [_Sample(request, index, tokenizer) for index in range(request.params.n)]

    @property
    def finished(self) -> bool:
        """Whether every sample has ended."""
        return all(sample.finished for sample in self._samples)

    def take(self, update: SequenceUpdate, now: float) -> bool:
        """Add an update that came at ``now``, in seconds on the engine's clock. True if the sample met a stop string,
        so that the engine must end it."""
        sample = self._samples[update.index]
        sample.take(update, now)
        return sample.stop_string is not None and not update.finished

    def delta(self) -> RequestOutput:
        """The oldest unread update of each sample that has one."""
        outputs = [sample.delta() for sample in self._samples if sample.has_news]
        return self._output(outputs, finished=self.finished and not self.has_news)

    @property
    def has_news(self) -> bool:
        """Whether any sample has an unread update."""
        return any(sample.has_news for sample in self._samples)

    def whole(self) -> RequestOutput:
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
