"""Requests to a server: lengths, bodies with prompts that no server has seen before, and arrival
times."""

import json
import math
import random
from collections.abc import Sequence
from itertools import accumulate, cycle, islice
from typing import Any, NamedTuple

import msgspec

from nanoserve.errors import UsageError, shown
from nanoserve.models.hub import DUMMY_PREFIX
from nanoserve.request import RequestShape

# ids that nearly every vocabulary has, and that are text there, not control tokens
_TOKENS = range(300, 4000)
_TEXT = (
    "the and that have for not with you this but his from they say her "
    "will one all would there their what out about who get which when make "
    "can like time just him know take people into year your good some could"
)
_WORDS = _TEXT.split()
"""In most vocabularies a token each, with the blank before it."""
_BIASED_TOKENS = range(300, 332)
_STRONGEST_BIAS = 100
TRACE_TICK = "trace"  # names the load of a trace whose times are as they are


class Work(NamedTuple):
    """Requests of every run."""

    name: str
    shapes: Sequence[RequestShape]  # the lengths of the requests
    times: Sequence[float] | None = None  # when the requests of a trace came, one for each

    def lengthened(self, requests: int) -> "Work":
        """This many requests without times: the lengths are repeated from the first on."""
        return Work(self.name, list(islice(cycle(self.shapes), requests)))


class Point(msgspec.Struct, frozen=True):
    concurrency: int | None = None  # number of clients of a closed loop; None means an open loop
    # requests per second of an open loop; None takes the times of a trace as they are
    rate: float | None = None
    traced: bool = False  # whether the open loop follows a trace, and not a Poisson process
    # whether arrivals of a Poisson process are stretched to the rate, which else is a mean of many
    exact: bool = False

    @property
    def name(self) -> str:
        if self.concurrency is not None:
            if self.concurrency == 1:
                return "1 client"
            return f"{self.concurrency} clients"
        if self.rate is None:
            return "trace"
        if self.traced:
            return f"trace at {self.rate:g} requests/s"
        return f"{self.rate:g} requests/s"

    @property
    def tick(self) -> str:
        if self.concurrency is not None:
            return str(self.concurrency)
        if self.rate is None:
            return TRACE_TICK
        return f"{self.rate:g}"

    def arrivals(self, work: Work, seed: int) -> list[float]:
        """When the requests of an open loop come; the times of a trace are the same for every
        seed."""
        if self.traced:
            return stretched_arrivals(work.times or (0.0,), self.rate)
        if self.rate is None:
            return [0.0] * len(work.shapes)
        arrivals = poisson_arrivals(self.rate, len(work.shapes), seed)
        if self.exact:
            arrivals = stretched_arrivals(arrivals, self.rate)
        return arrivals


class PreparedRequest(NamedTuple):
    body: bytes
    shape: RequestShape


class RequestStyle(msgspec.Struct, frozen=True, kw_only=True):
    """How requests are put."""

    model: str  # name of the model on the server
    # completions sends token ids; chat sends words, about as many as tokens are wanted
    endpoint: str = "completions"
    # answers have the whole length that is asked for; an extra which not every server takes
    ignore_eos: bool = True

    @property
    def path(self) -> str:
        if self.endpoint == "chat":
            return "/chat/completions"
        return "/completions"

    def prepare(self, shapes: Sequence[RequestShape], salt: str) -> list[PreparedRequest]:
        """Requests of these lengths. Equal salts give equal prompts, and different salts different
        ones."""
        generator = random.Random(salt)
        requests = []
        for shape in shapes:
            if self.endpoint == "chat":
                text = " ".join(generator.choices(_WORDS, k=shape.input_tokens))
                requests.append(self._request(shape, messages=[{"role": "user", "content": text}]))
            else:
                requests.append(
                    self._request(shape, prompt=generator.choices(_TOKENS, k=shape.input_tokens))
                )
        return requests

    def completion(self, prompt: Sequence[int], output_tokens: int) -> PreparedRequest:
        """A request with the very token ids that are given."""
        return self._request(RequestShape(len(prompt), output_tokens), prompt=prompt)

    def _request(self, shape: RequestShape, **prompt: Any) -> PreparedRequest:
        """Greedy, streamed, with the usage at the end."""
        body = {"model": self.model, **prompt, "max_tokens": shape.output_tokens, "temperature": 0}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.model.startswith(DUMMY_PREFIX):
            # A dummy has more tokens than its tokenizer knows, and what cannot be read is not
            # streamed.
            body["logit_bias"] = {str(token): _STRONGEST_BIAS for token in _BIASED_TOKENS}
        return PreparedRequest(json.dumps(body).encode(), shape)


_HIGHEST_RATE = 1e6


def poisson_arrivals(rate: float, count: int, seed: int) -> list[float]:
    """The first arrivals of a Poisson process; with an infinite rate, all of them come at once, at
    zero."""
    if math.isinf(rate):
        return [0.0] * count
    generator = random.Random(seed)
    return list(accumulate(generator.expovariate(rate) for _ in range(count)))


def stretched_arrivals(times: Sequence[float], rate: float | None = None) -> list[float]:
    """Times, of a trace say, from the first on, evenly stretched to a mean rate if one is given.
    The mean rate of n arrivals is n - 1 over the time from the first to the last. Raises UsageError
    if that is zero."""
    first = min(times)
    offsets = [time - first for time in times]
    if rate is None:
        return offsets
    if math.isinf(rate):
        return [0.0] * len(offsets)
    duration = max(offsets)
    if duration == 0:
        raise UsageError(
            "the trace's requests come all at once: there is no rate to change, leave --rate away"
        )
    stretch = (len(offsets) - 1) / rate / duration
    return [offset * stretch for offset in offsets]


def offered_rate(arrivals: Sequence[float]) -> float | None:
    """Requests per second as they come; None if they come all at once."""
    span = max(arrivals) - min(arrivals)
    if span == 0:
        return None
    return (len(arrivals) - 1) / span


def parse_rates(text: str, flag: str) -> tuple[float, ...]:
    """Requests per second above 0, or inf, separated by commas: "0.5,2,inf". A UsageError names the
    flag."""
    rates = []
    for part in text.split(","):
        try:
            rate = float(part)
        except ValueError:
            rate = math.nan
        if not (0 < rate <= _HIGHEST_RATE or rate == math.inf):
            raise UsageError(
                f"{flag} takes requests per second such as 0.5,2,inf, not {shown(text)}"
            )
        rates.append(rate)
    return tuple(dict.fromkeys(rates))
