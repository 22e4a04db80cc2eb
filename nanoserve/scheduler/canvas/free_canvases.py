"""FreeCanvases: canvases that begin behind the known tokens, and as random tokens
(DiffusionGemma)."""

from msgspec.structs import replace

from nanoserve.request import Sequence, Status
from nanoserve.scheduler.canvas.canvas_blocks import FreeCanvasBlocks
from nanoserve.scheduler.canvas.canvases import Canvases
from nanoserve.scheduler.kv import BlockPool
from nanoserve.scheduler.optional import CanvasRow
from nanoserve.scheduler.plan import Row, StepPlan, StepResult
from nanoserve.scheduler.plan_builder import PlanBuilder

_PREFILL, _DECODE = Status.PREFILL, Status.DECODE  # Enum lookup is slow in Python 3.11; hoist it.


class FreeCanvases(Canvases):
    """Canvases of a model that computes known tokens as any other does, causally, and a canvas in
    another way.

    The canvas of a sequence begins directly behind its known tokens, wherever these end. A row is
    either known tokens, of which nothing is sampled, or a denoising step: the canvas and nothing
    else. When the canvas is settled, its tokens are computed once more in a row of known tokens,
    as a prompt's chunk is. The next canvas begins in the row after that.
    """

    def make_blocks(self, pool: BlockPool, windows: tuple[int, ...]) -> FreeCanvasBlocks:
        return FreeCanvasBlocks(pool, windows, self.length)

    def count(self, sequence: Sequence) -> int:
        """Count the tokens of a sequence's next row: those that are known and not computed, or else
        the canvas."""
        return sequence.remaining or self.length

    def room_for_prompts(self, taken: int) -> int:
        return self.token_budget - taken

    def add_row(self, builder: PlanBuilder, sequence: Sequence) -> None:
        if sequence.remaining:
            builder.add_chunk(sequence, sequence.remaining)
            return
        new_blocks, _ = self.table.blocks.grow(sequence, self.length)
        canvas, steps = self.unsettled(sequence)
        if canvas is None:
            canvas = (0,) * self.length  # the executor draws its tokens
        row = Row(
            sequence.sequence_id,
            sequence.computed,
            canvas,
            True,
            tuple(new_blocks),
            canvas=CanvasRow(self.length, 0, steps),
        )
        self.put(builder, sequence, row)

    def new_tokens(self, sequence: Sequence, canvas: tuple[int, ...]) -> list[int | None]:
        return list(canvas)

    def after_prompt_row(self, builder: PlanBuilder, prompt: Sequence) -> None:
        """Sample nothing after known tokens."""
        row = builder.rows[-1]
        if row.sample:
            builder.rows[-1] = prompt.in_flight[-1] = replace(row, sample=False)

    def run_first(self, builder: PlanBuilder, first: Sequence | None) -> bool:
        if first is None or first.status is not _DECODE:
            return False
        if builder.make_room(first, self.count(first)):
            self.add_row(builder, first)
        return builder.does_something

    def plan_ended(self, plan: StepPlan, result: StepResult) -> None:
        """Have sequences decode whose prompts are computed."""
        for row in plan.rows:
            sequence = self.table.sequences.get(row.sequence)
            if sequence is not None and sequence.status is _PREFILL and not sequence.remaining:
                sequence.move_to(_DECODE)
