"""What is asked and when: lengths, bodies with prompts that no server has seen before, and arrival times."""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from nanoserve.errors import UsageError
from nanoserve.measures.workloads import RequestShape
from nanoserve.models.hub import DUMMY_PREFIX

ENDPOINTS = ("completions", "chat")

_TOKENS = range(300, 4000)
"""Ids that nearly every vocabulary has, and that are text there, not control tokens."""
_WORDS = (
    *("the", "and", "that", "have", "for", "not", "with", "you", "this", "but", "his", "from", "they", "say", "her"),
    *("will", "one", "all", "would", "there", "their", "what", "out", "about", "who", "get", "which", "when", "make"),
    *("can", "like", "time", "just", "him", "know", "take", "people", "into", "year", "your", "good", "some", "could"),
)
"""In most vocabularies a token each, with the blank before it."""
_BIASED_TOKENS = range(300, 332)
_STRONGEST_BIAS = 100


@dataclass(frozen=True, slots=True)
class Work:
    """What is asked in every run."""

    name: str
    shapes: Sequence[RequestShape]
    """The lengths of the requests."""
    times: Sequence[float] | None = None
    """When the requests of a trace came, one for each."""

    def fitting(self, context: int | None) -> "Work":
        """The requests that fit into a context of ``context`` tokens; all requests if it is None.

        Raises:
            UsageError: if none does.
        """
        if context is None:
            return self
        places = [place for place, shape in enumerate(self.shapes) if shape.total_tokens <= context]
        if not places:
            raise UsageError(f"every request of {self.name} is longer than the context of {context} tokens")
        times = None if self.times is None else [self.times[place] for place in places]
        return Work(self.name, [self.shapes[place] for place in places], times)


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that only has to be sent."""

    body: bytes
    shape: RequestShape


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStyle:
    """How requests are put."""

    model: str
    """Name of the model on the server."""
    endpoint: str = "completions"
    """Completions sends token ids; chat sends words, about as many as tokens are wanted."""
    ignore_eos: bool = True
    """Answers have the whole length that is asked for; an extra which not every server takes."""
    readable: bool = False
    """Only tokens that every tokenizer here can read are answered. A dummy model has more tokens than its tokenizer
    knows, and what cannot be read is not streamed."""

    @property
    def path(self) -> str:
        """Below /v1."""
        return "/chat/completions" if self.endpoint == "chat" else "/completions"

    @classmethod
    def of(cls, model: str, endpoint: str = "completions", *, ignore_eos: bool = True) -> Self:
        """For a model of this name, of which a dummy is told by it."""
        readable = model.startswith(DUMMY_PREFIX)
        return cls(model=model, endpoint=endpoint, ignore_eos=ignore_eos, readable=readable)

    def prepare(self, shapes: Sequence[RequestShape], salt: str) -> list[PreparedRequest]:
        """Requests of these lengths; the prompts are those of the salt, and other ones for every other salt."""
        generator = random.Random(salt)
        return [PreparedRequest(self._draw(shape, generator), shape) for shape in shapes]

    def _draw(self, shape: RequestShape, generator: random.Random) -> bytes:
        if self.endpoint == "chat":
            text = " ".join(generator.choices(_WORDS, k=shape.input_tokens))
            return self._body({"messages": [{"role": "user", "content": text}]}, shape.output_tokens)
        return self._body({"prompt": generator.choices(_TOKENS, k=shape.input_tokens)}, shape.output_tokens)

    def completion(self, prompt: Sequence[int], output_tokens: int) -> PreparedRequest:
        """A request with the very token ids that are given."""
        body = self._body({"prompt": prompt}, output_tokens)
        return PreparedRequest(body, RequestShape(len(prompt), output_tokens))

    def _body(self, prompt: dict[str, Any], output_tokens: int) -> bytes:
        """Greedy, streamed, with the usage at the end."""
        body = {"model": self.model, **prompt, "max_tokens": output_tokens, "temperature": 0}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.readable:
            body["logit_bias"] = {str(token): _STRONGEST_BIAS for token in _BIASED_TOKENS}
        return json.dumps(body).encode()


def check_endpoint(name: str) -> str:
    """Raise UsageError for one that there is not."""
    if name not in ENDPOINTS:
        raise UsageError(f"--endpoint {name!r:.40} is not one of {', '.join(ENDPOINTS)}")
    return name


HIGHEST_RATE = 1e6


def poisson_arrivals(rate: float, count: int, seed: int) -> list[float]:
    """The first arrivals of a Poisson process: independent exponential gaps with mean 1 / rate.

    An infinite rate lets all of them come at once, at zero.
    """
    if math.isinf(rate):
        return [0.0] * count
    generator, now, arrivals = random.Random(seed), 0.0, []
    for _ in range(count):
        now += generator.expovariate(rate)
        arrivals.append(now)
    return arrivals


def trace_arrivals(times: Sequence[float], rate: float | None = None) -> list[float]:
    """The times of a trace from its first arrival on, evenly stretched to a mean rate if one is given.

    The mean rate of n arrivals is n - 1 over the time from the first to the last.

    Raises:
        UsageError: if the trace has no duration that could be stretched.
    """
    first = min(times)
    offsets = [time - first for time in times]
    if rate is None:
        return offsets
    if math.isinf(rate):
        return [0.0] * len(offsets)
    duration = max(offsets)
    if duration == 0:
        raise UsageError("the trace's requests come all at once: there is no rate to change, leave --rate away")
    stretch = (len(offsets) - 1) / rate / duration
    return [offset * stretch for offset in offsets]


def offered_rate(arrivals: Sequence[float]) -> float | None:
    """Requests per second as they come; None if they come all at once."""
    span = max(arrivals) - min(arrivals)
    return (len(arrivals) - 1) / span if span > 0 else None


def parse_rates(text: str, flag: str) -> tuple[float, ...]:
    """Requests per second above 0, or inf, separated by commas: "0.5,2,inf".

    Raises:
        UsageError: naming the flag.
    """
    rates = []
    for part in text.split(","):
        try:
            rate = float(part)
        except ValueError:
            rate = math.nan
        if not (0 < rate <= HIGHEST_RATE or rate == math.inf):
            raise UsageError(f"{flag} takes requests per second such as 0.5,2,inf, not {text!r:.100}")
        rates.append(rate)
    return tuple(dict.fromkeys(rates))
