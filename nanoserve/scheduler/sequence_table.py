"""The sequence table: which sequences wait, run and move, in order of age, and the blocks that they hold."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from nanoserve.errors import UsageError
from nanoserve.kv import HostTier, SequenceBlocks
from nanoserve.processes.quarantine import Quarantine
from nanoserve.request import FinishReason, Place, Request, Sequence, Status

_DECODE, _FINISHED = Status.DECODE, Status.FINISHED  # Enum lookup is slow in Python 3.11; hoist it.
_DEVICE, _MOVING = Place.DEVICE, Place.MOVING


def _age(sequence: Sequence) -> int:
    return sequence.sequence_id


class AgeOrdered:
    """A set of sequences, oldest first. It is fast at both ends, where the scheduler works."""

    def __init__(self) -> None:
        self._items: list[Sequence] = []

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, sequence: Sequence) -> bool:
        position = bisect_left(self._items, _age(sequence), key=_age)
        return position < len(self._items) and self._items[position] is sequence

    @property
    def oldest(self) -> Sequence | None:
        return self._items[0] if self._items else None

    @property
    def newest(self) -> Sequence | None:
        return self._items[-1] if self._items else None

    def add(self, sequence: Sequence) -> None:
        insort(self._items, sequence, key=_age)

    def remove(self, sequence: Sequence) -> None:
        position = bisect_left(self._items, _age(sequence), key=_age)
        if position == len(self._items) or self._items[position] is not sequence:
            raise ValueError(f"sequence {sequence.sequence_id} is not here")
        del self._items[position]


class WaitingQueue(AgeOrdered):
    """Sequences that hold no blocks, and the sum of their tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = 0

    def add(self, sequence: Sequence) -> None:
        super().add(sequence)
        self.tokens += len(sequence.tokens)

    def remove(self, sequence: Sequence) -> None:
        super().remove(sequence)
        self.tokens -= len(sequence.tokens)


@dataclass(kw_only=True)
class SequenceTable:
    """All sequences that have not ended, or that have ended but are still in flight.

    A sequence waits, runs on the device (holding blocks), may be preempted and wait again, may move to host memory and
    back, and ends.
    """

    blocks: SequenceBlocks
    """The block tables of the device."""
    host_tier: HostTier
    """Those of host memory."""
    fewest_blocks: int
    """Blocks on the device, in the layout that has fewest."""
    max_model_len: int
    """Longest sequence, prompt and output together."""
    max_num_seqs: int
    """Sequences that run on the device at a time, moving ones included."""
    feeds_tokens: bool
    """Whether the executor takes fed rows."""

    def __post_init__(self) -> None:
        self.quarantine = Quarantine()
        self.preemptions = 0
        self.sequences: dict[int, Sequence] = {}
        self.waiting = WaitingQueue()  # hold no KV
        self.held = AgeOrdered()  # hold no KV, and wait until a suspected request has run alone
        self.running = AgeOrdered()  # hold KV on the device
        self.on_host = AgeOrdered()  # hold KV in host memory
        self.moving = AgeOrdered()  # move between the two; finished ones stay until they arrive
        self._requests: dict[str, list[Sequence]] = {}  # all samples of each
        self._ended: list[int] = []  # that the executor has not been told
        self._short_of_blocks: tuple[Sequence, int] | None = None
        self._ids = count()
        self._caches = self.blocks.pool.prefix_caching

    # ---- intake -----------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue the first sample of a request; the others wait until its prompt is computed.

        Raises:
            UsageError: if it can never run to its end, or its id is in use.
        """
        if request.request_id in self._requests:
            raise UsageError(f"request id {request.request_id!r} is in use")
        self._check_admissible(request)
        end_tokens = () if request.params.ignore_eos else request.end_tokens
        stop_tokens = frozenset((*end_tokens, *request.params.stop_token_ids))  # one set for all samples
        family = [self._new_sequence(request, index, stop_tokens) for index in range(request.params.n)]
        self._requests[request.request_id] = family
        self._wait(family[0])
        family[0].siblings = family[1:]

    def _check_admissible(self, request: Request) -> None:
        length, params, longest = len(request.prompt), request.params, self.max_model_len
        if length == 0:
            raise UsageError("the prompt is empty: give at least one token")
        if length >= longest:
            raise UsageError(
                f"the prompt has {length} tokens, but the context holds {longest} with at least one "
                "for the answer; shorten the prompt or raise --max-model-len"
            )
        if length + params.min_tokens > longest:
            raise UsageError(
                f"min_tokens {params.min_tokens} can never be reached: after a prompt of {length} tokens the "
                f"context of {longest} has room for {longest - length}; lower it"
            )
        tokens = min(longest, length + (params.max_tokens or longest))
        # Attention never reads the last token, so its KV is never written.
        if (needed := self.blocks.pool.blocks_for(tokens - 1)) > self.fewest_blocks:
            raise UsageError(
                f"the request may grow to {tokens} tokens, which take {needed} KV blocks, but there are "
                f"{self.fewest_blocks}; lower max_tokens or raise --kv-cache-memory"
            )

    def _new_sequence(self, request: Request, index: int, stop_tokens: frozenset[int]) -> Sequence:
        params, length = request.params, len(request.prompt)
        max_length = min(self.max_model_len, length + (params.max_tokens or self.max_model_len))
        sequence = Sequence(
            next(self._ids),
            request,
            index,
            tokens=[*request.prompt, *(request.resumed[index] if request.resumed else ())],
            stop_tokens=stop_tokens,
            min_length=length + params.min_tokens,
            max_length=max_length,
            # The token it waits for must not be its last one.
            fed_below=max_length - 1 if self.feeds_tokens and params.may_be_fed else 0,
        )
        self.sequences[sequence.sequence_id] = sequence
        return sequence

    def _wait(self, sequence: Sequence) -> None:
        (self.waiting if self.quarantine.admits(sequence.request.request_id) else self.held).add(sequence)

    def _sort_waiting(self) -> None:
        """The quarantine's suspect has changed: hold sequences back or let them wait."""
        for queue in (self.waiting, self.held):
            for sequence in reversed(list(queue)):
                queue.remove(sequence)
                self._wait(sequence)

    def unfinished(self, request_id: str) -> list[Sequence]:
        """The unfinished samples of a request; none if it is unknown or finished."""
        return [sequence for sequence in self._requests.get(request_id, []) if not sequence.finished]

    @property
    def requests_in_flight(self) -> list[str]:
        """Requests with rows or swaps that the executor has not answered, oldest first."""
        under_way = (one for one in self.sequences.values() if one.in_flight or one.place is _MOVING)
        return list(dict.fromkeys(one.request.request_id for one in under_way))

    @property
    def oldest(self) -> Sequence | None:
        """The oldest running sequence; if none runs, the oldest of those that wait or live on the host."""
        if self.running.oldest is not None:
            return self.running.oldest
        others = (queue.oldest for queue in (self.waiting, self.on_host))
        return min((one for one in others if one is not None), key=_age, default=None)

    @property
    def free_slots(self) -> int:
        """How many more sequences may run."""
        return self.max_num_seqs - len(self.running) - len(self.moving)

    def may_go_on(self, sequence: Sequence) -> bool:
        """Whether a sequence in flight may enter the next plan too, because the executor feeds tokens.

        A decode is then fed; a prompt's chunks follow each other, as plans run in order. Prompts whose log
        probabilities are wanted wait: an answer belongs to their only row in flight.
        """
        if not self.feeds_tokens:
            return False
        if sequence.status is _DECODE:
            return len(sequence.tokens) < sequence.fed_below
        return sequence.remaining > 0 and sequence.request.params.prompt_logprobs is None

    # ---- admission and preemption -----------------------------------------------------------------------------

    def admit(self, sequence: Sequence) -> None:
        """Move a waiting sequence to running, with the cached blocks of its prefix."""
        self.waiting.remove(sequence)
        # Cached positions have no logits, so a prompt whose log probabilities are wanted is computed whole.
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
        """Move a sequence back to waiting, with nothing held."""
        (self.running if sequence.place is _DEVICE else self.on_host).remove(sequence)
        self._release(sequence)
        sequence.move_to(Status.WAITING)
        self._wait(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Take all blocks of a sequence; it waits to be recomputed."""
        self.preemptions += 1
        sequence.preemptions += 1
        self.unadmit(sequence)

    def reset(self) -> None:
        """All KV is lost and nothing in flight will be answered. Sequences with KV are requeued; finished ones are
        dropped. No executor is notified."""
        self.blocks.pool.forget_cache()
        for sequence in list(self.sequences.values()):
            self._requeue(sequence)
        self._ended.clear()
        self._sort_waiting()

    def lose_host(self) -> None:
        """All KV in host memory is lost, and nothing in flight of sequences there will be answered.

        Moving sequences keep theirs: what swaps have read or written is whole.
        """
        for sequence in [one for one in self.sequences.values() if one.place is Place.HOST]:
            self._requeue(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        sequence.in_flight.clear()
        if sequence.status is _FINISHED:
            self._retire(sequence)
        elif sequence.place is not Place.NONE:
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
        # A moving parent has its blocks on the device until it arrives.
        prompt_is_computed = parent.first_token_time is not None and parent.place in (_DEVICE, _MOVING)
        siblings, parent.siblings = parent.siblings, []
        for sibling in siblings:
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
        """A sequence leaves its tier, with nothing in flight or with its last row.

        The executor forgets it, after that row if there is one, and it begins again on arrival.
        """
        (self.running if sequence.place is _DEVICE else self.on_host).remove(sequence)
        self.moving.add(sequence)
        sequence.place = _MOVING
        if not sequence.in_flight:
            self._end_for_executor(sequence)

    def arrive(self, sequence: Sequence, place: Place) -> None:
        """All its KV is there; its blocks on the other tier are freed. It may have ended on the way."""
        self.moving.remove(sequence)
        sequence.place = place
        self._end_for_executor(sequence)
        if place is _DEVICE:
            self.host_tier.release(sequence)
        else:
            self.blocks.release(sequence)
        if sequence.status is _FINISHED:
            self._retire(sequence)
        else:
            (self.running if place is _DEVICE else self.on_host).add(sequence)

    # ---- answer and end ---------------------------------------------------------------------------------------

    def answered(self, sequence: Sequence) -> None:
        """Its oldest row in flight is answered. A finished sequence is retired after its last row."""
        sequence.in_flight.popleft()
        status = sequence.status
        if self._caches and status is not _FINISHED and sequence.place is _DEVICE:
            self.blocks.share_full(sequence, sequence.computed - len(sequence.in_flight))
        if sequence.siblings and (status is _DECODE or status is _FINISHED):
            self.release_siblings(sequence)
        if status is _FINISHED and not sequence.in_flight and sequence.place is not _MOVING:
            self._retire(sequence)

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
        """Free what a finished sequence held and forget it."""
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
        self.host_tier.release(sequence)
        sequence.computed = 0
        sequence.place = Place.NONE
        self._end_for_executor(sequence)

    def _end_for_executor(self, sequence: Sequence) -> None:
        if sequence.begun:
            self._ended.append(sequence.sequence_id)
            sequence.begun = False

    def take_ended(self) -> tuple[int, ...]:
        """Ids that the executor may forget, each once."""
        ended = tuple(self._ended)
        self._ended.clear()
        return ended
