"""All that passes between scheduler and executors: StepPlan, StepResult, and the Executor protocol.

Plans and results are msgspec Structs, so they cross to worker processes as typed msgpack and never as pickle. They are
arrays there: every step sends its rows to every worker.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from nanoserve.request import SamplingParams, TokenLogprob
from nanoserve.scheduler.work import Chunk, StepWork, Strategy

Tier = Literal["device", "host"]


class Begin(msgspec.Struct, frozen=True, array_like=True):
    """A sequence enters the executor: at its first plan, and again after a preemption or a move between tiers.

    A second Begin replaces everything the executor knew of the sequence, including its block table.
    """

    sequence: int
    tokens: tuple[int, ...]
    """Prompt and output so far."""
    prompt_length: int
    index: int
    """Its number among the request's ``n`` samples; part of the random counter."""
    seed: int
    """The request's resolved seed."""
    params: SamplingParams
    end_tokens: tuple[int, ...] = ()
    """Ids that min_tokens keeps from being sampled too early."""


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Some consecutive positions of one sequence to compute in this step.

    A decode is a row of one token, a prefill chunk a row of many, speculation a row of several. A row without tokens
    names a host sequence whose token is under way; this step finishes it.

    A fed row is a decode that is planned before its token is known: the device fills in what the sequence's row samples
    in the preceding plan with rows. It is always answered; if that token ended the sequence, the answer is discarded.

    Neither rows nor answers are ever in a cycle, so the garbage collector skips them.
    """

    sequence: int
    start: int
    """First position."""
    tokens: tuple[int, ...]
    """The ids at positions start, start + 1, ..."""
    sample: bool
    """Whether the logits after the last position are sampled; with guesses, also those before each of them."""
    new_blocks: tuple[int, ...] = ()
    """Appended to the sequence's block table before the row is computed. Where the model has several cache groups, for
    each block's worth of positions there is one block of every group, in their order; -1 where the sequence needs none,
    as these positions lie behind the group's window."""
    tier: Tier = "device"
    """Where the sequence's KV is, which is the pool that its block numbers refer to."""
    sub_batch: int = 0
    """0, or 1 for the second of the two that alternate in an asymmetric step."""
    fed: bool = False
    """The token is on the device; ``tokens`` is then (0,), a placeholder."""
    guesses: int = 0
    """How many of the last tokens are guesses (speculation). The answer is the longest run of them that is sampled as
    guessed, and one token more."""
    draft: int = 0
    """How many tokens the executor's drafter shall guess after the answer, for the sequence's next row. The block table
    reaches start + len(tokens) + draft positions: the drafter's own cache has the same blocks."""


class Copy(msgspec.Struct, frozen=True, array_like=True):
    """Copy device block ``source`` to ``target``, all layers, before anything of the plan is written."""

    source: int
    target: int


class Swap(msgspec.Struct, frozen=True, array_like=True):
    """Move a sequence's blocks between tiers; both sides stay owned until the swap is answered."""

    swap: int
    """Its id, which the result names."""
    sequence: int
    direction: Literal["out", "in"]
    """"out" is device to host, "in" is host to device."""
    device_blocks: tuple[int, ...]
    host_blocks: tuple[int, ...]
    """Pairwise source and target."""
    after_row: bool = False
    """Only for "out": the sequence's row in the same plan, the last chunk of a parked prompt, fills the device blocks.
    Each layer's blocks are copied once that layer is computed, while later layers compute. The swap may be answered
    before the row's token, with it or after it."""


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One step. Order of effects: end, begin, copies, swaps, then rows; in each layer all rows write before any reads.
    A swap with ``after_row`` follows its row instead, layer by layer.

    A plan of nothing but swaps is answered by their ids alone; its step does not end. A plan without rows whose
    strategy is "overlap" lets the host sequences under way go on.
    """

    step: int
    begin: tuple[Begin, ...] = ()
    rows: tuple[Row, ...] = ()
    copies: tuple[Copy, ...] = ()
    swaps: tuple[Swap, ...] = ()
    end: tuple[int, ...] = ()
    layout: int = 0
    """Which parallel layout runs it."""
    strategy: Strategy = "device"
    """How host sequences take part."""
    transition: int | None = None
    """The layout to change to; such a plan holds nothing else."""
    decodes: int = 0
    prompt_tokens: int = 0
    """Rows of one token, and tokens of longer rows, as the plan builder counts them."""

    @property
    def ends(self) -> bool:
        """Whether its step ends. A plan of nothing but swaps is answered by theirs."""
        return bool(self.rows) or self.transition is not None or self.strategy == "overlap"


class Answer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The news of one sequence: sampled tokens (one, or several accepted), or an error."""

    sequence: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per token, where asked for."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """For prompt positions row.start + 1 .. row.start + len(row.tokens), where asked for."""
    error: str | None = None
    """Set if the sequence cannot go on, for example because of NaN logits; there are no tokens then."""
    complete: bool = False
    """The sequence's grammar allows nothing after these tokens."""
    draft: tuple[int, ...] = ()
    """What a drafter guesses to follow these tokens, where the row asked for it; perhaps fewer, or none."""


class CohortProgress(msgspec.Struct, frozen=True, array_like=True):
    """The host sequences that began a token in plan ``step`` have passed this many layers."""

    step: int
    layers: int


class HostWork(msgspec.Struct, frozen=True, array_like=True):
    """The time of CPU attention for some host sequences in one layer."""

    sequences: int
    context_tokens: int
    """Keys that their attention read, summed over sequences."""
    seconds: float
    """Measured from receiving queries, keys and values until the result is ready."""


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """What the executor has found out since its last result."""

    step: int | None
    """The plan that ended, or None. This also answers its rows without ``sample``."""
    answers: tuple[Answer, ...] = ()
    """Answers by sequence, perhaps to earlier plans."""
    swapped: tuple[int, ...] = ()
    """Ids of the swaps that are done."""
    cohorts: tuple[CohortProgress, ...] = ()
    """Progress of the host sequences under way."""
    seconds: float = 0.0
    """Device time of the step, without what guesses behind it."""
    lost: str | None = None
    """Why the workers died; such a result holds nothing else. No plan that was submitted before it was collected will
    be answered, and everything the executor knew of sequences and blocks is lost, on both tiers. New workers start in
    the layout of the last answered transition; plans may be submitted at once and wait for them."""
    ran: float = 0.0
    """Seconds that the dead workers had run; 0 if they were still starting, so that no plan has reached them."""
    host_work: tuple[HostWork, ...] = ()
    """Attention on the CPU that ended since the last result."""
    draft_seconds: float = 0.0
    """How long a drafter guessed behind the step."""
    host_lost: str | None = None
    """Why attention on the CPU died or hangs. Everything else in the result was known before. No host row of a plan
    that was submitted before this was collected will be answered after it, and the KV of host sequences must be
    recomputed. Nothing else is affected: the plans end, and their rows on the device and all swaps are answered. Host
    rows of later plans run as before."""


@dataclass(frozen=True, slots=True)
class LayoutCapacity:
    """The KV blocks and plans in flight of a parallel layout."""

    num_blocks: int
    pipeline_depth: int = 1
    """Most plans in flight."""


class Executor(Protocol):
    """Runs plans, in the order they are submitted."""

    max_in_flight: int
    """Most plans that are submitted and have not ended."""
    feeds_tokens: bool
    """Whether it takes fed rows. Then it has one stage, and the next plan is made while the device computes."""

    def submit(self, plan: StepPlan) -> None:
        """Take a plan; never blocks on the device. Raises RuntimeFailure if the plans in flight will never be answered,
        but later ones may be; WorkersFailed if no plan will ever be answered."""

    def collect(self, until: float | None) -> list[StepResult]:
        """Results in the order they became known; waits for the first one, at most until this time on ``now()``. Raises
        as `submit` does."""

    @property
    def ready(self) -> bool:
        """Whether a plan would be computed at once; not while workers are stopped or being started."""

    def now(self) -> float:
        """Seconds on this executor's clock, real or virtual."""

    def close(self) -> None:
        """Free all resources; further calls are errors."""


def work_of(rows: Iterable[Row], sum_up: Callable[[list[int], list[Chunk], int], StepWork] = StepWork.of) -> StepWork:
    """Sum the rows of a plan up; ``sum_up`` gets the decodes' contexts, the chunks and how many positions are
    sampled. A row with guesses is a decode."""
    contexts: list[int] = []
    chunks: list[Chunk] = []
    sampled = guesses = 0
    for row in rows:
        sampled += row.sample + row.guesses
        if len(row.tokens) == 1 or row.guesses:
            contexts.append(row.start + len(row.tokens))
            guesses += row.guesses
        else:
            chunks.append((row.start, len(row.tokens)))
    work = sum_up(contexts, chunks, sampled)
    return msgspec.structs.replace(work, guesses=guesses) if guesses else work
