"""The only words that pass between scheduler and executors: StepPlan, StepResult, Executor.

Everything here is a msgspec Struct, so a plan crosses to a worker process as typed msgpack and never as pickle.
The words grow by adding fields, each with a test.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from nanoserve.costs.work import Chunk, StepWork
from nanoserve.request import SamplingParams, TokenLogprob
from nanoserve.scheduler.load import Strategy

Tier = Literal["device", "host"]


class Begin(msgspec.Struct, frozen=True):
    """A sequence enters the executor: at its first plan, and again after a preemption or a move between tiers.

    A second Begin of a sequence replaces everything the executor knew of it, its block table included.
    """

    sequence: int
    """Its id."""
    tokens: tuple[int, ...]
    """Prompt and output so far."""
    prompt_length: int
    """How many of ``tokens`` are the prompt."""
    index: int
    """Which of the request's ``n`` samples it is; part of the random counter."""
    seed: int
    """The request's resolved seed."""
    params: SamplingParams
    """Its sampling parameters."""
    end_tokens: tuple[int, ...] = ()
    """Ids that min_tokens keeps from being sampled too early."""


class Row(msgspec.Struct, frozen=True):
    """Some consecutive positions of one sequence to compute in this step.

    A decode is a row of one token, a prefill chunk a row of many, speculation a row of several. A row of no tokens
    names a host sequence whose token is under way and which this step shall finish.

    A fed row is a decode that was planned before its token was known: the token is the one that the sequence's row
    samples in the plan with rows before this one, which stays on the device. What comes of a fed row is thrown away if
    that token turns out to end the sequence, and must be answered nevertheless.
    """

    sequence: int
    """Its id."""
    start: int
    """First position."""
    tokens: tuple[int, ...]
    """The ids at positions start, start + 1, ... Ids behind the last one the executor knows are guesses (speculation):
    it answers the longest run of them that it would have sampled, and one token more."""
    sample: bool
    """Whether the logits after the last position are sampled."""
    new_blocks: tuple[int, ...] = ()
    """Appended to the sequence's block table before the row is computed."""
    tier: Tier = "device"
    """Where the sequence's KV lives, and so what the numbers of its blocks mean."""
    sub_batch: int = 0
    """0, or 1 for the second of the two that alternate in an asymmetric step."""
    fed: bool = False
    """The token is on the device; ``tokens`` is then (0,), which says that there is one and not which."""


class Copy(msgspec.Struct, frozen=True, array_like=True):
    """Copy device block ``source`` to ``target``, all layers, before anything of the plan is written."""

    source: int
    target: int


class Swap(msgspec.Struct, frozen=True):
    """Move a sequence's blocks between tiers; both sides stay owned until the swap is answered."""

    swap: int
    """Id that the answer names."""
    sequence: int
    direction: Literal["out", "in"]
    """"out" is device to host, "in" is host to device."""
    device_blocks: tuple[int, ...]
    host_blocks: tuple[int, ...]
    """Pairwise source and target."""
    after_row: bool = False
    """Of direction "out": the sequence's row in the same plan, the last chunk of a prompt that is parked, fills these
    device blocks. Each layer's are copied once that layer is computed, while later ones compute. The swap may be
    answered before the row's token, with it or after it."""


class StepPlan(msgspec.Struct, frozen=True):
    """One step. Order of effects: end, begin, copies, swaps, then rows; in each layer all rows write before any reads.
    A swap with ``after_row`` comes behind its row instead, layer by layer.

    A plan without rows that holds nothing but swaps is answered by their ids alone; its step does not end. One without
    rows whose strategy is "overlap" lets the host sequences under way go on.
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

    @property
    def ends(self) -> bool:
        """Whether its step ends. A plan of nothing but swaps is answered by theirs."""
        return bool(self.rows) or self.transition is not None or self.strategy == "overlap"


class Answer(msgspec.Struct, frozen=True):
    """What became known of one sequence: sampled tokens (one, or several accepted), or what went wrong."""

    sequence: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per token, where asked for."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """For prompt positions row.start + 1 .. row.start + len(row.tokens), where asked for."""
    error: str | None = None
    """Set if the sequence cannot go on (its logits were not numbers, say); it then has no tokens."""
    complete: bool = False
    """Nothing can follow these tokens: the sequence's grammar allows no more."""


class CohortProgress(msgspec.Struct, frozen=True, array_like=True):
    """How far the host sequences that began a token in plan ``step`` are: so many layers are behind them."""

    step: int
    layers: int


class HostWork(msgspec.Struct, frozen=True, array_like=True):
    """What the CPU took to attend for some host sequences in one layer."""

    sequences: int
    """How many."""
    context_tokens: int
    """Keys that their attention read, summed over them."""
    seconds: float
    """From taking queries, keys and values over to having the result ready, measured."""


class StepResult(msgspec.Struct, frozen=True):
    """What the executor knows anew."""

    step: int | None
    """The plan that ended, or None. Its rows without ``sample`` are thereby answered."""
    answers: tuple[Answer, ...] = ()
    """By sequence, perhaps to earlier plans."""
    swapped: tuple[int, ...] = ()
    """Ids of swaps that are done."""
    cohorts: tuple[CohortProgress, ...] = ()
    """Progress of the host sequences under way."""
    seconds: float = 0.0
    """Device time of the step."""
    lost: str | None = None
    """The workers died, and why; such a result comes alone and says nothing else. No plan that was submitted before it
    was collected will be answered, and nothing is left of what the executor knew of sequences and blocks, on either
    tier. New workers are on their way, in the layout of the last transition that was answered: plans may be submitted
    at once, and wait."""
    ran: float = 0.0
    """Of workers that died, for how many seconds they had run; 0 if they were still starting, so that no plan has
    reached them."""
    host_work: tuple[HostWork, ...] = ()
    """Attention on the CPU that ended since the last result."""
    host_lost: str | None = None
    """Attention on the CPU died or hangs, and why. What else the result says was known before. No host row of a plan
    that was submitted before this was collected will be answered after it, whether a cohort has it or an asymmetric
    step, and the KV of host sequences is to be computed again. Nothing else is touched: the plans end, their rows on
    the device and all swaps are answered. Host rows of later plans run as before."""


@dataclass(frozen=True, slots=True)
class LayoutCapacity:
    """What the scheduler must know of a parallel layout."""

    num_blocks: int
    """KV blocks on the device."""
    pipeline_depth: int = 1
    """Plans in flight at most."""


class Executor(Protocol):
    """Runs plans, in the order they are submitted."""

    max_in_flight: int
    """How many plans may be submitted and not yet ended."""
    feeds_tokens: bool
    """Whether it takes fed rows. It has one stage then, and two plans may be in flight, so that the next one is made
    and its inputs are prepared while the device computes."""

    def submit(self, plan: StepPlan) -> None:
        """Take a plan; never blocks on the device.

        Raises:
            RuntimeFailure: if what is in flight will never be answered; later plans may be.
            WorkersFailed: if no plan will be any more.
        """

    def collect(self, until: float | None) -> list[StepResult]:
        """Results in order of becoming known; waits for the first one, at most until that time on ``now()``.

        Raises: as `submit` does.
        """

    @property
    def ready(self) -> bool:
        """Whether a plan would be computed at once; not while workers are stopped or being started."""

    def now(self) -> float:
        """Seconds on this executor's clock, real or virtual."""

    def close(self) -> None:
        """Give everything back; further calls are errors."""


def work_of(rows: Iterable[Row], sum_up: Callable[[list[int], list[Chunk], int], StepWork] = StepWork.of) -> StepWork:
    """Sum rows up.

    Args:
        rows: of a plan.
        sum_up: makes work of the decodes' contexts, the chunks and how many rows are sampled.
    """
    contexts: list[int] = []
    chunks: list[Chunk] = []
    sampled = 0
    for row in rows:
        sampled += row.sample
        if len(row.tokens) == 1:
            contexts.append(row.start + 1)
        else:
            chunks.append((row.start, len(row.tokens)))
    return sum_up(contexts, chunks, sampled)
