"""Lifecycle: who waits, who runs and who is gone, and the blocks that go with it."""

from nanoserve.kv.host_tier import HostTier
from nanoserve.kv.sequence_blocks import SequenceBlocks
from nanoserve.request import FinishReason, Place, Request, SamplingParams, Sequence, Status, TokenLogprob
from nanoserve.scheduler.quarantine import Quarantine
from nanoserve.scheduler.queues import AgeOrdered, WaitingQueue

_DECODE, _FINISHED = Status.DECODE, Status.FINISHED  # looking a member up takes Python 3.11 longer than a call
_DEVICE, _MOVING = Place.DEVICE, Place.MOVING


def may_be_fed(params: SamplingParams) -> bool:
    """Whether the next token can be sampled before the host knows the one before it.

    Not where the host prepares what may be sampled: a grammar follows every token, penalties count them, and bias and
    min_tokens are kept in the same tables. Prompts that are scored stay out too: their answers are matched with rows.
    """
    counts = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
    adjusted = counts or params.min_tokens > 0 or bool(params.logit_bias)
    return not adjusted and params.json_schema is None and params.prompt_logprobs is None


class Lifecycle:
    """All sequences that have not ended, or that have but are still in flight.

    A sequence waits, runs on the device (holding blocks), perhaps gives its blocks up and waits again, or moves to
    host memory and perhaps back, and ends.

    Args:
        blocks: the block tables of the device.
        host_tier: those of host memory.
        max_model_len: longest sequence, prompt and output together.
        max_num_seqs: sequences that run on the device at a time, with those on their way to or from it.
        feeds_tokens: whether the executor takes fed rows.

    Attributes:
        quarantine: says whether one request is to run alone.
        waiting: hold no KV.
        held: hold none either, and wait until another request has run alone.
        running: have it on the device.
        on_host: have it in host memory.
        moving: are on their way between the two; those that have ended meanwhile too. A prompt that is parked goes with
            its last row, and is there when that is answered too.
        sequences: all of them, and those that have ended but are still in flight.
    """

    def __init__(
        self,
        blocks: SequenceBlocks,
        host_tier: HostTier,
        *,
        max_model_len: int,
        max_num_seqs: int,
        feeds_tokens: bool = False,
    ) -> None:
        self.blocks = blocks
        self.host_tier = host_tier
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.feeds_tokens = feeds_tokens
        self.quarantine = Quarantine()
        self.waiting = WaitingQueue()
        self.held = AgeOrdered()
        self.running = AgeOrdered()
        self.on_host = AgeOrdered()
        self.moving = AgeOrdered()
        self.sequences: dict[int, Sequence] = {}
        self.preemptions = 0
        self._requests: dict[str, list[Sequence]] = {}
        self._siblings: dict[int, list[Sequence]] = {}
        self._ended: list[int] = []
        self._owed: tuple[Sequence, int] | None = None
        self._next_sequence = 0

    # ---- intake -----------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue the first sample of a request; the others wait until its prompt is computed."""
        family = [self._new_sequence(request, index) for index in range(request.params.n)]
        self._requests[request.request_id] = family
        self._wait(family[0])
        if len(family) > 1:
            self._siblings[family[0].sequence_id] = family[1:]

    def _new_sequence(self, request: Request, index: int) -> Sequence:
        params, length = request.params, len(request.prompt)
        end_tokens = () if params.ignore_eos else request.end_tokens
        max_length = min(self.max_model_len, length + (params.max_tokens or self.max_model_len))
        sequence = Sequence(
            self._next_sequence,
            request,
            index,
            tokens=[*request.prompt, *(request.resumed[index] if request.resumed else ())],
            stop_tokens=frozenset((*end_tokens, *params.stop_token_ids)),
            min_length=length + params.min_tokens,
            max_length=max_length,
            # The token it waits for must not be its last one.
            fed_below=max_length - 1 if self.feeds_tokens and may_be_fed(params) else 0,
        )
        self._next_sequence += 1
        self.sequences[sequence.sequence_id] = sequence
        return sequence

    def _wait(self, sequence: Sequence) -> None:
        (self.waiting if self.quarantine.admits(sequence.request.request_id) else self.held).add(sequence)

    def _sort_waiting(self) -> None:
        """Hold back or let wait, as the quarantine says now."""
        for queue in (self.waiting, self.held):
            for sequence in reversed(list(queue)):
                queue.remove(sequence)
                self._wait(sequence)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def unfinished(self, request_id: str) -> list[Sequence]:
        """The samples of a request that go on; none of an unknown or a finished one."""
        return [sequence for sequence in self._requests.get(request_id, []) if not sequence.finished]

    @property
    def requests_in_flight(self) -> list[str]:
        """Of which the executor has rows or swaps that it has not answered, oldest first."""
        under_way = (one for one in self.sequences.values() if one.in_flight or one.place is _MOVING)
        return list(dict.fromkeys(one.request.request_id for one in under_way))

    @property
    def oldest(self) -> Sequence | None:
        """The oldest running sequence, or if none runs the oldest of those that wait or live on the host."""
        if self.running.oldest is not None:
            return self.running.oldest
        others = (queue.oldest for queue in (self.waiting, self.on_host))
        return min((one for one in others if one is not None), key=lambda one: one.sequence_id, default=None)

    @property
    def free_slots(self) -> int:
        """How many more sequences may run."""
        return self.max_num_seqs - len(self.running) - len(self.moving)

    def may_take_the_next_chunk(self, prompt: Sequence) -> bool:
        """While one is in flight: plans run in order, and there is one stage where tokens are fed.

        Prompts that are scored wait: what is said of them is matched with their newest row.
        """
        waits = prompt.preempt_when_answered or prompt.request.params.prompt_logprobs is not None
        return self.feeds_tokens and prompt.remaining > 0 and not waits

    # ---- admission and preemption -----------------------------------------------------------------------------

    def admit(self, sequence: Sequence) -> None:
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
        sequence.place = _DEVICE
        self.running.add(sequence)

    def unadmit(self, sequence: Sequence) -> None:
        """Back to waiting, with nothing held."""
        (self.running if sequence.place is _DEVICE else self.on_host).remove(sequence)
        self._release(sequence)
        sequence.move_to(Status.WAITING)
        self._wait(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Take all blocks of a sequence; it waits to be recomputed."""
        self.preemptions += 1
        sequence.preemptions += 1
        sequence.preempt_when_answered = False
        self.unadmit(sequence)

    def begin_anew(self) -> None:
        """No KV is left anywhere and nothing in flight will be answered, but swaps, which are over already.

        Who held KV waits to be recomputed; who has ended is gone. Of neither there is anyone to be told.
        """
        self.blocks.pool.forget_cache()
        for sequence in list(self.sequences.values()):
            self._begin_again(sequence)
        self._ended.clear()
        self._sort_waiting()

    def lose_host(self) -> list[int]:
        """No KV is left in host memory, and nothing in flight of sequences there will be answered.

        Those on their way keep theirs: what swaps write is whole, and what they have read too.

        Returns:
            the sequences that are recomputed from their tokens, or that had ended and are gone.
        """
        lost = [sequence for sequence in self.sequences.values() if sequence.place is Place.HOST]
        for sequence in lost:
            self._begin_again(sequence)
        return [sequence.sequence_id for sequence in lost]

    def _begin_again(self, sequence: Sequence) -> None:
        """It has no KV and nothing in flight any more: it waits to be recomputed, or is gone if it has ended."""
        sequence.in_flight = 0
        if sequence.status is _FINISHED:
            self._retire(sequence)
        elif sequence.place is not Place.NONE:
            self.preempt(sequence)

    def owe_blocks(self, sequence: Sequence) -> None:
        """It sits out until others have given way to it."""
        self._owed = sequence, sequence.computed

    @property
    def owes_blocks(self) -> bool:
        """Whether the last that had to sit out still does: what others give up for it is not for waiting prompts."""
        if self._owed is not None:
            sequence, computed = self._owed
            if sequence.computed != computed or sequence not in self.running:
                self._owed = None
        return self._owed is not None

    def release_siblings(self, parent: Sequence) -> None:
        """The parent's prompt is computed, or the parent is gone: its siblings may start."""
        # One that moves has its blocks on the device until it arrives.
        prompt_is_computed = parent.first_token_time is not None and parent.place in (_DEVICE, _MOVING)
        for sibling in self._siblings.pop(parent.sequence_id, []):
            if sibling.finished:
                continue
            if prompt_is_computed and self.free_slots > 0:
                self.blocks.fork(parent, sibling)
                sibling.cached_tokens = sibling.computed
                self._start(sibling)
            else:
                self._wait(sibling)

    # ---- from tier to tier ------------------------------------------------------------------------------------

    def depart(self, sequence: Sequence) -> None:
        """A sequence leaves its tier, with nothing in flight or with its last row. Where it arrives it begins anew for
        the executor, which forgets it now if it need not compute that row."""
        (self.running if sequence.place is _DEVICE else self.on_host).remove(sequence)
        self.moving.add(sequence)
        sequence.place = _MOVING
        if not sequence.in_flight:
            self._end_for_executor(sequence)

    def arrive(self, sequence: Sequence, place: Place) -> None:
        """It has all its KV there, and what it held where it came from is free; or it has ended on the way."""
        self.moving.remove(sequence)
        sequence.place = place
        self._end_for_executor(sequence)
        if place is _DEVICE:
            self.host_tier.release(sequence)
        else:
            self.blocks.release_table(sequence)
        if sequence.status is _FINISHED:
            self._retire(sequence)
        else:
            (self.running if place is _DEVICE else self.on_host).add(sequence)

    # ---- answer and end ---------------------------------------------------------------------------------------

    def keep_prompt_logprobs(self, sequence: Sequence, start: int, logprobs: tuple[TokenLogprob, ...]) -> None:
        """Of the prompt behind that position; those of a request's first sample stand for all."""
        if sequence.index == 0:
            already = len(sequence.prompt_logprobs) - start  # a recomputed prompt is scored again
            sequence.prompt_logprobs += logprobs[already:]

    def answered(self, sequence: Sequence) -> None:
        """The oldest of its rows in flight is. What is to become of it waits for the last one."""
        sequence.in_flight -= 1
        status = sequence.status
        if status is not _FINISHED and sequence.place is _DEVICE:
            self.blocks.share_full(sequence, sequence.computed - sequence.in_flight)
        if sequence.sequence_id in self._siblings and (status is _DECODE or status is _FINISHED):
            self.release_siblings(sequence)
        if sequence.in_flight or sequence.place is _MOVING:
            return
        if status is _FINISHED:
            self._retire(sequence)
        elif sequence.preempt_when_answered:
            self.preempt(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        """End a sequence; if it is in flight or moves, its blocks come back with its last answer."""
        for queue in (self.running, self.waiting, self.on_host, self.held):
            if sequence in queue:
                queue.remove(sequence)
                break
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.quarantine.on_answer()
        sequence.move_to(Status.FINISHED)
        sequence.finish_reason = reason
        sequence.finished_time = now
        if not sequence.in_flight and sequence.place is not _MOVING:
            self._retire(sequence)

    def _retire(self, sequence: Sequence) -> None:
        """Give back what a finished sequence held and forget it."""
        self._release(sequence)
        del self.sequences[sequence.sequence_id]
        family = self._requests[sequence.request.request_id]
        if all(member.sequence_id not in self.sequences for member in family):
            del self._requests[sequence.request.request_id]
            self.quarantine.forget(sequence.request.request_id)
            if self.held:
                self._sort_waiting()

    def _release(self, sequence: Sequence) -> None:
        self.blocks.release(sequence)
        if sequence.host_table:
            self.host_tier.release(sequence)
        self._end_for_executor(sequence)

    def _end_for_executor(self, sequence: Sequence) -> None:
        if sequence.begun:
            self._ended.append(sequence.sequence_id)
            sequence.begun = False

    def take_ended(self) -> tuple[int, ...]:
        """Ids that the executor may forget, each told once."""
        ended = tuple(self._ended)
        self._ended.clear()
        return ended

    # ---- invariants -------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise RuntimeError if blocks, queues and states contradict each other."""
        for sequence in self.sequences.values():
            self._check_state(sequence)
        self.blocks.check_integrity(list(self.sequences.values()))
        self.host_tier.check_integrity(self.sequences.values())
        if self.waiting.tokens != sum(len(sequence.tokens) for sequence in self.waiting):
            raise RuntimeError("the count of waiting tokens is wrong")
        for queue in (self.waiting, self.running, self.on_host, self.moving, self.held):
            if any(self.quarantine.admits(one.request.request_id) == (queue is self.held) for one in queue):
                raise RuntimeError("who may run is not who the quarantine admits")
        if self.held and self.quarantine.suspect not in self._requests:
            raise RuntimeError("sequences are held back for a request that is gone")

    def _check_state(self, sequence: Sequence) -> None:
        name = f"sequence {sequence.sequence_id}"
        goes_on = not sequence.finished
        for queue, should_be_there in (
            (self.running, goes_on and sequence.place is Place.DEVICE),
            (self.on_host, goes_on and sequence.place is Place.HOST),
            (self.moving, sequence.place is Place.MOVING),
        ):
            if (sequence in queue) != should_be_there:
                raise RuntimeError(f"{name} is {sequence.status} in {sequence.place} but its queue says otherwise")
        computes_its_prompt = sequence.place is Place.MOVING and sequence.in_flight
        elsewhere = sequence.place in (Place.HOST, Place.MOVING) and not computes_its_prompt
        if elsewhere and sequence.status not in (_DECODE, _FINISHED):
            raise RuntimeError(f"{name} is in {sequence.place} but does not decode")
        if sequence.place is Place.HOST and (sequence.block_table or sequence.chain):
            raise RuntimeError(f"{name} lives on the host but holds device blocks")
        if sequence.place is Place.NONE and (
            sequence.block_table or sequence.host_table or sequence.computed or sequence.in_flight
        ):
            raise RuntimeError(f"{name} is nowhere but holds something")
        if (sequence.status is Status.WAITING) != (sequence.place is Place.NONE):
            raise RuntimeError(f"{name} is {sequence.status} in {sequence.place}")
        plans, remaining = sequence.in_flight, sequence.remaining
        if sequence.status is Status.DECODE and remaining != 1 - plans:
            raise RuntimeError(f"{name} decodes in {plans} plans, but {remaining} tokens are not computed")
        known = len(sequence.tokens) - (sequence.status is Status.DECODE)
        if len(sequence.chain) * self.blocks.pool.block_size > known:
            raise RuntimeError(f"{name} shares a block before all of its tokens are known")
        if sequence.preempt_when_answered and not sequence.in_flight:
            raise RuntimeError(f"{name} is to be preempted with its answer, but none will come")
