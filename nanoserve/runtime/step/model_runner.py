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
from nanoserve.runtime.host.hybrid_pass import DeviceRows, HostGroup, HybridPass
from nanoserve.runtime.host.hybrid_rows import StagedHostRows, stage_host_rows
from nanoserve.runtime.moves.layer_marks import LayerComputed
from nanoserve.runtime.sampling.grammars import SequenceGrammar
from nanoserve.runtime.sampling.logprobs import LogprobColumns, rows_per_chunk
from nanoserve.runtime.sampling.sampler import SamplingRows, SamplingState, sample
from nanoserve.runtime.step.device_to_host import DeviceToHostCopy
from nanoserve.runtime.step.fed_tokens import FedTokens, LastTokens
from nanoserve.runtime.step.forward_pass import ForwardFunction, ForwardPass, attention_over, make_caches
from nanoserve.runtime.step.launched_step import LaunchedStep, SampledTokens, ScoredPrompt
from nanoserve.runtime.step.sequence_record import SequenceRecord
from nanoserve.runtime.step.staging import Staged, Staging
from nanoserve.runtime.step.step_inputs import BlockTable, InputBuilder, StagedInputs, StepInputs, row_ends
from nanoserve.scheduler.plan import Answer, Begin, Copy, Row, StepPlan
from triton_ops import copy_blocks


@dataclass(frozen=True, slots=True)
class _Scoring:
    """A row with prompt tokens that are to be scored."""

    sequence: int
    first_token: int
    """Where the row's tokens begin in the step."""
    targets: Staged
    """int64 [L], the prompt tokens that the hidden states from there on predict."""
    top: int
    """How many of the likeliest tokens to name."""


@dataclass(frozen=True, slots=True)
class _Sampling:
    """The N rows of a step that are sampled."""

    sequences: list[int]
    states: list[SamplingState]
    last_tokens: Staged
    """int64 [N], the place of each one's last token in the step."""
    settings: SamplingRows
    asked: list[tuple[int, int]]
    """Places among them of those that want log probabilities, each with how many of the likeliest tokens to name."""
    asked_places: Staged | None
    """int64 [number of these], if there are any."""


@dataclass(frozen=True, slots=True)
class _StagedRows:
    """The rows of a step, on their way to the device."""

    inputs: StagedInputs
    fed: FedTokens | None
    scorings: list[_Scoring]
    sampling: _Sampling | None


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A plan whose inputs are on their way to the device."""

    plan: StepPlan
    fetching: DeviceToHostCopy
    copies: Staged | None
    """int64 [number of copies, 2], source and target blocks; None if the plan has none."""
    rows: _StagedRows | None
    """Those whose KV is on the device; None if the plan has none."""
    host: StagedHostRows | None = None
    """What host sequences have to do with the step; None if they take no part."""
    computed: LayerComputed | None = None
    """Told of each layer whose keys and values its rows on the device have written; None if nobody waits."""

    @property
    def num_tokens(self) -> int:
        """T, the tokens of all its rows on the device."""
        return 0 if self.rows is None else len(self.rows.inputs.token_ids.array)


class ModelRunner:
    """Executes plans in order; `run_layer` runs the decoder's layers, `grammars` compiles JSON schemas.

    Its KV cache is in the decoder's dtype, and in `storage` if that is given, as `make_caches` has it. Raises torch's
    errors when memory runs out.
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
    ) -> None:
        config = decoder.config
        self.decoder = decoder
        self.config = config
        self.device = device
        # keys and values.
        self.caches = make_caches(
            config, num_blocks=num_blocks, block_size=block_size, dtype=decoder.dtype, device=device, storage=storage
        )
        # computes the rows of a step; whoever has a faster way to do so may put it here.
        self.forward: ForwardFunction = ForwardPass(decoder, self.caches, run_layer)
        # computes steps in which host sequences take part; None where there is no host memory to attend over.
        self.hybrid: HybridPass | None = None
        self._grammars = grammars
        self._block_size = block_size
        self._inputs = cycle((InputBuilder(block_size), InputBuilder(block_size)))
        self._staging, self._late_staging = Staging(device), Staging(device)
        self._last_tokens = LastTokens()
        self._records: dict[int, SequenceRecord] = {}

    def forget(self) -> None:
        """Forget all sequences: what is in the caches is of no use from now on."""
        self._records.clear()
        if self.hybrid is not None:
            self.hybrid.forget()

    def execute(self, plan: StepPlan) -> tuple[Answer, ...]:
        """Launch one plan and wait for its answers.

        Raises:
            RuntimeError: as `launch` does.
        """
        return self.launch(plan).answers()

    def launch(self, plan: StepPlan, computed: LayerComputed | None = None) -> LaunchedStep:
        """Hand one plan to the device without waiting for it; on the CPU it is done then. `computed`: see PreparedStep.

        Raises:
            RuntimeError: as `prepare` does.
        """
        step = replace(self.prepare(plan), computed=computed)
        if step.host is None:
            return self.sample(step, self.compute(step))
        return self.sample(step, *self.compute_hybrid(step))

    @torch.inference_mode()
    def prepare(self, plan: StepPlan) -> PreparedStep:
        """The host's part of a plan: what its rows need is on its way to the device when this returns.

        Another thread may do so while the step prepared before is being computed, but not any that comes before that:
        two sets of buffers take turns.

        Raises:
            RuntimeError: if the plan has rows in host memory or grammars where there are none, or sequences or tokens
                unknown here.
        """
        for sequence in plan.end:
            self._records.pop(sequence, None)
        for begin in plan.begin:
            self._records[begin.sequence] = SequenceRecord(begin, self.config.vocab_size, self._grammar(begin))
        pairs = self._stage_copies(plan.copies) if plan.copies else None
        host = self._stage_host(plan)
        own = plan.rows if host is None else [row for row in plan.rows if row.tier == "device"]
        rows = self._stage(own, alone=host is None) if own else None
        self._staging.transfer()
        return PreparedStep(plan, DeviceToHostCopy(self.device), pairs, rows, host)

    @torch.inference_mode()
    def compute(self, step: PreparedStep, entering: Tensor | None = None) -> Tensor | None:
        """Issue the work of a step's layers.

        Args:
            entering: hidden states of its tokens, [T, hidden_size], from the stage before; None in the first stage.

        Returns:
            hidden states of its tokens, [T, hidden_size], which are good until the next step; None without rows.
        """
        inputs = self._begin(step, entering)
        return None if inputs is None else self.forward(inputs)

    @torch.inference_mode()
    def compute_hybrid(
        self, step: PreparedStep, entering: Tensor | None = None, arriving: Sequence[Sequence[HostGroup]] = ((), ())
    ) -> tuple[Tensor | None, list[HostGroup]]:
        """Issue the work of a step's layers in which host sequences take part. It may wait: for the CPU in a step of
        asymmetric pipelining, and for the device where it has to be seen how far the CPU has come.

        Args:
            entering: as for `compute`.
            arriving: groups of either sub-batch that come from the stage before.

        Returns:
            hidden states of its tokens on the device, None without any; and the groups that have passed the last layer.
        """
        assert step.host is not None and self.hybrid is not None
        inputs, device = self._begin(step, entering), None
        if inputs is not None:
            attention = attention_over(self.caches, self.config, inputs)
            device = DeviceRows(*self.decoder.enter(inputs.first, inputs.positions), attention, inputs.computed)
        halves = [list(groups) for groups in arriving]
        for number, half in enumerate(halves):
            if self.decoder.is_first:
                half += step.host.begin(step.plan.step, self.decoder, number)
            half += self.hybrid.take(step.host.going_on[number])
        if step.host.strategy == "overlap":
            hidden, groups = self.hybrid.overlap(device, halves[0])
        else:
            hidden, groups = self.hybrid.asymmetric(device, *halves)
        for group in groups:
            group.hidden = self.decoder.leave(group.hidden)
        return None if hidden is None else self.decoder.leave(hidden), groups

    def _begin(self, step: PreparedStep, entering: Tensor | None) -> StepInputs | None:
        """Issue what comes before the layers; the inputs of the rows on the device, None without any."""
        step.fetching.begin()
        if step.copies is not None:
            self._copy(step.copies)
        if step.rows is None:
            if step.computed is not None:
                raise RuntimeError("a swap follows a row, and the plan has none on the device")
            return None
        inputs = step.rows.inputs.tensors()
        if step.rows.fed is not None:
            step.rows.fed.write_into(inputs.token_ids)
        return replace(inputs, entering=entering, computed=step.computed)

    @torch.inference_mode()
    def sample(self, step: PreparedStep, hidden: Tensor | None, groups: Sequence[HostGroup] = ()) -> LaunchedStep:
        """Issue the work behind the last layer: logits and samples of what `compute` or `compute_hybrid` returned in
        the last stage.

        All ranks of a tensor-parallel group do so; what comes of it is known to the first.
        """
        fetching = step.fetching
        launched = LaunchedStep(fetching)
        if hidden is not None or groups:
            scorings = step.rows.scorings if step.rows is not None else []
            prompts = [] if hidden is None else [self._score(scoring, hidden, fetching) for scoring in scorings]
            sampling = step.rows.sampling if step.rows is not None else None
            if step.host is not None:  # only now it is known which of its sequences have their token
                sampling = self._stage_with_groups(step.plan, groups)
                hidden = torch.cat([*([] if hidden is None else [hidden]), *(group.hidden for group in groups)])
            if sampling is None:
                self._last_tokens.keep([], None)
                sampled = None
            else:
                assert hidden is not None
                sampled = self._sample(sampling, hidden, fetching)
            launched = LaunchedStep(fetching, prompts, sampled)
        fetching.end()
        return launched

    def _stage_host(self, plan: StepPlan) -> StagedHostRows | None:
        """Host rows of a plan; None if host sequences take no part."""
        if self.hybrid is None:
            if any(row.tier != "device" for row in plan.rows):
                raise RuntimeError("the rows of a plan for one device are all in its memory")
            return None
        for row in plan.rows:
            if row.tier == "host" and row.tokens:
                self._record(row.sequence).take(row)
        return stage_host_rows(plan, self._table_of, self._block_size, self._staging)

    def _table_of(self, sequence: int) -> BlockTable:
        return self._record(sequence).block_table

    def _stage_with_groups(self, plan: StepPlan, groups: Sequence[HostGroup]) -> _Sampling | None:
        """What is sampled of a step's rows on the device and of the groups behind them."""
        rows = [row for row in plan.rows if row.tier == "device"]
        rows += [row for group in groups for row in group.rows]
        records = [self._record(row.sequence) for row in rows]
        # Apart from what the next plan is prepared with, perhaps at this moment.
        sampling = self._stage_sampling(rows, row_ends(rows), records, self._late_staging)
        self._late_staging.transfer()
        return sampling

    def _stage(self, rows: Sequence[Row], *, alone: bool) -> _StagedRows:
        """Put together what the device must be told of these rows; what is sampled of them only if they are alone."""
        records = [self._record(row.sequence) for row in rows]
        for row, record in zip(rows, records, strict=True):
            record.take(row)
        ends, tables = row_ends(rows), [record.block_table for record in records]
        samples = self.decoder.is_last
        return _StagedRows(
            inputs=next(self._inputs).stage(rows, ends, tables, self._staging),
            fed=self._last_tokens.stage(rows, ends, self._staging),
            scorings=self._stage_scorings(rows, ends, records) if samples else [],
            sampling=self._stage_sampling(rows, ends, records, self._staging) if samples and alone else None,
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
        for key_cache, value_cache in zip(self.caches.keys, self.caches.values, strict=True):
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
        self, rows: Sequence[Row], ends: np.ndarray, records: Sequence[SequenceRecord], staging: Staging
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
            last_tokens=staging.add(ends[places] - 1),
            settings=SamplingRows.stage(states, positions, staging),
            asked=asked,
            asked_places=staging.add(np.array([place for place, _ in asked])) if asked else None,
        )

    def _score(self, scoring: _Scoring, hidden: Tensor, fetching: DeviceToHostCopy) -> ScoredPrompt:
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

    def _sample(self, sampling: _Sampling, hidden: Tensor, fetching: DeviceToHostCopy) -> SampledTokens | None:
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
