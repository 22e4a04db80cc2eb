"""Explanation: what the steps of a run saw, decided and did, as data. JSON leaves out fields at their defaults."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from nanoserve.scheduler.plan import Tier

Span = tuple[float, float]


class ExplainedSequence(msgspec.Struct, frozen=True, omit_defaults=True):
    """A sequence, the request that it answers, and the beginning of its prompt."""

    sequence: int
    request: str
    prompt_tokens: int
    prompt: str = ""
    """At most MOST_CHARACTERS; empty without a tokenizer."""


class ExplainedRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """Positions ``start`` to ``start + count - 1`` of a sequence, which the step computes."""

    sequence: int
    start: int
    count: int
    kind: Literal["prefill", "decode"]
    tier: Tier = "device"
    sample: bool = False
    tokens: tuple[str, ...] = ()
    """The first MOST_TOKENS of its tokens, as texts; ids without a tokenizer, "?" where the device fills it in."""


class ExplainedTable(msgspec.Struct, frozen=True, omit_defaults=True):
    """The blocks of a sequence on one tier; while it moves, it has a table on both."""

    sequence: int
    tier: Tier
    blocks: tuple[int, ...]
    tokens: int
    """Tokens that the blocks hold once the rows in flight are computed."""


class ExplainedSwap(msgspec.Struct, frozen=True):
    sequence: int
    direction: Literal["out", "in"]
    """"out" is device to host."""
    blocks: int


class ExplainedAnswer(msgspec.Struct, frozen=True):
    sequence: int
    tokens: tuple[str, ...]
    """Texts, or ids without a tokenizer."""


class ExplainedStep(msgspec.Struct, frozen=True, omit_defaults=True):
    """One step: the snapshot, the decision, the plan, the blocks after it, and its answers. Times are seconds."""

    step: int
    began: float
    """When the plan was made; the run begins at 0."""
    load: Mapping[str, Any]
    """The fields of Load that differ from their defaults; those without a default always."""
    decision: Mapping[str, Any]
    """The fields of Decision that differ from their defaults; those without a default always."""
    free_blocks: int
    total_blocks: int
    ended: float | None = None
    """When its result was known; None if it never was."""
    bound: str = ""
    """Which part of the policy's formula gave the numbers."""
    layout: int = 0
    strategy: str = "device"
    transition: int | None = None
    rows: tuple[ExplainedRow, ...] = ()
    tables: tuple[ExplainedTable, ...] = ()
    """All block tables after the plan was made, in order of the sequences."""
    shared: tuple[int, ...] = ()
    """Device blocks that are in more than one table."""
    copies: tuple[tuple[int, int], ...] = ()
    """Copy on write: (source, target)."""
    swaps: tuple[ExplainedSwap, ...] = ()
    ended_sequences: tuple[int, ...] = ()
    """Sequences that the executor forgets before the step: finished, preempted or moved."""
    free_host: int = 0
    total_host: int = 0
    answers: tuple[ExplainedAnswer, ...] = ()
    """What came with the step's result."""
    spans: tuple[Span, ...] = ()
    """When each stage computed the step; empty if that is not known."""


class ExplainedRun(msgspec.Struct, frozen=True):
    policy: str
    block_size: int
    stages: int
    sequences: tuple[ExplainedSequence, ...]
    steps: tuple[ExplainedStep, ...]


class Explanation(msgspec.Struct, frozen=True):
    """One run, or the same requests under several policies."""

    title: str
    runs: tuple[ExplainedRun, ...]
