"""RequestTracker: turns the engine's token updates into text, stop strings, log probabilities and
times.

It runs beside the engine (LLM) or in another process (a server), never inside a step.
"""

from collections import deque
from collections.abc import Collection, Mapping
from collections.abc import Sequence as SequenceOf
from copy import copy
from dataclasses import replace
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

# deltas of a sample that may wait for their reader. Later updates are merged into the last one
MAX_DELTAS = 64
MASK = " _"
"""Stands in a draft for a token that is not settled. Lines may break before it."""
Canvas = SequenceOf[int | None]
"""New tokens of a canvas, None for each that is not settled."""

_REPLACEMENT = "\ufffd"
_LONGEST_WINDOW = 8
"""Ids that a Detokenizer decodes again with each new one, at most: more are dropped together, as
dropping some takes a second decoding."""
_PROMPT_WINDOW = 6
"""Prompt tokens that tell how the first generated token joins the prompt: with a blank or
without."""


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

    All pushes and the flush, joined, equal the text of all ids decoded at once. The text of a token
    depends only on its neighbours. So each push decodes a short window: at least the ids of the
    last complete text, then the new ones. The text beyond the known part of the window is new. Time
    per token does not grow with the output.
    """

    def __init__(self, tokenizer: TokenDecoder, prompt_ids: SequenceOf[int] = ()) -> None:
        """The output continues `prompt_ids`; without them it is decoded as the beginning of a
        text."""
        self._tokenizer = tokenizer
        self._window = self._readable(prompt_ids[-4 * _PROMPT_WINDOW :])[-_PROMPT_WINDOW:]
        self._known_ids = len(self._window)
        # Half a character at the end of the prompt is completed by the output.
        self._emitted = len(tokenizer.decode(self._window).rstrip(_REPLACEMENT))

    def copy(self) -> "Detokenizer":
        """Return one that goes on from here, and leaves this one as it is."""
        copied = copy(self)
        copied._window = list(self._window)
        return copied

    def push(self, token_ids: SequenceOf[int]) -> str:
        """Return the text that these ids complete; empty while a character is incomplete."""
        new = self._readable(token_ids)
        if not new:
            return ""
        self._window += new
        # A run of byte tokens is decoded as a whole, and its text is known only when the run has
        # ended.
        if self._tokenizer.is_byte(self._window[-1]):
            return ""
        text = self._tokenizer.decode(self._window)
        complete = text.removesuffix(_REPLACEMENT)
        fresh = complete[self._emitted :]
        self._emitted += len(fresh)
        if fresh and complete == text:
            if len(self._window) > _LONGEST_WINDOW:
                self._window = self._window[self._known_ids :]
                self._emitted = len(self._tokenizer.decode(self._window))
            self._known_ids = len(self._window)
        return fresh

    def flush(self) -> str:
        """Return the rest, at the end of the output; bytes that never became a character read as
        U+FFFD."""
        text = self._tokenizer.decode(self._window)
        fresh = text[self._emitted :]
        self._emitted = len(text)
        return fresh

    def cut(self) -> str:
        """Return the text before a marker token, as `flush`. Later ids do not complete a character
        before it."""
        fresh = self.flush()
        if self._tokenizer.decode(self._window).endswith(_REPLACEMENT):
            self._window = []
            self._emitted = 0
        self._known_ids = len(self._window)
        return fresh

    def _readable(self, token_ids: SequenceOf[int]) -> list[int]:
        """Leave out ids without a text: control tokens, and rows that only pad the embedding."""
        skipped, vocab_size = self._tokenizer.special_ids, self._tokenizer.vocab_size
        return [token for token in token_ids if token not in skipped and token < vocab_size]


class _StopString:
    """A stop string that texts are searched for as they grow, each character once (Knuth, Morris,
    Pratt 1977)."""

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
        """Read the ``new`` end of a text that ended with the first ``matched`` characters of the
        stop string.

        Returns the number of its characters with which the text ends now, and how many of the new
        ones complete the string, if they do.
        """
        text = self.text
        place = 0
        while place < len(new):
            if matched == 0:
                place = new.find(text[0], place)
                if place < 0:
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
    """Passes text on until a stop string appears, without it; holds back an end that may be the
    beginning of one.

    The first stop string to be complete wins; if several are complete at once, the one that began
    first wins. There may be no stop strings. SamplingParams refuses empty ones.
    """

    def __init__(self, stops: SequenceOf[str]) -> None:
        self._stops = [_stop_string(stop) for stop in stops]
        self._matched = [0] * len(stops)  # of each, how many characters the text ends with
        self._held = ""
        self._stopped: str | None = None

    def copy(self) -> "StopStrings":
        """Return one that goes on from here, and leaves this one as it is."""
        copied = copy(self)
        copied._matched = list(self._matched)
        return copied

    def push(self, text: str, *, early: bool = False) -> tuple[str, str | None]:
        """Return (text that is safe to show, the stop string that was met or None). After a match
        all text is dropped. In early text, that of a sample's first tokens, no stop string counts,
        and none begins."""
        if early or not self._stops:
            return text, None
        if self._stopped is not None:
            return "", self._stopped
        ends: dict[str, int] = {}
        for number, stop in enumerate(self._stops):
            self._matched[number], end = stop.advance(self._matched[number], text)
            if end is not None:
                ends[stop.text] = len(self._held) + end
        known = self._held + text
        if ends:
            first = min(ends, key=lambda stop: (ends[stop], -len(stop)))
            self._held, self._stopped = "", first
            return known[: ends[first] - len(first)], first
        cut = len(known) - max(self._matched)
        self._held = known[cut:]
        return known[:cut], None

    def flush(self) -> str:
        """Return the text that was held back, where the text ends or a marker stands: it is no stop
        string."""
        held = self._held
        self._held = ""
        self._matched = [0] * len(self._stops)
        return held


class _Sample:
    """One sample of a request, as text.

    Tokens are decoded when somebody reads them: many at once where nobody reads before the end.
    With stop strings they are decoded as they come, since one of them may end the sample.
    """

    def __init__(self, request: Request, index: int, tokenizer: TokenDecoder) -> None:
        self.index = index
        self._params = request.params
        self._arrival_time = request.arrival_time
        self._markers = tokenizer.markers
        self._detokenizer = Detokenizer(tokenizer, request.prompt)
        self._stops = StopStrings(request.params.stop)
        self._tokens: list[int] = []
        # a piece for each token that is decoded, perhaps empty, then one for the end
        self._text: list[str] = []
        # the number of pieces up to a marker token, its own included, and its id
        self._marks: list[tuple[int, int]] = []
        self._logprobs: list[TokenLogprob] = []
        self.sequence: Sequence | None = None  # as of the last update
        self._last_token_time: float | None = None
        # the place of the token that ended the sample, if its text is left out
        self._stop_place: int | None = None
        self._shown = 0  # tokens
        # for each update that no delta has returned yet, the number of tokens behind it
        self.unread: deque[int] = deque()
        self.stop_string: str | None = None
        self.finished = False

    def take(self, update: SequenceUpdate, now: float) -> None:
        """Add an update; sets ``stop_string`` when the text meets one."""
        sequence = self.sequence = update.sequence
        new_tokens, is_last = update.new_tokens, update.finished
        if self.finished or not (new_tokens or is_last):
            return
        if new_tokens:
            self._last_token_time = now
            self._tokens += new_tokens
        self.finished = is_last
        if is_last and self._tokens and self._tokens[-1] == sequence.stop_token:
            self._stop_place = len(self._tokens) - 1
        if self._params.stop:
            self._read(len(self._tokens))
            if self.stop_string is not None:
                self.finished = True
                del self._tokens[len(self._text) :]
        if self._params.logprobs is not None:
            self._logprobs += sequence.logprobs[len(self._logprobs) : len(self._tokens)]
        if len(self.unread) == MAX_DELTAS:
            self.unread.pop()
        self.unread.append(len(self._tokens))

    def _read(self, end: int) -> None:
        """Turn the first ``end`` tokens into text, if it does not meet a stop string before."""
        while self.stop_string is None and (place := len(self._text)) < end:
            token = self._tokens[place]
            if token in self._markers:
                self._mark(token, place + 1)
            elif place == self._stop_place:
                self._text.append("")
            else:
                last = place + 1
                # one at a time where a stop string may appear: tokens behind it are dropped
                while last < end and last != self._stop_place and not self._params.stop:
                    if self._tokens[last] in self._markers:
                        break
                    last += 1
                text = self._detokenizer.push(self._tokens[place:last])
                early = last <= self._params.min_tokens
                text, self.stop_string = self._stops.push(text, early=early)
                self._text += [""] * (last - place - 1)
                self._text.append(text)
        if self.finished and self.stop_string is None and len(self._text) == len(self._tokens):
            early = len(self._tokens) <= self._params.min_tokens
            rest, self.stop_string = self._stops.push(self._detokenizer.flush(), early=early)
            if self.stop_string is None:
                rest += self._stops.flush()
            self._text.append(rest)

    def _mark(self, token: int, num_tokens: int) -> None:
        """Note a marker token after all text before it; no stop string reaches over it."""
        early = num_tokens <= self._params.min_tokens
        text, self.stop_string = self._stops.push(self._detokenizer.cut(), early=early)
        if self.stop_string is not None:
            self._text.append(text)
            return
        self._text.append(text + self._stops.flush())
        self._marks.append((len(self._text), token))

    def draft(self, canvas: Canvas) -> CompletionOutput:
        """Return the text that a canvas would add as it is now, with MASK for each token that is
        not settled. The sample itself stays as it is."""
        sequence = self.sequence
        assert sequence is not None, "an update tells of every denoising step"
        known = len(self._tokens)
        self._read(known)
        ahead = copy(self)
        ahead._detokenizer, ahead._stops = self._detokenizer.copy(), self._stops.copy()
        ahead._tokens = self._tokens + [token for token in canvas if token is not None]
        ahead._text, ahead._marks = [], []
        num_tokens = len(ahead._tokens)
        for token in canvas[: sequence.max_length - len(sequence.tokens)]:
            if token in sequence.stop_tokens:
                break
            if token is None:
                ahead._end_whole_characters(MASK)
            elif token in self._markers:
                ahead._mark(token, num_tokens)
            else:
                early = num_tokens <= self._params.min_tokens
                text = ahead._detokenizer.push([token])
                text, ahead.stop_string = ahead._stops.push(text, early=early)
                ahead._text.append(text)
            if ahead.stop_string is not None:
                break
        ahead._end_whole_characters("")
        return ahead._output(slice(0, len(ahead._text)), slice(known, known), ended=False)

    def _end_whole_characters(self, mask: str) -> None:
        """Add the text of a draft that is still held, but for half a character, and a mask."""
        held = self._detokenizer.cut().rstrip(_REPLACEMENT)
        early = len(self._tokens) <= self._params.min_tokens
        text, self.stop_string = self._stops.push(held, early=early)
        if self.stop_string is None:
            text += self._stops.flush() + mask
        self._text.append(text)

    def delta(self) -> CompletionOutput:
        """Return the oldest update that no delta has returned yet."""
        first, end = self._shown, self.unread.popleft()
        self._shown = end
        self._read(end)
        tokens = slice(first, end)
        if self.finished and not self.unread:
            return self._output(slice(first, len(self._text)), tokens, ended=True)
        return self._output(tokens, tokens, ended=False)

    def whole(self) -> CompletionOutput:
        """Return all of the sample so far. The text of updates that no delta has returned yet comes
        with the last of them then."""
        end = len(self._tokens)
        self._read(end)
        return self._output(slice(0, len(self._text)), slice(0, end), ended=self.finished)

    def _output(self, pieces: slice, tokens: slice, *, ended: bool) -> CompletionOutput:
        """Return a part of the sample: some pieces of its text, and some of its tokens."""
        sequence = self.sequence
        finish_reason: FinishReason | None = None
        stop_reason: str | int | None = None
        if ended and sequence is not None:
            finish_reason, stop_reason = sequence.finish_reason, sequence.stop_token
            if self.stop_string is not None:
                finish_reason, stop_reason = FinishReason.STOP, self.stop_string
        metrics = RequestMetrics(
            arrival_time=self._arrival_time,
            first_scheduled_time=None if sequence is None else sequence.first_scheduled_time,
            first_token_time=None if sequence is None else sequence.first_token_time,
            last_token_time=self._last_token_time,
            finished_time=None if sequence is None else sequence.finished_time,
            output_tokens=len(self._tokens),
        )
        logprobs = None
        if self._params.logprobs is not None:
            logprobs = tuple(self._logprobs[tokens])
        return CompletionOutput(
            index=self.index,
            text="".join(self._text[pieces]),
            token_ids=tuple(self._tokens[tokens]),
            logprobs=logprobs,
            finish_reason=None if finish_reason is None else finish_reason.value,
            stop_reason=stop_reason,
            metrics=metrics,
            error=sequence.error if ended and sequence is not None else None,
            marks=self._marks_between(pieces.start, pieces.stop) if self._marks else (),
        )

    def _marks_between(self, first: int, last: int) -> tuple[tuple[int, int], ...]:
        """Return the marker tokens among these pieces of text, each with its place in their
        text."""
        marks = []
        for place, token in self._marks:
            if first < place <= last:
                characters = sum(len(piece) for piece in self._text[first:place])
                marks.append((characters, token))
        return tuple(marks)


class RequestTracker:
    """Collects the output of one request, sample by sample."""

    def __init__(
        self, request: Request, tokenizer: TokenDecoder, *, prompt: str | None = None
    ) -> None:
        self.request = request
        self.finished = False  # whether every sample has ended
        self._prompt = prompt
        self._samples = [_Sample(request, index, tokenizer) for index in range(request.params.n)]

    def take(self, update: SequenceUpdate, now: float) -> bool:
        """Add an update that came at ``now``, in seconds on the engine's clock. Returns whether the
        sample met a stop string, so that the engine must end it."""
        sample = self._samples[update.index]
        sample.take(update, now)
        if sample.finished:
            self.finished = all(each.finished for each in self._samples)
        return sample.stop_string is not None and not update.finished

    @property
    def has_news(self) -> bool:
        """Whether any sample has an unread update."""
        return any(sample.unread for sample in self._samples)

    def delta(self) -> RequestOutput:
        """Return the oldest unread update of each sample that has one."""
        outputs = [sample.delta() for sample in self._samples if sample.unread]
        return self._output(outputs, finished=self.finished and not self.has_news)

    def draft(self, canvases: Mapping[int, Canvas]) -> RequestOutput:
        """Return the texts of the samples' canvases as they are now, by the samples' indices."""
        drafts = [self._samples[index].draft(canvas) for index, canvas in canvases.items()]
        return replace(self._output(drafts, finished=False), draft=True)

    def whole(self) -> RequestOutput:
        """Return the whole output so far."""
        return self._output([sample.whole() for sample in self._samples], finished=self.finished)

    def _output(self, outputs: SequenceOf[CompletionOutput], *, finished: bool) -> RequestOutput:
        sequence = self._samples[0].sequence  # the first sample keeps what the prompt has
        prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        if sequence is not None and self.request.params.prompt_logprobs is not None:
            prompt_logprobs = (None, *sequence.prompt_logprobs)
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self._prompt,
            prompt_token_ids=self.request.prompt,
            outputs=outputs,
            finished=finished,
            cached_tokens=0 if sequence is None else sequence.cached_tokens,
            prompt_logprobs=prompt_logprobs,
        )
