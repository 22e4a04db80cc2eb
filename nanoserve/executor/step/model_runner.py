"""ModelRunner: keeps the sequences' records and the KV cache of one device, computes the rows of
plans, and samples.

A plan is prepared, begun, computed, sampled, then answered. Only the answers wait for the device,
so that on a GPU the next plan can be launched while this one computes. In a pipeline another thread
prepares a plan while the one before it is computed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch
from torch import Tensor

from nanoserve.executor.mechanism import Mechanism, bound
from nanoserve.executor.sampling.adjustments import SequenceGrammar
from nanoserve.executor.sampling.sampler import SamplingState
from nanoserve.executor.step.answers import SampledRows, ScoredPrompt, StepSamples
from nanoserve.executor.step.forward_pass import (
    BlockTable,
    BlockTables,
    ForwardFunction,
    ForwardPass,
    InputBuilder,
    SmallSteps,
    StepInputs,
    make_caches,
    row_ends,
)
from nanoserve.executor.step.staging import DeviceToHostCopy, Staging
from nanoserve.models.decoder import Decoder, DecoderLayer, LayerFunction
from nanoserve.scheduler.plan import Answer, Begin, Row, StepPlan
from nanoserve.text.grammar.compiler import GrammarCompiler
from triton_ops import copy_blocks

StageSampled = Callable[
    [Sequence[Row], np.ndarray, Sequence[SamplingState], Staging], StepSamples | None
]
"""Stages what a step samples: see `SampledRows.stage`."""


class SequenceRecord:
    """The runner's knowledge of one sequence, from its Begin on."""

    def __init__(
        self,
        begin: Begin,
        vocab_size: int,
        block_table: BlockTable,
        grammar: SequenceGrammar | None,
    ) -> None:
        self.prompt = np.array(begin.tokens[: begin.prompt_length], np.int64)
        self.prompt_logprobs = begin.params.prompt_logprobs
        self.num_known = len(begin.tokens)
        self.block_table = block_table
        self.sampling = SamplingState(begin, vocab_size, grammar)


@dataclass(slots=True)
class PreparedStep:
    """A plan whose inputs are on their way to the device, and what comes of it."""

    plan: StepPlan
    rows: Sequence[Row]
    """The rows that the forward pass computes: all of the plan's, unless a mechanism computes
    some."""
    results: DeviceToHostCopy
    copies: Tensor | None = None
    """int64 [number of copies, 2], source and target blocks; None if the plan has none."""
    inputs: StepInputs | None = None
    """Inputs of the rows; None if there are none."""
    forward: Callable[[Tensor | None], Tensor | None] | None = None
    """Computes the layers in place of the runner's forward pass, and stages the sampled rows: a
    mechanism's."""
    prompts: list[ScoredPrompt] = field(default_factory=list)
    sampled: StepSamples | None = None
    launch_seconds: float = 0.0
    """How long the host took to prepare the step and to issue its work."""
    num_tokens: int = 0
    """Number of tokens of its rows."""
    context_tokens: int = 0
    """Number of tokens to whose keys and values its rows attend."""

    def answers(self) -> tuple[Answer, ...]:
        """Wait for the device, then answer for each row that has a result. Call it once, after
        `sample`."""
        self.results.wait()
        sampled = () if self.sampled is None else tuple(self.sampled.answers())
        if not self.prompts:
            return sampled
        answers = {scored.sequence: scored.answer() for scored in self.prompts}
        for answer in sampled:
            earlier = answers.get(answer.sequence)
            answers[answer.sequence] = answer if earlier is None else _joined(earlier, answer)
        return tuple(answers.values())


def _joined(prompt: Answer, sampled: Answer) -> Answer:
    """Join the answers of a row that has prompt log probabilities and a sampled token; an error of
    either is the error."""
    error = prompt.error or sampled.error
    if error is not None:
        return Answer(sampled.sequence, error=error)
    return msgspec.structs.replace(sampled, prompt_logprobs=prompt.prompt_logprobs)


class ModelRunner:
    """Executes plans in order; `run_layer` runs the decoder's layers, `grammars` compiles JSON
    schemas.

    Its KV cache is in the decoder's dtype, and in `storage` if that is given, as `make_caches` has
    it. The mechanisms are attached in their order. Raises torch's errors when memory runs out.
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
        mechanisms: Sequence[Mechanism] = (),
    ) -> None:
        self.decoder, self.device = decoder, device
        self.block_size, self.run_layer = block_size, run_layer
        self.config = config = decoder.config
        self.caches = make_caches(
            config,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=decoder.dtype,
            device=device,
            storage=storage,
        )
        # Computes the rows of a step; DecodeGraphs may take its place.
        self.forward: ForwardFunction = ForwardPass(decoder, self.caches, run_layer)
        self._small_steps = SmallSteps(decoder)
        self.stage_sampled: StageSampled = SampledRows.stage
        self.moves_blocks = False  # a mechanism that carries out swaps sets it
        self.staging = Staging(device)
        self.records: dict[int, SequenceRecord] = {}
        self._scored = set[int]()  # sequences whose prompts' log probabilities are wanted
        self._grammars = grammars
        self._tables = BlockTables()
        self._inputs = InputBuilder(block_size, config.cache_groups.shares)
        self._preparing = bound(mechanisms, Mechanism.prepare)
        self._beginning = bound(mechanisms, Mechanism.begin)
        for mechanism in mechanisms:
            mechanism.attach(self)

    def execute(self, plan: StepPlan) -> tuple[Answer, ...]:
        """Run one plan and wait for its answers; raises as `prepare` and `begin` do."""
        step = self.prepare(plan)
        self.begin(step)
        return self.sample(step, self.compute(step)).answers()

    @torch.inference_mode()
    def prepare(self, plan: StepPlan) -> PreparedStep:
        """Do the host's part of a plan: its inputs are on their way to the device when this
        returns. Another thread may prepare the next step while this one is computed, but none
        beyond it: two sets of buffers take turns. Raises RuntimeError if the plan has rows in host
        memory or grammars where there are none, or sequences or tokens unknown here."""
        for sequence in plan.end:
            self._forget(sequence)
        for begin in plan.begin:
            self._forget(begin.sequence)
            grammar = self._grammar(begin)
            self.records[begin.sequence] = SequenceRecord(
                begin, self.config.vocab_size, self._tables.open(), grammar
            )
            if begin.params.prompt_logprobs is not None:
                self._scored.add(begin.sequence)
        step = PreparedStep(plan, plan.rows, DeviceToHostCopy(self.device))
        for prepare in self._preparing:
            prepare(step)
        if plan.copies:
            step.copies = self.staging.add(
                np.array([(copy.source, copy.target) for copy in plan.copies])
            )
        if step.rows:
            self._stage_rows(step)
        self.staging.transfer()
        return step

    @torch.inference_mode()
    def begin(self, step: PreparedStep) -> None:
        """Issue what comes before the layers of a step whose turn has come. Raises RuntimeError if
        nothing here carries out the plan's swaps."""
        if step.plan.host.swaps and not self.moves_blocks:
            raise RuntimeError("this executor has no host pool")
        step.results.begin()
        if step.copies is not None:
            for key_cache, value_cache in zip(self.caches.keys, self.caches.values, strict=True):
                copy_blocks(key_cache, value_cache, step.copies)
        for begin in self._beginning:
            begin(step)

    @torch.inference_mode()
    def compute(
        self, step: PreparedStep, intermediate_hidden_states: Tensor | None = None
    ) -> Tensor | None:
        """Issue the work of a step's layers: from the hidden states of the stage before, [T,
        hidden_size], None in the first stage, to those of this stage, valid until the next step;
        None without rows."""
        with self._small_steps.on_one_thread(step.num_tokens, step.context_tokens):
            if step.forward is not None:
                return step.forward(intermediate_hidden_states)
            if step.inputs is None:
                return None
            step.inputs.intermediate_hidden_states = intermediate_hidden_states
            return self.forward(step.inputs)

    @torch.inference_mode()
    def sample(self, step: PreparedStep, hidden: Tensor | None) -> PreparedStep:
        """Issue the work behind the last layer: logits and samples of what `compute` returned in
        the last stage.

        All ranks of a tensor-parallel group do so; the first one alone has the answers. Returns the
        step.
        """
        with self._small_steps.on_one_thread(step.num_tokens, step.context_tokens):
            if hidden is not None:
                for prompt in step.prompts:
                    prompt.score(self.decoder, hidden, step.results)
                if step.sampled is not None:
                    step.sampled.sample(self.decoder, hidden, step.results)
        step.results.end()
        return step

    def take_rows(self, rows: Sequence[Row]) -> list[SequenceRecord]:
        """Note rows that are about to be computed; returns the records of their sequences. What a
        row samples counts as known: the device will know it. Raises RuntimeError for sequences that
        have not begun, and for tokens that are neither of Begin nor sampled."""
        known, records = self.records, list[SequenceRecord]()
        for row in rows:
            record = known.get(row.sequence)
            if record is None:
                raise RuntimeError(f"sequence {row.sequence} is in a plan without having begun")
            end = row.start + len(row.tokens)
            if end > record.num_known:
                raise RuntimeError(
                    f"sequence {row.sequence}: a row goes beyond its {record.num_known} known "
                    "tokens"
                )
            if row.new_blocks:
                record.block_table.extend(row.new_blocks)
            if row.sample and end == record.num_known:
                record.num_known = end + 1
            records.append(record)
        return records

    def forget(self) -> None:
        """Forget all sequences."""
        for sequence in list(self.records):
            self._forget(sequence)

    def _forget(self, sequence: int) -> None:
        record = self.records.pop(sequence, None)
        if record is not None:
            self._tables.close(record.block_table)
            self._scored.discard(sequence)

    # ---- the parts of prepare --------------------------------------------------------------------

    def _grammar(self, begin: Begin) -> SequenceGrammar | None:
        """The grammar of a sequence that begins, if it has one and is sampled here."""
        schema = begin.params.json_schema
        if schema is None or not self.decoder.shard.answers:  # the others do not sample
            return None
        if self._grammars is None:
            raise RuntimeError("this executor has no grammars")
        return SequenceGrammar(begin, schema, self.config.vocab_size, self._grammars)

    def _stage_rows(self, step: PreparedStep) -> None:
        """Have the inputs of the step's rows moved to the device, and what their sampling needs."""
        rows = step.rows
        elsewhere = [row for row in rows if row.host is not None]
        if elsewhere:
            raise RuntimeError("the rows of a plan for one device are all in its memory")
        records = self.take_rows(rows)
        ends = row_ends(rows)
        tables = [record.block_table for record in records]
        step.inputs = self._inputs.build(rows, ends, tables, self.staging.add)
        step.num_tokens = int(ends[-1])
        step.context_tokens = sum([row.start for row in rows]) + step.num_tokens
        if not self.decoder.is_last:
            return
        if self._scored:
            step.prompts = self._stage_prompts(rows, ends, records)
        if step.forward is None:
            states = [record.sampling for record in records]
            step.sampled = self.stage_sampled(rows, ends, states, self.staging)

    def _stage_prompts(
        self, rows: Sequence[Row], ends: np.ndarray, records: Sequence[SequenceRecord]
    ) -> list[ScoredPrompt]:
        """Stage the prompt tokens that are to be scored, for each row whose logits predict some."""
        prompts = list[ScoredPrompt]()
        for row, end, record in zip(rows, ends.tolist(), records, strict=True):
            top, length = record.prompt_logprobs, len(row.tokens)
            targets = record.prompt[row.start + 1 : row.start + 1 + length]
            if top is not None and len(targets):
                prompts.append(
                    ScoredPrompt(row.sequence, end - length, self.staging.add(targets), top)
                )
        return prompts
