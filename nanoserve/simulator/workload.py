"""Workload: arrivals and lengths, joined to requests one at a time, so that only what is in flight is held."""

from collections.abc import Iterable, Iterator
from itertools import islice

from nanoserve.measures.workloads import RequestShape
from nanoserve.request import Request, SamplingParams
from nanoserve.simulator.executor import DUMMY_TOKEN, END_TOKEN

_UNLIMITED = SamplingParams(temperature=0.0)


class Workload:
    """Requests whose tokens mean nothing and whose seed is the length of the answer; it can be gone through once.

    Args:
        arrivals: seconds, in order.
        lengths: of each request; the shorter of the two streams ends the workload.
        limit: requests at most.
    """

    def __init__(self, arrivals: Iterable[float], lengths: Iterable[RequestShape], limit: int | None = None) -> None:
        self._pairs = islice(zip(arrivals, lengths, strict=False), limit)

    def __iter__(self) -> Iterator[Request]:
        for number, (time, shape) in enumerate(self._pairs):
            prompt = (DUMMY_TOKEN,) * shape.input_tokens
            name = f"request-{number}"
            yield Request(name, prompt, _UNLIMITED, shape.output_tokens, end_tokens=(END_TOKEN,), arrival_time=time)
