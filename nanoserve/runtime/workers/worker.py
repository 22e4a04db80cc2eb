"""A worker's loop: a plan, the hidden states of the stage before, its layers, on to the stage behind or an answer."""

import time
from collections.abc import Sequence
from typing import NoReturn

import msgspec
from torch import Tensor

from nanoserve.runtime.compiled_layers import CompiledLayers
from nanoserve.runtime.memory import memory_errors
from nanoserve.runtime.model_runner import ModelRunner
from nanoserve.runtime.stage_times import StageTimes
from nanoserve.runtime.workers.activations import Activations
from nanoserve.runtime.workers.intake import Intake, Turn
from nanoserve.runtime.workers.messages import Answered, Follow, Observed, Prepare, Prepared, Run
from nanoserve.runtime.workers.ranks import Ranks
from nanoserve.runtime.workers.station import Station
from nanoserve.scheduler.plan import StepPlan, StepResult
from triton_ops.cpu import CpuOperators

_BUILDING_SECONDS = 0.5
"""How often to look, with nothing else to do, whether something has been built."""


class Worker:
    """Runs plans in the order in which they come.

    Args:
        layers: compiled ones, where there are any to be had.
        built: what is loaded between two steps once it is ready.
        coupled: plans come from the stage before.
        observe_times: report what was done when.
    """

    def __init__(
        self,
        station: Station,
        ranks: Ranks,
        runner: ModelRunner,
        activations: Activations,
        *,
        layers: CompiledLayers | None,
        built: Sequence[CpuOperators | CompiledLayers],
        coupled: bool,
        observe_times: bool,
    ) -> None:
        self._station = station
        self._ranks = ranks
        self._runner = runner
        self._activations = activations
        self._layers = layers
        self._built = built
        self._coupled = coupled
        self._observe_times = observe_times
        self._preparing = False
        self._intake = Intake(station.plans, None if coupled else self._prepare, runner.device)
        self._plan_decoder = msgspec.msgpack.Decoder(StepPlan)

    def run(self) -> NoReturn:
        """Serve until the process is ended.

        Raises:
            RuntimeFailure: if memory runs out.
            Exception: whatever else a step fails with; hidden states that other workers wait for are then missing.
        """
        while True:
            free = time.monotonic()
            message = self._intake.next(_BUILDING_SECONDS if self._preparing else None)
            for built in self._built:
                built.poll()
            self._tell_prepared()
            if isinstance(message, Turn):
                self._take(message, max(free, message.received))
            elif isinstance(message, Run):
                self._take_coupled(message.plan)
            elif isinstance(message, Follow):
                self._take_coupled(self._plan_decoder.decode(self._activations.receive_plan()))
            elif isinstance(message, Prepare):
                self._make_faster()

    def _prepare(self, plan: StepPlan, received: float) -> Turn:
        """The host's part of a step, and a place for its hidden states."""
        step = self._runner.prepare(plan)
        entering = self._activations.expect(step.num_tokens)
        return Turn(step, entering, received, time.monotonic())

    def _take(self, turn: Turn, began: float) -> None:
        """Compute a step whose turn it is."""
        entering = None if turn.entering is None else turn.entering.wait()
        arrived = began if entering is None else time.monotonic()
        problem = f"a step of {turn.step.num_tokens} tokens does not fit"
        with memory_errors(self._runner.device, problem, "lower --max-num-batched-tokens"):
            computed, result = self._compute(turn, entering)
        self._intake.done()
        if self._observe_times:
            times = StageTimes(
                step=turn.step.plan.step,
                rank=self._ranks.rank,
                tokens=turn.step.num_tokens,
                received=turn.received,
                prepared=turn.prepared,
                began=began,
                arrived=arrived,
                computed=computed,
                sent=time.monotonic(),
            )
            self._station.report(Observed(times))
        if result is not None:  # behind the times: with its last answer the engine may end
            self._station.report(Answered(result))

    def _compute(self, turn: Turn, entering: Tensor | None) -> tuple[float, StepResult | None]:
        """Run its layers, and pass on or sample what comes of it; when the device was done, and what to answer."""
        hidden = self._runner.compute(turn.step, entering)
        if self._ranks.behind is not None:
            computed = time.monotonic()
            if hidden is not None:
                self._activations.send(hidden)
            return computed, None
        answers = self._runner.sample(turn.step, hidden).answers()
        computed = time.monotonic()
        if not self._ranks.answers:
            return computed, None
        return computed, StepResult(turn.step.plan.step, answers, seconds=computed - turn.received)

    def _take_coupled(self, plan: StepPlan) -> None:
        """A plan of which nothing was known before: prepare its inputs now, after the stage behind has been told."""
        received = time.monotonic()
        if self._ranks.behind is not None:
            self._activations.send_plan(msgspec.msgpack.encode(plan))
        self._take(self._prepare(plan, received), received)

    def _make_faster(self) -> None:
        """Load the layers, or have them compiled in the background."""
        if self._layers is not None:
            self._layers.start()
        self._preparing = True
        self._tell_prepared()

    def _tell_prepared(self) -> None:
        """Once nothing is being built any more."""
        if self._preparing and not any(built.pending for built in self._built):
            self._preparing = False
            compiled = self._layers is not None and self._layers.loaded
            self._station.report(Prepared(self._ranks.rank, compiled))
