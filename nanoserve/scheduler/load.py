"""Load, the snapshot a policy sees; Decision, what it answers; and Policy, what every policy is.

A policy is a pure function of a Load, which holds state such as the previous decision too. It
chooses *how many*; the Scheduler chooses *which*: the oldest first, or in the policy's order.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

from nanoserve.errors import PolicyFailed, UsageError, first_line, shown
from nanoserve.request import Request
from nanoserve.scheduler.optional import (
    DEVICE_ONLY,
    NO_HOST,
    ONE_LAYOUT,
    HostDecision,
    HostLoad,
    LayoutsLoad,
)
from nanoserve.scheduler.predictor import Predictor


@dataclass(frozen=True, slots=True)
class Decision:
    """Contents of the next step, in numbers."""

    prefill_tokens: int
    """Most prompt tokens to compute."""
    decodes: int
    """Most running sequences to decode, one token each."""
    whole_prompts: bool = False
    """Take prompts whole or not at all. The first may exceed ``prefill_tokens``, or it could never
    run."""
    host: HostDecision = DEVICE_ONLY
    """With a host tier: which sequences move, and how those in host memory take part."""
    admission_reserve: bool = True
    """Begin a new prompt only if the free blocks hold all of it and one more for each running
    decode to grow into. Otherwise they only have to hold the prompt, and the newest is soon
    preempted and recomputed, over and over."""
    draft_tokens: int | None = None
    """With speculation: how many draft tokens each row checks at most, 7 if it is more. None
    chooses by predicted times."""
    layout: int = 0
    """The wanted parallel layout. The device is drained before it changes. An unknown layout is
    ignored, and so is any until a token was answered since the last drain began."""
    bound: str = field(default="", compare=False)
    """Which part of the policy's formula gave the numbers, for whoever looks at the step."""


@dataclass(slots=True)
class Load:
    """The engine's state when a step is to be decided. Nobody changes it; it is not frozen, because
    making it takes a part of each step, and a frozen dataclass of this size takes four times as
    long to make.

    A sequence is ready if it may enter the next plan. With asynchronous scheduling it may be in
    flight then.
    """

    previous: Decision | None
    """None before the first step."""
    waiting_tokens: int
    """#WP: prompt tokens of waiting and partly prefilled sequences that no plan computes yet."""
    first_waiting_tokens: int
    """Remaining tokens of the prompt that would be prefilled next; 0 if none may start."""
    running_decodes: int
    """#RD: sequences that decode on the device, in flight or not."""
    ready_decodes: int
    ready_prefills: int
    """Partly prefilled sequences that are ready."""
    context_tokens: int
    """Tokens in the KV cache of all running sequences on the device."""
    free_blocks: int
    """KV blocks without an owner, cached or not."""
    total_blocks: int
    block_size: int
    """Tokens per block."""
    free_slots: int
    """How many more sequences may be admitted."""
    steps_in_flight: int = 0
    """Plans submitted and not ended."""
    pipeline_depth: int = 1
    """P: the decodes are divided among this many plans in flight; 1 with asynchronous scheduling:
    each of two plans has all."""
    expected_growth: int = 0
    """KV blocks that running sequences are expected to need beyond those they hold, before enough
    of them have ended; from 0 to ``total_blocks - 1``. Estimated every few steps; 0 unless the
    policy ``reads_forecast``."""
    layouts: LayoutsLoad = ONE_LAYOUT
    """Which of several parallel layouts runs."""
    host: HostLoad = NO_HOST
    """Host memory and the sequences there."""
    longest_remaining: int = 0
    """Tokens until the last of the running decodes ends; estimated like ``expected_growth``."""
    predictor: Predictor | None = None
    """Predicts step times in the current layout; None where nothing was measured."""

    @property
    def free_tokens(self) -> int:
        return self.free_blocks * self.block_size

    @property
    def free_fraction(self) -> float:
        return self.free_blocks / self.total_blocks

    def step_seconds(self, tokens: int, keys: int = 0) -> float:
        """Predicted time of a step through all stages, with decodes that read so many keys."""
        predictor = self.predictor
        assert predictor is not None, "only a policy that has looked asks"
        layer = predictor.linear_seconds(tokens) + predictor.attention_seconds(keys)
        return predictor.num_layers * layer + predictor.step_overhead_seconds(tokens if keys else 1)

    def chunk(self, tokens: int, steps: range) -> int:
        """C = tokens / k, rounded up, k of ``steps``, for which (k + P - 1) t(C) is least: then so
        many prompt tokens are predicted to be through the P stages soonest, t being the time of a
        step."""

        def seconds(number: int) -> float:
            return (number + self.pipeline_depth - 1) * self.step_seconds(-(-tokens // number))

        return -(-tokens // min(steps, key=seconds))

    def first_waiting_fits(self, *, admission_reserve: bool = True) -> bool:
        """Whether the next prompt may start or go on, and the free blocks hold all of it and the
        Decision's reserve."""
        kept = self.running_decodes if admission_reserve and not self.ready_prefills else 0
        return (
            self.first_waiting_tokens > 0 and self.first_waiting_blocks + kept <= self.free_blocks
        )

    @property
    def first_waiting_blocks(self) -> int:
        """Blocks that the rest of the next prompt fills."""
        return -(-self.first_waiting_tokens // self.block_size)

    @property
    def decode_share(self) -> int:
        """RD / P, rounded up: a step's equal share of the decodes (gLLM, equation 4), at least one
        if any is ready."""
        return min(max(1, -(-self.running_decodes // self.pipeline_depth)), self.ready_decodes)


def parameter(default: Any, at_least: float, *, below: float = math.inf, up_to: str = "") -> Any:
    """A policy's parameter: its default, and the range that `Policy` checks; ``up_to`` names
    another parameter."""
    return field(default=default, metadata={"range": (at_least, below, up_to)})


FIRST_COME = "first-come"
ORDERS: dict[str, Callable[[Request, float], float]] = {
    FIRST_COME: lambda request, fair_start: 0.0,
    "shortest-first": lambda request, fair_start: len(request.prompt),
    "priority": lambda request, fair_start: request.priority,
    "fair-share": lambda request, fair_start: fair_start,
}
"""The rank of a request by the name of the order, which every policy has as a parameter."""


class Policy(ABC):
    """A scheduling policy: a dataclass of its parameters, which raises UsageError if one is out of
    its range."""

    __slots__ = ()

    order: ClassVar[str] = FIRST_COME
    """Which requests go first, by name; a policy may have a `rank` of its own instead."""
    aging: ClassVar[int] = 1000
    """Steps after which a request goes before all younger ones, whatever their ranks, so that none
    waits for ever."""
    reads_forecast: ClassVar[bool] = False
    """Whether it reads ``expected_growth`` or ``longest_remaining``. Only then does the Scheduler
    estimate them."""

    def __post_init__(self) -> None:
        bounded = [one for one in fields(self) if one.metadata]  # type: ignore[arg-type]  # every policy is a dataclass
        for one in bounded:
            value, (low, below, up_to) = getattr(self, one.name), one.metadata["range"]
            most = getattr(self, up_to) if up_to else math.inf
            if not (low <= value < below and value <= most):
                upper = f" and at most {up_to} ({most})" if up_to else ""
                upper += f" and below {below}" if below < math.inf else ""
                raise UsageError(f"{one.name} must be at least {low}{upper}, not {value}")

    @classmethod
    def ordered(cls, order: str, aging: int) -> type[Self]:
        """Return this policy's class with that ``order`` and ``aging``. Raises UsageError if either
        makes no sense."""
        if order not in [*ORDERS] or not isinstance(aging, int) or aging < 1:
            raise UsageError(
                f"order must be one of {', '.join(ORDERS)}, not {shown(order)}, and aging at least "
                "1"
            )
        changed = {"__slots__": (), "order": order, "aging": aging}
        return (
            cls if (order, aging) == (cls.order, cls.aging) else type(cls.__name__, (cls,), changed)
        )

    @abstractmethod
    def decide(self, load: Load) -> Decision:
        """Choose the contents of the next step: a pure function of the snapshot, which it does not
        change."""

    def rank(self, request: Request, fair_start: float) -> float:
        """The place of an arriving request, which all its sequences keep: lower ranks begin first,
        and the highest gives way first where blocks run out. Of equal ranks the oldest is first.
        ``fair_start`` is lower, the less the request's user has been served (`Ordering`)."""
        return ORDERS[self.order](request, fair_start)

    @property
    def ranks(self) -> bool:
        """Whether requests may overtake each other. If not, `rank` is never called."""
        return self.order != FIRST_COME or type(self).rank is not Policy.rank

    @property
    def ranking(self) -> "Policy":
        """The policy whose ranks count: this one, unless it only carries another."""
        return self


@contextmanager
def policy_failures(where: str, but: type[Exception] | tuple[()] = ()) -> Iterator[None]:
    """Raises PolicyFailed, in one line, for any error within ``but`` those."""
    try:
        yield
    except but:
        raise
    except (Exception, SystemExit) as error:
        raise PolicyFailed(
            f"policy {where}: {type(error).__name__}: {first_line(error)}"
        ) from error
