"""SimulatedExecutor: answers plans on a virtual clock: pipelines of stages, host memory, and
attention on the CPU."""

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from random import Random
from typing import Literal, cast

from nanoserve.errors import UsageError, shown
from nanoserve.lab.simulator.host_attention import HostAttention, HostToken, Processor, SubBatch
from nanoserve.lab.simulator.pipeline import (
    DECOUPLED,
    MovingTimes,
    Passage,
    Pipeline,
    Runtime,
    StepTimes,
    TieredTimes,
)
from nanoserve.record.times import ReshardTimes, StageTimes, SwapTimes, Times
from nanoserve.scheduler.optional import HostResult, Swap, draft_of
from nanoserve.scheduler.plan import Answer, Row, StepPlan, StepResult
from nanoserve.scheduler.work import StepWork, work_of

END_TOKEN, DUMMY_TOKEN = 0, 1
VOCAB_SIZE = 2
"""Number of different answer tokens: END_TOKEN ends the sequence, DUMMY_TOKEN does not."""
_END, _DUMMY = (END_TOKEN,), (DUMMY_TOKEN,)


@dataclass(frozen=True, slots=True)
class SimulatedDrafter:
    """Something that drafts, of which only this is known. Raises UsageError for shares outside 0 to
    1."""

    rates: tuple[float, ...]
    """How often a row's first, second, ... draft token is right, if the draft tokens before it are;
    the last rate stands for more."""
    cost: float = 0.05
    """The time to draft a token for each row, over that of a step that decodes one for each."""

    def __post_init__(self) -> None:
        shares = self.rates + (self.cost,)
        if not self.rates or not all(0 <= share <= 1 for share in shares):
            raise UsageError(
                "a drafter's draft tokens are right with a share of 0 to 1, and cost such a share "
                "of a step"
            )

    @classmethod
    def parse(cls, text: str) -> "SimulatedDrafter":
        """From RATE,RATE,...:COST, the cost being optional."""
        rates, _, cost = text.partition(":")
        try:
            shares = tuple(map(float, rates.split(",")))
            if cost:
                return cls(shares, float(cost))
            return cls(shares)
        except ValueError:
            raise UsageError(
                f"{shown(text)} is not RATE,RATE,...:COST, as 0.8,0.7,0.6:0.05"
            ) from None


class DummyModel:
    """Answers dummy tokens, and ends each sequence after ``seed`` of them: the scheduler cannot
    know the length. Which draft tokens are right is drawn as the ``drafter`` says; the others are
    END_TOKEN."""

    def __init__(self, drafter: SimulatedDrafter | None = None) -> None:
        self._last: dict[int, int] = {}
        self._rates: tuple[float, ...] = ()
        if drafter is not None:
            self._rates = drafter.rates
        self._random = Random(0)

    def __call__(self, plan: StepPlan) -> tuple[Answer, ...]:
        """One token for every row that is sampled, and one more for each accepted draft token; a
        row of no tokens was answered when its token began."""
        for sequence in plan.end:
            del self._last[sequence]
        for begin in plan.begin:
            self._last[begin.sequence] = begin.prompt_length + begin.seed - 1
        answers = []
        for row in plan.rows:
            if not row.sample or not row.tokens:
                continue
            last = self._last[row.sequence]
            if draft_of(row).verify or draft_of(row).propose:
                answers.append(self._verified(row, last))
            elif row.start + len(row.tokens) < last:
                answers.append(Answer(row.sequence, _DUMMY))
            else:
                answers.append(Answer(row.sequence, _END))
        return tuple(answers)

    def _verified(self, row: Row, last: int) -> Answer:
        first, rates = row.start + len(row.tokens) - draft_of(row).verify, self._rates
        draft_tokens = row.tokens[len(row.tokens) - draft_of(row).verify :]
        # its last token's position
        end = first + sum(1 for _ in takewhile(DUMMY_TOKEN.__eq__, draft_tokens))
        tokens = _DUMMY * (end - first + 1)
        if end >= last:
            tokens = _DUMMY * (last - first) + _END
        drawn = (
            self._random.random() < rates[min(place, len(rates) - 1)]
            for place in range(draft_of(row).propose)
        )
        right = sum(takewhile(bool, drawn))
        return Answer(
            row.sequence, tokens, draft=_DUMMY * right + _END * (draft_of(row).propose - right)
        )


class SimulatedExecutor:
    """The Executor protocol in virtual time; nothing passes but what ``collect`` waits for.

    * A step passes through the stages of the pipeline of its layout.
    * A swap moves over the host link from the moment its plan is submitted, beside the stages'
      computing. One that follows its row moves from the moment at which the step computes, layer by
      layer, and ends with it or later. Every device has a full-duplex link, and all move their
      parts at once: one clock for each direction suffices.
    * A transition reloads the new layout's weights from host memory over the same link when all
      before it has ended (Seesaw, section 4.1); the slowest stage counts. It is answered as the end
      of its plan.
    * Host rows advance by cohorts or in asymmetric steps: see host_attention.py.

    The first layout is current in the beginning; swaps and transitions want MovingTimes, host rows
    TieredTimes. A block is one of ``groups`` that hold the same positions. ``max_in_flight``
    defaults to the stages of the deepest layout, ``answer``, which makes the tokens of a plan, to a
    DummyModel. A ``drafter`` drafts in the last stage, behind each step whose rows ask for it.
    """

    def __init__(
        self,
        *layouts: StepTimes,
        block_size: int = 16,
        groups: int = 1,
        runtime: Runtime = DECOUPLED,
        max_in_flight: int | None = None,
        answer: Callable[[StepPlan], tuple[Answer, ...]] | None = None,
        drafter: SimulatedDrafter | None = None,
    ) -> None:
        self.max_in_flight = max_in_flight or max(times.num_stages for times in layouts)
        self.async_scheduling = False
        self.ready = True
        self.pipelines = tuple(Pipeline(times, runtime) for times in layouts)
        self.host_tokens = 0  # sampled so far for sequences in host memory
        self.due = 0.0  # time of the next result; now, if the engine has not answered the last one
        self._layouts = layouts
        self._block_size, self._groups = block_size, groups
        self._answer = answer or DummyModel(drafter)
        self._draft_cost = 0.0
        if drafter is not None:
            self._draft_cost = drafter.cost
        self._told: list[Times] = []
        self._processor = Processor(self._told.append)
        self._link_free: dict[Literal["out", "in"], float] = {"out": 0.0, "in": 0.0}
        self._now = 0.0
        # a heap: when, in which order, what
        self._pending: list[tuple[float, int, StepResult]] = []
        self._results = self._in_flight = 0
        self._enter(0)

    def _enter(self, layout: int) -> None:
        """Plans run in this layout from now on."""
        times = self._layouts[layout]
        self._layout, self._times, self._pipeline = (
            layout,
            cast(MovingTimes, times),
            self.pipelines[layout],
        )
        self._host: HostAttention | None = None
        if isinstance(times, TieredTimes):
            self._host = HostAttention(times, self._processor)

    def submit(self, plan: StepPlan) -> None:
        """Begin a plan's swaps and its step or transition; it is known at once when each will be
        over.

        Raises UsageError for host rows under a layout of several stages, and RuntimeError for a
        plan that the scheduler must not make.
        """
        only_moves = plan.host.swaps and not plan.ends
        if self._in_flight >= self.max_in_flight and not only_moves:
            raise RuntimeError(
                f"plan {plan.step}: {self.max_in_flight} plans are in flight already"
            )
        for swap in plan.host.swaps:
            if not swap.after_row:
                self._swap(swap, Passage(self._now, self._now))
        if plan.layouts.transition is not None:
            self._change_layout(plan, plan.layouts.transition)
        elif only_moves:
            self._answer(plan)  # nothing ends, but the model may be told to forget
        elif plan.layouts.current != self._layout:
            raise RuntimeError(
                f"plan {plan.step} is for layout {plan.layouts.current}, but {self._layout} is "
                "current"
            )
        else:
            if plan.host.strategy != "device" and self._concerns_host(plan):
                passages = self._run_hybrid(plan)
            else:
                passages = self._run(plan)
            for swap in plan.host.swaps:
                if swap.after_row:
                    self._swap(swap, Passage(passages[0].start, passages[-1].end))

    def _run(self, plan: StepPlan) -> Sequence[Passage]:
        answers, work = self._answer(plan), self._work(plan.rows)
        drafting = self._draft_seconds(plan.rows)
        passages = self._pipeline.run(work, self._now, drafting)
        seconds = passages[-1].end - passages[0].start - drafting
        drafted: float | None = None
        if drafting:
            drafted = drafting
        self._know(
            passages[-1].end, StepResult(plan.step, answers, seconds=seconds, draft_seconds=drafted)
        )
        self._tell(plan, work, passages)
        return passages

    def _draft_seconds(self, rows: Iterable[Row]) -> float:
        """One token after the other, for all rows that ask for one."""
        if not self._draft_cost:
            return 0.0
        asked = [
            (draft_of(row).propose, row.start + len(row.tokens))
            for row in rows
            if draft_of(row).propose
        ]
        if not asked:
            return 0.0
        times, work = self._times, self._times.work([context for _, context in asked])
        step = sum(times.stage_seconds(work, stage) for stage in range(times.num_stages))
        return max(count for count, _ in asked) * self._draft_cost * step

    def _know(self, time: float, result: StepResult) -> None:
        """The result will be known then; a plan that it ends is in flight until then."""
        if result.step is not None:
            self._in_flight += 1
        heapq.heappush(self._pending, (time, self._results, result))
        self._results += 1

    def _tell(self, plan: StepPlan, work: StepWork, passages: Sequence[Passage]) -> None:
        now, step, tokens = self._now, plan.step, work.tokens
        for stage, (start, end) in enumerate(passages):
            self._told.append(StageTimes(step, stage, tokens, now, now, start, start, end, end))

    def take_times(self) -> Sequence[Times]:
        """Times of the plans submitted since the last call; a simulation knows them at once."""
        told = tuple(self._told)
        self._told.clear()
        return told

    def _work(self, rows: Iterable[Row]) -> StepWork:
        return work_of(rows, self._times.work)

    def collect(self, until: float | None) -> list[StepResult]:
        """Let time pass until the next plan or swap is over, at most until that moment; returns all
        results known then.

        Raises RuntimeError if nothing is in flight and no moment is given, because the wait would
        never end.
        """
        if until is None and not self._pending:
            raise RuntimeError("nothing is in flight: there is nothing to wait for")
        moment = math.inf
        if self._pending:
            moment = self._pending[0][0]
        if until is not None:
            moment = min(moment, until)
        self._now = max(self._now, moment)
        results = []
        while self._pending and self._pending[0][0] <= self._now:
            result = heapq.heappop(self._pending)[2]
            if result.step is not None:
                self._in_flight -= 1
            results.append(result)
        self.due = math.inf
        if results:
            self.due = self._now
        elif self._pending:
            self.due = self._pending[0][0]
        return results

    def now(self) -> float:
        """Virtual seconds since the beginning."""
        return self._now

    def close(self) -> None:
        """Nothing is held."""

    def _move(self, direction: Literal["out", "in"], seconds: float, ready: float) -> Passage:
        """Queue a transfer behind the transfers of its direction."""
        start = max(ready, self._link_free[direction])
        end = self._link_free[direction] = start + seconds
        return Passage(start, end)

    def _swap(self, swap: Swap, source: Passage) -> None:
        """Move it while what it reads is computed: not before that begins, nor to an end before it
        ends."""
        tokens = len(swap.device_blocks) // self._groups * self._block_size
        seconds = max(
            self._times.swap_seconds(tokens, stage) for stage in range(self._times.num_stages)
        )
        start, end = self._move(swap.direction, seconds, source.start)
        end = max(end, source.end)
        self._know(end, StepResult(None, host=HostResult(swapped=(swap.swap,))))
        self._told.append(
            SwapTimes(swap.swap, 0, swap.direction, 0, start, end, after_row=swap.after_row)
        )

    def _change_layout(self, plan: StepPlan, layout: int) -> None:
        if self._host is not None and self._host.under_way:
            raise RuntimeError(
                f"plan {plan.step} changes the layout while tokens of host sequences are under way"
            )
        self._answer(plan)
        self._enter(layout)
        seconds = max(self._times.reload_seconds(stage) for stage in range(self._times.num_stages))
        idle = max(self._now, max(self._link_free.values()))
        for time, _, _ in self._pending:
            idle = max(idle, time)
        passage = self._move("in", seconds, idle)
        self._pipeline.not_before(passage.end)
        self._know(passage.end, StepResult(plan.step, seconds=seconds))
        self._told.append(ReshardTimes(plan.step, 0, layout, 0, passage.start, passage.end))

    def _concerns_host(self, plan: StepPlan) -> bool:
        """Whether host sequences take part in the step, so that it takes another time than a plain
        one."""
        carries = (
            plan.host.strategy == "overlap" and self._host is not None and self._host.under_way
        )
        return carries or not plan.rows or any(row.host is not None for row in plan.rows)

    def _run_hybrid(self, plan: StepPlan) -> Sequence[Passage]:
        if self._times.num_stages > 1:
            raise UsageError(
                "attention on the host is simulated for one pipeline stage, not for "
                f"{self._times.num_stages}; use --pp 1, with --tp for more devices"
            )
        if self._host is None:
            raise TypeError("attention on the host wants step times that know it: see TieredTimes")
        tokens = {answer.sequence: answer for answer in self._answer(plan)}
        work = self._work(row for row in plan.rows if row.tokens)
        start = self._pipeline.begin(work, self._now)
        if plan.host.strategy == "overlap":
            passage, answers = self._overlap(self._host, plan, tokens, start)
        else:
            passage, answers = self._asymmetric(self._host, plan, tokens, start)
        self._pipeline.occupy(passage)
        progress, done = self._host.progress, self._host.take_work(passage.end)
        seconds = passage.end - passage.start
        self._know(
            passage.end,
            StepResult(
                plan.step,
                tuple(answers),
                host=HostResult(cohorts=progress, work=done),
                seconds=seconds,
            ),
        )
        self._tell(plan, work, [passage])
        return [passage]

    def _overlap(
        self, attention: HostAttention, plan: StepPlan, tokens: dict[int, Answer], start: float
    ) -> tuple[Passage, list[Answer]]:
        beginning = {
            row.sequence: HostToken(row.start + 1, tokens.pop(row.sequence))
            for row in plan.rows
            if row.host is not None
        }
        device = self._work(row for row in plan.rows if row.host is None)
        passage, sampled = attention.overlap(plan.step, device, beginning, start)
        self.host_tokens += len(sampled)
        return passage, list(tokens.values()) + sampled

    def _asymmetric(
        self, attention: HostAttention, plan: StepPlan, tokens: dict[int, Answer], start: float
    ) -> tuple[Passage, list[Answer]]:
        """Run an asymmetric step: all rows end their token in it, and rows without tokens leave
        their cohorts."""
        batches: tuple[list[HostToken], list[HostToken]] = ([], [])
        for row in plan.rows:
            if row.host is not None:
                if row.tokens:
                    host_row = HostToken(row.start + 1, tokens[row.sequence])
                else:
                    host_row = attention.take(row.sequence)
                batches[row.host.sub_batch].append(host_row)
        first = SubBatch(self._work(row for row in plan.rows if row.host is None), batches[0])
        second = SubBatch(self._work(()), batches[1])
        passage = attention.asymmetric(first, second, start)
        host = {row.answer.sequence: row.answer for batch in batches for row in batch}
        self.host_tokens += len(host)
        return passage, list((tokens | host).values())
