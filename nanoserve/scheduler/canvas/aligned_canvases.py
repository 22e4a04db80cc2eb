"""AlignedCanvases: canvases that begin at multiples of their length, and as masks (SDAR)."""

from msgspec.structs import replace

from nanoserve.request import Sequence, Status
from nanoserve.scheduler.canvas.canvas_blocks import AlignedCanvasBlocks
from nanoserve.scheduler.canvas.canvases import Canvases
from nanoserve.scheduler.kv import BlockPool
from nanoserve.scheduler.optional import CanvasRow
from nanoserve.scheduler.plan import Row
from nanoserve.scheduler.plan_builder import PlanBuilder
from nanoserve.scheduler.scheduler import Scheduler

_DECODE = Status.DECODE  # Enum lookup is slow in Python 3.11; hoist it.


class AlignedCanvases(Canvases):
    """Canvases of a model whose positions are divided into spans.

    The canvas of a sequence is the span of positions in which its next token is. It begins with the
    tokens of the span that are known, and masks. Each row of the sequence is a denoising step,
    which ends with the whole canvas. When all of it is settled, the next row begins with its
    tokens, now known, so that their keys and values are written for good, and ends with the first
    step of the next canvas. In the same way the last row of a prompt ends with the first step of
    the first canvas.
    """

    def __init__(self, *, length: int, mask_token: int, token_budget: int) -> None:
        super().__init__(length=length, token_budget=token_budget)
        self._mask_token = mask_token

    def make_blocks(self, pool: BlockPool, windows: tuple[int, ...]) -> AlignedCanvasBlocks:
        if any(windows):
            raise ValueError("canvases together with sliding windows: choose one")
        return AlignedCanvasBlocks(pool, self.length)

    def attach(self, scheduler: Scheduler) -> None:
        super().attach(scheduler)
        blocks = scheduler.table.blocks
        assert isinstance(blocks, AlignedCanvasBlocks), "the scheduler took them from here"
        self._blocks = blocks

    def count(self, sequence: Sequence) -> int:
        """Count the tokens of a sequence's next row: those that are known and not computed, and the
        rest of the canvas."""
        return self._blocks.end_of_canvas(len(sequence.tokens)) - sequence.computed

    def room_for_prompts(self, taken: int) -> int:
        """A prompt's last row may be longer than its budget: by a part of a span, and by the first
        canvas."""
        return self.token_budget - taken - 2 * self.length

    def add_row(self, builder: PlanBuilder, sequence: Sequence) -> None:
        count = self.count(sequence)
        new_blocks, _ = self._blocks.grow(sequence, count)  # its prompt's row has made the copies
        known = sequence.tokens[sequence.computed :]
        fixed = len(sequence.tokens) % self.length
        canvas, steps = self.unsettled(sequence)
        if canvas is None:
            canvas = self._masked(sequence)
        row = Row(
            sequence.sequence_id,
            sequence.computed,
            (*known[: len(known) - fixed], *canvas),
            True,
            tuple(new_blocks),
            canvas=CanvasRow(self.length, fixed, steps),
        )
        self.put(builder, sequence, row)
        sequence.computed += count - self.length

    def _masked(self, sequence: Sequence) -> tuple[int, ...]:
        """Return a canvas that has had no step: the known tokens of its span, then masks."""
        fixed = len(sequence.tokens) % self.length
        known = sequence.tokens[len(sequence.tokens) - fixed :]
        return (*known, *[self._mask_token] * (self.length - fixed))

    def new_tokens(self, sequence: Sequence, canvas: tuple[int, ...]) -> list[int | None]:
        new = canvas[len(sequence.tokens) % self.length :]
        return [None if token == self._mask_token else token for token in new]

    def after_prompt_row(self, builder: PlanBuilder, prompt: Sequence) -> None:
        """Put the first canvas behind the prompt's last row."""
        row = builder.rows[-1]
        if not row.sample:
            return
        fixed = len(prompt.tokens) % self.length
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
            canvas=CanvasRow(self.length, fixed, 0),
        )
        builder.rows[-1] = prompt.in_flight[-1] = row
        prompt.computed -= fixed

    def run_first(self, builder: PlanBuilder, first: Sequence | None) -> bool:
        assert first is not None, "a sequence runs or waits, as nothing is in flight"
        if first.status is Status.WAITING:
            self.table.admit(first)
        if builder.make_room(first, self.count(first)):
            if first.status is _DECODE:
                self.add_row(builder, first)
            else:
                builder.add_chunk(first, max(self.length, self.token_budget - 2 * self.length))
        return builder.does_something
