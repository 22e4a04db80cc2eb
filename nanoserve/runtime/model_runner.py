"""Runs plans on one device: keeps the sequences' records and the KV cache, computes rows, samples, answers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor

from nanoserve.grammar.compiler import GrammarCompiler
from nanoserve.models.decoder import Decoder, DecoderLayer, LayerFunction
from nanoserve.request import TokenLogprob
from nanoserve.runtime.forward_pass import Caches, ForwardFunction, ForwardPass
from nanoserve.runtime.grammars import SequenceGrammar
from nanoserve.runtime.logprobs import rows_per_chunk, token_logprobs
from nanoserve.runtime.sampling import SamplingRows, SamplingState, sample
from nanoserve.runtime.staging import Staged, Staging
from nanoserve.runtime.step_inputs import BlockTable, InputBuilder
from nanoserve.scheduler.plan import Answer, Begin, Copy, Row, StepPlan
from triton_ops import copy_blocks

NOT_NUMBERS = "the model's logits are not numbers (NaN or infinite), or no token was left to sample"


class SequenceRecord:
    """What the runner knows of one sequence from its Begin on."""

    def __init__(self, begin: Begin, vocab_size: int, grammar: SequenceGrammar | None) -> None:
        self.prompt = np.array(begin.tokens[: begin.prompt_length], np.int64)
        self.params = begin.params
        self.num_known = len(begin.tokens)
        self.block_table = BlockTable()
        self.sampling = SamplingState(begin, vocab_size, grammar)

    def take(self, row: Row) -> None:
        """Take note of a row that is about to be computed.

        Raises:
            RuntimeError: if it has tokens that neither Begin nor sampling told: guesses are not verified here.
        """
        if row.start + len(row.tokens) > self.num_known:
            raise RuntimeError(f"sequence {row.sequence}: a row goes beyond its {self.num_known} known tokens")
        self.block_table.extend(row.new_blocks)

    def append(self, token: int) -> None:
        """Take note of a sampled token."""
        self.num_known += 1
        self.sampling.append(token)

    def prompt_targets(self, row: Row) -> np.ndarray:
        """The prompt tokens that the row's logits predict, where their log probabilities are asked for."""
        if self.params.prompt_logprobs is None:
            return self.prompt[:0]
        return self.prompt[row.start + 1 : row.start + 1 + len(row.tokens)]


@dataclass(frozen=True, slots=True)
class _Sampling:
    """The rows of a step that are sampled.

    Attributes:
        last_tokens: int64 [number of rows], the place of each one's last token in the step.
    """

    rows: list[Row]
    records: list[SequenceRecord]
    last_tokens: Staged
    settings: SamplingRows


class ModelRunner:
    """Executes plans in order; `run_layer` runs the decoder's layers, `grammars` compiles JSON schemas.

    Its KV cache is a pair of tensors per layer, [num_blocks, num_kv_heads, block_size, head_dim], in the decoder's
    dtype, and holds anything at first: memory that is never touched costs no time. Raises torch's errors when memory
    runs out.

    Attributes:
        forward: computes the rows of a step; whoever has a faster way to do so may put it here.
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
    ) -> None:
        config = decoder.config
        self.decoder = decoder
        self.config = config
        self.device = device
        shape = (num_blocks, config.num_kv_heads, block_size, config.head_dim)
        dtype = decoder.embedding.weight.dtype
        self.key_caches = [torch.empty(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
        self.value_caches = [torch.empty(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
        self.forward: ForwardFunction = ForwardPass(decoder, Caches(self.key_caches, self.value_caches), run_layer)
        self._grammars = grammars
        self._inputs = InputBuilder(block_size)
        self._staging = Staging(device)
        self._records: dict[int, SequenceRecord] = {}

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> tuple[Answer, ...]:
        """Run one plan and wait for its answers, one for each row that has something to say.

        Raises:
            RuntimeError: if the plan uses a host tier or grammars where there are none, or sequences or tokens unknown
                here.
        """
        if plan.swaps or any(row.tier != "device" for row in plan.rows):
            raise RuntimeError("this executor has no host tier")
        for sequence in plan.end:
            self._records.pop(sequence, None)
        for begin in plan.begin:
            self._records[begin.sequence] = SequenceRecord(begin, self.config.vocab_size, self._grammar(begin))
        pairs = self._staging.add(np.array([(copy.source, copy.target) for copy in plan.copies], np.int64))
        records = [self._record(row.sequence) for row in plan.rows]
        for row, record in zip(plan.rows, records, strict=True):
            record.take(row)
        if not plan.rows:
            self._staging.transfer()
            self._copy(plan.copies, pairs)
            return ()
        inputs = self._inputs.stage(plan.rows, [record.block_table for record in records], self._staging)
        sampling = self._stage_sampling(plan.rows, records)
        self._staging.transfer()
        self._copy(plan.copies, pairs)
        return self._answer(plan.rows, records, self.forward(inputs.tensors()), sampling)

    def _grammar(self, begin: Begin) -> SequenceGrammar | None:
        schema = begin.params.json_schema
        if schema is None:
            return None
        if self._grammars is None:
            raise RuntimeError("this executor has no grammars")
        return SequenceGrammar(begin, schema, self.config.vocab_size, self._grammars)

    def _record(self, sequence: int) -> SequenceRecord:
        if sequence not in self._records:
            raise RuntimeError(f"sequence {sequence} is in a plan without having begun")
        return self._records[sequence]

    def _copy(self, copies: Sequence[Copy], pairs: Staged) -> None:
        if copies:
            for key_cache, value_cache in zip(self.key_caches, self.value_caches, strict=True):
                copy_blocks(key_cache, value_cache, pairs.tensor)

    def _stage_sampling(self, rows: Sequence[Row], records: Sequence[SequenceRecord]) -> _Sampling | None:
        """Of the rows that are to be sampled; None if none is."""
        sampled = [place for place, row in enumerate(rows) if row.sample]
        if not sampled:
            return None
        ends = np.cumsum([len(row.tokens) for row in rows])
        positions = [rows[place].start + len(rows[place].tokens) for place in sampled]
        return _Sampling(
            rows=[rows[place] for place in sampled],
            records=[records[place] for place in sampled],
            last_tokens=self._staging.add(ends[sampled] - 1),
            settings=SamplingRows.stage([records[place].sampling for place in sampled], positions, self._staging),
        )

    def _answer(
        self, rows: Sequence[Row], records: Sequence[SequenceRecord], hidden: Tensor, sampling: _Sampling | None
    ) -> tuple[Answer, ...]:
        ends = np.cumsum([len(row.tokens) for row in rows])
        answers: dict[int, Answer] = {}
        for row, record, end in zip(rows, records, ends, strict=True):
            if len(targets := record.prompt_targets(row)):
                logprobs = self._prompt_logprobs(hidden[end - len(row.tokens) :], targets, record)
                answers[row.sequence] = Answer(
                    row.sequence, prompt_logprobs=logprobs or (), error=None if logprobs else NOT_NUMBERS
                )
        if sampling is not None:
            for answer in self._sample(self.decoder.compute_logits(hidden[sampling.last_tokens.tensor]), sampling):
                earlier = answers.get(answer.sequence)
                answers[answer.sequence] = _joined(earlier, answer) if earlier else answer
        return tuple(answers.values())

    def _sample(self, logits: Tensor, sampling: _Sampling) -> Iterable[Answer]:
        """One answer for each row of logits."""
        rows, records = sampling.rows, sampling.records
        sampled = sample(logits, sampling.settings)
        tokens, valid = sampled.tokens.tolist(), sampled.valid.tolist()
        logprobs = self._sampled_logprobs(logits, sampled.tokens, records, valid)
        for place, (row, record) in enumerate(zip(rows, records, strict=True)):
            if valid[place]:
                record.append(tokens[place])
            grammar = record.sampling.grammar
            error = None if grammar is None else grammar.error
            if error is not None or not valid[place]:
                yield Answer(row.sequence, error=error or NOT_NUMBERS)
                continue
            complete = grammar is not None and grammar.complete
            yield Answer(row.sequence, (tokens[place],), logprobs.get(place, ()), complete=complete)

    def _sampled_logprobs(
        self, logits: Tensor, tokens: Tensor, records: Sequence[SequenceRecord], valid: Sequence[bool]
    ) -> dict[int, tuple[TokenLogprob]]:
        """For the places in the batch that ask for them."""
        asked = [
            (place, top)
            for place, record in enumerate(records)
            if (top := record.params.logprobs) is not None and valid[place]
        ]
        if not asked:
            return {}
        places = torch.tensor([place for place, _ in asked], device=self.device)
        logprobs = token_logprobs(logits[places], tokens[places], [top for _, top in asked])
        return {place: (logprob,) for (place, _), logprob in zip(asked, logprobs, strict=True)}

    def _prompt_logprobs(
        self, hidden: Tensor, targets: np.ndarray, record: SequenceRecord
    ) -> tuple[TokenLogprob, ...] | None:
        """Of the targets, which the first hidden states of [L, hidden_size] predict; None if logits are not numbers."""
        tokens = torch.from_numpy(targets).to(self.device)
        top = record.params.prompt_logprobs or 0
        chunk = rows_per_chunk(self.config.vocab_size)
        logprobs: list[TokenLogprob] = []
        for start in range(0, len(targets), chunk):
            part = tokens[start : start + chunk]
            logits = self.decoder.compute_logits(hidden[start : start + len(part)])
            if not torch.isfinite(logits.amax(dim=1)).all():
                return None
            logprobs += token_logprobs(logits, part, [top] * len(part))
        return tuple(logprobs)


def _joined(prompt: Answer, sampled: Answer) -> Answer:
    """One answer of a row that has prompt log probabilities and a sampled token; an error of either is the error."""
    if error := prompt.error or sampled.error:
        return Answer(sampled.sequence, error=error)
    return msgspec.structs.replace(sampled, prompt_logprobs=prompt.prompt_logprobs)
