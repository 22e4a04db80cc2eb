"""Runs plans on one device: keeps the sequences' records and the KV cache, computes rows, samples.

A plan is prepared, computed, sampled, then answered. Only the answers wait for the device, so that on a GPU the next
plan can be launched while this one computes. In a pipeline another thread prepares a plan while the one before it is
computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle

import msgspec
import numpy as np
import torch
from torch import Tensor

from nanoserve.executor.drafting.drafter import DraftedSequence, Drafter, Drafting
from nanoserve.executor.sampling.adjustments import SequenceGrammar
from nanoserve.executor.sampling.sampler import SamplingState
from nanoserve.executor.step.answers import SampledRows, ScoredPrompt
from nanoserve.executor.step.forward_pass import (
    BlockTable,
    ForwardFunction,
    ForwardPass,
    InputBuilder,
    StepInputs,
    make_caches,
    row_ends,
)
from nanoserve.executor.step.staging import DeviceToHostCopy, Staging
from nanoserve.models.decoder import Decoder, DecoderLayer, LayerFunction
from nanoserve.scheduler.plan import Answer, Begin, Copy, Row, StepPlan
from nanoserve.text.grammar.compiler import GrammarCompiler
from triton_ops import copy_blocks


class SequenceRecord:
    """What the runner knows of one sequence from its Begin on."""

    def __init__(self, begin: Begin, vocab_size: int, grammar: SequenceGrammar | None, *, drafts: bool) -> None:
        self.prompt = np.array(begin.tokens[: begin.prompt_length], np.int64)
        self.params = begin.params
        self.num_known = len(begin.tokens)
        self.block_table = BlockTable()
        self.sampling = SamplingState(begin, vocab_size, grammar)
        self.drafted = DraftedSequence(list(begin.tokens), self.block_table, self.sampling) if drafts else None

    def take(self, row: Row) -> None:
        """Note a row that is about to be computed. What it samples counts as known: the device will know it. Raises
        RuntimeError for tokens that are neither of Begin, nor sampled, nor guesses."""
        end = row.start + len(row.tokens)
        if end - row.guesses > self.num_known:
            raise RuntimeError(f"sequence {row.sequence}: a row goes beyond its {self.num_known} known tokens")
        if row.new_blocks:
            self.block_table.extend(row.new_blocks)
        if row.sample:
            self.num_known = max(self.num_known, end + 1)


@dataclass(slots=True)
class PreparedStep:
    """A plan whose inputs are on their way to the device, and what comes of it."""

    plan: StepPlan
    results: DeviceToHostCopy
    copies: Tensor | None = None
    """int64 [number of copies, 2], source and target blocks; None if the plan has none."""
    inputs: StepInputs | None = None
    """Inputs of the rows whose KV is on the device; None if the plan has none."""
    fed: Tensor | None = None
    """int64 [2, F], for each fed row the place of its token in this step, and of its sample in the step before."""
    prompts: list[ScoredPrompt] = field(default_factory=list)
    sampled: SampledRows | None = None
    launch_seconds: float = 0.0
    """How long the host took to prepare the step and to issue its work."""
    drafting: Drafting | None = None
    """None where nothing guesses."""
    drafted: dict[int, tuple[Row, DraftedSequence]] = field(default_factory=dict)
    """The sampled rows by sequence, for a drafter."""
    draft_seconds: float = 0.0
    """How long guessing took, once there are answers."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all its rows on the device."""
        return 0 if self.inputs is None else len(self.inputs.token_ids)

    def answers(self) -> tuple[Answer, ...]:
        """Wait for the device, then answer for each row that has a result. Call it once, after `sample`."""
        self.results.wait()
        answers = {scored.sequence: scored.answer() for scored in self.prompts}
        if self.sampled is not None:
            for answer in self.sampled.answers():
                earlier = answers.get(answer.sequence)
                answers[answer.sequence] = _joined(earlier, answer) if earlier else answer
        found = tuple(answers.values())
        if self.drafting is not None:
            found, self.draft_seconds = self.drafting.follow(found, self.drafted)
        return found


def _joined(prompt: Answer, sampled: Answer) -> Answer:
    """One answer of a row that has prompt log probabilities and a sampled token; an error of either is the error."""
    if error := prompt.error or sampled.error:
        return Answer(sampled.sequence, error=error)
    return msgspec.structs.replace(sampled, prompt_logprobs=prompt.prompt_logprobs)


class ModelRunner:
    """Executes plans in order; `run_layer` runs the decoder's layers, `grammars` compiles JSON schemas.

    Its KV cache is in the decoder's dtype, and in `storage` if that is given, as `make_caches` has it. A `drafter`
    guesses what follows its answers. Raises torch's errors when memory runs out.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        run_layer: LayerFunction = DecoderLayer.__call__,
        grammars: GrammarCompiler | None = None,
        storage: Tensor | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self.drafting = None if drafter is None else Drafting(drafter)
        self.features = None if drafter is None else drafter.features
        self.decoder, self.device = decoder, device
        self.config = config = decoder.config
        self.caches = make_caches(
            config, num_blocks=num_blocks, block_size=block_size, dtype=decoder.dtype, device=device, storage=storage
        )
        # Computes the rows of a step; DecodeGraphs may take its place.
        self.forward: ForwardFunction = ForwardPass(decoder, self.caches, run_layer, self.features)
        self._grammars = grammars
        self._inputs = cycle([InputBuilder(block_size, config.cache_groups.shares) for _ in range(2)])
        self._staging = Staging(device)
        self._records: dict[int, SequenceRecord] = {}
        # The sequences that the last plan with rows sampled, and their tokens on the device, int64.
        self._last_sampled: tuple[Sequence[int], Tensor | None] = ((), None)

    def forget(self) -> None:
        """Forget all sequences: the content of the caches is of no use from now on."""
        self._records.clear()

    def execute(self, plan: StepPlan) -> tuple[Answer, ...]:
        """Run one plan and wait for its answers; raises as `prepare` does."""
        step = self.prepare(plan)
        return self.sample(step, self.compute(step)).answers()

    @torch.inference_mode()
    def prepare(self, plan: StepPlan) -> PreparedStep:
        """The host's part of a plan: its inputs are on their way to the device when this returns. Another thread may
        prepare the next step while this one is computed, but none beyond it: two sets of buffers take turns. Raises
        RuntimeError if the plan has rows in host memory or grammars where there are none, or sequences or tokens
        unknown here."""
        if any(row.tier != "device" for row in plan.rows):
            raise RuntimeError("the rows of a plan for one device are all in its memory")
        self._begin_and_end(plan)
        step = PreparedStep(plan, DeviceToHostCopy(self.device), self._stage_copies(plan.copies))
        if plan.rows:
            states, ends = self._stage_rows(step, plan.rows)
            if self.decoder.is_last:
                step.sampled = SampledRows.stage(plan.rows, ends, states, self._staging)
        self._staging.transfer()
        return step

    @torch.inference_mode()
    def compute(self, step: PreparedStep, entering: Tensor | None = None) -> Tensor | None:
        """Issue the work of a step's layers: from the hidden states of the stage before, [T, hidden_size], None in the
        first stage, to those of this stage, valid until the next step; None without rows."""
        inputs = self._issue_inputs(step, entering)
        return None if inputs is None else self.forward(inputs)

    @torch.inference_mode()
    def sample(self, step: PreparedStep, hidden: Tensor | None) -> PreparedStep:
        """Issue the work behind the last layer: logits and samples of what `compute` returned in the last stage.

        All ranks of a tensor-parallel group do so; the first one alone has the answers. Returns the step.
        """
        if hidden is not None:
            for prompt in step.prompts:
                prompt.score(self.decoder, hidden, step.results)
            sampled, self._last_sampled = step.sampled, ((), None)
            if sampled is not None:
                self._last_sampled = sampled.sequences, sampled.sample(self.decoder, hidden, step.results)
        step.results.end()
        return step

    def _begin_and_end(self, plan: StepPlan) -> None:
        """Forget the sequences that end with a plan, and begin those that begin."""
        for sequence in plan.end:
            self._records.pop(sequence, None)
        for begin in plan.begin:
            drafts, vocab_size = self.drafting is not None, self.config.vocab_size
            self._records[begin.sequence] = SequenceRecord(begin, vocab_size, self._grammar(begin), drafts=drafts)

    def _stage_copies(self, copies: Sequence[Copy]) -> Tensor | None:
        return self._staging.add(np.array([(copy.source, copy.target) for copy in copies])) if copies else None

    def _stage_rows(self, step: PreparedStep, rows: Sequence[Row]) -> tuple[list[SamplingState], np.ndarray]:
        """Have the inputs of these rows moved to the device; returns their sampling states, and where tokens end."""
        records = self._take_rows(rows)
        ends, tables = row_ends(rows), [record.block_table for record in records]
        step.inputs = next(self._inputs).build(rows, ends, tables, self._staging.add)
        step.fed = self._stage_fed(rows, ends)
        if self.drafting is not None:
            pairs, step.drafting = zip(rows, records, strict=True), self.drafting
            step.drafted = {row.sequence: (row, one.drafted) for row, one in pairs if row.sample and one.drafted}
        if self.decoder.is_last:
            step.prompts = self._stage_prompts(rows, ends, records)
        return [record.sampling for record in records], ends

    def _take_rows(self, rows: Sequence[Row]) -> list[SequenceRecord]:
        records = [self._record(row.sequence) for row in rows]
        for row, record in zip(rows, records, strict=True):
            record.take(row)
        return records

    def _stage_fed(self, rows: Sequence[Row], ends: np.ndarray) -> Tensor | None:
        """Which tokens the device fills in before the host knows them, as `PreparedStep.fed`. Raises RuntimeError if
        the last plan did not sample one of them."""
        fed = [place for place, row in enumerate(rows) if row.fed]
        if not fed:
            return None
        sampled, tokens = self._last_sampled
        place_of = {sequence: place for place, sequence in enumerate(sampled)}
        sequences = [rows[place].sequence for place in fed]
        missing = [sequence for sequence in sequences if sequence not in place_of]
        if missing or tokens is None:
            raise RuntimeError(f"sequence {missing[0]} is fed a token that the plan before it does not sample")
        sources = np.array([place_of[sequence] for sequence in sequences])
        return self._staging.add(np.stack((ends[fed] - 1, sources)))

    def _stage_prompts(
        self, rows: Sequence[Row], ends: np.ndarray, records: Sequence[SequenceRecord]
    ) -> list[ScoredPrompt]:
        """The rows whose logits predict prompt tokens that are to be scored."""
        prompts = []
        for row, end, record in zip(rows, ends.tolist(), records, strict=True):
            top, length = record.params.prompt_logprobs, len(row.tokens)
            if top is not None and len(targets := record.prompt[row.start + 1 : row.start + 1 + length]):
                prompts.append(ScoredPrompt(row.sequence, end - length, self._staging.add(targets), top))
        return prompts

    def _issue_inputs(self, step: PreparedStep, entering: Tensor | None) -> StepInputs | None:
        """Issue what comes before the layers; the inputs of the rows on the device, None without any."""
        step.results.begin()
        if step.copies is not None:
            for key_cache, value_cache in zip(self.caches.keys, self.caches.values, strict=True):
                copy_blocks(key_cache, value_cache, step.copies)
            if self.features is not None:
                self.features.copy(step.copies)
        inputs = step.inputs
        if inputs is not None:
            inputs.entering = entering
            if step.fed is not None:
                places, sources = step.fed
                _, tokens = self._last_sampled
                assert tokens is not None
                inputs.token_ids.index_copy_(0, places, tokens.index_select(0, sources))
        return inputs

    def _grammar(self, begin: Begin) -> SequenceGrammar | None:
        schema = begin.params.json_schema
        if schema is None or not self.decoder.shard.answers:  # the others do not sample
            return None
        if self._grammars is None:
            raise RuntimeError("this executor has no grammars")
        return SequenceGrammar(begin, schema, self.config.vocab_size, self._grammars)

    def _record(self, sequence: int) -> SequenceRecord:
        if sequence not in self._records:
            raise RuntimeError(f"sequence {sequence} is in a plan without having begun")
        return self._records[sequence]
