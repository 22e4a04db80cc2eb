"""A second, small simulator of a pipeline that serves requests, to check nanoserve's simulator
against.

It was written from the rules of gLLM (Token Throttling) and Sarathi-Serve, without reading
nanoserve's simulator or scheduler. It shares no code with them. At most P micro-batches are in
flight in a pipeline of P stages, and one is built each time a slot is free. Prompts are computed in
chunks, first come first served, at most one chunk of a prompt in flight. One pool of KV blocks
serves all stages. Blocks of a finished sequence are free when its micro-batch leaves the last
stage. The two policies decide how many decodes and prompt tokens a micro-batch takes.

The papers leave these details open, and they are decided here:

* A micro-batch is built at once when a slot is free, even if the first stage is busy. So an empty
  pipeline that finds many requests builds P micro-batches in one moment. All completions and
  arrivals of one moment come before that.
* Blocks are taken when a micro-batch is built, or the next one could be promised the same blocks. A
  chunk takes blocks for its own tokens only. The share of free blocks is taken before the decodes
  of the same micro-batch get theirs.
* The last chunk of a prompt samples the first token. A decode writes the KV of the token sampled
  before, so the last token's KV is never written. Results return at once. A sequence is in decode
  (RD) when its first token has returned.
* A prompt with a chunk in flight is passed over, and later prompts may go on or begin.
* The deadlock guard holds for Sarathi-Serve, too, when no block is free. The number of sequences
  has no limit.
* A link carries one micro-batch at a time, and its stage may compute the next one meanwhile.

These are open, too. They were decided otherwise at first, and follow nanoserve since the two were
compared. A figure says how far the makespan of a load in test_replica.py moves at most if one
detail alone is changed back:

* The oldest sequences decode first, not those that returned first (0.4 %).
* In equation 3, WT is rounded up and UT down. At first their combination was rounded up (0.3 %).
* A prompt begins only if the free blocks hold all of it. At first, one chunk was enough (28 %).
* If a decode finds no block, the newest sequence gives way. If that one is in flight, the decode
  waits. At first, the newest that was not in flight gave way (23 %). No prompt begins in such a
  micro-batch.
* A lone prompt below the threshold takes up to MaxP. At first it took MinP, equation 3's value
  there (2.2 %).
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Request:
    arrival: float
    prompt: int
    answer: int


@dataclass(frozen=True)
class Pipeline:
    """A pipeline whose stages take the same time, by prompt tokens, decodes and context (see
    MicroBatch)."""

    stages: int
    blocks: int
    block_size: int
    stage_seconds: Callable[[int, int, int], float]
    link_seconds: float


@dataclass(frozen=True)
class Outcome:
    """Seconds from zero until the last token, input and output tokens per second of them, and a
    count."""

    makespan: float
    tokens_per_second: float
    preemptions: int


@dataclass(frozen=True)
class State:
    """The numbers that a policy sees. Decoding sequences are ready if they are not in flight."""

    waiting_tokens: int
    decoding: int
    ready: int
    free: float
    stages: int
    is_lone_prompt: bool = False  # nothing else holds blocks, and nothing else can run


@dataclass(frozen=True)
class Quota:
    decodes: int
    prompt_tokens: int


@dataclass(frozen=True)
class SarathiServe:
    """One token budget: all decodes that are not in flight, then prompt tokens."""

    budget: int = 2048

    def quota(self, state: State) -> Quota:
        decodes = min(state.ready, self.budget)
        return Quota(decodes, self.budget - decodes)


@dataclass(frozen=True)
class TokenThrottling:
    """Decodes and prompt tokens are throttled independently (gLLM, equations 1 to 4)."""

    iterations: int = 8
    max_prompt_tokens: int = 2048
    min_prompt_tokens: int = 32
    threshold: float = 0.05

    def quota(self, state: State) -> Quota:
        share = max(1, math.ceil(state.decoding / state.stages))  # equation 4
        return Quota(min(share, state.ready), self._prompt_tokens(state))

    def _prompt_tokens(self, state: State) -> int:
        if state.free < self.threshold:
            return self.max_prompt_tokens if state.is_lone_prompt else 0
        by_waiting = math.ceil(state.waiting_tokens / self.iterations)
        by_memory = math.floor(
            self.max_prompt_tokens * (state.free - self.threshold) / (1 - self.threshold)
        )
        combined = max(min(by_waiting, by_memory), self.min_prompt_tokens)  # equation 3
        return min(combined, self.max_prompt_tokens, state.waiting_tokens)


@dataclass(eq=False)
class Sequence:
    request: Request
    to_prefill: int
    """The prompt, and after a preemption the answer so far."""

    scheduled: int = 0
    """Tokens whose KV is computed, or will be by a micro-batch in flight."""

    generated: int = 0
    blocks: int = 0
    decoding: bool = False
    in_flight: bool = False

    @property
    def unscheduled(self) -> int:
        return max(self.to_prefill - self.scheduled, 0)


@dataclass
class MicroBatch:
    sequences: list[Sequence] = field(default_factory=list)
    prompt_tokens: int = 0
    decodes: int = 0
    context: int = 0
    """KV positions read: for each decode and each chunk, all tokens up to and including its last
    one."""

    begins_prompts: bool = True
    done_at: float = 0.0

    def add(self, sequence: Sequence, tokens: int) -> None:
        sequence.scheduled += tokens
        sequence.in_flight = True
        self.sequences.append(sequence)
        self.context += sequence.scheduled
        if sequence.decoding:
            self.decodes += tokens
        else:
            self.prompt_tokens += tokens


class Replica:
    def __init__(self, pipeline: Pipeline, policy: SarathiServe | TokenThrottling) -> None:
        self.pipeline = pipeline
        self.policy = policy
        self.free_blocks = pipeline.blocks
        self.sequences: list[Sequence] = []  # unfinished ones, in the order of arrival
        self.in_flight: deque[MicroBatch] = deque()
        self.stage_free_at = [0.0] * pipeline.stages
        self.link_free_at = [0.0] * pipeline.stages
        self.preemptions = 0

    def run(self, requests: list[Request]) -> Outcome:
        """Serve requests, which are in the order of arrival."""
        arrivals = deque(Sequence(request, request.prompt) for request in requests)
        now = 0.0
        while arrivals or self.sequences:
            now = self._next_moment(arrivals)
            while self.in_flight and self.in_flight[0].done_at <= now:
                self._finish(self.in_flight.popleft())
            while arrivals and arrivals[0].request.arrival <= now:
                self.sequences.append(arrivals.popleft())
            self._fill_pipeline(now)
        tokens = sum(request.prompt + request.answer for request in requests)
        return Outcome(now, tokens / now, self.preemptions)

    def _next_moment(self, arrivals: deque[Sequence]) -> float:
        moments = [batch.done_at for batch in self.in_flight]
        if arrivals:
            moments.append(arrivals[0].request.arrival)
        if not moments:
            raise RuntimeError("a prompt needs more blocks than there are")
        return min(moments)

    def _fill_pipeline(self, now: float) -> None:
        while len(self.in_flight) < self.pipeline.stages:
            batch = self._build()
            if not batch.sequences and not self.in_flight:
                batch = self._break_deadlock()
            if not batch.sequences:
                return
            self._launch(batch, now)

    def _launch(self, batch: MicroBatch, now: float) -> None:
        """Pass a micro-batch through all stages and links, each of which takes one after
        another."""
        seconds = self.pipeline.stage_seconds(batch.prompt_tokens, batch.decodes, batch.context)
        moment = now
        for stage in range(self.pipeline.stages):
            moment = max(moment, self.stage_free_at[stage]) + seconds
            self.stage_free_at[stage] = moment
            if stage + 1 < self.pipeline.stages:
                moment = max(moment, self.link_free_at[stage]) + self.pipeline.link_seconds
                self.link_free_at[stage] = moment
        batch.done_at = moment
        self.in_flight.append(batch)

    def _finish(self, batch: MicroBatch) -> None:
        for sequence in batch.sequences:
            sequence.in_flight = False
            if sequence.unscheduled > 0:
                continue
            sequence.generated += 1
            sequence.decoding = True
            if sequence.generated == sequence.request.answer:
                self._release(sequence)
                self.sequences.remove(sequence)

    def _ready(self) -> list[Sequence]:
        return [
            sequence for sequence in self.sequences if sequence.decoding and not sequence.in_flight
        ]

    def _state(self) -> State:
        return State(
            waiting_tokens=sum(sequence.unscheduled for sequence in self.sequences),
            decoding=sum(sequence.decoding for sequence in self.sequences),
            ready=len(self._ready()),
            free=self.free_blocks / self.pipeline.blocks,
            stages=self.pipeline.stages,
        )

    def _build(self) -> MicroBatch:
        quota = self.policy.quota(self._state())
        batch = MicroBatch()
        self._add_decodes(batch, quota.decodes)
        self._add_chunks(batch, quota.prompt_tokens, self.sequences)
        return batch

    def _add_decodes(self, batch: MicroBatch, quota: int) -> None:
        for sequence in self._ready()[:quota]:
            if sequence.decoding and self._make_room(sequence, batch):
                self._take_blocks(sequence, 1)
                batch.add(sequence, 1)

    def _make_room(self, sequence: Sequence, batch: MicroBatch) -> bool:
        """Preempt newer sequences, the newest first, until one more token fits. One in flight
        cannot be preempted."""
        while self._tokens_that_fit(sequence) == 0:
            batch.begins_prompts = False
            newest = self._holders()[-1]
            if newest is sequence or newest.in_flight:
                return False
            self._preempt(newest)
        return True

    def _add_chunks(self, batch: MicroBatch, quota: int, prompts: list[Sequence]) -> None:
        for sequence in prompts:
            wanted = min(sequence.unscheduled, quota - batch.prompt_tokens)
            if sequence.in_flight or wanted == 0:
                continue
            fitting = self._tokens_that_fit(sequence)
            if sequence.blocks == 0 and (
                fitting < sequence.unscheduled or not batch.begins_prompts
            ):
                return
            if (tokens := min(wanted, fitting)) > 0:
                self._take_blocks(sequence, tokens)
                batch.add(sequence, tokens)

    def _break_deadlock(self) -> MicroBatch:
        """Partial prompts hold all KV and none can go on: preempt the newest ones, let the last one
        pass."""
        batch = MicroBatch()
        while len(holders := self._holders()) > 1 and not batch.sequences:
            self._preempt(holders[-1])
            batch = self._build()
        if not batch.sequences:
            quota = self.policy.quota(replace(self._state(), is_lone_prompt=True))
            self._add_chunks(batch, quota.prompt_tokens, holders)
        return batch

    def _holders(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.blocks > 0]

    def _preempt(self, sequence: Sequence) -> None:
        self._release(sequence)
        sequence.decoding, sequence.scheduled = False, 0
        sequence.to_prefill = sequence.request.prompt + sequence.generated
        self.preemptions += 1

    def _tokens_that_fit(self, sequence: Sequence) -> int:
        return (sequence.blocks + self.free_blocks) * self.pipeline.block_size - sequence.scheduled

    def _take_blocks(self, sequence: Sequence, tokens: int) -> None:
        needed = math.ceil((sequence.scheduled + tokens) / self.pipeline.block_size)
        self.free_blocks -= needed - sequence.blocks
        sequence.blocks = needed

    def _release(self, sequence: Sequence) -> None:
        self.free_blocks += sequence.blocks
        sequence.blocks = 0
