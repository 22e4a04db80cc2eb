"""Scheduler: keeps the sequences and their blocks (SequenceTable), asks the policy how much to do,
turns that into a StepPlan (PlanBuilder), and takes the StepResult back. Whatever the policy says,
no block is used twice, every block comes back, and every admitted sequence finishes once arrivals
stop.

No sequence is in two plans in flight, unless scheduling is asynchronous. Then a decode may enter
the next plan while its token is still being sampled. That token is never its last by length; if it
ends the sequence otherwise, the extra step is discarded. A prompt's chunks follow each other in the
same way.
"""

from collections.abc import Sequence as SequenceOf
from typing import Protocol

from nanoserve.errors import WorkersFailed
from nanoserve.request import FinishReason, Place, Request, Sequence, SequenceUpdate, Status
from nanoserve.scheduler.extension import NOTHING_ATTACHED, Extensions, Moments
from nanoserve.scheduler.growth import GrowthForecast
from nanoserve.scheduler.kv import BlockPool, SequenceBlocks
from nanoserve.scheduler.load import Decision, Load, Policy
from nanoserve.scheduler.ordering import Ordering
from nanoserve.scheduler.plan import Answer, Row, StepPlan, StepResult
from nanoserve.scheduler.plan_builder import PlanBuilder
from nanoserve.scheduler.predictor import Predictor
from nanoserve.scheduler.sequence_table import SequenceTable
from nanoserve.scheduler.windows import WindowedBlocks

_PREFILL, _DECODE = Status.PREFILL, Status.DECODE  # Enum lookup is slow in Python 3.11; hoist it.
_DEVICE = Place.DEVICE
_ERROR = FinishReason.ERROR


class SchedulerObserver(Protocol):
    """Sees plans and results, and changes nothing."""

    def on_plan(self, plan: StepPlan, load: Load, decision: Decision) -> None:
        """A plan is made from what the policy saw and decided; no extension has followed it yet."""

    def on_result(self, result: StepResult) -> None:
        """A result has come, and nothing of it is taken in yet."""

    def on_reset(self) -> None:
        """The plans in flight will have no results."""


class Scheduler:
    """Queues, blocks and a policy.

    ``num_blocks`` are the KV blocks on the device. ``max_model_len`` is the longest sequence,
    prompt and output together. ``max_num_seqs`` hold blocks at a time. At most ``pipeline_depth``
    plans are in flight: P, the micro-batches of a pipeline of P stages. With ``async_scheduling``
    the executor takes placeholder rows, so one more plan may be in flight. Sequences whose
    parameters forbid it (``SamplingParams.allows_async_scheduling``) then skip every other plan
    while others are. ``windows`` are those of the model's cache groups, as of `CacheGroups`;
    policies count a block of every group as one. ``predictors`` are one for each parallel layout.
    ``extensions`` are the mechanisms beside the plain path. Raises ValueError if scheduling is
    asynchronous and there is more than one stage, or if there are windows and recurrent states.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        max_num_seqs: int = 256,
        prefix_caching: bool = True,
        pipeline_depth: int = 1,
        predictors: SequenceOf[Predictor] = (),
        async_scheduling: bool = False,
        windows: tuple[int, ...] = (0,),
        extensions: Extensions = NOTHING_ATTACHED,
    ) -> None:
        if async_scheduling and pipeline_depth > 1:
            raise ValueError("asynchronous scheduling needs one stage: pipeline_depth must be 1")
        self.policy = policy
        self.observers: list[SchedulerObserver] = []
        self.extensions = extensions
        self._moments = Moments(self.extensions)
        self.pool = BlockPool(
            num_blocks, block_size, prefix_caching=prefix_caching, groups=len(windows)
        )
        self.pipeline_depth = pipeline_depth
        self.async_scheduling = async_scheduling
        self.steps = self.forced_steps = 0
        # of requests that have their first token; sampled for all samples
        self.prompt_tokens = self.output_tokens = 0
        blocks = SequenceBlocks(self.pool)
        if any(windows):
            blocks = WindowedBlocks(self.pool, windows)
        for makes_blocks in (extensions.state, extensions.canvases):
            if makes_blocks is not None:
                blocks = makes_blocks.make_blocks(self.pool, windows)
        self.table = SequenceTable(
            blocks=blocks,
            moments=self._moments,
            fewest_blocks=num_blocks,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            async_scheduling=async_scheduling,
            ordering=Ordering(policy.ranking) if policy.ranking.ranks else None,
        )
        self.waiting, self.running = self.table.waiting, self.table.running
        self.predictors = tuple(predictors)
        self.plans_in_flight: dict[int | None, StepPlan] = {}
        self.policy_failure: str | None = None  # the last one
        self._previous: Decision | None = None
        self._growth = GrowthForecast() if policy.reads_forecast else None
        for extension in self.extensions:
            extension.attach(self)

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished or anything in flight."""
        return bool(self.table.sequences or self.plans_in_flight)

    @property
    def steps_in_flight(self) -> int:
        return len(self.plans_in_flight)

    @property
    def awaits_results(self) -> bool:
        """Whether the executor will report anything in flight."""
        return bool(self.plans_in_flight or self.table.busy)

    @property
    def goes_on(self) -> bool:
        """Whether a plan without rows would let something go on."""
        return any(goes_on() for goes_on in self._moments.goes_on)

    def add(self, request: Request) -> None:
        """Queue a request, as `SequenceTable.add` does and raises."""
        self.table.add(request)

    def stop(
        self,
        request_id: str,
        now: float,
        *,
        index: int | None = None,
        reason: FinishReason = FinishReason.ABORT,
    ) -> list[SequenceUpdate]:
        """End a request, or one of its samples, from outside: an abort, or a stop string the caller
        has seen. One in flight ends at once for the caller; its blocks come back with its last
        answer. Unknown ones are ignored."""
        family = [
            sequence
            for sequence in self.table.unfinished(request_id)
            if index in (None, sequence.index)
        ]
        for sequence in family:
            self.table.finish(sequence, reason, now)
        for sequence in family:
            self.table.release_siblings(sequence)
        return [SequenceUpdate(request_id, sequence.index, (), sequence) for sequence in family]

    def stop_all(self, error: str, now: float) -> list[SequenceUpdate]:
        """End every request with an error of the policy, as `stop` does."""
        self.policy_failure = error
        for sequence in self.table.sequences.values():
            if not sequence.finished:
                sequence.error = error
        stopped = [
            self.stop(request_id, now, reason=_ERROR) for request_id in list(self.table.requests)
        ]
        return [update for updates in stopped for update in updates]

    def schedule(self, now: float) -> StepPlan | None:
        """The next plan, or None if nothing can run before an answer or an arrival comes."""
        moments = self._moments
        most_in_flight = self.pipeline_depth
        if self.async_scheduling:
            most_in_flight += 1  # the next plan is made while tokens are sampled
        if len(self.plans_in_flight) >= most_in_flight:
            return None
        if any(holds_back() for holds_back in moments.holds_back):
            return None
        if (ordering := self.table.ordering) is not None:
            self.table.put_first(ordering.overdue(self.steps))
        builder = self._build(now)
        if not builder.does_something:
            if self.plans_in_flight:
                return None
            if not self.goes_on:
                if self.awaits_results or not self.has_work:
                    return None
                builder = self._break_deadlock(now, builder)
        plan = builder.plan(self.steps)
        for complete in moments.complete:
            plan = complete(plan)
        self.steps += 1
        self._previous = builder.decision
        for observer in self.observers:
            observer.on_plan(plan, builder.load, builder.decision)
        if plan.ends:
            self.plans_in_flight[plan.step] = plan
        for planned in moments.planned:
            planned(plan)
        if self._growth is not None:
            self._growth.add(self.table.sequences[begin.sequence] for begin in plan.begin)
        return plan

    def _build(self, now: float, *, admits: bool = True) -> PlanBuilder:
        """Ask the policy and carry out its decision, as far as the blocks go."""
        load, decodes, prefills = self._survey()
        builder = PlanBuilder(
            table=self.table,
            moments=self._moments,
            load=load,
            decision=self.policy.decide(load),
            now=now,
            admits=admits,
        )
        for take_over in self._moments.take_over:
            if take_over(builder):
                return builder
        builder.build(decodes, prefills)
        return builder

    def _break_deadlock(self, now: float, builder: PlanBuilder) -> PlanBuilder:
        """Nothing is in flight and the decision moved nothing, so nothing would ever change. While
        partly computed prompts hold all blocks, preempt the last and ask again; at last, run the
        first."""
        while len(self.running) > 1 and all(
            sequence.status is _PREFILL for sequence in self.running
        ):
            self.table.preempt(self.running[-1])
            builder = self._build(now, admits=False)
            if builder.does_something:
                return builder
        builder.force_first()
        self.forced_steps += 1
        return builder

    def _survey(self) -> tuple[Load, list[Sequence], list[Sequence]]:
        """Make the policy's snapshot, and list the decodes and partly computed prompts that may
        enter the plan."""
        running_decodes = context = partial_tokens = 0
        decodes, prefills = [], []
        prompt_may_go_on = self.table.prompt_may_go_on
        for sequence in self.running:
            context += sequence.computed
            if sequence.status is _DECODE:
                running_decodes += 1
                if sequence.in_flight:
                    # Only with a placeholder; a call would take longer than the rest of the loop.
                    waiting = sequence.placeholders
                    if waiting is None or len(sequence.tokens) >= waiting.limit or waiting.wait:
                        continue
                decodes.append(sequence)
            else:
                partial_tokens += sequence.remaining
                if not sequence.in_flight or prompt_may_go_on(sequence):
                    prefills.append(sequence)
        pool, free_slots = self.pool, self.table.free_slots
        next_prefill = prefills[0] if prefills else None
        if next_prefill is None and free_slots > 0 and not self.table.waits_for_blocks:
            next_prefill = self.table.next_waiting
        groups = pool.groups
        growth = longest = 0
        if self._growth is not None:
            tokens, longest = self._growth.look(self.steps, self.running)
            growth = min(pool.blocks_for(tokens), pool.num_blocks // groups - 1)
        load = Load(
            previous=self._previous,
            waiting_tokens=self.waiting.tokens + partial_tokens,
            first_waiting_tokens=0 if next_prefill is None else next_prefill.remaining,
            running_decodes=running_decodes,
            ready_decodes=len(decodes),
            ready_prefills=len(prefills),
            context_tokens=context,
            free_blocks=pool.free_blocks // groups,
            total_blocks=pool.num_blocks // groups,
            block_size=pool.block_size,
            free_slots=free_slots,
            steps_in_flight=self.steps_in_flight,
            pipeline_depth=self.pipeline_depth,
            expected_growth=growth,
            longest_remaining=longest,
            predictor=self.predictors[0] if self.predictors else None,
        )
        for survey in self._moments.survey:
            survey(load)
        return load, decodes, prefills

    def apply(self, result: StepResult, now: float) -> list[SequenceUpdate]:
        """Take in what an executor found out; returns what each sequence gained. Raises
        WorkersFailed if workers have died too often, and it is not known of which request."""
        if result.lost is not None:
            return self._lose_workers(result.lost, now, ran=result.ran)
        for observer in self.observers:
            observer.on_result(result)
        updates = self._take_answers(result.answers, now)
        for take_in in self._moments.take_in:
            take_in(result, len(updates))
        if result.step is not None:
            plan = self.plans_in_flight.pop(result.step)
            for row in plan.rows:
                if not row.sample:
                    self._answer_unsampled(row)
            for plan_ended in self._moments.plan_ended:
                plan_ended(plan, result)
        if self.table.blocks.slides:
            self.table.slide()
        return updates

    def _take_answers(self, answers: SequenceOf[Answer], now: float) -> list[SequenceUpdate]:
        """Give each answer to its sequence, whose oldest row in flight it belongs to."""
        updates = []
        gained = 0
        sequences = self.table.sequences
        settle = self.table.settle
        share_full = self.table.blocks.share_full
        hearing = self._moments.answered
        block_size = self.pool.block_size
        for answer in answers:
            sequence = sequences[answer.sequence]
            in_flight = sequence.in_flight
            row = in_flight[0]
            if answer.prompt_logprobs:
                sequence.keep_prompt_logprobs(row.start, answer.prompt_logprobs)
            if answer.error is not None:
                if sequence.finish_reason is None:
                    updates.append(self._end(sequence, answer.error, now))
            elif not row.sample:
                continue
            elif sequence.finish_reason is None:  # else it was ended while in flight
                if sequence.status is _PREFILL or sequence.first_token_time is None:
                    self._begin_decoding(sequence, answer, now)
                new_tokens = answer.tokens
                tokens = sequence.tokens
                is_plain = len(new_tokens) == 1 and not answer.logprobs and not answer.complete
                is_last = len(tokens) + 1 >= sequence.max_length
                if is_plain and not is_last and new_tokens[0] not in sequence.stop_tokens:
                    tokens.append(new_tokens[0])
                    gained += 1
                else:
                    new_tokens = self._extend(sequence, answer, now)
                    gained += len(new_tokens)
                request_id = sequence.request.request_id
                updates.append(SequenceUpdate(request_id, sequence.index, new_tokens, sequence))
            if hearing:
                for answered in hearing:
                    answered(sequence, row, answer)
            in_flight.popleft()
            # A decode in flight has an unknown token; a prompt's full blocks were shared before.
            known = sequence.computed - len(in_flight)
            # Most answers fill no block and end nothing: calls would take a tenth of the time here.
            has_ended = sequence.finish_reason is not None
            if has_ended or sequence.fork is not None or sequence.place is not _DEVICE:
                settle(sequence)
            elif known >= (len(sequence.cached_columns) + 1) * block_size:
                share_full(sequence, known)
        self.output_tokens += gained
        self.table.outstanding += gained
        return updates

    def _begin_decoding(self, sequence: Sequence, answer: Answer, now: float) -> None:
        """The prompt of a sequence is computed, and the answer may have its first token."""
        if sequence.status is _PREFILL:
            sequence.move_to(_DECODE)
        # else it is here again after a preemption, or its first canvas is not settled
        if sequence.first_token_time is None and answer.tokens:
            family = self.table.requests[sequence.request.request_id]
            if all(one.first_token_time is None for one in family):
                self.prompt_tokens += sequence.prompt_length
            sequence.first_token_time = now

    def _extend(self, sequence: Sequence, answer: Answer, now: float) -> tuple[int, ...]:
        """Give a sequence its tokens, and end it if it has all of them then. Returns the tokens
        that it took."""
        new_tokens, reason = sequence.extend(answer.tokens, answer.logprobs)
        if answer.complete and len(new_tokens) == len(answer.tokens):
            reason = FinishReason.STOP
        if reason is not None:
            if self._growth is not None:
                self._growth.record(sequence.output_length)
            self.table.finish(sequence, reason, now)
        return new_tokens

    def _end(self, sequence: Sequence, error: str, now: float) -> SequenceUpdate:
        """End a sequence with an error."""
        sequence.error = error
        self.table.finish(sequence, _ERROR, now)
        return SequenceUpdate(sequence.request.request_id, sequence.index, (), sequence)

    def _answer_unsampled(self, row: Row) -> None:
        """The plan of a row without a token has ended, which is the row's answer unless it had one
        before."""
        sequence = self.table.sequences.get(row.sequence)
        if sequence is not None and sequence.in_flight and sequence.in_flight[0] is row:
            sequence.in_flight.popleft()
            self.table.settle(sequence)

    def fail_steps(self, error: str, now: float) -> list[SequenceUpdate]:
        """End the sequences in flight with an error: their plans will never be answered. Other
        sequences go on."""
        # blocks are shared once their plan is submitted; these were perhaps never written
        self.pool.forget_cache()
        sequences = self.table.sequences
        answers = tuple(
            Answer(key, error=error)
            for key, sequence in sequences.items()
            for _ in sequence.in_flight
        )
        updates = self.apply(StepResult(None, answers), now)
        updates += self._fail([one for one in self.table.busy if not one.finished], error, now)
        self._forget_plans(all_is_lost=False)
        return updates

    def _lose_workers(self, cause: str, now: float, *, ran: float) -> list[SequenceUpdate]:
        """Reset. A suspected request that was alone in flight fails."""
        quarantine = self.table.quarantine
        culprit = quarantine.on_death(self.table.requests_in_flight if ran else (), now, ran=ran)
        if (times := quarantine.exhausted) is not None:
            raise WorkersFailed(f"the workers died {times}; the last time {cause}")
        self._reset()
        if culprit is None:
            return []
        error = (
            f"the workers died whenever this request ran, and at last when it ran alone: {cause}"
        )
        return self._fail(self.table.unfinished(culprit), error, now)

    def _reset(self) -> None:
        """Nothing in flight will be answered and no KV is left: every sequence is recomputed from
        its tokens."""
        self._forget_plans(all_is_lost=True)
        self._previous = None  # it was decided for a state that is gone
        self.table.reset()

    def _forget_plans(self, *, all_is_lost: bool) -> None:
        self.plans_in_flight.clear()
        for abandon in self._moments.abandon:
            abandon(all_is_lost=all_is_lost)
        for observer in self.observers:
            observer.on_reset()

    def fail_all(self, error: str, now: float) -> list[SequenceUpdate]:
        """Nothing will ever be answered again: every sequence ends with an error, whether it ran or
        waited."""
        self._reset()
        return self._fail(list(self.table.sequences.values()), error, now)

    def _fail(self, unfinished: list[Sequence], error: str, now: float) -> list[SequenceUpdate]:
        """End sequences that have nothing in flight with an error; all samples of their requests
        are among them."""
        updates = [self._end(sequence, error, now) for sequence in unfinished]
        for sequence in unfinished:
            self.table.release_siblings(sequence)
        return updates
