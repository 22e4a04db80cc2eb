"""Canvases: puts the canvases of sequences into plans, and keeps them from one denoising step to
the next."""

from msgspec.structs import replace

from nanoserve.errors import UsageError
from nanoserve.request import PlannedRow, Request, Sequence, Status
from nanoserve.scheduler.canvas.canvas_blocks import CanvasBlocks
from nanoserve.scheduler.extension import Extension
from nanoserve.scheduler.kv import BlockPool
from nanoserve.scheduler.optional import CanvasRow
from nanoserve.scheduler.plan import Answer, Row
from nanoserve.scheduler.plan_builder import PlanBuilder
from nanoserve.scheduler.scheduler import Scheduler

_DECODE = Status.DECODE  # Enum lookup is slow in Python 3.11; hoist it.


class Canvases(Extension):
    """The canvases of a scheduler's sequences (text diffusion).

    A sequence that decodes has a canvas: the span of positions in which its next token is. The
    canvas begins with the tokens of the span that are known, and masks. Each row of the sequence
    is a denoising step, which ends with the whole canvas. When all of it is settled, the sequence
    gets its tokens. Its next row begins with them, now known, so that their keys and values are
    written for good, and ends with the first step of the next canvas. In the same way the last row
    of a prompt ends with the first step of the first canvas.

    A row has more tokens than one, so a step holds fewer sequences than a policy decides for:
    as many as the ``token_budget`` holds. Prompts get the rest of it.
    """

    def __init__(self, *, length: int, mask_token: int, token_budget: int) -> None:
        self._length, self._mask_token, self._token_budget = length, mask_token, token_budget
        self._unsettled: dict[int, tuple[tuple[int, ...], int]] = {}
        """The canvas of each sequence after its last step, and the number of its steps."""
        self._decodes: list[Sequence] = []  # of the plan that is being made

    def make_blocks(self, pool: BlockPool, windows: tuple[int, ...]) -> CanvasBlocks:
        """Make the block tables of a scheduler. Raises ValueError if one of its cache groups has a
        window."""
        if any(windows):
            raise ValueError("canvases together with sliding windows: choose one")
        return CanvasBlocks(pool, self._length)

    def attach(self, scheduler: Scheduler) -> None:
        if scheduler.async_scheduling:
            raise ValueError("canvases together with asynchronous scheduling: choose one")
        self._table = scheduler.table
        blocks = scheduler.table.blocks
        assert isinstance(blocks, CanvasBlocks), "the scheduler took them from here"
        self._blocks = blocks

    def check(self, request: Request) -> None:
        params = request.params
        asked = {
            "penalties, logit_bias and min_tokens": params.adjusts_logits,
            "json_schema": params.json_schema is not None,
            "prompt_logprobs": params.prompt_logprobs is not None,
        }
        for name, is_asked in asked.items():
            if is_asked:
                raise UsageError(
                    f"{name}: the model writes {self._length} tokens at a time, which does not "
                    "support it; leave it out"
                )

    # ---- a plan is made --------------------------------------------------------------------------

    def before_rows(
        self, builder: PlanBuilder, decodes: list[Sequence], prefills: list[Sequence]
    ) -> list[Sequence]:
        """Take all decodes: none of them has a row of one token."""
        self._decodes = decodes[: builder.decision.decodes]
        return []

    def after_decodes(self, builder: PlanBuilder) -> None:
        """Add a row for each canvas that fits, oldest first, and leave the rest of the budget to
        prompts. A prompt's last row may be longer than its budget: by a part of a span, and by the
        first canvas."""
        taken = 0
        for sequence in self._decodes:
            count = self._count(sequence)
            if taken and taken + count > self._token_budget:
                break
            if sequence.sequence_id not in builder.skipped and builder.make_room(sequence, count):
                self._add_row(builder, sequence, count)
                taken += count
        most = self._token_budget - taken - 2 * self._length
        builder.taken_tokens = max(0, builder.decision.prefill_tokens - most)

    def _count(self, sequence: Sequence) -> int:
        """Count the tokens of a sequence's next row: those that are known and not computed, and the
        rest of the canvas."""
        return self._blocks.end_of_canvas(len(sequence.tokens)) - sequence.computed

    def _add_row(self, builder: PlanBuilder, sequence: Sequence, count: int) -> None:
        new_blocks, _ = self._blocks.grow(sequence, count)  # its prompt's row has made the copies
        known = sequence.tokens[sequence.computed :]
        fixed = len(sequence.tokens) % self._length
        canvas, steps = self._unsettled.get(sequence.sequence_id, (None, 0))
        if canvas is None:
            canvas = self._masked(sequence)
        row = Row(
            sequence.sequence_id,
            sequence.computed,
            (*known[: len(known) - fixed], *canvas),
            True,
            tuple(new_blocks),
            canvas=CanvasRow(self._length, fixed, steps),
        )
        builder.rows.append(row)
        builder.prompt_tokens += count
        builder.longer_rows += 1
        sequence.in_flight.append(row)
        sequence.computed += count - self._length

    def _masked(self, sequence: Sequence) -> tuple[int, ...]:
        """Return a canvas that has had no step: the known tokens of its span, then masks."""
        fixed = len(sequence.tokens) % self._length
        known = sequence.tokens[len(sequence.tokens) - fixed :]
        return (*known, *[self._mask_token] * (self._length - fixed))

    def after_prompt_row(self, builder: PlanBuilder, prompt: Sequence) -> None:
        """Put the first canvas behind the prompt's last row."""
        row = builder.rows[-1]
        if not row.sample:
            return
        fixed = len(prompt.tokens) % self._length
        masks = self._masked(prompt)[fixed:]
        new_blocks, _ = self._blocks.grow(prompt, len(masks))
        if len(row.tokens) == 1:
            builder.longer_rows += 1
            builder.prompt_tokens += 1
        builder.prompt_tokens += len(masks)
        row = replace(
            row,
            tokens=row.tokens + masks,
            new_blocks=row.new_blocks + tuple(new_blocks),
            canvas=CanvasRow(self._length, fixed, 0),
        )
        builder.rows[-1] = prompt.in_flight[-1] = row
        prompt.computed -= fixed

    def run_first(self, builder: PlanBuilder, first: Sequence | None) -> bool:
        assert first is not None, "a sequence runs or waits, as nothing is in flight"
        if first.status is Status.WAITING:
            self._table.admit(first)
        count = self._count(first)
        if builder.make_room(first, count):
            if first.status is _DECODE:
                self._add_row(builder, first, count)
            else:
                builder.add_chunk(first, max(self._length, self._token_budget - 2 * self._length))
        return builder.does_something

    # ---- results ---------------------------------------------------------------------------------

    def answered(self, sequence: Sequence, row: PlannedRow, answer: Answer) -> None:
        """Keep the canvas of a sequence until it is settled."""
        name = sequence.sequence_id
        if sequence.finished or not answer.canvas:
            self._unsettled.pop(name, None)
            return
        _, steps = self._unsettled.get(name, ((), 0))
        self._unsettled[name] = answer.canvas, steps + 1

    def draft(self, sequence: Sequence) -> list[int | None]:
        """Return the new tokens of a sequence's canvas as its last step left them, None for each
        that is not settled. There are none before the first step, and after the last one."""
        canvas, _ = self._unsettled.get(sequence.sequence_id, ((), 0))
        new = canvas[len(sequence.tokens) % self._length :]
        return [None if token == self._mask_token else token for token in new]

    def released(self, sequence: Sequence) -> None:
        """Drop the canvas of a sequence that has given up its blocks: it will begin again."""
        self._unsettled.pop(sequence.sequence_id, None)
