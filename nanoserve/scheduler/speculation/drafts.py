"""Drafts: adds draft tokens to the rows of a plan, as its Speculator chooses, and tells it what became of them."""

from msgspec.structs import replace

from nanoserve.request import Place, PlannedRow, Sequence
from nanoserve.scheduler.extension import Extension
from nanoserve.scheduler.optional import DraftRow, draft_of
from nanoserve.scheduler.plan import Answer, StepPlan, StepResult
from nanoserve.scheduler.plan_builder import PlanBuilder
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.scheduler.speculation.speculator import Speculator
from nanoserve.scheduler.work import work_of


class Drafts(Extension):
    """The draft tokens of a scheduler's rows."""

    def __init__(self, speculator: Speculator) -> None:
        self.speculator = speculator

    def attach(self, scheduler: Scheduler) -> None:
        self._table = scheduler.table
        self._feeds_tokens = scheduler.feeds_tokens

    def added(self, sequence: Sequence) -> None:
        sequence.waits_for_token = True  # until the speculator has looked at it

    def after_rows(self, builder: PlanBuilder) -> None:
        """Add guesses to the rows that are sampled, and ask for the next ones, where blocks are free for them. Each
        sequence that runs keeps a free block to grow into: no guess ever costs another sequence its blocks."""
        wanted = builder.decision.draft_tokens
        if self.speculator.rests() and wanted is None:
            return
        sequences, places = [], []
        for place, row in enumerate(builder.rows):
            sequence = self._table.sequences[row.sequence]
            if row.sample and not row.placeholder and sequence.place is Place.DEVICE:
                sequences.append(sequence)
                places.append(place)
        if not sequences:
            return
        chosen = self.speculator.choose(
            sequences,
            lambda: work_of(builder.rows),
            builder.load.predictor,
            wanted,
            builder.load.steps_in_flight,
            builder.prompt_tokens,
        )
        for sequence, place, (guesses, draft) in zip(sequences, places, chosen, strict=True):
            if guesses or draft:
                self._extend(builder, sequence, place, guesses, draft)

    def _extend(
        self, builder: PlanBuilder, sequence: Sequence, place: int, guesses: tuple[int, ...], draft: int
    ) -> None:
        """Add to a row as many guesses, and then as many tokens to draft, as there is room for."""
        blocks, row = self._table.blocks, builder.rows[place]
        spare = max(0, blocks.pool.free_blocks // blocks.groups - len(self._table.running))
        room = sequence.capacity - sequence.computed + spare * blocks.pool.block_size
        guesses = guesses[:room]
        draft = min(draft, room - len(guesses))
        if not (guesses or draft):
            return
        new_blocks, _ = blocks.grow(sequence, len(guesses) + draft)
        row = replace(
            row,
            tokens=row.tokens + guesses,
            draft=DraftRow(len(guesses), draft),
            new_blocks=row.new_blocks + tuple(new_blocks),
        )
        builder.rows[place] = sequence.in_flight[-1] = row
        sequence.computed += len(guesses)

    def answered(self, sequence: Sequence, row: PlannedRow, answer: Answer) -> None:
        """Take back the positions of guesses that were wrong, and learn from the answer."""
        draft = draft_of(row)
        if draft.verify:
            accepted = max(0, len(answer.tokens) - 1)
            sequence.computed -= draft.verify - accepted
        if row.draft is not None or self._feeds_tokens:
            self.speculator.learn(sequence, draft.verify, len(answer.tokens), draft.propose, answer.draft)

    def plan_ended(self, plan: StepPlan, result: StepResult) -> None:
        """Learn how long drafting took."""
        if result.draft_seconds is not None:
            asking = [row.draft for row in plan.rows if row.draft is not None and row.draft.propose]
            longest = max([draft.propose for draft in asking])
            steady = all(draft.verify for draft in asking)
            self.speculator.learn_pace(result.draft_seconds / longest, steady=steady)

    def released(self, sequence: Sequence) -> None:
        if sequence.finished:
            self.speculator.forget(sequence.sequence_id)
