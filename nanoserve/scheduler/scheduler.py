"""Scheduler: the mechanism shared by all policies.

It owns the queues and the blocks, asks the policy how much to do, turns the answer into a StepPlan, and takes the
StepResult back. Whatever the policy says: no block is used twice, every block comes back, no sequence is in two
plans in flight, and every admitted sequence finishes once arrivals stop.
"""

from nanoserve.errors import UsageError
from nanoserve.kv.block_pool import BlockPool
from nanoserve.kv.sequence_blocks import SequenceBlocks
from nanoserve.request import FinishReason, Place, Request, Sequence, SequenceUpdate, Status
from nanoserve.scheduler.load import Decision, Load, Policy
from nanoserve.scheduler.plan import Answer, Begin, Copy, Row, StepPlan, StepResult
from nanoserve.scheduler.queues import AgeOrdered, WaitingQueue


class _Draft:
    """The plan that is being put together."""

    def __init__(self) -> None:
        self.begin: list[Begin] = []
        self.rows: list[Row] = []
        self.copies: list[Copy] = []
        self.preempted = False


class Scheduler:
    """Queues, blocks and a policy.

    Args:
        policy: decides how much each step holds.
        num_blocks: KV blocks on the device.
        block_size: tokens per block.
        max_model_len: longest sequence, prompt and output together.
        max_num_seqs: sequences that hold blocks at a time.
        prefix_caching: share full blocks of equal prefixes.
        pipeline_depth: plans that can be in flight.
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
    ) -> None:
        self.policy = policy
        self.pool = BlockPool(num_blocks, block_size, prefix_caching=prefix_caching)
        self.blocks = SequenceBlocks(self.pool)
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.pipeline_depth = pipeline_depth
        self.waiting = WaitingQueue()
        self.running = AgeOrdered()
        self.preemptions = 0
        self.forced_steps = 0
        self._sequences: dict[int, Sequence] = {}
        self._requests: dict[str, list[Sequence]] = {}
        self._siblings: dict[int, list[Sequence]] = {}
        self._rows_in_flight: dict[int, Row] = {}
        self._plans_in_flight: dict[int, StepPlan] = {}
        self._ended: list[int] = []
        self._previous: Decision | None = None
        self._next_step = 0
        self._next_sequence = 0

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished or still in flight."""
        return bool(self._sequences)

    @property
    def steps_in_flight(self) -> int:
        return len(self._plans_in_flight)

    # ---- intake -----------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request; its samples after the first wait until its prompt is computed.

        Raises:
            UsageError: if it can never run here, or its id is in use.
        """
        self._check_admissible(request)
        family = [self._new_sequence(request, index) for index in range(request.params.n)]
        self._requests[request.request_id] = family
        self.waiting.add(family[0])
        if len(family) > 1:
            self._siblings[family[0].sequence_id] = family[1:]

    def _check_admissible(self, request: Request) -> None:
        length = len(request.prompt)
        if request.request_id in self._requests:
            raise UsageError(f"request id {request.request_id!r} is in use")
        if length == 0:
            raise UsageError("the prompt is empty: give at least one token")
        if length >= self.max_model_len:
            raise UsageError(
                f"the prompt has {length} tokens, but the context holds {self.max_model_len} with at least one "
                "for the answer; shorten the prompt or raise --max-model-len"
            )
        if length + request.params.min_tokens > self.max_model_len:
            raise UsageError(
                f"min_tokens {request.params.min_tokens} can never be reached: after a prompt of {length} tokens the "
                f"context of {self.max_model_len} has room for {self.max_model_len - length}; lower it"
            )
        longest = min(self.max_model_len, length + (request.params.max_tokens or self.max_model_len))
        # The last token is never attended to, so its KV is never written.
        if (needed := self.pool.blocks_for(longest - 1)) > self.pool.num_blocks:
            raise UsageError(
                f"the request may grow to {longest} tokens, which take {needed} KV blocks, but there are "
                f"{self.pool.num_blocks}; lower max_tokens or raise --kv-cache-memory"
            )

    def _new_sequence(self, request: Request, index: int) -> Sequence:
        resumed = request.resumed[index] if request.resumed else ()
        sequence = Sequence(self._next_sequence, request, index, [*request.prompt, *resumed])
        self._next_sequence += 1
        self._sequences[sequence.sequence_id] = sequence
        return sequence

    def stop(
        self, request_id: str, now: float, *, index: int | None = None, reason: FinishReason = FinishReason.ABORT
    ) -> list[SequenceUpdate]:
        """End a request, or one of its samples, from outside: an abort, or a stop string the caller has seen.

        A sequence in flight ends at once for the caller; its blocks come back with its last answer. Unknown and
        finished ones are passed over.
        """
        family = [
            sequence
            for sequence in self._requests.get(request_id, [])
            if not sequence.finished and index in (None, sequence.index)
        ]
        for sequence in family:
            self._finish(sequence, reason, now)
        for sequence in family:
            self._release_siblings(sequence)
        return [SequenceUpdate(request_id, sequence.index, (), sequence) for sequence in family]

    # ---- a plan -----------------------------------------------------------------------------------------------

    def load(self) -> Load:
        """The snapshot that the policy sees now."""
        running_decodes = ready_decodes = ready_prefills = context = partial_tokens = 0
        first_waiting = 0
        for sequence in self.running:
            context += sequence.computed
            if sequence.status is Status.DECODE:
                running_decodes += 1
                ready_decodes += sequence.ready
            else:
                partial_tokens += sequence.remaining
                if sequence.ready:
                    ready_prefills += 1
                    first_waiting = first_waiting or sequence.remaining
        free_slots = self.max_num_seqs - len(self.running)
        if not first_waiting and free_slots > 0 and self.waiting.oldest is not None:
            first_waiting = self.waiting.oldest.remaining
        return Load(
            previous=self._previous,
            waiting_tokens=self.waiting.tokens + partial_tokens,
            first_waiting_tokens=first_waiting,
            running_decodes=running_decodes,
            ready_decodes=ready_decodes,
            ready_prefills=ready_prefills,
            context_tokens=context,
            free_blocks=self.pool.free_blocks,
            total_blocks=self.pool.num_blocks,
            block_size=self.pool.block_size,
            free_slots=free_slots,
            steps_in_flight=self.steps_in_flight,
            pipeline_depth=self.pipeline_depth,
            preemptions=self.preemptions,
        )

    def schedule(self, now: float) -> StepPlan | None:
        """The next plan, or None if nothing can run before an answer or an arrival comes."""
        decision = self.policy.decide(self.load())
        draft = _Draft()
        self._draft_decodes(draft, decision.decodes, now)
        self._draft_prefills(draft, decision, now)
        if not draft.rows and not self._plans_in_flight and self._sequences:
            self._force_oldest(draft, decision, now)
        if not draft.rows:
            return None
        self._previous = decision
        plan = StepPlan(
            step=self._next_step,
            begin=tuple(draft.begin),
            rows=tuple(draft.rows),
            copies=tuple(draft.copies),
            end=tuple(self._ended),
        )
        self._ended.clear()
        self._next_step += 1
        self._plans_in_flight[plan.step] = plan
        return plan

    def _draft_decodes(self, draft: _Draft, count: int, now: float) -> None:
        candidates = [sequence for sequence in self.running if sequence.ready and sequence.status is Status.DECODE]
        for sequence in candidates[:count]:
            # An older one may have preempted it meanwhile.
            if sequence.ready and sequence.status is Status.DECODE and self._make_room(draft, sequence, 1):
                self._draft_row(draft, sequence, 1, now)

    def _draft_prefills(self, draft: _Draft, decision: Decision, now: float) -> None:
        budget = decision.prefill_tokens
        started = [sequence for sequence in self.running if sequence.ready and sequence.status is Status.PREFILL]
        for sequence in started:
            budget -= self._draft_chunk(draft, sequence, budget, decision, now)
        if draft.preempted:
            return  # what was just taken from one sequence is not for a newer one
        while budget > 0 and self.pool.free_blocks and len(self.running) < self.max_num_seqs:
            if (oldest := self.waiting.oldest) is None:
                return
            self._admit(oldest)
            computed = self._draft_chunk(draft, oldest, budget, decision, now)
            if computed == 0:
                self._unadmit(oldest)
                return
            budget -= computed

    def _draft_chunk(self, draft: _Draft, sequence: Sequence, budget: int, decision: Decision, now: float) -> int:
        """Plan as much of the prompt as budget and free blocks hold; returns how many tokens."""
        chunk = min(sequence.remaining, self.blocks.capacity(sequence))
        if decision.whole_prompts:
            first = not draft.rows
            if chunk < sequence.remaining or (chunk > budget and not (first and budget > 0)):
                return 0
        else:
            chunk = min(chunk, budget)
        if chunk <= 0:
            return 0
        self._draft_row(draft, sequence, chunk, now)
        return chunk

    def _force_oldest(self, draft: _Draft, decision: Decision, now: float) -> None:
        """Nothing is in flight and the decision moved nothing: run the oldest sequence, whatever that takes."""
        sequence = next(iter(self.running), None) or self.waiting.oldest
        assert sequence is not None, "a sequence is neither running nor waiting, with nothing in flight"
        if sequence.status is Status.WAITING:
            self._admit(sequence)
        if not self._make_room(draft, sequence, min(sequence.remaining, self.pool.block_size)):
            raise RuntimeError(f"sequence {sequence.sequence_id} does not fit an otherwise empty device")
        budget = max(decision.prefill_tokens, self.pool.block_size)
        chunk = min(sequence.remaining, self.blocks.capacity(sequence), budget)
        self.forced_steps += 1
        self._draft_row(draft, sequence, chunk, now)

    def _draft_row(self, draft: _Draft, sequence: Sequence, count: int, now: float) -> None:
        """Put ``count`` positions of a sequence into the plan; the blocks they need are free."""
        start, end = sequence.computed, sequence.computed + count
        new_blocks, copy = self.blocks.grow(sequence, count)
        if copy is not None:
            draft.copies.append(Copy(*copy))
        if not sequence.begun:
            draft.begin.append(_begin(sequence))
            sequence.begun = True
            new_blocks = sequence.block_table
        if sequence.first_scheduled_time is None:
            sequence.first_scheduled_time = now
        row = Row(
            sequence=sequence.sequence_id,
            start=start,
            tokens=tuple(sequence.tokens[start:end]),
            sample=end == len(sequence.tokens),
            new_blocks=tuple(new_blocks),
        )
        draft.rows.append(row)
        self._rows_in_flight[sequence.sequence_id] = row
        sequence.in_flight = 1
        sequence.computed = end
        if sequence.status is Status.PREFILL:
            self.blocks.share_full(sequence)

    # ---- admission and preemption -----------------------------------------------------------------------------

    def _admit(self, sequence: Sequence) -> None:
        """Move a waiting sequence to running, with the cached blocks of its prefix."""
        self.waiting.remove(sequence)
        # Positions taken from the cache have no logits, so a prompt that is to be scored is computed whole.
        if sequence.request.params.prompt_logprobs is None:
            self.blocks.take_prefix(sequence)
            if sequence.first_scheduled_time is None:
                sequence.cached_tokens = sequence.computed
        self._start(sequence)

    def _start(self, sequence: Sequence) -> None:
        sequence.move_to(Status.PREFILL)
        sequence.place = Place.DEVICE
        self.running.add(sequence)

    def _unadmit(self, sequence: Sequence) -> None:
        """Back to waiting, with nothing held."""
        self.running.remove(sequence)
        self._release(sequence)
        sequence.move_to(Status.WAITING)
        self.waiting.add(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.blocks.release(sequence)
        if sequence.begun:
            self._ended.append(sequence.sequence_id)
            sequence.begun = False

    def _make_room(self, draft: _Draft, sequence: Sequence, count: int) -> bool:
        """Preempt newer sequences, newest first, until ``count`` more positions fit."""
        while self.blocks.capacity(sequence) < count:
            victim = next(reversed(self.running))
            if victim.sequence_id <= sequence.sequence_id:
                return False
            if victim.in_flight:
                # Its blocks come back with its answer; until then this sequence sits out.
                victim.preempt_when_answered = True
                return False
            self._preempt(victim)
            draft.preempted = True
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Take all blocks of a sequence; it waits to be recomputed."""
        self.preemptions += 1
        sequence.preemptions += 1
        sequence.preempt_when_answered = False
        self._unadmit(sequence)

    def _release_siblings(self, parent: Sequence) -> None:
        """The parent's prompt is computed, or the parent is gone: its siblings may start."""
        prompt_is_computed = parent.first_token_time is not None and parent.place is Place.DEVICE
        for sibling in self._siblings.pop(parent.sequence_id, []):
            if sibling.finished:
                continue
            if prompt_is_computed and len(self.running) < self.max_num_seqs:
                self.blocks.fork(parent, sibling)
                sibling.cached_tokens = sibling.computed
                self._start(sibling)
            else:
                self.waiting.add(sibling)

    # ---- a result ---------------------------------------------------------------------------------------------

    def apply(self, result: StepResult, now: float) -> list[SequenceUpdate]:
        """Take in what an executor found out; returns what each sequence gained."""
        updates = []
        for answer in result.answers:
            sequence = self._sequences[answer.sequence]
            row = self._rows_in_flight[answer.sequence]
            self._keep_prompt_logprobs(sequence, row, answer)
            if row.sample or answer.error is not None:
                updates += self._take_tokens(sequence, answer, now)
                self._answered(sequence)
        if result.step is not None:
            plan = self._plans_in_flight.pop(result.step)
            for row in plan.rows:
                if not row.sample and self._rows_in_flight.get(row.sequence) is row:
                    self._answered(self._sequences[row.sequence])
        return updates

    def fail_steps(self, error: str, now: float) -> list[SequenceUpdate]:
        """The plans in flight will never be answered: their sequences end with an error, the others go on."""
        # Blocks are shared from the moment their plan is submitted; these were perhaps never written.
        self.pool.forget_cache()
        updates = []
        for plan in list(self._plans_in_flight.values()):
            answers = tuple(Answer(row.sequence, error=error) for row in plan.rows)
            updates += self.apply(StepResult(plan.step, answers), now)
        return updates

    def _keep_prompt_logprobs(self, sequence: Sequence, row: Row, answer: Answer) -> None:
        if answer.prompt_logprobs and sequence.index == 0:
            already = len(sequence.prompt_logprobs) - row.start  # a recomputed prompt is scored again
            sequence.prompt_logprobs += answer.prompt_logprobs[already:]

    def _take_tokens(self, sequence: Sequence, answer: Answer, now: float) -> list[SequenceUpdate]:
        if sequence.finished:  # aborted while in flight
            return []
        before = len(sequence.tokens)
        if answer.error is not None:
            sequence.error = answer.error
            self._finish(sequence, FinishReason.ERROR, now)
        elif sequence.status is Status.PREFILL:
            sequence.move_to(Status.DECODE)
        for position, token in enumerate(answer.tokens):
            sequence.tokens.append(token)
            sequence.logprobs += answer.logprobs[position : position + 1]
            if sequence.first_token_time is None:
                sequence.first_token_time = now
            if (reason := self._reason_to_finish(sequence, token)) is not None:
                self._finish(sequence, reason, now)
                break
        new_tokens = tuple(sequence.tokens[before:])
        return [SequenceUpdate(sequence.request.request_id, sequence.index, new_tokens, sequence)]

    def _reason_to_finish(self, sequence: Sequence, token: int) -> FinishReason | None:
        params = sequence.request.params
        if sequence.output_length > params.min_tokens:
            ends = token in sequence.request.end_tokens and not params.ignore_eos
            if ends or token in params.stop_token_ids:
                sequence.stop_token = token
                return FinishReason.STOP
        if sequence.output_length == params.max_tokens or len(sequence.tokens) == self.max_model_len:
            return FinishReason.LENGTH
        return None

    def _answered(self, sequence: Sequence) -> None:
        """Nothing of the sequence is in flight any more."""
        sequence.in_flight = 0
        del self._rows_in_flight[sequence.sequence_id]
        if not sequence.finished:
            self.blocks.share_full(sequence)
        if sequence.status is Status.DECODE or sequence.finished:
            self._release_siblings(sequence)
        if sequence.finished:
            self._retire(sequence)
        elif sequence.preempt_when_answered:
            self._preempt(sequence)

    def _finish(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.move_to(Status.FINISHED)
        sequence.finish_reason = reason
        sequence.finished_time = now
        if not sequence.in_flight:
            self._retire(sequence)

    def _retire(self, sequence: Sequence) -> None:
        """Give back what a finished sequence held and forget it."""
        self._release(sequence)
        del self._sequences[sequence.sequence_id]
        family = self._requests[sequence.request.request_id]
        if all(member.sequence_id not in self._sequences for member in family):
            del self._requests[sequence.request.request_id]

    # ---- invariants -------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise RuntimeError if blocks, queues and states contradict each other. Tests call it after every step."""
        for sequence in self._sequences.values():
            _check_queues(sequence, self)
        self.blocks.check_integrity(list(self._sequences.values()))
        if self.waiting.tokens != sum(len(sequence.tokens) for sequence in self.waiting):
            raise RuntimeError("the count of waiting tokens is wrong")
        if set(self._rows_in_flight) != {key for key, sequence in self._sequences.items() if sequence.in_flight}:
            raise RuntimeError("rows in flight and sequences in flight differ")


def _begin(sequence: Sequence) -> Begin:
    request = sequence.request
    return Begin(
        sequence=sequence.sequence_id,
        tokens=tuple(sequence.tokens),
        prompt_length=sequence.prompt_length,
        index=sequence.index,
        seed=request.seed,
        params=request.params,
        end_tokens=() if request.params.ignore_eos else request.end_tokens,
    )


def _check_queues(sequence: Sequence, scheduler: Scheduler) -> None:
    name = f"sequence {sequence.sequence_id}"
    if (sequence in scheduler.running) != (sequence.status in (Status.PREFILL, Status.DECODE)):
        raise RuntimeError(f"{name} is {sequence.status} but its queue says otherwise")
    if sequence.status is Status.WAITING and (sequence.block_table or sequence.computed or sequence.in_flight):
        raise RuntimeError(f"{name} waits but holds something")
    if sequence.status is Status.DECODE and not sequence.in_flight and sequence.remaining != 1:
        raise RuntimeError(f"{name} decodes but {sequence.remaining} of its tokens are not computed")
