"""Canvases: puts the canvases of sequences into plans, and keeps them from one denoising step to
the next. Its two kinds are AlignedCanvases and FreeCanvases."""

from abc import abstractmethod

from nanoserve.errors import UsageError
from nanoserve.request import PlannedRow, Request, Sequence
from nanoserve.scheduler.extension import Extension
from nanoserve.scheduler.kv import BlockPool, SequenceBlocks
from nanoserve.scheduler.plan import Answer, Row
from nanoserve.scheduler.plan_builder import PlanBuilder
from nanoserve.scheduler.scheduler import Scheduler


class Canvases(Extension):
    """The canvases of a scheduler's sequences (text diffusion).

    A sequence that decodes has a canvas of ``length`` positions. A row that ends with the canvas is
    a denoising step. When the canvas is settled, the sequence gets its tokens, and a later row
    writes their keys and values for good.

    A row has more tokens than one, so a step holds fewer sequences than a policy decides for:
    as many as the ``token_budget`` holds. Prompts get the rest of it.
    """

    def __init__(self, *, length: int, token_budget: int) -> None:
        self.length, self.token_budget = length, token_budget
        self._unsettled: dict[int, tuple[tuple[int, ...], int]] = {}
        """The canvas of each sequence after its last step, and the number of its steps."""
        self._decodes: list[Sequence] = []  # of the plan that is being made

    @abstractmethod
    def make_blocks(self, pool: BlockPool, windows: tuple[int, ...]) -> SequenceBlocks:
        """Make the block tables of a scheduler, whose cache groups have these windows. Raises
        ValueError if the kind does not go together with them."""

    @abstractmethod
    def count(self, sequence: Sequence) -> int:
        """Count the tokens of the next row of a sequence that decodes."""

    @abstractmethod
    def add_row(self, builder: PlanBuilder, sequence: Sequence) -> None:
        """Put the next row of a sequence that decodes into the plan; its blocks are free."""

    @abstractmethod
    def room_for_prompts(self, taken: int) -> int:
        """Count the prompt tokens of a plan whose rows of decodes have ``taken`` tokens."""

    @abstractmethod
    def new_tokens(self, sequence: Sequence, canvas: tuple[int, ...]) -> list[int | None]:
        """Return those tokens of a sequence's canvas that are not known, None for each mask."""

    def attach(self, scheduler: Scheduler) -> None:
        if scheduler.async_scheduling:
            raise ValueError("canvases together with asynchronous scheduling: choose one")
        self.table = scheduler.table

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
                    f"{name}: the model writes {self.length} tokens at a time, which does not "
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
        """Add a row for each sequence that fits, oldest first, and leave the rest of the budget to
        prompts."""
        taken = 0
        for sequence in self._decodes:
            count = self.count(sequence)
            if taken and taken + count > self.token_budget:
                break
            if sequence.sequence_id not in builder.skipped and builder.make_room(sequence, count):
                self.add_row(builder, sequence)
                taken += count
        most = self.room_for_prompts(taken)
        builder.taken_tokens = max(0, builder.decision.prefill_tokens - most)

    def unsettled(self, sequence: Sequence) -> tuple[tuple[int, ...] | None, int]:
        """Return the canvas of a sequence after its last step, None before its first one, and the
        number of its steps."""
        return self._unsettled.get(sequence.sequence_id, (None, 0))

    @staticmethod
    def put(builder: PlanBuilder, sequence: Sequence, row: Row) -> None:
        """Put a row that ends with a canvas into the plan."""
        builder.rows.append(row)
        sequence.in_flight.append(row)
        if len(row.tokens) > 1:
            builder.prompt_tokens += len(row.tokens)
            builder.longer_rows += 1

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
        mask. There are none before the first step, and after the last one."""
        canvas, _ = self.unsettled(sequence)
        if canvas is None:
            return []
        return self.new_tokens(sequence, canvas)

    def released(self, sequence: Sequence) -> None:
        """Drop the canvas of a sequence that has given up its blocks: it will begin again."""
        self._unsettled.pop(sequence.sequence_id, None)
