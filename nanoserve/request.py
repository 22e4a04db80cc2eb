"""A user's request (SamplingParams, Request), its life in the engine (Sequence), and its outputs.

A Request with ``n`` samples becomes ``n`` Sequences. A Sequence has two words of state: its status,
which moves along the arrows of ``LEGAL_TRANSITIONS`` and nowhere else, and the place of its KV
cache.
"""

import json
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import msgspec

from nanoserve.errors import UsageError, shown

MAX_SAMPLES = 16
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LENGTH = 1024
MAX_STOP_TOKENS = 1024
MAX_LOGIT_BIASES = 1024
MAX_JSON_SCHEMA_LENGTH = 1 << 16
MAX_SEED = 2**63 - 1
MAX_TOKENS = 2**31 - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling settings, and conditions that end a sequence; names and meanings are vLLM's."""

    n: int = 1
    """Samples of one prompt, 1 to 16."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 or -1 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches p, in (0, 1]."""
    min_p: float = 0.0
    """Drop tokens less likely than min_p times the likeliest, in [0, 1]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens seen in prompt or output."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of a token already in the output, -2 to 2."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence in the output, -2 to 2."""
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    """Added to the logits of these token ids, -100 to 100."""
    seed: int | None = None
    """Equal requests with equal seeds give equal tokens; None draws a seed, and so does vLLM's
    -1."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; they are not part of it."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the sequence, at most 1024."""
    max_tokens: int | None = None
    """None means until the context is full. 0 needs prompt_logprobs: then the prompt is computed
    and nothing else."""
    min_tokens: int = 0
    """End tokens are not sampled before the output has this many tokens."""
    ignore_eos: bool = False
    """Go on past the model's end tokens."""
    logprobs: int | None = None
    """Report the log probabilities of the sampled token and of this many likeliest tokens (0 to
    20)."""
    prompt_logprobs: int | None = None
    """Report log probabilities for every prompt token but the first."""
    json_schema: str | None = None
    """The text of a JSON schema; the output is JSON that meets it and ends there, even before
    min_tokens."""

    def __post_init__(self) -> None:
        _check_integer("n", self.n, 1, MAX_SAMPLES)
        _check_number("temperature", self.temperature, 0.0, 100.0)
        _check_integer("top_k", self.top_k, -1, MAX_TOKENS)
        _check_number("top_p", self.top_p, 0.0, 1.0, above=True)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, above=True)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        least_tokens = 1 if self.prompt_logprobs is None else 0
        _check_optional_integer("seed", self.seed, -1, MAX_SEED)
        _check_optional_integer("max_tokens", self.max_tokens, least_tokens, MAX_TOKENS)
        _check_optional_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _check_optional_integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if self.seed == -1:
            msgspec.structs.force_setattr(self, "seed", None)
        most_tokens = MAX_TOKENS if self.max_tokens is None else self.max_tokens
        _check_integer("min_tokens", self.min_tokens, 0, most_tokens)
        self._check_stops()
        self._check_logit_bias()
        self._check_json_schema()

    @property
    def penalizes_tokens(self) -> bool:
        """Whether the tokens so far change the odds of the next one."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    @property
    def adjusts_logits(self) -> bool:
        """Whether the host keeps a table of adjusted logits: penalties, bias, and end tokens that
        must wait."""
        return self.penalizes_tokens or self.min_tokens > 0 or bool(self.logit_bias)

    def listed_tokens(self, known: int) -> int:
        """Tokens that the executor goes through when a sequence begins with ``known`` tokens: the
        tokens that the parameters name and, for penalties, the known ones."""
        named = len(self.logit_bias) + len(self.stop_token_ids)
        if self.penalizes_tokens:
            return named + known
        return named

    @property
    def allows_async_scheduling(self) -> bool:
        """Whether the next token can be sampled before the host knows the one before it. It cannot
        where the host prepares what may be sampled (adjusted logits, a grammar), nor with prompt
        log probabilities: an answer belongs to the only row in flight."""
        return not self.adjusts_logits and self.json_schema is None and self.prompt_logprobs is None

    def _check_stops(self) -> None:
        if isinstance(self.stop, str) or len(self.stop) > MAX_STOP_STRINGS:
            raise UsageError(f"stop must be a list of at most {MAX_STOP_STRINGS} strings")
        for text in self.stop:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_STRING_LENGTH:
                raise UsageError(
                    f"every stop string must have 1 to {MAX_STOP_STRING_LENGTH} characters"
                )
            if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
                raise UsageError(
                    f"the stop string {shown(text)} is not valid Unicode: no answer can contain it"
                )
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            raise UsageError(f"stop_token_ids may name at most {MAX_STOP_TOKENS} tokens")
        for token in self.stop_token_ids:
            _check_integer("every stop token id", token, 0, MAX_TOKENS)

    def _check_logit_bias(self) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIASES:
            raise UsageError(f"logit_bias may name at most {MAX_LOGIT_BIASES} tokens")
        for token, bias in self.logit_bias.items():
            _check_integer("every token id of logit_bias", token, 0, MAX_TOKENS)
            _check_number("every value of logit_bias", bias, -100.0, 100.0)

    def _check_json_schema(self) -> None:
        if self.json_schema is None:
            return
        if not isinstance(self.json_schema, str):
            raise UsageError("json_schema must be a text: json.dumps(schema)")
        if len(self.json_schema) > MAX_JSON_SCHEMA_LENGTH:
            raise UsageError(
                f"json_schema has {len(self.json_schema)} characters; at most "
                f"{MAX_JSON_SCHEMA_LENGTH} are taken"
            )
        if self.ignore_eos:
            raise UsageError(
                "ignore_eos makes no sense with json_schema: nothing can follow a complete JSON "
                "text"
            )

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> "SamplingParams":
        """Build from untrusted settings (a JSON row, flags): unknown names and wrong types raise
        UsageError."""
        settings = dict(settings)
        if isinstance(settings.get("stop"), str):
            settings["stop"] = [settings["stop"]]
        bias, schema = settings.get("logit_bias"), settings.get("json_schema")
        if isinstance(bias, Mapping):  # JSON keys are strings
            settings["logit_bias"] = {_token_id(key): value for key, value in bias.items()}
        if isinstance(schema, Mapping):
            settings["json_schema"] = json.dumps(schema)
        try:
            return msgspec.convert(settings, cls)
        except msgspec.ValidationError as error:
            attempts = [settings] + [{name: value} for name, value in settings.items()]
            for attempt in attempts:
                # an unknown name, or no list where one is needed
                with suppress(TypeError, AttributeError):
                    cls(**attempt)  # its own checks say which values a setting takes
            raise UsageError(f"sampling settings: {error}") from None


def _token_id(key: object) -> object:
    if isinstance(key, str) and key.isascii() and key.isdigit():
        return int(key)
    return key


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise UsageError(f"{name} must be a whole number from {low} to {high}, not {shown(value)}")


def _check_optional_integer(name: str, value: object, low: int, high: int) -> None:
    if value is not None:
        _check_integer(name, value, low, high)


def _check_number(
    name: str, value: object, low: float, high: float, *, above: bool = False
) -> None:
    # NaN is in no range, and an integer too large for a float is compared exactly.
    is_right = (
        isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
    )
    if not is_right or (above and value == low):
        bounds = f"above {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"
        raise UsageError(f"{name} must be a number {bounds}, not {shown(value)}")


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt as the engine takes it in: token ids, never text."""

    request_id: str
    """The caller's name for it, unique among the requests in the engine."""
    prompt: tuple[int, ...]
    """Token ids, at least one."""
    params: SamplingParams
    seed: int
    """The resolved seed (``params.seed`` or one drawn at the edge)."""
    end_tokens: tuple[int, ...] = ()
    """The model's end-of-sequence ids."""
    arrival_time: float = 0.0
    """Seconds on the executor's clock."""
    cache_salt: str = ""
    """Requests share cached prefixes only with requests of the same salt."""
    priority: int = 0
    """Lower goes first, as in vLLM, where the policy orders by priority."""
    user: str = ""
    """The user who sent the request, where the policy shares between users."""
    resumed: tuple[tuple[int, ...], ...] = ()
    """Tokens that each sample already got from an engine that died; it continues after them."""


@dataclass(frozen=True, slots=True)
class RequestShape:
    """The length of one request, in tokens."""

    input_tokens: int
    output_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.input_tokens + self.output_tokens


ExpectedLengths = Callable[[int], SequenceOf[RequestShape]]
"""Lengths of the requests to come; the argument is the longest sequence in tokens."""


class Status(Enum):
    """The stage of a sequence's life; LEGAL_TRANSITIONS lists the allowed changes."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


class Place(Enum):
    """The place of a sequence's KV cache."""

    NONE = "none"
    DEVICE = "device"
    HOST = "host"
    MOVING = "moving"


class FinishReason(Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


_FINISHED = Status.FINISHED  # Enum lookup is slow in Python 3.11; hoist it.

LEGAL_TRANSITIONS: dict[Status, frozenset[Status]] = {
    Status.WAITING: frozenset({Status.PREFILL, Status.FINISHED}),
    Status.PREFILL: frozenset({Status.DECODE, Status.WAITING, Status.FINISHED}),
    Status.DECODE: frozenset({Status.WAITING, Status.FINISHED}),
    Status.FINISHED: frozenset(),
}


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log probability of one token under the model's raw distribution, before penalties and
    temperature. There may be a million of them and none is in a cycle, so the garbage collector
    skips them."""

    token: int
    """The token this position really holds."""
    logprob: float
    """Its natural log probability."""
    rank: int
    """1 for the likeliest token of the vocabulary."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens and their log probabilities, best first."""


class PlannedDraft(Protocol):
    """The draft tokens of a row, `nanoserve.scheduler.optional.DraftRow`."""

    @property
    def verify(self) -> int: ...

    @property
    def propose(self) -> int: ...


class PlannedRow(Protocol):
    """The part of a submitted plan's row that a sequence needs, `nanoserve.scheduler.plan.Row`."""

    @property
    def start(self) -> int: ...

    @property
    def sample(self) -> bool: ...

    @property
    def draft(self) -> PlannedDraft | None: ...


@dataclass(slots=True)
class Placeholders:
    """How a decode may enter plans before its latest token is known (asynchronous scheduling): with
    a placeholder for it."""

    limit: int
    """It may while it has fewer tokens than this."""
    wait: bool = False
    """Whether its latest token must be known all the same, as draft tokens may follow it."""


@dataclass(slots=True, eq=False)
class Fork:
    """How the samples of a request share the prompt, which is computed once for all of them."""

    siblings: "list[Sequence]" = field(default_factory=list)
    """In the first sample: the other samples, while they wait until its prompt is computed."""
    copy_source: tuple[int, ...] = ()
    """In another sample: blocks, one of each cache group, whose first slots must be copied before
    it writes (copy-on-write)."""


@dataclass(slots=True, eq=False)
class StateSlots:
    """The slots of a sequence's recurrent state; a slot of -1 is the state before the first
    position. Only the folder scheduler/recurrent_state/ changes it."""

    working: int
    """The slot that its rows write to; -1 before the first row."""
    current: int
    """The slot that holds the state after its last planned row: its own, or a snapshot."""
    for_siblings: int | None = None
    """The slot that holds the state before the prompt's last token, for the other samples."""
    lasting: frozenset[int] = frozenset()
    """Positions of the prompt whose snapshots are kept when newer ones follow."""
    latest: Any = None
    """The prefix cache's column of its newest snapshot at another position."""
    unanswered: list[tuple[int, int]] = field(default_factory=list)
    """The position and slot of each snapshot whose last token is still being computed."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample of one request: its tokens, its blocks and its state. Only the Scheduler changes
    it.

    The last five members belong to mechanisms that most sequences do without, and are None then.
    """

    sequence_id: int
    """Unique and increasing with arrival."""
    request: Request
    index: int
    tokens: list[int]
    """Prompt, then everything generated."""
    stop_tokens: frozenset[int] = frozenset()
    """Ids that end it once it has more than ``min_length`` tokens."""
    min_length: int = 0
    max_length: int = MAX_TOKENS
    """Tokens, prompt and output together, at which it ends."""
    status: Status = Status.WAITING
    place: Place = Place.NONE
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    error: str | None = None
    computed: int = 0
    """Positions ``0..computed-1`` have their KV written by plans already submitted. While two
    tokens are being sampled that is one more than there are tokens, and while draft tokens are
    verified it counts them."""
    block_table: list[int] = field(default_factory=list)
    """Device blocks in order of position, for each position one of every cache group."""
    capacity: int = 0
    """Positions that these blocks hold."""
    cached_columns: list[Any] = field(default_factory=list)
    """The prefix cache's columns of its first full blocks."""
    in_flight: deque[PlannedRow] = field(default_factory=deque)
    """Rows of submitted plans that are not answered yet, oldest first; ``place`` shows a swap in
    flight."""
    begun: bool = False
    """Whether the executor knows it."""
    cached_tokens: int = 0
    preemptions: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    rank: float = 0.0
    """The policy's rank of its request: lower goes first, and of equal ranks the oldest."""
    fork: Fork | None = None
    """The part of a request with several samples."""
    placeholders: Placeholders | None = None
    """None where each token must be known before the next row is planned."""
    window_start: int | None = None
    """With sliding windows: the position from which on queries need their blocks. Those before its
    windows are given back."""
    host_table: list[int] | None = None
    """With a host tier: blocks in host memory, in order as in the block table. On the device, they
    are reserved for a prompt that will move."""
    state: StateSlots | None = None
    """With recurrent states: its slots, while it is on the device."""

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt)

    @property
    def prompt_computed(self) -> int:
        """Prompt tokens whose KV is written by plans that are answered."""
        computed = self.computed
        rows = tuple(self.in_flight)  # another thread may ask, while rows come and go
        if rows:
            computed = rows[0].start
        return min(computed, self.prompt_length)

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def output_tokens(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def remaining(self) -> int:
        """Known tokens whose KV no submitted plan computes yet."""
        return len(self.tokens) - self.computed

    @property
    def finished(self) -> bool:
        return self.status is _FINISHED

    def keep_prompt_logprobs(self, start: int, logprobs: tuple[TokenLogprob, ...]) -> None:
        """Keep log probabilities of the positions after ``start``; a request's first sample keeps
        them for all."""
        if self.index == 0:
            already = len(self.prompt_logprobs) - start  # a recomputed prompt is scored again
            self.prompt_logprobs += logprobs[already:]

    def extend(
        self, tokens: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]
    ) -> tuple[tuple[int, ...], FinishReason | None]:
        """Append sampled tokens up to the one that ends the sequence, with their log probabilities
        if there are any. Returns the tokens appended, and why the sequence ends with them, if it
        does."""
        reason, known, before = None, self.tokens, len(self.tokens)
        if before == self.max_length:  # max_tokens is 0, and the prompt is computed
            return (), FinishReason.LENGTH
        for token in tokens:
            known.append(token)
            if token in self.stop_tokens and len(known) > self.min_length:
                self.stop_token, reason = token, FinishReason.STOP
                break
            if len(known) == self.max_length:
                reason = FinishReason.LENGTH
                break
        taken = len(known) - before
        if logprobs:
            self.logprobs += logprobs[:taken]
        return tokens[:taken], reason

    def move_to(self, status: Status) -> None:
        """The one place where a status changes. Raises RuntimeError if the transition is not in
        LEGAL_TRANSITIONS."""
        if status not in LEGAL_TRANSITIONS[self.status]:
            raise RuntimeError(
                f"sequence {self.sequence_id}: illegal transition {self.status} -> {status}"
            )
        self.status = status


class SequenceUpdate(msgspec.Struct, frozen=True, gc=False):
    """One sequence's gain in one step, as the engine hands it to its callers, who may read
    ``sequence`` but not change it. The garbage collector skips updates, which are never in a
    cycle."""

    request_id: str
    index: int
    new_tokens: tuple[int, ...]
    sequence: Sequence

    @property
    def finished(self) -> bool:
        return self.sequence.status is _FINISHED


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of one sequence, in seconds on the engine's clock; None where the event never came."""

    arrival_time: float
    first_scheduled_time: float | None
    first_token_time: float | None
    last_token_time: float | None
    finished_time: float | None
    output_tokens: int

    @property
    def queue_time(self) -> float | None:
        """From arrival until a plan first held the sequence."""
        return self._since_arrival(self.first_scheduled_time)

    @property
    def time_to_first_token(self) -> float | None:
        """TTFT: from arrival until the first token was known."""
        return self._since_arrival(self.first_token_time)

    @property
    def latency(self) -> float | None:
        """E2EL: from arrival until the last token was known."""
        return self._since_arrival(self.finished_time)

    @property
    def time_per_output_token(self) -> float | None:
        """TPOT: from the first token to the last one so far, over the tokens after the first; None
        without such."""
        if self.last_token_time is None or self.first_token_time is None or self.output_tokens < 2:
            return None
        return (self.last_token_time - self.first_token_time) / (self.output_tokens - 1)

    def _since_arrival(self, event: float | None) -> float | None:
        if event is None:
            return None
        return event - self.arrival_time


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sample: the whole from ``generate``, its new part from ``stream``."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: str | None
    """"stop", "length", "abort", "error", or None while it goes on."""
    stop_reason: str | int | None
    """The stop string or the token id that ended it, if one did."""
    metrics: RequestMetrics
    error: str | None = None
    marks: tuple[tuple[int, int], ...] = ()
    """Control tokens by which the model's chat format tells reasoning, text and tool calls apart:
    the place in `text` and the token's id, in order. They are no part of the text."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The outputs of one request."""

    request_id: str
    prompt: str | None
    """The prompt's text where the caller gave text."""
    prompt_token_ids: tuple[int, ...]
    outputs: SequenceOf[CompletionOutput]
    finished: bool
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """None at the first position, as nothing predicts it."""
    draft: bool = False
    """Whether the texts may still change (text diffusion): they take the place of the last draft,
    and the next output takes theirs."""
