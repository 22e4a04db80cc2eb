"""Scheduler: keeps the sequences and their blocks (SequenceTable), asks the policy how much to do, turns that into a
StepPlan (PlanBuilder), and takes the StepResult back. Whatever the policy says, no block is used twice, every block
comes back, and every admitted sequence finishes once arrivals stop.

No sequence is in two plans in flight, unless the executor feeds tokens. Then a decode may enter the next plan while its
token is still being sampled. That token is never its last by length; if it ends the sequence otherwise, the extra step
is discarded. A prompt's chunks follow each other in the same way.
"""

from collections.abc import Sequence as SequenceOf
from typing import Protocol

from nanoserve.errors import WorkersFailed
from nanoserve.request import FinishReason, Request, Sequence, SequenceUpdate, Status
from nanoserve.scheduler.cohorts import HostCohorts
from nanoserve.scheduler.growth import GrowthForecast
from nanoserve.scheduler.kv import BlockPool, SequenceBlocks
from nanoserve.scheduler.load import Decision, Load, Policy
from nanoserve.scheduler.ordering import Ordering
from nanoserve.scheduler.plan import Answer, LayoutCapacity, StepPlan, StepResult
from nanoserve.scheduler.plan_builder import PlanBuilder
from nanoserve.scheduler.predictor import Predictor
from nanoserve.scheduler.sequence_table import SequenceTable
from nanoserve.scheduler.speculation.speculator import Speculator

_PREFILL, _DECODE = Status.PREFILL, Status.DECODE  # Enum lookup is slow in Python 3.11; hoist it.
_ERROR = FinishReason.ERROR

MOST_HOST_LOSSES = 3
"""After this many losses of attention on the CPU, sequences live on the device alone."""


class SchedulerObserver(Protocol):
    """Sees plans and results, and changes nothing."""

    def on_plan(self, plan: StepPlan, load: Load, decision: Decision, cohorts: HostCohorts) -> None:
        """A plan is made from what the policy saw and decided; the cohorts have not followed it yet."""

    def on_result(self, result: StepResult, cohorts: HostCohorts) -> None:
        """A result has come; the cohorts have not advanced by it yet."""

    def on_reset(self) -> None:
        """The plans in flight will have no results."""


class Layouts:
    """The parallel layouts: which one runs, and when it may be left for another.

    A transition needs an idle, empty device. Draining costs recomputation or two swaps for each sequence, so a policy
    that keeps changing its mind must not spend all time on it: at least one token is answered between two drains.
    Answers are finite, so everything finishes.
    """

    def __init__(self, capacities: SequenceOf[LayoutCapacity]) -> None:
        self.capacities = capacities
        self.current = 0  # the layout that runs
        self.target: int | None = None  # of the transition in flight
        self.answered = True  # whether a token was answered since the last drain began
        self._draining = False

    @property
    def changing(self) -> bool:
        """Whether the device is being drained, or a transition is in flight."""
        return self._draining or self.target is not None

    def drains_for(self, wanted: int) -> bool:
        """Whether to drain the device now that the policy wants this layout; an unknown one is ignored."""
        if wanted == self.current or not 0 <= wanted < len(self.capacities):
            self._draining = False
        elif not self._draining and self.answered:
            self._draining, self.answered = True, False
        return self._draining

    def end(self) -> LayoutCapacity:
        """The transition is done; returns the capacity of the new layout."""
        assert self.target is not None, "a transition has begun"
        self.current, self.target, self._draining = self.target, None, False
        return self.capacities[self.current]

    def abandon(self) -> None:
        """The transition, if there is one, failed: the layout stays."""
        self.target, self._draining = None, False


class Scheduler:
    """Queues, blocks and a policy.

    ``num_blocks`` are the KV blocks on the device, ``host_blocks`` those in host memory; with none, nothing ever moves
    there. ``max_model_len`` is the longest sequence, prompt and output together. ``max_num_seqs`` hold blocks at a
    time. At most ``pipeline_depth`` plans are in flight: P, the micro-batches of a pipeline of P stages.
    ``other_layouts`` are parallel layouts 1, 2, ..., with one of the ``predictors`` for each layout. With
    ``feeds_tokens`` the executor takes fed rows, so one more plan may be in flight. Sequences that cannot be fed
    (``SamplingParams.may_be_fed``) then skip every other plan while others are. A ``speculator`` adds guesses to what
    the policy has decided. ``windows`` are those of the model's cache groups, as of `CacheGroups`; policies count a
    block of every group as one. Raises ValueError if tokens are to be fed through more than one stage.
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
        host_blocks: int = 0,
        other_layouts: SequenceOf[LayoutCapacity] = (),
        predictors: SequenceOf[Predictor] = (),
        feeds_tokens: bool = False,
        speculator: Speculator | None = None,
        windows: tuple[int, ...] = (0,),
    ) -> None:
        layouts = (LayoutCapacity(num_blocks, pipeline_depth), *other_layouts)
        if feeds_tokens and max(one.pipeline_depth for one in layouts) > 1:
            raise ValueError("tokens are fed within one stage: pipeline_depth must be 1")
        self.policy = policy
        self.observers: list[SchedulerObserver] = []
        groups = len(windows)
        self.pool = BlockPool(num_blocks, block_size, prefix_caching=prefix_caching, groups=groups)
        self.pipeline_depth = pipeline_depth
        self.feeds_tokens = feeds_tokens
        self.steps = self.forced_steps = self.transitions = self.host_losses = 0
        self.prompt_tokens = self.output_tokens = 0  # of requests that have their first token; sampled for all samples
        self.host_pool = BlockPool(host_blocks, block_size, prefix_caching=False, groups=groups)
        self.table = SequenceTable(
            blocks=SequenceBlocks(self.pool, self.host_pool, windows),
            fewest_blocks=min(one.num_blocks for one in layouts),
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            feeds_tokens=feeds_tokens,
            ordering=Ordering(policy.ranking) if policy.ranking.ranks else None,
            speculator=speculator,
        )
        self.waiting, self.running, self.on_host = self.table.waiting, self.table.running, self.table.on_host
        self.predictors = tuple(predictors)
        self.layouts = Layouts(layouts)
        self.plans_in_flight: dict[int | None, StepPlan] = {}
        self._cohorts = HostCohorts()
        self.policy_failure: str | None = None  # the last one
        self._previous: Decision | None = None
        self._growth = GrowthForecast() if policy.reads_forecast else None

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished or anything in flight."""
        return bool(self.table.sequences or self.plans_in_flight)

    @property
    def steps_in_flight(self) -> int:
        return len(self.plans_in_flight)

    @property
    def awaits_results(self) -> bool:
        """Whether the executor will report anything in flight: plans, or swaps alone."""
        return bool(self.plans_in_flight or self.table.moving)

    def add(self, request: Request) -> None:
        """Queue a request, as `SequenceTable.add` does and raises."""
        self.table.add(request)

    def stop(
        self, request_id: str, now: float, *, index: int | None = None, reason: FinishReason = FinishReason.ABORT
    ) -> list[SequenceUpdate]:
        """End a request, or one of its samples, from outside: an abort, or a stop string the caller has seen. One in
        flight ends at once for the caller; its blocks come back with its last answer. Unknown ones are ignored."""
        family = [sequence for sequence in self.table.unfinished(request_id) if index in (None, sequence.index)]
        for sequence in family:
            self.table.finish(sequence, reason, now)
        for sequence in family:
            self.table.release_siblings(sequence)
        return [SequenceUpdate(request_id, sequence.index, (), sequence) for sequence in family]

    def stop_all(self, error: str, now: float) -> list[SequenceUpdate]:
        """End every request with an error of the policy, as `stop` does."""
        self.policy_failure = error
        for sequence in self.table.sequences.values():
            sequence.error = sequence.error if sequence.finished else error
        stopped = [self.stop(request_id, now, reason=_ERROR) for request_id in list(self.table.requests)]
        return [update for updates in stopped for update in updates]

    def schedule(self, now: float) -> StepPlan | None:
        """The next plan, or None if nothing can run before an answer or an arrival comes."""
        if len(self.plans_in_flight) >= self.pipeline_depth + self.feeds_tokens or self.layouts.target is not None:
            return None
        if (ordering := self.table.ordering) is not None:
            self.table.put_first(ordering.overdue(self.steps))
        builder = self._build(now)
        if not builder.does_something:
            if self.plans_in_flight:
                return None
            if not self._cohorts:  # else a plan without rows lets the host sequences under way go on
                if self.awaits_results or not self.has_work:
                    return None
                builder = self._break_deadlock(now, builder)
        plan = builder.plan(self.steps, self.layouts.current)
        self.steps += 1
        self._previous = builder.decision
        for observer in self.observers:
            observer.on_plan(plan, builder.load, builder.decision, self._cohorts)
        if plan.ends:
            self.plans_in_flight[plan.step] = plan
        if self._cohorts or plan.strategy != "device":
            self._cohorts.follow(plan, self.table.sequences)
        self.layouts.target = plan.transition
        if self._growth is not None:
            self._growth.add(self.table.sequences[begin.sequence] for begin in plan.begin)
        return plan

    def _build(self, now: float, *, admits: bool = True) -> PlanBuilder:
        """Ask the policy and carry out its decision, as far as the blocks go."""
        load, *ready = self._survey()
        decision = self.policy.decide(load)
        builder = PlanBuilder(
            table=self.table,
            cohorts=self._cohorts,
            in_flight=self.plans_in_flight.values(),
            load=load,
            decision=decision,
            now=now,
            admits=admits,
        )
        if not self.layouts.drains_for(decision.layout):
            builder.build(*ready)
            if self.table.speculator is not None:
                builder.add_guesses(self.table.speculator)
            return builder
        builder.drain()
        if not (len(self.running) or self.awaits_results or self._cohorts):
            builder.transition = decision.layout
        return builder

    def _break_deadlock(self, now: float, builder: PlanBuilder) -> PlanBuilder:
        """Nothing is in flight and the decision moved nothing, so nothing would ever change. While partly computed
        prompts hold all blocks, preempt the last and ask again; at last, run the first."""
        while len(self.running) > 1 and all(sequence.status is _PREFILL for sequence in self.running):
            self.table.preempt(self.running[-1])
            builder = self._build(now, admits=False)
            if builder.does_something:
                return builder
        builder.force_first()
        self.forced_steps += 1
        return builder

    def _survey(self) -> tuple[Load, list[Sequence], list[Sequence], list[Sequence]]:
        """What the policy sees, and which decodes, partly computed prompts and host sequences may enter the plan."""
        running_decodes = context = partial_tokens = 0
        decodes, prefills, feeds_tokens, may_go_on = [], [], self.feeds_tokens, self.table.may_go_on
        for sequence in self.running:
            context += sequence.computed
            is_ready = not sequence.in_flight or (feeds_tokens and may_go_on(sequence))
            if sequence.status is _DECODE:
                running_decodes += 1
                if is_ready:
                    decodes.append(sequence)
            else:
                partial_tokens += sequence.remaining
                if is_ready:
                    prefills.append(sequence)
        ready_host = [sequence for sequence in self.on_host if not sequence.in_flight]
        pool, host_pool, free_slots = self.pool, self.host_pool, self.table.free_slots
        has_host = not self.table.host_disabled
        may_begin = free_slots > 0 and not self.table.waits_for_blocks
        next_prefill = prefills[0] if prefills else self.table.next_waiting if may_begin else None
        growth, longest = (0, 0) if self._growth is None else self._growth.look(self.steps, self.running)
        groups = pool.groups
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
            expected_growth=min(pool.blocks_for(growth), pool.num_blocks // groups - 1),
            longest_remaining=longest,
            layout=self.layouts.current,
            layouts=len(self.layouts.capacities),
            predictor=self.predictors[self.layouts.current] if self.predictors else None,
            host_decodes=len(self.on_host),
            ready_host=len(ready_host),
            host_context_tokens=sum([sequence.computed for sequence in self.on_host]),
            moving=len(self.table.moving),
            host_free_blocks=host_pool.free_blocks // groups if has_host else 0,
            host_blocks=host_pool.num_blocks // groups if has_host else 0,
            cohorts=tuple(self._cohorts.under_way.values()) if self._cohorts else (),
        )
        return load, decodes, prefills, ready_host

    def apply(self, result: StepResult, now: float) -> list[SequenceUpdate]:
        """Take in what an executor found out; returns what each sequence gained. Raises WorkersFailed if workers have
        died too often, and it is not known of which request."""
        if result.lost is not None:
            return self._lose_workers(result.lost, now, ran=result.ran)
        table, cohorts, any_on_host = self.table, self._cohorts, bool(self._cohorts)
        for observer in self.observers:
            observer.on_result(result, cohorts)
        updates = []
        for progress in result.cohorts:
            cohorts.advance(progress.step, progress.layers)
        sequences, answered, speculator = table.sequences, table.answered, table.speculator
        for answer in result.answers:
            sequence = sequences[answer.sequence]
            row = sequence.in_flight[0]
            if answer.prompt_logprobs:
                sequence.keep_prompt_logprobs(row.start, answer.prompt_logprobs)
            if row.sample or answer.error is not None:
                if speculator is not None:
                    sequence.computed -= row.guesses - max(0, len(answer.tokens) - 1) if row.guesses else 0
                if sequence.finish_reason is None:  # else it was ended while in flight
                    updates.append(self._take_tokens(sequence, answer, now))
                if speculator is not None and (row.guesses or row.draft or self.feeds_tokens):
                    speculator.learn(sequence, row.guesses, len(answer.tokens), row.draft, answer.draft)
                answered(sequence)
                if any_on_host:
                    cohorts.leave(answer.sequence)
        if updates:
            self.layouts.answered = True
            gained = sum([len(update.new_tokens) for update in updates])
            self.output_tokens += gained
            table.outstanding += gained
        for swap in result.swapped:
            table.swap_answered(swap)
        if result.step is not None:
            plan = self.plans_in_flight.pop(result.step)
            self._end_plan(plan)
            if speculator is not None and result.draft_seconds:
                asking = [row for row in plan.rows if row.draft]
                pace = result.draft_seconds / max([row.draft for row in asking])
                speculator.learn_pace(pace, steady=all(row.guesses for row in asking))
        if result.host_lost is not None:
            # Host rows in flight, of asymmetric plans too, will not be answered; their plans end all the same.
            self.host_losses += 1
            table.lose_host(for_good=self.host_losses >= MOST_HOST_LOSSES)
            cohorts.clear()
        if table.blocks.slides:
            table.slide()
        return updates

    def _end_plan(self, plan: StepPlan) -> None:
        """Its device work is done; that answers the rows without a token."""
        for row in plan.rows:
            if row.sample:
                continue
            sequence = self.table.sequences.get(row.sequence)
            if sequence is not None and sequence.in_flight and sequence.in_flight[0] is row:
                self.table.answered(sequence)
        if plan.transition is not None:
            self.transitions += 1
            layout = self.layouts.end()
            self.pool.replace_blocks(layout.num_blocks)
            self.pipeline_depth = layout.pipeline_depth

    def fail_steps(self, error: str, now: float) -> list[SequenceUpdate]:
        """What is in flight will never be answered: its sequences end with an error, the others go on."""
        self.pool.forget_cache()  # blocks are shared once their plan is submitted; these were perhaps never written
        self._forget_plans()
        sequences = self.table.sequences
        answers = tuple(Answer(key, error=error) for key, sequence in sequences.items() for _ in sequence.in_flight)
        updates = self.apply(StepResult(None, answers), now)
        updates += self._fail([one for one in self.table.moving if not one.finished], error, now)
        self.table.abandon_swaps()
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
        error = f"the workers died whenever this request ran, and at last when it ran alone: {cause}"
        return self._fail(self.table.unfinished(culprit), error, now)

    def _reset(self) -> None:
        """Nothing in flight will be answered and no KV is left: every sequence is recomputed from its tokens."""
        self._forget_plans()
        self.layouts.answered = True  # nothing is left on the device, so another drain is free
        self._previous = None  # it was decided for a state that is gone: a drain, say
        self.table.reset()

    def _forget_plans(self) -> None:
        self.plans_in_flight.clear()
        self._cohorts.clear()
        for observer in self.observers:
            observer.on_reset()
        self.layouts.abandon()

    def fail_all(self, error: str, now: float) -> list[SequenceUpdate]:
        """Nothing will ever be answered again: every sequence ends with an error, whether it ran or waited."""
        self._reset()
        return self._fail(list(self.table.sequences.values()), error, now)

    def _fail(self, unfinished: list[Sequence], error: str, now: float) -> list[SequenceUpdate]:
        """End sequences that have nothing in flight with an error; all samples of their requests are among them."""
        updates = [self._take_tokens(one, Answer(one.sequence_id, error=error), now) for one in unfinished]
        for sequence in unfinished:
            self.table.release_siblings(sequence)
        return updates

    def _take_tokens(self, sequence: Sequence, answer: Answer, now: float) -> SequenceUpdate:
        new_tokens: tuple[int, ...] = ()
        reason: FinishReason | None = _ERROR
        if answer.error is not None:
            sequence.error = answer.error
        else:
            if sequence.status is _PREFILL:
                sequence.move_to(Status.DECODE)
                if sequence.first_token_time is None:  # else it is here again after a preemption
                    self._count_prompt(sequence)
                    sequence.first_token_time = now
            new_tokens, reason = sequence.extend(answer.tokens, answer.logprobs)
            if answer.complete and len(new_tokens) == len(answer.tokens):
                reason = FinishReason.STOP
            if reason is not None and self._growth is not None:
                self._growth.record(sequence.output_length)
        if reason is not None:
            self.table.finish(sequence, reason, now)
        return SequenceUpdate(sequence.request.request_id, sequence.index, new_tokens, sequence)

    def _count_prompt(self, sequence: Sequence) -> None:
        """The first of the samples of a request gets its first token."""
        family = self.table.requests[sequence.request.request_id]
        if all(one.first_token_time is None for one in family):
            self.prompt_tokens += sequence.prompt_length
