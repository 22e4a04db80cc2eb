"""Drafts: adds draft tokens to the rows of a plan, as its DraftProposer chooses, and tells it what
became of them."""

from msgspec.structs import replace

from nanoserve.request import Place, PlannedRow, Sequence
from nanoserve.scheduler.extension import Extension
from nanoserve.scheduler.optional import DraftRow, draft_of
from nanoserve.scheduler.plan import Answer, StepPlan, StepResult
from nanoserve.scheduler.plan_builder import PlanBuilder
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.scheduler.speculation.draft_proposer import DraftProposer
from nanoserve.scheduler.work import work_of


class Drafts(Extension):
    """The draft tokens of a scheduler's rows."""

    def __init__(self, proposer: DraftProposer) -> None:
        self.proposer = proposer

    def attach(self, scheduler: Scheduler) -> None:
        self._table = scheduler.table
        self._async_scheduling = scheduler.async_scheduling

    def added(self, sequence: Sequence) -> None:
        if sequence.placeholders is not None:
            sequence.placeholders.wait = True  # until the proposer has looked at it

    def after_rows(self, builder: PlanBuilder) -> None:
        """Add draft tokens to the rows that are sampled, and ask for the next ones, where blocks
        are free for them. Each sequence that runs keeps a free block to grow into: no draft token
        ever costs another sequence its blocks."""
        wanted = builder.decision.draft_tokens
        if self.proposer.rests() and wanted is None:
            return
        sequences, places = [], []
        for place, row in enumerate(builder.rows):
            sequence = self._table.sequences[row.sequence]
            if row.sample and not row.placeholder and sequence.place is Place.DEVICE:
                sequences.append(sequence)
                places.append(place)
        if not sequences:
            return
        chosen = self.proposer.choose(
            sequences,
            lambda: work_of(builder.rows),
            builder.load.predictor,
            wanted,
            builder.load.steps_in_flight,
            builder.prompt_tokens,
        )
        for sequence, place, (draft_tokens, draft) in zip(sequences, places, chosen, strict=True):
            if draft_tokens or draft:
                self._extend(builder, sequence, place, draft_tokens, draft)

    def _extend(
        self,
        builder: PlanBuilder,
        sequence: Sequence,
        place: int,
        draft_tokens: tuple[int, ...],
        draft: int,
    ) -> None:
        """Add draft tokens to a row, and then tokens to draft, as far as there is room."""
        blocks, row = self._table.blocks, builder.rows[place]
        spare = max(0, blocks.pool.free_blocks // blocks.groups - len(self._table.running))
        room = sequence.capacity - sequence.computed + spare * blocks.pool.block_size
        draft_tokens = draft_tokens[:room]
        draft = min(draft, room - len(draft_tokens))
        if not (draft_tokens or draft):
            return
        new_blocks, _ = blocks.grow(sequence, len(draft_tokens) + draft)
        row = replace(
            row,
            tokens=row.tokens + draft_tokens,
            draft=DraftRow(len(draft_tokens), draft),
            new_blocks=row.new_blocks + tuple(new_blocks),
        )
        builder.rows[place] = sequence.in_flight[-1] = row
        sequence.computed += len(draft_tokens)

    def answered(self, sequence: Sequence, row: PlannedRow, answer: Answer) -> None:
        """Take back the positions of draft tokens that were wrong, and learn from the answer."""
        draft = draft_of(row)
        if draft.verify:
            accepted = max(0, len(answer.tokens) - 1)
            sequence.computed -= draft.verify - accepted
        if row.draft is not None or self._async_scheduling:
            self.proposer.learn(
                sequence, draft.verify, len(answer.tokens), draft.propose, answer.draft
            )

    def plan_ended(self, plan: StepPlan, result: StepResult) -> None:
        """Learn how long drafting took."""
        if result.draft_seconds is not None:
            asking = [row.draft for row in plan.rows if row.draft is not None and row.draft.propose]
            longest = max([draft.propose for draft in asking])
            steady = all(draft.verify for draft in asking)
            self.proposer.learn_pace(result.draft_seconds / longest, steady=steady)

    def released(self, sequence: Sequence) -> None:
        if sequence.finished:
            self.proposer.forget(sequence.sequence_id)
