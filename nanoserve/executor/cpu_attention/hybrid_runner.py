"""A ModelRunner of a stage in which the CPU attends for host sequences, those whose KV is in host memory.

In a pipeline, a group of host sequences is under way in a stage while plans pass through it, and leaves its last layer
with one of them: with that plan its hidden states travel to the next stage. A header tells later stages which groups
follow a plan. The plan in which a group began says where its keys and values are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor

from nanoserve.executor.compile.layer_runner import LayerRunner
from nanoserve.executor.cpu_attention.host_attention import HostAttentionThread
from nanoserve.executor.cpu_attention.hybrid_pass import DeviceRows, HostGroup, HybridPass, joined
from nanoserve.executor.step.answers import SampledRows
from nanoserve.executor.step.forward_pass import InputBuilder, StepInputs, row_ends
from nanoserve.executor.step.model_runner import ModelRunner, PreparedStep
from nanoserve.executor.step.staging import DeviceToHostCopy, Staging
from nanoserve.models.attention import PagedAttention
from nanoserve.models.decoder import Decoder
from nanoserve.scheduler.plan import CohortProgress, HostWork, Row, StepPlan


class Leaving(msgspec.Struct, frozen=True, array_like=True):
    """A group of host sequences that goes on to the next stage."""

    step: int  # the plan in which they began their token
    sequences: tuple[int, ...]  # in the order of their hidden states


class Header(msgspec.Struct, frozen=True, array_like=True):
    """Which groups have left a stage with a plan, and the progress of those that are under way.

    It goes ahead of hidden states, because the plan alone does not say how many come: which groups leave depends on how
    far the CPU is.
    """

    leaving: tuple[Leaving, ...] = ()
    """Their hidden states follow those of the plan's rows on the device, one group after the other."""
    cohorts: tuple[CohortProgress, ...] = ()
    """Progress of the host sequences that are under way in this stage and in those before it."""
    host_work: tuple[HostWork, ...] = ()  # work that the CPU finished there since the last such plan

    @property
    def num_rows(self) -> int:
        return sum(len(group.sequences) for group in self.leaving)


@dataclass(frozen=True, slots=True)
class Beginning:
    """Host sequences that begin a token in one sub-batch of a step."""

    step: int
    rows: Sequence[Row]
    inputs: StepInputs
    """Token ids and positions are on the device, the AttentionBatch on the CPU."""

    def group(self, decoder: Decoder) -> HostGroup:
        """The sequences at the first layer of the first stage."""
        hidden, angles = decoder.enter(self.inputs.token_ids, self.inputs.positions)
        return HostGroup(self.step, self.rows, self.inputs.batch, hidden, angles)

    def arrive(self, decoder: Decoder, sequences: Sequence[int], hidden: Tensor) -> HostGroup:
        """Some of them at the first layer of a later stage, with hidden states [n, hidden_size]."""
        place_of = {row.sequence: place for place, row in enumerate(self.rows)}
        chosen = [place_of[sequence] for sequence in sequences]
        hidden, angles = decoder.enter(hidden, self.inputs.positions[chosen])
        batch = self.inputs.batch.pick(torch.tensor(chosen))
        return HostGroup(self.step, [self.rows[place] for place in chosen], batch, hidden, angles)


@dataclass(slots=True)
class HybridStep(PreparedStep):
    """A prepared step in which host sequences take part."""

    beginning: Sequence[Beginning | None] = ()  # the sequences that begin a token, by sub-batch; None for none
    header: Header | None = None  # what came ahead of the hidden states; None in the first stage
    groups: list[HostGroup] = field(default_factory=list)
    """Once the step is computed, the groups that have passed the last layer."""


class HybridRunner(ModelRunner):
    """A ModelRunner with a HybridPass, for the steps in which host sequences take part. Computing such a step may wait:
    for the CPU under asymmetric pipelining, and for the device to see how far the CPU is."""

    def __init__(
        self,
        decoder: Decoder,
        layers: LayerRunner,
        make_host: Callable[[], HostAttentionThread],
        *,
        block_size: int,
        device: torch.device,
        **settings: Any,
    ) -> None:
        super().__init__(decoder, block_size=block_size, device=device, run_layer=layers, **settings)
        self.hybrid = HybridPass(decoder, layers, make_host)
        self._block_size = block_size
        # Apart from the staging of the next plan, which may be prepared at the same moment.
        self._late_staging = Staging(device)
        self._coming: dict[int, Beginning] = {}  # by sequence, those that are in a stage before

    def forget(self) -> None:
        super().forget()
        self.forget_host()

    def forget_host(self) -> None:
        """Drop all host sequences under way, in any stage; nothing more is written for one."""
        self._coming.clear()
        self.hybrid.forget()
        self.hybrid.take_loss()  # it is not waited for any more

    @torch.inference_mode()
    def prepare(self, plan: StepPlan) -> PreparedStep:
        if plan.strategy == "device":
            return super().prepare(plan)
        self._begin_and_end(plan)
        step = HybridStep(plan, DeviceToHostCopy(self.device), self._stage_copies(plan.copies))
        step.beginning = [self._stage_beginning(plan, number) for number in range(2)]
        if own := [row for row in plan.rows if row.tier == "device"]:
            self._stage_rows(step, own)  # only later is it known which host rows are sampled together with these
        self._staging.transfer()
        return step

    @torch.inference_mode()
    def compute(self, step: PreparedStep, entering: Tensor | None = None) -> Tensor | None:
        """Run the layers as ModelRunner does. In a HybridStep, the hidden states of the device's tokens are followed by
        those of host groups: the groups that the header names enter, and the ones past their last layer leave."""
        if not isinstance(step, HybridStep):
            return super().compute(step, entering)
        halves: tuple[list[HostGroup], list[HostGroup]] = [], []
        if step.header is not None:
            entering = self._arrive(step, step.header, entering, halves)
        inputs, device = self._issue_inputs(step, entering), None
        if inputs is not None:
            attention = PagedAttention(self.config, self.caches.keys, self.caches.values, inputs.batch)
            device = DeviceRows(*self.decoder.enter(inputs.first, inputs.positions), attention, inputs.computed)
        for number, half in enumerate(halves):
            beginning = step.beginning[number]
            if self.decoder.is_first and beginning is not None:
                half.append(beginning.group(self.decoder))
            rows = (row for row in step.plan.rows if row.tier == "host" and row.sub_batch == number)
            half += self.hybrid.take([row.sequence for row in rows if not row.tokens])
        if step.plan.strategy == "overlap":
            hidden, groups = self.hybrid.overlap(device, halves[0])
        else:
            hidden, groups = self.hybrid.asymmetric(device, *halves)
        step.groups = groups
        parts = [*([] if hidden is None else [hidden]), *(group.hidden for group in groups)]
        return self.decoder.leave(joined(parts)) if parts else None

    @torch.inference_mode()
    def sample(self, step: PreparedStep, hidden: Tensor | None) -> PreparedStep:
        if isinstance(step, HybridStep):
            step.sampled = self._stage_with_groups(step)
        return super().sample(step, hidden)

    def header_behind(self, step: HybridStep) -> Header:
        """What goes to the next stage ahead of the step's hidden states."""
        before = step.header or Header()
        return Header(
            leaving=tuple(Leaving(group.step, tuple(row.sequence for row in group.rows)) for group in step.groups),
            cohorts=(*before.cohorts, *self.hybrid.progress),
            host_work=(*before.host_work, *self.hybrid.take_work()),
        )

    def _stage_beginning(self, plan: StepPlan, sub_batch: int) -> Beginning | None:
        rows = [row for row in plan.rows if row.tier == "host" and row.sub_batch == sub_batch and row.tokens]
        if not rows:
            return None
        records = self._take_rows(rows)
        # Arrays of their own: the CPU reads them as long as the token is under way.
        builder, tables = InputBuilder(self._block_size), [record.block_table for record in records]
        inputs = builder.build(rows, row_ends(rows), tables, self._staging.add, torch.from_numpy)
        return Beginning(plan.step, rows, inputs)

    def _arrive(
        self, step: HybridStep, header: Header, entering: Tensor | None, halves: Sequence[list[HostGroup]]
    ) -> Tensor | None:
        """Put the groups that the header names into their sub-batches; returns the other hidden states."""
        for beginning in step.beginning:
            if beginning is not None:
                self._coming |= dict.fromkeys((row.sequence for row in beginning.rows), beginning)
        if entering is None:
            return None
        # Sequences that the plan does not name are carried along.
        sub_batches = {row.sequence: row.sub_batch for row in step.plan.rows if row.tier == "host"}
        end = step.num_tokens
        for named in header.leaving:
            # A copy: the buffer that it came in is for other hidden states soon.
            hidden = entering[end : (end := end + len(named.sequences))].clone()
            beginning = self._coming[named.sequences[0]]
            for sequence in named.sequences:
                del self._coming[sequence]
            group = beginning.arrive(self.decoder, named.sequences, hidden)
            halves[sub_batches.get(named.sequences[0], 0)].append(group)
        return entering[: step.num_tokens] if step.num_tokens else None

    def _stage_with_groups(self, step: HybridStep) -> SampledRows | None:
        """The sampling of a step's rows on the device and of the groups behind them."""
        rows = [row for row in step.plan.rows if row.tier == "device"]
        rows += [row for group in step.groups for row in group.rows]
        if not rows:
            return None
        states = [self._record(row.sequence).sampling for row in rows]
        sampled = SampledRows.stage(rows, row_ends(rows), states, self._late_staging)
        self._late_staging.transfer()
        return sampled
