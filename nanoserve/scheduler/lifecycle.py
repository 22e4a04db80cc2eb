"""Lifecycle: who waits, who runs and who is gone, and the blocks that go with it."""

from nanoserve.kv.sequence_blocks import SequenceBlocks
from nanoserve.request import FinishReason, Place, Request, Sequence, Status
from nanoserve.scheduler.queues import AgeOrdered, WaitingQueue

_DECODE, _FINISHED = Status.DECODE, Status.FINISHED  # looking a member up takes Python 3.11 longer than a call


class Lifecycle:
    """All sequences that have not ended, or that have but are still in flight.

    A sequence waits, runs (holding blocks), perhaps gives its blocks up and waits again, and ends.

    Args:
        blocks: the block tables.
        max_model_len: longest sequence, prompt and output together.
        max_num_seqs: sequences that run at a time.
    """

    def __init__(self, blocks: SequenceBlocks, *, max_model_len: int, max_num_seqs: int) -> None:
        self.blocks = blocks
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.waiting = WaitingQueue()
        self.running = AgeOrdered()
        self.sequences: dict[int, Sequence] = {}
        self.preemptions = 0
        self._requests: dict[str, list[Sequence]] = {}
        self._siblings: dict[int, list[Sequence]] = {}
        self._ended: list[int] = []
        self._next_sequence = 0

    # ---- intake -----------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue the first sample of a request; the others wait until its prompt is computed."""
        family = [self._new_sequence(request, index) for index in range(request.params.n)]
        self._requests[request.request_id] = family
        self.waiting.add(family[0])
        if len(family) > 1:
            self._siblings[family[0].sequence_id] = family[1:]

    def _new_sequence(self, request: Request, index: int) -> Sequence:
        params, length = request.params, len(request.prompt)
        end_tokens = () if params.ignore_eos else request.end_tokens
        sequence = Sequence(
            self._next_sequence,
            request,
            index,
            tokens=[*request.prompt, *(request.resumed[index] if request.resumed else ())],
            stop_tokens=frozenset((*end_tokens, *params.stop_token_ids)),
            min_length=length + params.min_tokens,
            max_length=min(self.max_model_len, length + (params.max_tokens or self.max_model_len)),
        )
        self._next_sequence += 1
        self.sequences[sequence.sequence_id] = sequence
        return sequence

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def unfinished(self, request_id: str) -> list[Sequence]:
        """The samples of a request that go on; none of an unknown or a finished one."""
        return [sequence for sequence in self._requests.get(request_id, []) if not sequence.finished]

    @property
    def oldest(self) -> Sequence | None:
        """The oldest running sequence, or the oldest waiting one if none runs."""
        return next(iter(self.running), None) or self.waiting.oldest

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
        sequence.place = Place.DEVICE
        self.running.add(sequence)

    def unadmit(self, sequence: Sequence) -> None:
        """Back to waiting, with nothing held."""
        self.running.remove(sequence)
        self._release(sequence)
        sequence.move_to(Status.WAITING)
        self.waiting.add(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Take all blocks of a sequence; it waits to be recomputed."""
        self.preemptions += 1
        sequence.preemptions += 1
        sequence.preempt_when_answered = False
        self.unadmit(sequence)

    def release_siblings(self, parent: Sequence) -> None:
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

    # ---- answer and end ---------------------------------------------------------------------------------------

    def answered(self, sequence: Sequence) -> None:
        """Nothing of the sequence is in flight any more."""
        sequence.in_flight = 0
        status = sequence.status
        if status is not _FINISHED:
            self.blocks.share_full(sequence)
        if sequence.sequence_id in self._siblings and (status is _DECODE or status is _FINISHED):
            self.release_siblings(sequence)
        if status is _FINISHED:
            self._retire(sequence)
        elif sequence.preempt_when_answered:
            self.preempt(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        """End a sequence; if it is in flight, its blocks come back with its answer."""
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
        del self.sequences[sequence.sequence_id]
        family = self._requests[sequence.request.request_id]
        if all(member.sequence_id not in self.sequences for member in family):
            del self._requests[sequence.request.request_id]

    def _release(self, sequence: Sequence) -> None:
        self.blocks.release(sequence)
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
        if self.waiting.tokens != sum(len(sequence.tokens) for sequence in self.waiting):
            raise RuntimeError("the count of waiting tokens is wrong")

    def _check_state(self, sequence: Sequence) -> None:
        name = f"sequence {sequence.sequence_id}"
        if (sequence in self.running) != (sequence.status in (Status.PREFILL, Status.DECODE)):
            raise RuntimeError(f"{name} is {sequence.status} but its queue says otherwise")
        if sequence.status is Status.WAITING and (sequence.block_table or sequence.computed or sequence.in_flight):
            raise RuntimeError(f"{name} waits but holds something")
        if sequence.status is Status.DECODE and not sequence.in_flight and sequence.remaining != 1:
            raise RuntimeError(f"{name} decodes but {sequence.remaining} of its tokens are not computed")
        if sequence.preempt_when_answered and not sequence.in_flight:
            raise RuntimeError(f"{name} is to be preempted with its answer, but none will come")
