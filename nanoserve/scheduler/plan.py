"""All that passes between scheduler and executors: StepPlan, StepResult, and the Executor protocol.

Plans and results are msgspec Structs, so they cross to worker processes as typed msgpack and never
as pickle. They are arrays there: every step sends its rows to every worker.
"""

from typing import Protocol

import msgspec

from nanoserve.request import SamplingParams, TokenLogprob
from nanoserve.scheduler import optional


class Begin(msgspec.Struct, frozen=True, array_like=True):
    """A sequence enters the executor: at its first plan, and again after a preemption or a move
    between tiers.

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

    A decode is a row of one token, a prefill chunk a row of many, speculation a row of several, a
    canvas one of its length. A
    row without tokens names a host sequence whose token is under way; this step finishes it.

    Under asynchronous scheduling, a decode may be planned before its token is known. The row then
    has a placeholder: the device fills in what the sequence's row samples in the preceding plan
    with rows. The row is always answered; if that token ended the sequence, the answer is
    discarded.

    Neither rows nor answers are ever in a cycle, so the garbage collector skips them.
    """

    sequence: int
    start: int
    """First position."""
    tokens: tuple[int, ...]
    """The ids at positions start, start + 1, ..."""
    sample: bool
    """Whether the logits after the last position are sampled; with draft tokens, also those before
    each of them."""
    new_blocks: tuple[int, ...] = ()
    """Appended to the sequence's block table before the row is computed. Where the model has
    several cache groups, for each block's worth of positions there is one block of every group, in
    their order; -1 where the sequence needs none, as these positions lie behind the group's
    window."""
    placeholder: bool = False
    """The token is on the device; ``tokens`` is then (0,)."""
    host: optional.HostRow | None = None
    """Where the sequence's KV is in host memory; its block numbers are then those of the host's
    pool."""
    draft: optional.DraftRow | None = None
    """Draft tokens that the row verifies, and those to propose after it."""
    canvas: optional.CanvasRow | None = None
    """The canvas at the row's end."""


class Copy(msgspec.Struct, frozen=True, array_like=True):
    """Copy device block ``source`` to ``target``, all layers, before anything of the plan is
    written."""

    source: int
    target: int


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One step. Order of effects: end, begin, copies, swaps, then rows; in each layer all rows
    write before any reads. A swap with ``after_row`` follows its row instead, layer by layer.

    A plan of nothing but swaps is answered by their ids alone; its step does not end. A plan
    without rows whose strategy is "overlap" lets the host sequences under way go on.
    """

    step: int
    begin: tuple[Begin, ...] = ()
    rows: tuple[Row, ...] = ()
    copies: tuple[Copy, ...] = ()
    end: tuple[int, ...] = ()
    decodes: int = 0
    prompt_tokens: int = 0
    """Rows of one token, and tokens of longer rows, as the plan builder counts them."""
    layouts: optional.LayoutPlan = optional.LayoutPlan()
    """Which of several parallel layouts runs it, or the one to change to."""
    host: optional.HostPlan = optional.HostPlan()
    """Swaps, and how host sequences take part."""
    state: optional.StatePlan = optional.StatePlan()
    """Where rows find and leave recurrent states."""

    @property
    def ends(self) -> bool:
        """Whether its step ends. A plan of nothing but swaps is answered by theirs."""
        if self.rows:
            return True
        return self.layouts.transition is not None or self.host.strategy == "overlap"


class Answer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The news of one sequence: sampled tokens (one, or several accepted), or an error."""

    sequence: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per token, where asked for."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """For prompt positions row.start + 1 .. row.start + len(row.tokens), where asked for."""
    error: str | None = None
    """Set if the sequence cannot go on, for example because of NaN logits; there are no tokens
    then."""
    complete: bool = False
    """The sequence's grammar allows nothing after these tokens."""
    draft: tuple[int, ...] = ()
    """Draft tokens to follow these tokens, where the row asked a drafter for them; perhaps fewer,
    or none."""
    canvas: tuple[int, ...] = ()
    """The row's canvas after the step, while it is not settled. There are no tokens then."""


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """Everything that the executor has found out since its last result."""

    step: int | None
    """The plan that ended, or None. This also answers its rows without ``sample``."""
    answers: tuple[Answer, ...] = ()
    """Answers by sequence, perhaps to earlier plans."""
    seconds: float = 0.0
    """Device time of the step, without what drafts behind it."""
    lost: str | None = None
    """Why the workers died; such a result holds nothing else. No plan that was submitted before it
    was collected will be answered, and everything the executor knew of sequences and blocks is
    lost, on both tiers. New workers start in the layout of the last answered transition; plans may
    be submitted at once and wait for them."""
    ran: float = 0.0
    """Seconds that the dead workers had run; 0 if they were still starting, so that no plan has
    reached them."""
    draft_seconds: float | None = None
    """How long a drafter drafted behind the step; None if it did not."""
    host: optional.HostResult = optional.HostResult()
    """Swaps that are done, and news of the host sequences."""


class Executor(Protocol):
    """Runs plans, in the order they are submitted."""

    max_in_flight: int
    """Most plans that are submitted and have not ended."""
    async_scheduling: bool
    """Whether it takes rows with placeholders. Then it has one stage, and the next plan is made
    while the device computes."""

    def submit(self, plan: StepPlan) -> None:
        """Take a plan; never blocks on the device. Raises RuntimeFailure if the plans in flight
        will never be answered, but later ones may be; WorkersFailed if no plan will ever be
        answered."""

    def collect(self, until: float | None) -> list[StepResult]:
        """Results in the order they became known; waits for the first one, at most until this time
        on ``now()``. Raises as `submit` does."""

    @property
    def ready(self) -> bool:
        """Whether a plan would be computed at once; not while workers are stopped or being
        started."""

    def now(self) -> float:
        """Seconds on this executor's clock, real or virtual."""

    def close(self) -> None:
        """Free all resources; further calls are errors."""
