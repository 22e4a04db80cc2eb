"""Scheduler: the mechanism shared by all policies.

It keeps the sequences and their blocks (Lifecycle), asks the policy how much to do, turns the answer into a StepPlan
(Draft), and takes the StepResult back. Sequences may live in host memory too: Tiers moves them, HostCohorts knows whose
token is under way there, and Layouts says when the device is to be emptied for another parallel layout. Whatever the
policy says: no block is used twice, every block comes back, and every admitted sequence finishes once arrivals stop.

No sequence is in two plans in flight, unless the executor feeds tokens: then a decode may enter the next plan with its
token still being sampled, as if it were there. The token never is its last by length; if it ends the sequence
otherwise, what the next plan makes of it is thrown away. A prompt's chunks follow each other in the same way.
"""

from collections.abc import Sequence as SequenceOf

from nanoserve.errors import UsageError, WorkersFailed
from nanoserve.kv.block_pool import BlockPool
from nanoserve.kv.host_tier import HostTier
from nanoserve.kv.sequence_blocks import SequenceBlocks
from nanoserve.request import FinishReason, Place, Request, Sequence, SequenceUpdate, Status
from nanoserve.scheduler.admission import check_admissible
from nanoserve.scheduler.draft import Draft
from nanoserve.scheduler.forecasts import Forecasts
from nanoserve.scheduler.growth import Forecaster
from nanoserve.scheduler.host_cohorts import HostCohorts
from nanoserve.scheduler.layouts import LayoutCapacity, Layouts
from nanoserve.scheduler.lifecycle import Lifecycle
from nanoserve.scheduler.load import Decision, Load, Policy, Predictor
from nanoserve.scheduler.plan import Answer, Row, StepPlan, StepResult
from nanoserve.scheduler.tiers import Tiers

_PREFILL, _DECODE = Status.PREFILL, Status.DECODE  # looking a member up takes Python 3.11 longer than a call

MOST_HOST_LOSSES = 3
"""So often may attention on the CPU be lost; then sequences live on the device alone."""


class Scheduler:
    """Queues, blocks and a policy.

    Args:
        policy: decides how much each step holds.
        num_blocks: KV blocks on the device.
        block_size: tokens per block.
        max_model_len: longest sequence, prompt and output together.
        max_num_seqs: sequences that hold blocks at a time.
        prefix_caching: share full blocks of equal prefixes.
        pipeline_depth: plans in flight at most, unless tokens are fed: P, the micro-batches of a pipeline of P stages.
        host_blocks: KV blocks in host memory; with none, nothing ever moves there.
        other_layouts: what num_blocks and pipeline_depth are in parallel layouts 1, 2, ...
        predictors: for the policy, one per layout.
        feeds_tokens: whether the executor takes fed rows; there may be one plan more in flight then. Sequences that
            cannot be fed (`lifecycle.may_be_fed`) sit out every other plan while others are.

    Attributes:
        transitions: changes of layout so far.
        host_losses: how often attention on the CPU was lost. After MOST_HOST_LOSSES times there is no host tier.
        forecasts: what each plan in flight was predicted to take.

    Raises:
        ValueError: if tokens are to be fed through more than one stage.
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
    ) -> None:
        if feeds_tokens and max([pipeline_depth, *(one.pipeline_depth for one in other_layouts)]) > 1:
            raise ValueError("tokens are fed within one stage: pipeline_depth must be 1")
        self.policy = policy
        self.pool = BlockPool(num_blocks, block_size, prefix_caching=prefix_caching)
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.pipeline_depth = pipeline_depth
        self.feeds_tokens = feeds_tokens
        self.steps = self.forced_steps = self.transitions = self.host_losses = 0
        self.host_pool = (host_tier := HostTier(host_blocks, block_size)).pool
        self._lifecycle = Lifecycle(
            SequenceBlocks(self.pool),
            host_tier,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            feeds_tokens=feeds_tokens,
        )
        self._tiers = Tiers(self._lifecycle)
        self._cohorts = HostCohorts()
        self._layouts = Layouts([LayoutCapacity(num_blocks, pipeline_depth), *other_layouts])
        self._predictors = tuple(predictors)
        self.forecasts = Forecasts(self._predictors)
        self.waiting = self._lifecycle.waiting
        self.running = self._lifecycle.running
        self.on_host = self._lifecycle.on_host
        self.held = self._lifecycle.held
        self._rows_in_flight: dict[int, Row] = {}  # the newest of each sequence
        self._chunks_before: dict[int, Row] = {}  # the older of two, where it is a chunk of a prompt and not sampled
        self._plans_in_flight: dict[int, StepPlan] = {}
        self._previous: Decision | None = None
        self._forecaster = Forecaster(wanted=getattr(policy, "reads_forecast", False))

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished or anything in flight."""
        return bool(self._lifecycle.sequences or self._plans_in_flight)

    @property
    def steps_in_flight(self) -> int:
        return len(self._plans_in_flight)

    @property
    def awaits_results(self) -> bool:
        """Whether anything is in flight of which the executor will tell: plans, or swaps alone."""
        return bool(self._plans_in_flight or len(self._tiers))

    @property
    def layout(self) -> int:
        """The number of the parallel layout that runs."""
        return self._layouts.current

    @property
    def changing_layout(self) -> bool:
        """Whether the device is being emptied for another layout, or changes to it."""
        return self._layouts.changing

    @property
    def preemptions(self) -> int:
        """So far."""
        return self._lifecycle.preemptions

    # ---- intake -----------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request; its samples after the first wait until its prompt is computed.

        Raises:
            UsageError: if it can never run here, or its id is in use.
        """
        if request.request_id in self._lifecycle:
            raise UsageError(f"request id {request.request_id!r} is in use")
        blocks, size = self._layouts.smallest.num_blocks, self.pool.block_size
        check_admissible(request, max_model_len=self.max_model_len, num_blocks=blocks, block_size=size)
        self._lifecycle.add(request)

    def stop(
        self, request_id: str, now: float, *, index: int | None = None, reason: FinishReason = FinishReason.ABORT
    ) -> list[SequenceUpdate]:
        """End a request, or one of its samples, from outside: an abort, or a stop string the caller has seen.

        A sequence in flight ends at once for the caller; its blocks come back with its last answer, and what that says
        is passed over. So are unknown and finished sequences.
        """
        lifecycle = self._lifecycle
        family = [sequence for sequence in lifecycle.unfinished(request_id) if index in (None, sequence.index)]
        for sequence in family:
            lifecycle.finish(sequence, reason, now)
        for sequence in family:
            lifecycle.release_siblings(sequence)
        return [SequenceUpdate(request_id, sequence.index, (), sequence) for sequence in family]

    # ---- a plan -----------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan | None:
        """The next plan, or None if nothing can run before an answer or an arrival comes."""
        if len(self._plans_in_flight) >= self.pipeline_depth + self.feeds_tokens or self._layouts.target is not None:
            return None
        draft = self._draft(now)
        if not draft.does_something:
            if self._plans_in_flight:
                return None
            if not self._rows_in_flight:  # else host sequences are under way: a plan without rows lets them go on
                if len(self._tiers) or not self.has_work:
                    return None
                draft = self._break_deadlock(now, draft)
        return self._submit(draft)

    def _submit(self, draft: Draft) -> StepPlan:
        """The draft's plan, which is in flight from now on."""
        plan = draft.plan(self.steps, self._layouts.current, any_under_way=bool(self._cohorts))
        self.steps += 1
        self._previous = draft.decision
        self.forecasts.expect(plan, draft.decision, self._cohorts)
        if plan.rows or plan.transition is not None or plan.strategy == "overlap":  # else it holds nothing but swaps
            self._plans_in_flight[plan.step] = plan
        self._chunks_before |= {key: self._rows_in_flight[key] for key in draft.chunks_behind}
        self._rows_in_flight |= draft.rows
        if draft.host_rows:
            self._rows_in_flight |= draft.host_rows
            self._cohorts.follow(plan, self._lifecycle.sequences)
        if plan.transition is not None:
            self._layouts.begin(plan.transition)
        self._forecaster.add(self._lifecycle.sequences[begin.sequence] for begin in plan.begin)
        return plan

    def _draft(self, now: float, *, admits: bool = True) -> Draft:
        """Ask the policy and carry its answer out, as far as the blocks go."""
        load, decodes, prefills, ready_host = self._survey()
        decision = self.policy.decide(load)
        draft = Draft(self._lifecycle, self._tiers, decision, now, running_decodes=load.running_decodes, admits=admits)
        if self._layouts.drains_for(decision.layout):
            draft.drain(nothing_in_flight=not self._rows_in_flight and not self._plans_in_flight)
            return draft
        if decision.swap_out:
            decodes = self._tiers.swap_out(decodes, decision.swap_out)
        if decision.swap_in:
            self._tiers.swap_in(ready_host, decision.swap_in)
            ready_host = [sequence for sequence in ready_host if sequence.place is Place.HOST]
        if decision.park:
            draft.keep_room_for_prompts(prefills)
        draft.add_decodes(decodes)
        if decision.strategy == "overlap":
            draft.begin_host_tokens(ready_host)
        elif decision.strategy == "asymmetric":
            # A plan in flight may be finishing the tokens under way: none of them can be named again before it ends.
            overlapping = any(plan.strategy == "overlap" for plan in self._plans_in_flight.values())
            draft.finish_host_tokens(() if overlapping else self._cohorts.most_advanced(), ready_host)
        draft.add_prefills(prefills)
        return draft

    def _break_deadlock(self, now: float, draft: Draft) -> Draft:
        """Nothing is in flight and the decision moved nothing, so nothing would ever change.

        Where all blocks are held by partly computed prompts, the newest gives its blocks up and the policy is asked
        again, until it moves something or one prompt is left; what helps nothing ends in a forced step.
        """
        while len(self.running) > 1 and all(sequence.status is _PREFILL for sequence in self.running):
            self._lifecycle.preempt(next(reversed(self.running)))
            draft = self._draft(now, admits=False)
            if draft.does_something:
                return draft
        draft.force_oldest()
        self.forced_steps += 1
        return draft

    def _survey(self) -> tuple[Load, list[Sequence], list[Sequence], list[Sequence]]:
        """What the policy sees now, and the sequences that may enter the next plan, oldest first.

        Returns:
            the snapshot; those on the device that decode, and that are partly prefilled; and those on the host.
        """
        running_decodes = context = partial_tokens = 0
        decodes, prefills, may_go_on = [], [], self._lifecycle.may_take_the_next_chunk
        for sequence in self.running:
            context += sequence.computed
            if sequence.status is _DECODE:
                running_decodes += 1
                if not sequence.in_flight or (
                    len(sequence.tokens) < sequence.fed_below and not sequence.preempt_when_answered
                ):
                    decodes.append(sequence)
            else:
                partial_tokens += sequence.remaining
                if not sequence.in_flight or may_go_on(sequence):
                    prefills.append(sequence)
        growth, longest = self._forecaster.look(self.steps, self.running)
        on_host, host_pool = self._lifecycle.on_host, None if self._tiers.host_given_up else self.host_pool
        ready_host = [sequence for sequence in on_host if not sequence.in_flight]
        free_slots = self._lifecycle.free_slots
        may_begin = free_slots > 0 and not self._lifecycle.owes_blocks
        next_prefill = prefills[0] if prefills else self.waiting.oldest if may_begin else None
        load = Load(
            previous=self._previous,
            waiting_tokens=self.waiting.tokens + partial_tokens,
            first_waiting_tokens=0 if next_prefill is None else next_prefill.remaining,
            running_decodes=running_decodes,
            ready_decodes=len(decodes),
            ready_prefills=len(prefills),
            context_tokens=context,
            free_blocks=self.pool.free_blocks,
            total_blocks=self.pool.num_blocks,
            block_size=self.pool.block_size,
            free_slots=free_slots,
            steps_in_flight=self.steps_in_flight,
            pipeline_depth=self.pipeline_depth,
            preemptions=self.preemptions,
            expected_growth=min(self.pool.blocks_for(growth), self.pool.num_blocks - 1),
            longest_remaining=longest,
            layout=self._layouts.current,
            layouts=len(self._layouts.capacities),
            host_decodes=len(on_host),
            ready_host=len(ready_host),
            host_context_tokens=sum([sequence.computed for sequence in on_host]),
            moving=len(self._tiers),
            host_free_blocks=0 if host_pool is None else host_pool.free_blocks,
            host_blocks=0 if host_pool is None else host_pool.num_blocks,
            cohorts=self._cohorts.snapshot(),
            predictor=self._predictors[self._layouts.current] if self._predictors else None,
        )
        return load, decodes, prefills, ready_host

    # ---- a result ---------------------------------------------------------------------------------------------

    def apply(self, result: StepResult, now: float) -> list[SequenceUpdate]:
        """Take in what an executor found out; returns what each sequence gained.

        Raises:
            WorkersFailed: if workers have died too often, and it is not known of which request.
        """
        if result.lost is not None:
            return self._lose_workers(result.lost, now, ran=result.ran)
        self.forecasts.learn(result, self._cohorts)
        updates = []
        lifecycle, rows = self._lifecycle, self._rows_in_flight
        for progress in result.cohorts:
            self._cohorts.advance(progress.step, progress.layers)
        any_on_host, any_moving = len(self._cohorts) > 0, len(self._tiers) > 0
        for answer in result.answers:
            sequence, row = lifecycle.sequences[answer.sequence], rows[answer.sequence]
            if answer.prompt_logprobs:
                lifecycle.keep_prompt_logprobs(sequence, row.start, answer.prompt_logprobs)
            if answer.error is not None:
                self._chunks_before.pop(answer.sequence, None)
            if row.sample or answer.error is not None:
                if sequence.finish_reason is None:  # else it was ended while in flight
                    updates.append(self._take_tokens(sequence, answer, now))
                if sequence.in_flight == 1:
                    del rows[answer.sequence]
                if any_on_host:
                    self._cohorts.leave(answer.sequence)
                lifecycle.answered(sequence)
                if any_moving:
                    self._tiers.row_answered(sequence)
        if updates:
            self._layouts.answered = True
        for swap in result.swapped:
            self._tiers.answered(swap)
        if result.step is not None:
            self._end_plan(self._plans_in_flight.pop(result.step))
        if result.host_lost is not None:
            self._lose_host()
        return updates

    def _end_plan(self, plan: StepPlan) -> None:
        """Its device work is done, and with it the rows for which there is nothing to answer."""
        lifecycle = self._lifecycle
        for row in plan.rows:
            if row.sample:
                continue
            for rows in (self._chunks_before, self._rows_in_flight):
                if rows.get(row.sequence) is row:
                    del rows[row.sequence]
                    lifecycle.answered(lifecycle.sequences[row.sequence])
        if plan.transition is not None:
            self.transitions += 1
            layout = self._layouts.end()
            self.pool.replace_blocks(layout.num_blocks)
            self.pipeline_depth = layout.pipeline_depth

    def fail_steps(self, error: str, now: float) -> list[SequenceUpdate]:
        """What is in flight will never be answered: its sequences end with an error, the others go on."""
        # Blocks are shared from the moment their plan is submitted; these were perhaps never written.
        self.pool.forget_cache()
        self._plans_in_flight.clear()
        self.forecasts.forget()
        self._layouts.abandon()
        times = {key: self._lifecycle.sequences[key].in_flight for key in self._rows_in_flight}
        answers = tuple(Answer(key, error=error) for key in times for _ in range(times[key]))
        updates = self.apply(StepResult(None, answers), now)
        for sequence in list(self._lifecycle.moving):
            if not sequence.finished:
                updates.append(self._take_tokens(sequence, Answer(sequence.sequence_id, error=error), now))
        self._tiers.abandon()
        return updates

    def _lose_workers(self, cause: str, now: float, *, ran: float) -> list[SequenceUpdate]:
        """Begin anew, but for a request that was alone in flight and is known for it: that one fails."""
        quarantine = self._lifecycle.quarantine
        culprit = quarantine.on_death(self._lifecycle.requests_in_flight if ran else (), now, ran=ran)
        if (times := quarantine.exhausted) is not None:
            raise WorkersFailed(f"the workers died {times}; the last time {cause}")
        self._begin_anew()
        if culprit is None:
            return []
        error = f"the workers died whenever this request ran, and at last when it ran alone: {cause}"
        return self._fail(self._lifecycle.unfinished(culprit), error, now)

    def _begin_anew(self) -> None:
        """Nothing in flight will be answered and no KV is left: every sequence is recomputed from the tokens it has."""
        for in_flight in (self._plans_in_flight, self._rows_in_flight, self._chunks_before):
            in_flight.clear()
        self.forecasts.forget()
        self._cohorts.clear()
        self._layouts.begin_anew()
        self._previous = None  # what was decided went with what it was decided for: a drain, say
        self._tiers.abandon()
        self._lifecycle.begin_anew()

    def _lose_host(self) -> None:
        """Attention on the CPU was lost: host sequences are recomputed, whether a token of theirs is under way or not.

        Rows of theirs in plans in flight, asymmetric ones too, will not be answered; the plans end all the same.
        """
        self.host_losses += 1
        self._cohorts.clear()
        for sequence in self._lifecycle.lose_host():
            self._rows_in_flight.pop(sequence, None)
        if self.host_losses == MOST_HOST_LOSSES:
            self._tiers.give_host_up()

    def fail_all(self, error: str, now: float) -> list[SequenceUpdate]:
        """Nothing will ever be answered again: every sequence ends with an error, whether it ran or waited."""
        self._begin_anew()
        return self._fail(list(self._lifecycle.sequences.values()), error, now)

    def _fail(self, unfinished: list[Sequence], error: str, now: float) -> list[SequenceUpdate]:
        """End sequences that have nothing in flight with an error; all samples of their requests are among them."""
        updates = [self._take_tokens(one, Answer(one.sequence_id, error=error), now) for one in unfinished]
        for sequence in unfinished:
            self._lifecycle.release_siblings(sequence)
        return updates

    def _take_tokens(self, sequence: Sequence, answer: Answer, now: float) -> SequenceUpdate:
        new_tokens: tuple[int, ...] = ()
        reason: FinishReason | None = FinishReason.ERROR
        sequence.error = answer.error
        if answer.error is None:
            if sequence.status is _PREFILL:
                sequence.move_to(Status.DECODE)
                if sequence.first_token_time is None:  # else it is here again after a preemption
                    sequence.first_token_time = now
            new_tokens, reason = sequence.extend(answer.tokens, answer.logprobs)
            if answer.complete and len(new_tokens) == len(answer.tokens):
                reason = FinishReason.STOP
            if reason is not None:
                self._forecaster.record(sequence.output_length)
        if reason is not None:
            self._lifecycle.finish(sequence, reason, now)
        return SequenceUpdate(sequence.request.request_id, sequence.index, new_tokens, sequence)

    # ---- invariants -------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise RuntimeError if blocks, queues and states contradict each other. Tests call it after every step."""
        self._lifecycle.check_integrity()
        self._tiers.check_integrity()
        in_flight = {key for key, sequence in self._lifecycle.sequences.items() if sequence.in_flight}
        if set(self._rows_in_flight) != in_flight:
            raise RuntimeError("rows in flight and sequences in flight differ")
