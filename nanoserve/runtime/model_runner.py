"""Runs plans on one device: keeps the sequences' records and the KV cache, computes rows, samples.

A plan is prepared, computed, sampled, then answered. None of the first three asks the device anything, so that on a GPU
the next plan can be launched while this one computes; only its answers wait. Preparing is the host's work alone: in a
pipeline another thread does it while the plan before is computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle

import numpy as np
import torch
from torch import Tensor

from nanoserve.grammar.compiler import GrammarCompiler
from nanoserve.models.decoder import Decoder, DecoderLayer, LayerFunction
from nanoserve.runtime.fed_tokens import FedTokens, LastTokens
from nanoserve.runtime.fetching import Fetching
from nanoserve.runtime.forward_pass import Caches, ForwardFunction, ForwardPass
from nanoserve.runtime.grammars import SequenceGrammar
from nanoserve.runtime.launched_step import LaunchedStep, SampledTokens, ScoredPrompt
from nanoserve.runtime.logprobs import LogprobColumns, rows_per_chunk
from nanoserve.runtime.sampling import SamplingRows, SamplingState, sample
from nanoserve.runtime.staging import Staged, Staging
from nanoserve.runtime.step_inputs import BlockTable, InputBuilder, StagedInputs, row_ends
from nanoserve.scheduler.plan import Answer, Begin, Copy, Row, StepPlan
from triton_ops import copy_blocks


class SequenceRecord:
    """What the runner knows of one sequence from its Begin on."""

    def __init__(self, begin: Begin, vocab_size: int, grammar: SequenceGrammar | None) -> None:
        self.prompt = np.array(begin.tokens[: begin.prompt_length], np.int64)
        self.params = begin.params
        self.num_known = len(begin.tokens)
        self.block_table = BlockTable()
        self.sampling = SamplingState(begin, vocab_size, grammar)

    def take(self, row: Row) -> None:
        """Take note of a row that is about to be computed. What it samples counts as known: the device will know it.

        Raises:
            RuntimeError: if it has tokens that neither Begin nor sampling told: guesses are not verified here.
        """
        end = row.start + len(row.tokens)
        if end > self.num_known:
            raise RuntimeError(f"sequence {row.sequence}: a row goes beyond its {self.num_known} known tokens")
        if row.new_blocks:
            self.block_table.extend(row.new_blocks)
        if row.sample:
            self.num_known = max(self.num_known, end + 1)

    def prompt_targets(self, row: Row) -> np.ndarray:
        """The prompt tokens that the row's logits predict."""
        return self.prompt[row.start + 1 : row.start + 1 + len(row.tokens)]


@dataclass(frozen=True, slots=True)
class _Scoring:
    """A row with prompt tokens that are to be scored.

    Attributes:
        first_token: where the row's tokens begin in the step.
        targets: int64 [L], the prompt tokens that the hidden states from there on predict.
        top: how many of the likeliest tokens to name.
    """

    sequence: int
    first_token: int
    targets: Staged
    top: int


@dataclass(frozen=True, slots=True)
class _Sampling:
    """The N rows of a step that are sampled.

    Attributes:
        last_tokens: int64 [N], the place of each one's last token in the step.
        asked: places among them of those that want log probabilities, each with how many of the likeliest tokens to
            name.
        asked_places: int64 [number of these], if there are any.
    """

    sequences: list[int]
    states: list[SamplingState]
    last_tokens: Staged
    settings: SamplingRows
    asked: list[tuple[int, int]]
    asked_places: Staged | None


@dataclass(frozen=True, slots=True)
class _StagedRows:
    """The rows of a step, on their way to the device."""

    inputs: StagedInputs
    fed: FedTokens | None
    scorings: list[_Scoring]
    sampling: _Sampling | None


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A plan whose inputs are on their way to the device.

    Attributes:
        copies: int64 [number of copies, 2], source and target blocks; None if the plan has none.
        rows: None if the plan has none.
    """

    plan: StepPlan
    fetching: Fetching
    copies: Staged | None
    rows: _StagedRows | None

    @property
    def num_tokens(self) -> int:
        """T, the tokens of all its rows."""
        return 0 if self.rows is None else len(self.rows.inputs.token_ids.array)


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
        dtype = decoder.dtype
        with torch.inference_mode():  # as steps run: compiled code is made for tensors of one mode
            self.key_caches = [torch.empty(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
            self.value_caches = [torch.empty(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
        self.forward: ForwardFunction = ForwardPass(decoder, Caches(self.key_caches, self.value_caches), run_layer)
        self._grammars = grammars
        self._inputs = cycle((InputBuilder(block_size), InputBuilder(block_size)))
        self._staging = Staging(device)
        self._last_tokens = LastTokens()
        self._records: dict[int, SequenceRecord] = {}

    def execute(self, plan: StepPlan) -> tuple[Answer, ...]:
        """Launch one plan and wait for its answers.

        Raises:
            RuntimeError: as `launch` does.
        """
        return self.launch(plan).answers()

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Hand one plan to the device; nothing in here waits for it. On the CPU it is done when this returns.

        Raises:
            RuntimeError: as `prepare` does.
        """
        step = self.prepare(plan)
        return self.sample(step, self.compute(step))

    @torch.inference_mode()
    def prepare(self, plan: StepPlan) -> PreparedStep:
        """The host's part of a plan: what its rows need is on its way to the device when this returns.

        Another thread may do so while the step prepared before is being computed, but not any that comes before that:
        two sets of buffers take turns.

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
        pairs = self._stage_copies(plan.copies) if plan.copies else None
        rows = self._stage(plan.rows) if plan.rows else None
        self._staging.transfer()
        return PreparedStep(plan, Fetching(self.device), pairs, rows)

    @torch.inference_mode()
    def compute(self, step: PreparedStep, entering: Tensor | None = None) -> Tensor | None:
        """Issue the work of a step's layers.

        Args:
            entering: hidden states of its tokens, [T, hidden_size], from the stage before; None in the first stage.

        Returns:
            hidden states of its tokens, [T, hidden_size], which are good until the next step; None without rows.
        """
        step.fetching.begin()
        if step.copies is not None:
            self._copy(step.copies)
        if step.rows is None:
            return None
        inputs = step.rows.inputs.tensors()
        if step.rows.fed is not None:
            step.rows.fed.write_into(inputs.token_ids)
        return self.forward(inputs if entering is None else replace(inputs, entering=entering))

    @torch.inference_mode()
    def sample(self, step: PreparedStep, hidden: Tensor | None) -> LaunchedStep:
        """Issue the work behind the last layer: logits and samples of what `compute` returned in the last stage.

        All ranks of a tensor-parallel group do so; what comes of it is known to the first.
        """
        fetching = step.fetching
        launched = LaunchedStep(fetching)
        if step.rows is not None and hidden is not None:
            prompts = [self._score(scoring, hidden, fetching) for scoring in step.rows.scorings]
            sampled = None
            if step.rows.sampling is None:
                self._last_tokens.keep([], None)
            else:
                sampled = self._sample(step.rows.sampling, hidden, fetching)
            launched = LaunchedStep(fetching, prompts, sampled)
        fetching.end()
        return launched

    def _stage(self, rows: Sequence[Row]) -> _StagedRows:
        """Put together what the device must be told of these rows."""
        records = [self._record(row.sequence) for row in rows]
        for row, record in zip(rows, records, strict=True):
            record.take(row)
        ends, tables = row_ends(rows), [record.block_table for record in records]
        samples = self.decoder.shard.is_last
        return _StagedRows(
            inputs=next(self._inputs).stage(rows, ends, tables, self._staging),
            fed=self._last_tokens.stage(rows, ends, self._staging),
            scorings=self._stage_scorings(rows, ends, records) if samples else [],
            sampling=self._stage_sampling(rows, ends, records) if samples else None,
        )

    def _grammar(self, begin: Begin) -> SequenceGrammar | None:
        schema = begin.params.json_schema
        shard = self.decoder.shard
        if schema is None or not (shard.is_last and shard.rank == 0):  # who does not sample needs none
            return None
        if self._grammars is None:
            raise RuntimeError("this executor has no grammars")
        return SequenceGrammar(begin, schema, self.config.vocab_size, self._grammars)

    def _record(self, sequence: int) -> SequenceRecord:
        if sequence not in self._records:
            raise RuntimeError(f"sequence {sequence} is in a plan without having begun")
        return self._records[sequence]

    def _stage_copies(self, copies: Sequence[Copy]) -> Staged:
        """As pairs of source and target, int64 [number of copies, 2]."""
        return self._staging.add(np.array([(copy.source, copy.target) for copy in copies]))

    def _copy(self, pairs: Staged) -> None:
        for key_cache, value_cache in zip(self.key_caches, self.value_caches, strict=True):
            copy_blocks(key_cache, value_cache, pairs.tensor)

    def _stage_scorings(
        self, rows: Sequence[Row], ends: np.ndarray, records: Sequence[SequenceRecord]
    ) -> list[_Scoring]:
        """Of the rows with prompt tokens that are to be scored."""
        scorings = []
        for place, record in enumerate(records):
            top = record.params.prompt_logprobs
            if top is not None and len(targets := record.prompt_targets(rows[place])):
                begin = int(ends[place]) - len(rows[place].tokens)
                scorings.append(_Scoring(rows[place].sequence, begin, self._staging.add(targets), top))
        return scorings

    def _stage_sampling(
        self, rows: Sequence[Row], ends: np.ndarray, records: Sequence[SequenceRecord]
    ) -> _Sampling | None:
        """Of the rows that are to be sampled; None if none is."""
        places = [place for place, row in enumerate(rows) if row.sample]
        if not places:
            return None
        states = [records[place].sampling for place in places]
        asked = [(place, top) for place, state in enumerate(states) if (top := state.params.logprobs) is not None]
        positions = [rows[place].start + len(rows[place].tokens) for place in places]
        return _Sampling(
            sequences=[rows[place].sequence for place in places],
            states=states,
            last_tokens=self._staging.add(ends[places] - 1),
            settings=SamplingRows.stage(states, positions, self._staging),
            asked=asked,
            asked_places=self._staging.add(np.array([place for place, _ in asked])) if asked else None,
        )

    def _score(self, scoring: _Scoring, hidden: Tensor, fetching: Fetching) -> ScoredPrompt:
        """Have the logits of the row's hidden states judge the tokens they predict, some positions at a time."""
        targets = scoring.targets.tensor
        chunk = rows_per_chunk(self.config.vocab_size)
        parts, finite = [], []
        for start in range(0, len(targets), chunk):
            part = targets[start : start + chunk]
            first = scoring.first_token + start
            logits = self.decoder.compute_logits(hidden[first : first + len(part)])
            if not len(logits):  # they are gathered by another rank
                continue
            finite.append(fetching.fetch(torch.isfinite(logits.amax(dim=1)).all()))
            parts.append(LogprobColumns.of(logits, part, scoring.top).through(fetching.fetch))
        return ScoredPrompt(scoring.sequence, parts, finite, scoring.top)

    def _sample(self, sampling: _Sampling, hidden: Tensor, fetching: Fetching) -> SampledTokens | None:
        logits = self.decoder.compute_logits(hidden[sampling.last_tokens.tensor])
        if not len(logits):  # they are gathered by another rank
            return None
        sampled = sample(logits, sampling.settings)
        self._last_tokens.keep(sampling.sequences, sampled.tokens)
        logprobs = None
        if sampling.asked_places is not None:
            places = sampling.asked_places.tensor
            most = max(top for _, top in sampling.asked)
            logprobs = LogprobColumns.of(logits[places], sampled.tokens[places], most).through(fetching.fetch)
        return SampledTokens(
            sequences=sampling.sequences,
            states=sampling.states,
            tokens=fetching.fetch(sampled.tokens),
            valid=fetching.fetch(sampled.valid),
            asked=sampling.asked,
            logprobs=logprobs,
        )
