"""A worker's loop: a plan, the hidden states of the stage before, its layers, on to the stage behind or an answer."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import msgspec
from torch import Tensor

from nanoserve.models.resharding import ReshardableWeights
from nanoserve.record.times import ReshardTimes, StageTimes, SwapTimes
from nanoserve.runtime.compile.layer_runner import LayerRunner
from nanoserve.runtime.launch.memory import memory_errors
from nanoserve.runtime.moves.swapping import BlockMover, Swapper
from nanoserve.runtime.step.model_runner import ModelRunner
from nanoserve.runtime.workers.activations import Activations
from nanoserve.runtime.workers.endpoint import WorkerEndpoint
from nanoserve.runtime.workers.hybrid_stage import HybridStage, joined
from nanoserve.runtime.workers.messages import (
    Answered,
    Follow,
    ForgetHost,
    HostLost,
    Moved,
    Observed,
    Prepare,
    Prepared,
    Run,
)
from nanoserve.runtime.workers.prefetch import PrefetchThread, Turn
from nanoserve.runtime.workers.ranks import Ranks
from nanoserve.scheduler.plan import StepPlan, StepResult, Swap
from triton_ops.cpu import CpuOperators

_BUILDING_SECONDS = 0.5
"""How often to look, with nothing else to do, whether something has been built."""


@dataclass(frozen=True, slots=True)
class WorkerLayout:
    """What a worker is in one parallel layout."""

    ranks: Ranks
    """Its place among the others."""
    runner: ModelRunner
    activations: Activations
    mover: BlockMover | None
    """Moves blocks of its cache; None without a host tier."""
    layers: LayerRunner | None
    """Compiled ones, where there are any to be had."""
    hybrid: HybridStage | None = None
    """Computes steps of host sequences; None where the CPU attends for none."""


class Worker:
    """Runs plans in the order in which they come.

    A plan's swaps begin when its turn comes and are copied beside its step and those behind it, by a Swapper's threads.
    Not sooner: a block that the plan before copies from may be free already, and one that comes in may go there.

    Args:
        layouts: by number.
        current: the one to begin in.
        weights: of all layouts; None where there is one.
        operators: loaded between two steps once they are ready, as layers are.
        coupled: plans come from the stage before.
        observe_times: report what was done when.
    """

    def __init__(
        self,
        endpoint: WorkerEndpoint,
        layouts: Sequence[WorkerLayout],
        *,
        current: int,
        weights: ReshardableWeights | None,
        operators: CpuOperators | None,
        coupled: bool,
        observe_times: bool,
    ) -> None:
        self._endpoint = endpoint
        self._layouts = layouts
        self._current = layouts[current]
        self._weights = weights
        self._layers = [layout.layers for layout in layouts if layout.layers is not None]
        self._built: list[CpuOperators | LayerRunner] = [*self._layers]
        if operators is not None:
            self._built.insert(0, operators)
        self._coupled = coupled
        self._observe_times = observe_times
        self._preparing = False
        self._forgotten = 0  # how often it was told to forget host sequences
        self._device = self._current.runner.device
        self._swapper: Swapper | None = None
        self._prefetch = PrefetchThread(endpoint.plans, None if coupled else self._prepare, self._device)
        if self._current.mover is not None:
            self._swapper = Swapper(self._swapped, self._prefetch.fail)
        self._plan_decoder = msgspec.msgpack.Decoder(StepPlan)

    def run(self) -> NoReturn:
        """Serve until the process is ended.

        Raises:
            RuntimeFailure: if memory runs out.
            Exception: whatever else a step fails with; hidden states that other workers wait for are then missing.
        """
        while True:
            free = time.monotonic()
            message = self._prefetch.next(_BUILDING_SECONDS if self._preparing else None)
            for built in self._built:
                built.poll()
            self._tell_prepared()
            if isinstance(message, Turn):
                self._take(message, max(free, message.received))
            elif isinstance(message, Run) and message.plan.transition is not None:
                self._reshard(message.plan.step, message.plan.transition)
            elif isinstance(message, Run):
                self._take_coupled(message.plan)
            elif isinstance(message, Follow):
                self._take_coupled(self._plan_decoder.decode(self._current.activations.receive_plan()))
            elif isinstance(message, ForgetHost):
                self._forget_host()
            elif isinstance(message, Prepare):
                self._make_faster(message)

    def _prepare(self, plan: StepPlan, received: float) -> Turn:
        """The host's part of a step, and a place for its hidden states.

        Where the plan does not say how many come, this waits until the stage before does.
        """
        step, activations = self._current.runner.prepare(plan), self._current.activations
        prepared = time.monotonic()
        header = None if step.host is None else activations.receive_header()
        entering = activations.expect(step.num_tokens + (0 if header is None else header.num_rows))
        return Turn(step, entering, received, prepared, header)

    def _take(self, turn: Turn, began: float) -> None:
        """Compute a step whose turn it is."""
        turn = self._begin_swaps(turn)
        entering = None if turn.entering is None else turn.entering.wait()
        arrived = began if entering is None else time.monotonic()
        problem = f"a step of {turn.step.num_tokens} tokens does not fit"
        with memory_errors(self._device, problem, "lower --max-num-batched-tokens"):
            computed, result = self._compute(turn, entering)
        self._prefetch.done()
        self._tell_host_loss()
        if not turn.step.plan.rows and turn.step.host is None:
            return  # a plan of swaps is answered by these alone
        if self._observe_times:
            times = StageTimes(
                step=turn.step.plan.step,
                rank=self._current.ranks.rank,
                tokens=turn.step.num_tokens,
                received=turn.received,
                prepared=turn.prepared,
                began=began,
                arrived=arrived,
                computed=computed,
                sent=time.monotonic(),
            )
            self._endpoint.report(Observed(times))
        if result is not None:  # behind the times: with its last answer the engine may end
            self._endpoint.report(Answered(result))

    def _compute(self, turn: Turn, entering: Tensor | None) -> tuple[float, StepResult | None]:
        """Run its layers, and pass on or sample what comes of it; when the device was done, and what to answer."""
        if turn.step.host is not None:
            return self._compute_hybrid(turn, entering)
        ranks, runner = self._current.ranks, self._current.runner
        hidden = runner.compute(turn.step, entering)
        if ranks.behind is not None:
            computed = time.monotonic()
            if hidden is not None:
                self._current.activations.send(hidden)
            return computed, None
        answers = runner.sample(turn.step, hidden).answers()
        computed = time.monotonic()
        if not ranks.answers:
            return computed, None
        return computed, StepResult(turn.step.plan.step, answers, seconds=computed - turn.received)

    def _compute_hybrid(self, turn: Turn, entering: Tensor | None) -> tuple[float, StepResult | None]:
        """The same for a step in which host sequences take part: which of them go on shows only now."""
        stage, ranks = self._current.hybrid, self._current.ranks
        assert stage is not None, "such a plan wants attention on the CPU"
        hidden, groups, header = stage.compute(turn.step, turn.header, entering)
        if ranks.behind is not None:
            computed = time.monotonic()
            self._current.activations.send_with_header(header, joined(hidden, groups))
            return computed, None
        answers = self._current.runner.sample(turn.step, hidden, groups).answers()
        computed = time.monotonic()
        step, seconds = turn.step.plan.step, computed - turn.received
        return computed, StepResult(step, answers, cohorts=header.cohorts, seconds=seconds, host_work=header.host_work)

    def _tell_host_loss(self) -> None:
        stage = self._current.hybrid
        if stage is not None and (reason := stage.take_loss()) is not None:
            self._endpoint.report(HostLost(self._current.ranks.rank, reason, self._forgotten))

    def _forget_host(self) -> None:
        """Host sequences under way were lost, here or in another stage."""
        self._forgotten += 1
        if self._current.hybrid is not None:
            self._current.hybrid.forget()

    def _take_coupled(self, plan: StepPlan) -> None:
        """A plan of which nothing was known before: prepare its inputs now, after the stage behind has been told."""
        received = time.monotonic()
        if self._current.ranks.behind is not None:
            self._current.activations.send_plan(msgspec.msgpack.encode(plan))
        self._take(self._prepare(plan, received), received)

    # ---- what moves -------------------------------------------------------------------------------------------

    def _begin_swaps(self, turn: Turn) -> Turn:
        """Those of its plan; the turn, with whom to tell of its layers if swaps follow its rows."""
        if not turn.step.plan.swaps:
            return turn
        assert self._swapper is not None and self._current.mover is not None, "no swap without a host tier"
        marks = self._swapper.begin(turn.step.plan.swaps, self._current.mover)
        return turn if marks is None else replace(turn, step=replace(turn.step, computed=marks.computed))

    def _swapped(self, swap: Swap, num_bytes: int, began: float, ended: float) -> None:
        """A thread has moved a sequence's blocks."""
        rank = self._current.ranks.rank
        times = SwapTimes(swap.swap, rank, swap.direction, num_bytes, began, ended, swap.after_row)
        self._endpoint.report(Moved(times))

    def _reshard(self, step: int, layout: int) -> None:
        """Change the layout, with nothing in flight: put the parameters that it needs in the place of the others."""
        assert self._weights is not None, "no change of layout where there is one"
        began = time.monotonic()
        self._current.runner.forget()
        num_bytes = self._weights.fill(layout)
        self._current = self._layouts[layout]
        times = ReshardTimes(step, self._current.ranks.rank, layout, num_bytes, began, time.monotonic())
        self._endpoint.report(Moved(times))

    # ---- what makes it faster ---------------------------------------------------------------------------------

    def _make_faster(self, message: Prepare) -> None:
        """Load what there is, or have it built by another process."""
        for built in self._built:
            built.start(waited=message.waited)
        self._preparing = True
        self._tell_prepared()

    def _tell_prepared(self) -> None:
        """Once nothing is being built any more."""
        if self._preparing and not any(built.pending for built in self._built):
            self._preparing = False
            compiled = all(layout.layers is not None and layout.layers.loaded for layout in self._layouts)
            self._endpoint.report(Prepared(self._current.ranks.rank, compiled))
