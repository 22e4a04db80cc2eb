"""Mechanism: how whatever goes beyond rows, blocks, copies and sampling takes part in a step.

Host memory, attention on the CPU, draft tokens and asynchronous scheduling are Mechanisms, each in
a folder of its own. An engine that does not use one neither builds nor imports it.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from torch import Tensor

from nanoserve.scheduler.plan import StepResult

if TYPE_CHECKING:
    from nanoserve.executor.step.model_runner import ModelRunner, PreparedStep
    from nanoserve.executor.workers.distributed import Activations
    from nanoserve.executor.workers.worker import Worker

P = ParamSpec("P")
T = TypeVar("T")


class Mechanism:
    """Base class of the mechanisms. Each method is a moment in the life of a step; here it does
    nothing.

    A mechanism overrides the moments that it needs. Whoever reaches a moment has bound its
    overrides once, with `bound`: a moment that nobody overrides is a loop over an empty tuple.
    `prepare` may run in another thread, one step ahead; the thread that computes calls all others.
    """

    def attach(self, runner: "ModelRunner") -> None:
        """Take part in the steps of a runner that has just been built. It may replace what the
        runner offers for that: its `forward`, and how it stages sampled rows."""

    # ---- with each plan --------------------------------------------------------------------------

    def prepare(self, step: "PreparedStep") -> None:
        """Look at a plan whose sequences have begun and ended, before its rows are staged. It may
        take rows out of `step.rows`, give the step a `forward` of its own, and add arrays to the
        runner's staging."""

    def begin(self, step: "PreparedStep") -> None:
        """Begin its part of a step whose turn has come: all work of earlier plans, and the step's
        copies of blocks, are issued; its layers are not."""

    def complete(self, step: "PreparedStep", result: StepResult) -> StepResult:
        """Add its part to the result of a step whose answers are known."""
        return result

    def wait(self, until: float | None) -> StepResult | None:
        """Wait for what is under way beside the steps while no plan is in flight, to that monotonic
        time or without limit. Returns None if nothing is under way."""

    # ---- at the end ------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Drop what is under way: it will not be answered, and nothing more may be written for
        it."""

    def close(self) -> None:
        """End its threads and give back what it holds."""

    # ---- of a worker alone -----------------------------------------------------------------------

    def connect(self, worker: "Worker") -> None:
        """Report to a worker from now on what is not part of a result."""

    def expect(self, step: "PreparedStep", activations: "Activations") -> int:
        """Count the hidden states that come from the stage before, beside the hidden states of the
        step's rows."""
        return 0

    def send(self, step: "PreparedStep", hidden: Tensor | None, activations: "Activations") -> bool:
        """Send the hidden states of a step to the next stage. Returns False to leave that to the
        worker."""
        return False

    def report(self) -> None:
        """Report what has happened by the end of a step."""


def bound(
    mechanisms: Iterable[Mechanism], moment: Callable[Concatenate[Any, P], T]
) -> tuple[Callable[P, T], ...]:
    """Bind a moment, such as ``Mechanism.begin``: the methods of those mechanisms that override it,
    in their order."""
    name = moment.__name__
    return tuple(
        getattr(each, name) for each in mechanisms if getattr(type(each), name) is not moment
    )
