"""The sequence table: which sequences wait and run, in order of rank, and the blocks that they
hold."""

import math
from bisect import bisect_left, insort
from dataclasses import dataclass
from itertools import count
from operator import attrgetter

from nanoserve.errors import UsageError, shown
from nanoserve.request import FinishReason, Fork, Place, Placeholders, Request, Sequence, Status
from nanoserve.scheduler.extension import Moments
from nanoserve.scheduler.kv import SequenceBlocks
from nanoserve.scheduler.ordering import Ordering
from nanoserve.utils.quarantine import Quarantine

_DECODE, _FINISHED = Status.DECODE, Status.FINISHED  # Enum lookup is slow in Python 3.11; hoist it.
_NONE, _DEVICE = Place.NONE, Place.DEVICE


in_order = attrgetter("rank", "sequence_id")
"""The key by which sequences are ordered."""


def _tokens_of(family: list[Sequence]) -> int:
    """Tokens of the prompt of a request, and of all its answers so far."""
    return family[0].prompt_length + sum(sequence.output_length for sequence in family)


class RankOrdered(list[Sequence]):
    """A set of sequences in order of rank, oldest first unless the policy ranks them. It is fast at
    both ends, where the scheduler works."""

    def __contains__(self, sequence: object) -> bool:
        assert isinstance(sequence, Sequence)
        position = bisect_left(self, in_order(sequence), key=in_order)
        return self[position : position + 1] == [sequence]

    @property
    def first(self) -> Sequence | None:
        return self[0] if self else None

    @property
    def last(self) -> Sequence | None:
        return self[-1] if self else None

    def add(self, sequence: Sequence) -> None:
        insort(self, sequence, key=in_order)

    def remove(self, sequence: Sequence) -> None:
        if sequence not in self:
            raise ValueError(f"sequence {sequence.sequence_id} is not here")
        del self[bisect_left(self, in_order(sequence), key=in_order)]


class WaitingQueue(RankOrdered):
    """Sequences that hold no blocks, and the sum of their tokens."""

    tokens = 0

    def add(self, sequence: Sequence) -> None:
        super().add(sequence)
        self.tokens += len(sequence.tokens)

    def remove(self, sequence: Sequence) -> None:
        super().remove(sequence)
        self.tokens -= len(sequence.tokens)


@dataclass(kw_only=True)
class SequenceTable:
    """All sequences that have not ended, or that have ended but are still in flight."""

    blocks: SequenceBlocks
    moments: Moments
    fewest_blocks: int
    """Blocks on the device, in the layout that has fewest."""
    max_model_len: int
    """Longest sequence, prompt and output together."""
    max_num_seqs: int
    """Sequences that run at a time, busy ones included."""
    async_scheduling: bool
    """Whether the executor takes placeholder rows."""
    ordering: Ordering | None = None
    """None where requests are served first come."""

    def __post_init__(self) -> None:
        self.quarantine = Quarantine()
        self.preemptions = 0
        # prompts and answers so far of requests that have not ended; their rest is unknown
        self.outstanding = 0
        self.sequences: dict[int, Sequence] = {}
        self.waiting = WaitingQueue()  # hold no KV
        self.running = RankOrdered()  # hold KV on the device
        # hold KV that the executor works on beside rows; finished ones stay until it is done
        self.busy = RankOrdered()
        self.queues: dict[Place, RankOrdered] = {_NONE: self.waiting, _DEVICE: self.running}
        self.requests: dict[str, list[Sequence]] = {}  # all samples of each that has not ended
        self._ended: list[int] = []  # that the executor has not been told
        self._short_of_blocks: tuple[Sequence, int] | None = None
        self._ids = count()

    # ---- intake ----------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue the first sample of a request; the others wait until its prompt is computed. Raises
        UsageError if it can never run to its end, or its id is in use."""
        if request.request_id in self.requests:
            raise UsageError(f"request id {shown(request.request_id)} is in use")
        self._check_admissible(request)
        for check in self.moments.check:
            check(request)
        end_tokens = () if request.params.ignore_eos else request.end_tokens
        # one set for all samples
        stop_tokens = frozenset(end_tokens) | frozenset(request.params.stop_token_ids)
        rank = 0.0 if self.ordering is None else self.ordering.rank(request)
        family = [
            self._new_sequence(request, index, stop_tokens, rank)
            for index in range(request.params.n)
        ]
        self.requests[request.request_id] = family
        self.outstanding += _tokens_of(family)
        self.waiting.add(family[0])
        if len(family) > 1:
            family[0].fork = Fork(siblings=family[1:])

    def _check_admissible(self, request: Request) -> None:
        length, params, longest = len(request.prompt), request.params, self.max_model_len
        if length == 0:
            raise UsageError("the prompt is empty: give at least one token")
        if request.priority != 0 and self.ordering is None:
            raise UsageError(
                f"priority {request.priority} has no effect here: start with --policy "
                "NAME:order=priority"
            )
        fewest_new = 0 if params.max_tokens == 0 else 1
        if length + fewest_new > longest:
            raise UsageError(
                f"the prompt has {length} tokens, but the context holds {longest} with at least "
                "one "
                "for the answer; shorten the prompt or raise --max-model-len"
            )
        if length + params.min_tokens > longest:
            raise UsageError(
                f"min_tokens {params.min_tokens} can never be reached: after a prompt of {length} "
                "tokens the "
                f"context of {longest} has room for {longest - length}; lower it"
            )
        tokens = min(
            longest, length + (longest if params.max_tokens is None else params.max_tokens)
        )
        # Attention never reads the last token of an answer, so its KV is never written.
        if (needed := self.blocks.most_held(max(length, tokens - 1))) > self.fewest_blocks:
            raise UsageError(
                f"the request may grow to {tokens} tokens, which take {needed} KV blocks, but "
                "there are "
                f"{self.fewest_blocks}; lower max_tokens or raise --kv-cache-memory"
            )

    def _new_sequence(
        self, request: Request, index: int, stop_tokens: frozenset[int], rank: float
    ) -> Sequence:
        params, length = request.params, len(request.prompt)
        most = self.max_model_len if params.max_tokens is None else params.max_tokens
        max_length = min(self.max_model_len, length + most)
        tokens = list(request.prompt)
        if request.resumed:
            tokens += request.resumed[index]
        placeholders = None
        if self.async_scheduling and params.allows_async_scheduling:
            # the token it waits for must not be its last one
            placeholders = Placeholders(limit=max_length - 1)
        sequence = Sequence(
            next(self._ids),
            request,
            index,
            tokens=tokens,
            stop_tokens=stop_tokens,
            min_length=length + params.min_tokens,
            max_length=max_length,
            rank=rank,
            placeholders=placeholders,
        )
        self.sequences[sequence.sequence_id] = sequence
        for added in self.moments.added:
            added(sequence)
        return sequence

    def enter(self, sequence: Sequence, place: Place) -> None:
        """Move a sequence from its queue to that of another place."""
        self.queues[sequence.place].remove(sequence)
        sequence.place = place
        self.queues[place].add(sequence)

    def put_first(self, overdue: list[str]) -> None:
        """These requests go before all younger ones from now on, whatever their ranks."""
        for sequence in [one for request_id in overdue for one in self.unfinished(request_id)]:
            queue = self.queues[sequence.place]
            if is_queued := sequence in queue:  # a sibling may not wait there yet
                queue.remove(sequence)
            sequence.rank = -math.inf
            if is_queued:
                queue.add(sequence)

    def unfinished(self, request_id: str) -> list[Sequence]:
        """The unfinished samples of a request; none if it is unknown or finished."""
        return [sequence for sequence in self.requests.get(request_id, []) if not sequence.finished]

    @property
    def requests_in_flight(self) -> list[str]:
        """Requests with anything that the executor has not answered, oldest first."""
        under_way = (one for one in self.sequences.values() if one.in_flight or one in self.busy)
        return list(dict.fromkeys(one.request.request_id for one in under_way))

    @property
    def next_waiting(self) -> Sequence | None:
        """The first waiting sequence; while a suspected request has to run alone, the first of that
        request."""
        if not self.waiting:
            return None
        suspect = self.quarantine.suspect
        return next(
            (one for one in self.waiting if suspect in (None, one.request.request_id)), None
        )

    @property
    def free_slots(self) -> int:
        """How many more sequences may run."""
        free = self.max_num_seqs - len(self.running) - len(self.busy)
        if self.blocks.states is not None:
            free = min(free, self.blocks.states.free_slots)
        return free

    def prompt_may_go_on(self, prompt: Sequence) -> bool:
        """Whether a partly computed prompt in flight may enter the next plan too, because
        scheduling is asynchronous: its chunks follow each other, as plans run in order. Prompts
        whose log probabilities are wanted wait: an answer belongs to their only row in flight."""
        return (
            self.async_scheduling
            and prompt.remaining > 0
            and prompt.request.params.prompt_logprobs is None
        )

    # ---- admission and preemption ----------------------------------------------------------------

    def admit(self, sequence: Sequence) -> None:
        """Move a waiting sequence to running, with the cached blocks of its prefix."""
        # Cached positions have no logits, so a prompt whose log probabilities are wanted is
        # computed whole.
        if sequence.request.params.prompt_logprobs is None:
            self.blocks.take_prefix(sequence)
            if sequence.first_scheduled_time is None:
                sequence.cached_tokens = sequence.computed
        if self.ordering is not None:
            self.ordering.admit(sequence.request)
        sequence.move_to(Status.PREFILL)
        self.enter(sequence, _DEVICE)

    def unadmit(self, sequence: Sequence) -> None:
        """Move a sequence back to waiting, with nothing held."""
        self.queues[sequence.place].remove(sequence)
        self._release(sequence)
        sequence.move_to(Status.WAITING)
        self.waiting.add(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Take all blocks of a sequence; it waits to be recomputed."""
        assert not sequence.in_flight, "rows in flight write to its blocks"
        self.preemptions += 1
        sequence.preemptions += 1
        self.unadmit(sequence)

    def reset(self) -> None:
        """All KV is lost and nothing in flight will be answered. Sequences with KV are requeued;
        finished ones are dropped. No executor is notified."""
        self.blocks.pool.forget_cache()
        for sequence in list(self.sequences.values()):
            self.requeue(sequence)
        self._ended = []

    def requeue(self, sequence: Sequence) -> None:
        """The KV of a sequence is lost, and nothing in flight of it will be answered: recompute it,
        if it goes on."""
        sequence.in_flight.clear()
        if sequence.status is _FINISHED:
            self.retire(sequence)
        elif sequence.place is not _NONE:
            self.preempt(sequence)

    def wait_for_blocks(self, sequence: Sequence) -> None:
        """Blocks for it will be free soon; no waiting prompt may take them."""
        self._short_of_blocks = sequence, sequence.computed

    @property
    def waits_for_blocks(self) -> bool:
        """Whether the last sequence that was short of blocks still is."""
        if self._short_of_blocks is not None:
            sequence, computed = self._short_of_blocks
            if sequence.computed != computed or sequence not in self.running:
                self._short_of_blocks = None
        return self._short_of_blocks is not None

    def release_siblings(self, parent: Sequence) -> None:
        """The parent's prompt is computed, or the parent is gone: its siblings may start."""
        if parent.fork is None or not parent.fork.siblings:
            return
        # A parent that waits again, or is gone, has no blocks to share.
        prompt_is_computed = parent.first_token_time is not None and len(parent.block_table) > 0
        may_fork = prompt_is_computed and self.blocks.may_fork(parent)
        siblings, parent.fork = parent.fork.siblings, None
        for sibling in siblings:
            if sibling.finished:
                continue
            if may_fork and self.free_slots > 0:
                self.blocks.fork(parent, sibling)
                sibling.cached_tokens = sibling.computed
                sibling.move_to(Status.PREFILL)
                sibling.place = _DEVICE
                self.running.add(sibling)
            else:
                self.waiting.add(sibling)

    # ---- answer and end --------------------------------------------------------------------------

    def settle(self, sequence: Sequence) -> None:
        """Let others use what an answer has made known. After its last row, a finished sequence is
        retired."""
        if sequence.place is not _DEVICE:
            for answered_elsewhere in self.moments.answered_elsewhere:
                answered_elsewhere(sequence)
        elif sequence.status is not _FINISHED:
            self.blocks.share_full(sequence, sequence.computed - len(sequence.in_flight))
            if sequence.fork is not None and sequence.first_token_time is not None:
                self.release_siblings(sequence)
        else:
            self.release_siblings(sequence)
            if not sequence.in_flight:
                self.retire(sequence)

    def slide(self) -> None:
        """Give back the blocks on which no answer that is still to come depends."""
        for sequence in self.running:
            position = sequence.computed
            if sequence.in_flight:
                position = sequence.in_flight[0].start
            self.blocks.slide(sequence, position)

    def finish(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        """End a sequence; if it is in flight or busy, its blocks come back with its last answer."""
        is_busy = sequence in self.busy
        queue = self.queues[sequence.place]
        if not is_busy and sequence in queue:  # a sibling may not wait there yet
            queue.remove(sequence)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.quarantine.on_answer()
        sequence.move_to(Status.FINISHED)
        sequence.finish_reason = reason
        sequence.finished_time = now
        if not sequence.in_flight and not is_busy:
            self.retire(sequence)

    def retire(self, sequence: Sequence) -> None:
        """Free what a finished sequence held and forget it."""
        self._release(sequence)
        del self.sequences[sequence.sequence_id]
        family = self.requests[sequence.request.request_id]
        if all(member.sequence_id not in self.sequences for member in family):
            del self.requests[sequence.request.request_id]
            self.outstanding -= _tokens_of(family)
            if self.ordering is not None:
                self.ordering.end(sequence.request, _tokens_of(family) - sequence.prompt_length)
            self.quarantine.forget(sequence.request.request_id)

    def _release(self, sequence: Sequence) -> None:
        self.blocks.release(sequence)
        for released in self.moments.released:
            released(sequence)
        sequence.computed = 0
        sequence.place = _NONE
        self.end_for_executor(sequence)

    def end_for_executor(self, sequence: Sequence) -> None:
        """Have the executor forget a sequence with the next plan, if it knows it."""
        if sequence.begun:
            self._ended.append(sequence.sequence_id)
            sequence.begun = False

    def take_ended(self) -> tuple[int, ...]:
        """Ids that the executor may forget, each once."""
        ended, self._ended = tuple(self._ended), []
        return ended
