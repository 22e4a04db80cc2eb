"""TieredExecutor: a SimulatedExecutor with host memory, attention on the CPU, and several parallel layouts."""

from collections.abc import Callable, Sequence
from typing import Literal

from nanoserve.errors import UsageError
from nanoserve.record.times import ReshardTimes, SwapTimes
from nanoserve.scheduler.plan import Answer, StepPlan, StepResult, Swap
from nanoserve.simulator.executor import SimulatedExecutor
from nanoserve.simulator.host_attention import HostAttention, HostRow, Processor, SubBatch
from nanoserve.simulator.pipeline import DECOUPLED, MovingTimes, Passage, Pipeline, Runtime, TieredTimes


class HostLink:
    """A full-duplex link: "out", from the devices to the host, and "in" do not hinder each other.

    Every device has such a link of its own, and all devices move their part of a transfer at once, so one clock for
    each direction stands for all of them; the host's memory is taken to keep up with them all. Copies run beside
    computing and do not slow it down.
    """

    def __init__(self) -> None:
        self._free: dict[Literal["out", "in"], float] = {"out": 0.0, "in": 0.0}

    @property
    def free(self) -> float:
        """Time at which everything that has begun is over, in seconds."""
        return max(self._free.values())

    def move(self, direction: Literal["out", "in"], seconds: float, now: float) -> Passage:
        """Queue a transfer behind those of its direction; returns from when to when it moves."""
        start = max(now, self._free[direction])
        end = self._free[direction] = start + seconds
        return Passage(start, end)


class TieredExecutor(SimulatedExecutor):
    """Runs all that a StepPlan can say; a plan that says none of it costs what it does without tiers.

    * A swap moves over the host link from the moment its plan is submitted, beside the stages' computing, and is
      answered when it is over. The scheduler swaps only what is not in flight, so nothing need be waited for. One that
      follows its row moves from the moment at which the step computes, layer by layer, and ends with it or later.
    * A transition reloads the new layout's weights from host memory over the same link when all before it has ended
      (Seesaw, section 4.1); the slowest stage counts. It is answered as the end of its plan.
    * Host rows advance by cohorts or in asymmetric steps: see host_attention.py.

    Args:
        layouts: their times; the first one is current in the beginning. Host rows want those of TieredTimes.
        block_size: tokens per KV block.
        runtime, answer: as the SimulatedExecutor takes them.

    Attributes:
        max_in_flight: of the deepest layout; the scheduler knows each one's own depth.
    """

    def __init__(
        self,
        layouts: Sequence[MovingTimes],
        *,
        block_size: int,
        runtime: Runtime = DECOUPLED,
        answer: Callable[[StepPlan], tuple[Answer, ...]] | None = None,
    ) -> None:
        deepest = max(times.num_stages for times in layouts)
        super().__init__(layouts[0], runtime=runtime, max_in_flight=deepest, answer=answer)
        self.pipelines = (self.pipeline, *(Pipeline(times, runtime) for times in layouts[1:]))
        self._link = HostLink()
        self._processor = Processor(self._told.append)
        self._layouts = tuple(layouts)
        self._layout = 0
        self._block_size = block_size
        self._host = self._host_attention(layouts[0])
        self._last_end = 0.0

    def submit(self, plan: StepPlan) -> None:
        """Begin a plan's swaps and its step or transition; it is known at once when each will be over.

        Raises:
            UsageError: for host rows under a layout of several stages.
            RuntimeError: for a plan that the scheduler must not make.
        """
        for swap in plan.swaps:
            if not swap.after_row:
                self._swap(swap, Passage(self._now, self._now))
        if plan.transition is not None:
            self._change_layout(plan, plan.transition)
        elif not plan.rows and plan.strategy != "overlap":
            self._answer(plan)  # it only moves KV: nothing ends, but the model may be told to forget
        elif plan.layout != self._layout:
            raise RuntimeError(f"plan {plan.step} is for layout {plan.layout}, but {self._layout} is current")
        else:
            passages = self._run_hybrid(plan) if self._concerns_host(plan) else self._run(plan)
            for swap in plan.swaps:
                if swap.after_row:
                    self._swap(swap, Passage(passages[0].start, passages[-1].end))

    def _end(self, time: float, result: StepResult) -> None:
        self._last_end = max(self._last_end, time)
        super()._end(time, result)

    # ---- swaps and transitions --------------------------------------------------------------------------------

    def _swap(self, swap: Swap, source: Passage) -> None:
        """Move it while what it reads is computed: not before that begins, nor to an end before it ends."""
        tokens = len(swap.device_blocks) * self._block_size
        times = self._layouts[self._layout]
        seconds = max(times.swap_seconds(tokens, stage) for stage in range(times.num_stages))
        start, end = self._link.move(swap.direction, seconds, source.start)
        passage = Passage(start, max(end, source.end))
        self._know(passage.end, StepResult(None, swapped=(swap.swap,)))
        self._told.append(SwapTimes(swap.swap, 0, swap.direction, 0, *passage, after_row=swap.after_row))

    def _change_layout(self, plan: StepPlan, layout: int) -> None:
        self._check_room(plan)
        if self._host is not None and self._host.under_way:
            raise RuntimeError(f"plan {plan.step} changes the layout while tokens of host sequences are under way")
        self._answer(plan)
        times = self._layouts[layout]
        seconds = max(times.reload_seconds(stage) for stage in range(times.num_stages))
        passage = self._link.move("in", seconds, max(self._now, self._last_end, self._link.free))
        self._layout, self._times, self.pipeline = layout, times, self.pipelines[layout]
        self.pipeline.not_before(passage.end)
        self._host = self._host_attention(times)
        self._end(passage.end, StepResult(plan.step, seconds=seconds))
        self._told.append(ReshardTimes(plan.step, 0, layout, 0, *passage))

    # ---- host rows --------------------------------------------------------------------------------------------

    def _host_attention(self, times: MovingTimes) -> HostAttention | None:
        return HostAttention(times, self._processor) if isinstance(times, TieredTimes) else None

    def _concerns_host(self, plan: StepPlan) -> bool:
        """Whether host sequences take part in the step, so that it takes another time than a plain one."""
        if plan.strategy == "device":
            return False
        carries = plan.strategy == "overlap" and self._host is not None and self._host.under_way
        return carries or not plan.rows or any(row.tier == "host" for row in plan.rows)

    def _run_hybrid(self, plan: StepPlan) -> Sequence[Passage]:
        self._check_room(plan)
        if self._times.num_stages > 1:
            raise UsageError(
                "attention on the host is simulated for one pipeline stage, not for "
                f"{self._times.num_stages}; use --pp 1, with --tp for more devices"
            )
        if self._host is None:
            raise TypeError("attention on the host wants step times that know it: see TieredTimes")
        tokens = {answer.sequence: answer for answer in self._answer(plan)}
        work = self._work(row for row in plan.rows if row.tokens)
        start = self.pipeline.begin(work, self._now)
        run = self._overlap if plan.strategy == "overlap" else self._asymmetric
        passage, answers = run(self._host, plan, tokens, start)
        self.pipeline.occupy(passage)
        seconds = passage.end - passage.start
        result = StepResult(
            plan.step,
            tuple(answers),
            cohorts=self._host.progress,
            seconds=seconds,
            host_work=self._host.take_work(passage.end),
        )
        self._end(passage.end, result)
        self._tell(plan, work, [passage])
        return [passage]

    def _overlap(
        self, attention: HostAttention, plan: StepPlan, tokens: dict[int, Answer], start: float
    ) -> tuple[Passage, list[Answer]]:
        beginning = {
            row.sequence: HostRow(row.start + 1, tokens.pop(row.sequence)) for row in plan.rows if row.tier == "host"
        }
        device = self._work(row for row in plan.rows if row.tier == "device")
        passage, sampled = attention.overlap(plan.step, device, beginning, start)
        self.host_tokens += len(sampled)
        return passage, [*tokens.values(), *sampled]

    def _asymmetric(
        self, attention: HostAttention, plan: StepPlan, tokens: dict[int, Answer], start: float
    ) -> tuple[Passage, list[Answer]]:
        """Run an asymmetric step: all rows end their token in it, and rows without tokens leave their cohorts."""
        batches: tuple[list[HostRow], list[HostRow]] = ([], [])
        for row in plan.rows:
            if row.tier == "host":
                under_way = None if row.tokens else attention.take(row.sequence)
                batches[row.sub_batch].append(under_way or HostRow(row.start + 1, tokens[row.sequence]))
        first, second = (
            SubBatch(self._work(row for row in plan.rows if row.tier == "device" and row.sub_batch == number), host)
            for number, host in enumerate(batches)
        )
        passage = attention.asymmetric(first, second, start)
        host = {row.answer.sequence: row.answer for batch in batches for row in batch}
        self.host_tokens += len(host)
        return passage, list((tokens | host).values())
