"""Explanation: what the steps of a run saw, decided and did, as data. JSON leaves out fields at
their defaults."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import chain, count
from pathlib import Path
from typing import Any, Literal

import msgspec

from nanoserve.record.events import HeldBlocks, States
from nanoserve.record.run_record import RunRecord, Span
from nanoserve.scheduler.load import Decision, Load
from nanoserve.scheduler.optional import (
    HostDecision,
    HostLoad,
    LayoutsLoad,
    StateRow,
    Tier,
    draft_of,
    tier_of,
)
from nanoserve.scheduler.plan import Answer, Copy, Row

MOST_TOKENS, MOST_CHARACTERS = 8, 60
MEANINGS = {
    "waiting_tokens": "#WP: prompt tokens that no plan computes yet",
    "first_waiting_tokens": "tokens left of the prompt that is next",
    "running_decodes": "#RD: sequences that decode on the device, in flight or not",
    "ready_decodes": "decodes that may enter this step",
    "ready_prefills": "partly computed prompts that may enter this step",
    "context_tokens": "tokens in the KV cache of all running sequences",
    "free_blocks": "KV blocks without an owner, cached or not",
    "total_blocks": "all KV blocks",
    "block_size": "tokens of a block",
    "free_slots": "sequences that may still be admitted",
    "steps_in_flight": "plans that are not ended",
    "pipeline_depth": "P: plans among which the decodes are divided",
    "expected_growth": "blocks that running sequences are expected to need",
    "layout": "parallel layout",
    "layouts": "number of parallel layouts",
    "host_decodes": "sequences with KV in host memory",
    "ready_host": "host sequences that may enter this step",
    "host_context_tokens": "tokens in the KV of all host sequences",
    "moving": "sequences that move between the tiers",
    "host_free_blocks": "host blocks without an owner",
    "host_blocks": "all host blocks",
    "cohorts": "host sequences whose token is under way",
    "longest_remaining": "tokens until the last running decode ends",
    "prefill_tokens": "prompt tokens to compute",
    "decodes": "running sequences to decode",
    "whole_prompts": "prompts are computed whole or not at all",
    "strategy": "how host sequences take part",
    "swap_out": "decodes to move to host memory",
    "swap_in": "host sequences to move to the device",
    "park": "prompts that end in this step move to host memory",
    "preempt_to_host": "preempted sequences move to host memory",
    "admission_reserve": "a new prompt leaves a block for each decode",
    "draft_tokens": "draft tokens of a row",
}
"""The meaning of each field that a step shows of its Load and Decision."""
AT_MOST = ("prefill_tokens", "decodes", "swap_out", "swap_in", "draft_tokens")
"""Fields of a Decision that are upper bounds: the scheduler takes what there is."""
NOT_SHOWN = ("previous", "predictor", "bound", "alternatives")  # of loads and decisions
NAMES = {
    (LayoutsLoad, "current"): "layout",
    (LayoutsLoad, "count"): "layouts",
    (HostLoad, "decodes"): "host_decodes",
    (HostLoad, "ready"): "ready_host",
    (HostLoad, "context_tokens"): "host_context_tokens",
    (HostLoad, "free_blocks"): "host_free_blocks",
    (HostLoad, "total_blocks"): "host_blocks",
    (HostDecision, "decodes"): "host_decodes",
    (HostDecision, "preempt"): "preempt_to_host",
    (Decision, "draft_tokens"): "draft_tokens",
}
"""Names under which a step shows a field, where they are not the field's own."""
Texts = Callable[[Sequence[int]], tuple[str, ...]]  # the texts of tokens, one by one


class ExplainedSequence(msgspec.Struct, frozen=True, omit_defaults=True):
    sequence: int
    request: str
    prompt_tokens: int
    prompt: str = ""
    """Its beginning, at most MOST_CHARACTERS; empty without a tokenizer."""


class ExplainedRow(msgspec.Struct, frozen=True, omit_defaults=True):
    sequence: int
    start: int
    """First position; the step computes ``count`` of them."""
    count: int
    kind: Literal["prefill", "decode"]
    tier: Tier = "device"
    sample: bool = False
    tokens: tuple[str, ...] = ()
    """The first MOST_TOKENS of its tokens, as texts; "?" where the device fills it in."""
    draft_tokens: int = 0
    """How many of the last tokens are draft tokens."""
    denoising_step: int = 0
    """Which step of the canvas at the row's end it is, from 1; 0: it has no canvas."""


class ExplainedSwap(msgspec.Struct, frozen=True):
    sequence: int
    direction: Literal["out", "in"]
    blocks: int


class ExplainedAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    sequence: int
    tokens: tuple[str, ...]
    is_canvas: bool = False
    """Whether the tokens are a canvas that is not settled."""


class ExplainedStep(msgspec.Struct, frozen=True, omit_defaults=True):
    """One step: the snapshot, the decision, the plan, the blocks after it, and its answers. Times
    are seconds from the beginning of the run."""

    step: int
    began: float
    """When the plan was made."""
    load: Mapping[str, Any]
    decision: Mapping[str, Any]
    """The fields of Load, and of Decision, that differ from their defaults; fields without a
    default always."""
    free_blocks: int
    total_blocks: int
    ended: float | None = None
    """When its result was known; None if it never was."""
    bound: str = ""  # which part of the policy's formula gave the numbers
    layout: int = 0
    strategy: str = "device"
    transition: int | None = None
    rows: tuple[ExplainedRow, ...] = ()
    tables: tuple[HeldBlocks, ...] = ()
    """All block tables after the plan was made, in order of the sequences."""
    shared: tuple[int, ...] = ()  # device blocks that are in more than one table
    copies: tuple[Copy, ...] = ()  # copy on write: (source, target)
    swaps: tuple[ExplainedSwap, ...] = ()
    ended_sequences: tuple[int, ...] = ()
    """Sequences that the executor forgets before the step: finished, preempted or moved."""
    free_host: int = 0
    total_host: int = 0
    states: States | None = None
    """The slots of recurrent states after the plan was made; None if it has none."""
    state_rows: tuple[StateRow, ...] = ()
    """Rows whose states are not in one slot before and after them, or leave snapshots."""
    answers: tuple[ExplainedAnswer, ...] = ()
    """Answers that came with the step's result."""
    spans: tuple[Span, ...] = ()  # when each stage computed the step; empty if that is not known


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
    meanings: Mapping[str, str] = msgspec.field(default_factory=lambda: dict(MEANINGS))
    at_most: tuple[str, ...] = AT_MOST


def explain_run(
    policy: str, record: RunRecord, block_size: int, stages: int, texts: Texts
) -> ExplainedRun:
    """Explain a recorded run, from its engine's first step on; the recorder kept the block tables.
    Without a tokenizer, ``texts`` are empty."""
    sequences = tuple(_sequences(record, texts))
    begin = 0.0
    if record.arrivals:
        begin = record.arrivals[0].arrival_time
    spans = defaultdict[int, list[Span]](list)
    workers = max((times.rank for times in record.stage_times), default=0) + 1
    for times in chain.from_iterable(record.stages(max(1, workers // stages))):
        spans[times.step].append((times.started - begin, times.computed - begin))
    steps = []
    for step, planned in record.planned.items():
        plan, blocks, ended, result = (
            planned.plan,
            planned.blocks,
            record.known.get(step),
            record.result_of.get(step),
        )
        on_device = chain.from_iterable(
            table.blocks for table in planned.tables if table.tier == "device"
        )
        answers: tuple[Answer, ...] = ()
        if result is not None:
            answers = result.answers
        if ended is not None:
            ended -= begin
        explained = ExplainedStep(
            step=step,
            began=planned.clock - begin,
            ended=ended,
            load=_shown(planned.load),
            decision=_shown(planned.decision),
            bound=planned.decision.bound,
            layout=plan.layouts.current,
            strategy=plan.host.strategy,
            transition=plan.layouts.transition,
            rows=tuple(_row(row, sequences[row.sequence], texts) for row in plan.rows),
            tables=planned.tables,
            shared=tuple(sorted(block for block, times in Counter(on_device).items() if times > 1)),
            copies=plan.copies,
            swaps=tuple(
                ExplainedSwap(one.sequence, one.direction, len(one.device_blocks))
                for one in plan.host.swaps
            ),
            ended_sequences=plan.end,
            free_blocks=blocks.device - blocks.used_device,
            total_blocks=blocks.device,
            free_host=blocks.host - blocks.used_host,
            total_host=blocks.host,
            states=blocks.states,
            state_rows=plan.state.rows,
            answers=tuple(
                ExplainedAnswer(
                    one.sequence, texts(one.tokens or one.canvas), is_canvas=len(one.canvas) > 0
                )
                for one in answers
            ),
            spans=tuple(spans[step]),
        )
        steps.append(explained)
    return ExplainedRun(policy, block_size, stages, sequences, tuple(steps))


def _sequences(record: RunRecord, texts: Texts) -> Iterator[ExplainedSequence]:
    """The samples of the requests in the order of their arrival, which is how a scheduler numbers
    them."""
    numbers = count()
    for request in record.arrivals:
        prompt = "".join(texts(request.prompt[:MOST_CHARACTERS]))[:MOST_CHARACTERS]
        for index in range(request.params.n):
            name = request.request_id
            if request.params.n > 1:
                name = f"{request.request_id}/{index}"
            yield ExplainedSequence(next(numbers), name, len(request.prompt), prompt)


def _row(row: Row, sequence: ExplainedSequence, texts: Texts) -> ExplainedRow:
    shown: tuple[str, ...] = ("?",)
    if not row.placeholder:
        shown = texts(row.tokens[:MOST_TOKENS])
    kind: Literal["prefill", "decode"] = "decode"
    if len(row.tokens) - draft_of(row).verify > 1 or row.start < sequence.prompt_tokens:
        kind = "prefill"
    denoising_step = 0
    if row.canvas is not None:
        denoising_step = row.canvas.step + 1
    return ExplainedRow(
        row.sequence,
        row.start,
        len(row.tokens),
        kind,
        tier_of(row),
        row.sample,
        shown,
        draft_of(row).verify,
        denoising_step,
    )


def _shown(value: Load | Decision | LayoutsLoad | HostLoad | HostDecision | None) -> dict[str, Any]:
    """The fields that differ from their defaults, in plain types; fields of the optional members
    are beside the others."""
    shown: dict[str, Any] = {}
    if value is not None:
        for one in fields(value):
            own = getattr(value, one.name)
            if isinstance(own, LayoutsLoad | HostLoad | HostDecision):
                shown |= _shown(own)
            elif own != one.default and one.name not in NOT_SHOWN:
                shown[NAMES.get((type(value), one.name), one.name)] = own
    plain: dict[str, Any] = msgspec.to_builtins(shown)
    return plain


def explanation_page(explanation: Explanation) -> str:
    """A page of HTML, which loads nothing. No text of a prompt can end the script that holds it as
    JSON."""
    page = Path(__file__).with_name("explanation.html").read_text(encoding="utf-8")
    content = msgspec.json.encode(explanation).decode()
    return page.replace("EXPLANATION_JSON", content.replace("<", "\\u003c"), 1)
