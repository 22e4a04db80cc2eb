"""CpuAttention: the CPU attends for host sequences, those whose KV is in host memory, beside the
steps of a stage."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import Tensor

from nanoserve.executor.compile.layer_runner import LayerRunner
from nanoserve.executor.cpu_attention.headers import Header
from nanoserve.executor.cpu_attention.host_processor import HostProcessor
from nanoserve.executor.cpu_attention.hybrid_pass import DeviceRows, HostGroup, HybridPass, joined
from nanoserve.executor.kv_transfer.host_pool import HostPart
from nanoserve.executor.mechanism import Mechanism
from nanoserve.executor.step.answers import StepSamples
from nanoserve.executor.step.forward_pass import InputBuilder, StepInputs, row_ends
from nanoserve.executor.step.staging import Staging
from nanoserve.models.attention import PagedAttention
from nanoserve.models.decoder import Decoder
from nanoserve.scheduler.plan import Row, StepPlan, StepResult

if TYPE_CHECKING:
    from nanoserve.executor.step.model_runner import ModelRunner, PreparedStep

Halves = tuple[list[HostGroup], list[HostGroup]]
"""The groups of the two sub-batches, at the first layer of a stage, or taken from the groups under
way."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """Host sequences that begin a token in one sub-batch of a step."""

    step: int
    rows: Sequence[Row]
    inputs: StepInputs
    """Token ids and positions are on the device, the AttentionBatch on the CPU."""

    def group(self, decoder: Decoder) -> HostGroup:
        """The sequences at the first layer of the first stage."""
        hidden, angles = decoder.embed(self.inputs.token_ids, self.inputs.positions)
        return HostGroup(self.step, self.rows, self.inputs.batch, hidden, angles)

    def arrive(self, decoder: Decoder, sequences: Sequence[int], hidden: Tensor) -> HostGroup:
        """Some of them at the first layer of a later stage, with hidden states [n, hidden_size]."""
        place_of = {row.sequence: place for place, row in enumerate(self.rows)}
        chosen = [place_of[sequence] for sequence in sequences]
        hidden, angles = decoder.embed(hidden, self.inputs.positions[chosen])
        batch = self.inputs.batch.pick(torch.tensor(chosen))
        return HostGroup(self.step, [self.rows[place] for place in chosen], batch, hidden, angles)


@dataclass(slots=True, eq=False)
class HybridForward:
    """The forward of a PreparedStep in which host sequences take part."""

    step: "PreparedStep"
    beginning: Sequence[Beginning | None]
    """The sequences that begin a token, by sub-batch; None for none."""
    run: Callable[["HybridForward", Tensor | None], Tensor | None]
    groups: list[HostGroup] = field(default_factory=list)
    """Once the step is computed, the groups that have passed the last layer."""
    arriving: Header | None = None
    """Which groups come from the stage before; None in the first stage."""
    leaving: Header = field(default_factory=Header)
    """Once the step is computed, which groups go to the next stage."""

    def __call__(self, intermediate_hidden_states: Tensor | None) -> Tensor | None:
        return self.run(self, intermediate_hidden_states)


class CpuAttention(Mechanism):
    """Gives a HybridPass the steps in which host sequences take part. Computing such a step may
    wait: for the CPU under asymmetric pipelining, and for the device to see how far the CPU is."""

    def __init__(self, processor: HostProcessor, layers: LayerRunner, part: HostPart) -> None:
        """`layers` run the layers of the device; `part` is the runner's part of the host pool."""
        self.processor, self._layers, self._part = processor, layers, part

    def attach(self, runner: "ModelRunner") -> None:
        self._runner, self._decoder = runner, runner.decoder
        start_host = partial(self.processor.start, runner.config, self._part, runner.device)
        self.hybrid = HybridPass(runner.decoder, self._layers, start_host)
        # Apart from the staging of the next plan, which may be prepared at the same moment.
        self._late_staging = Staging(runner.device)

    def prepare(self, step: "PreparedStep") -> None:
        """Leave the step its rows on the device, and stage the host rows that begin a token."""
        plan = step.plan
        if plan.host.strategy == "device":
            return
        step.rows = [row for row in plan.rows if row.host is None]
        step.forward = HybridForward(
            step, [self._stage_beginning(plan, number) for number in range(2)], self.run
        )

    def run(
        self, forward: HybridForward, intermediate_hidden_states: Tensor | None
    ) -> Tensor | None:
        """Run the layers. Hidden states of the host groups that pass the last layer follow the
        hidden states of the device's tokens. Only now are these groups known, and the rows that are
        sampled together."""
        return self.advance(forward, intermediate_hidden_states, ([], []))

    def advance(
        self, forward: HybridForward, intermediate_hidden_states: Tensor | None, halves: Halves
    ) -> Tensor | None:
        """Run the layers as `run` does, with groups that are at the first layer of this stage."""
        step, decoder, runner = forward.step, self._decoder, self._runner
        device = None
        if step.inputs is not None:
            step.inputs.intermediate_hidden_states = intermediate_hidden_states
            attention = PagedAttention(
                runner.config, runner.caches.keys, runner.caches.values, step.inputs.batch
            )
            hidden, angles = decoder.embed(step.inputs.first, step.inputs.positions)
            device = DeviceRows(hidden, angles, attention, step.inputs.computed)
        for number, half in enumerate(halves):
            beginning = forward.beginning[number]
            if decoder.is_first and beginning is not None:
                half.append(beginning.group(decoder))
            rows = _host_rows(step.plan, number)
            half.extend(self.hybrid.take([row.sequence for row in rows if not row.tokens]))
        if step.plan.host.strategy == "overlap":
            passed, forward.groups = self.hybrid.overlap(device, halves[0])
        else:
            passed, forward.groups = self.hybrid.asymmetric(device, *halves)
        if decoder.is_last:
            step.sampled = self._stage_sampled(forward)
        parts = [group.hidden for group in forward.groups]
        if passed is not None:
            parts.insert(0, passed)
        return decoder.apply_final_norm(joined(parts)) if parts else None

    def abandon(self) -> None:
        """Drop all host sequences under way."""
        self.hybrid.forget()
        self.hybrid.take_loss()  # it is not waited for any more

    def close(self) -> None:
        """End the CPU's part, and let the device have all cores again."""
        self.hybrid.close()
        self.processor.close()

    def _stage_beginning(self, plan: StepPlan, sub_batch: int) -> Beginning | None:
        rows = [row for row in _host_rows(plan, sub_batch) if row.tokens]
        if not rows:
            return None
        tables = [record.block_table for record in self._runner.take_rows(rows)]
        # Arrays of their own: the CPU reads them as long as the token is under way.
        builder = InputBuilder(self._runner.block_size)
        inputs = builder.build(
            rows, row_ends(rows), tables, self._runner.staging.add, torch.from_numpy
        )
        return Beginning(plan.step, rows, inputs)

    def _stage_sampled(self, forward: HybridForward) -> StepSamples | None:
        """Stage the sampling of a step's rows on the device and of the groups behind them."""
        rows = list(forward.step.rows)
        for group in forward.groups:
            rows.extend(group.rows)
        if not rows:
            return None
        states = [self._runner.records[row.sequence].sampling for row in rows]
        sampled = self._runner.stage_sampled(rows, row_ends(rows), states, self._late_staging)
        self._late_staging.transfer()
        return sampled


class LocalCpuAttention(CpuAttention):
    """The CpuAttention of an executor of this process: results tell progress and loss."""

    def attach(self, runner: "ModelRunner") -> None:
        super().attach(runner)
        self._newest = -1  # the newest plan that is prepared, and with that in flight
        self._lost_up_to = -1  # host rows of plans up to this one are never answered

    def prepare(self, step: "PreparedStep") -> None:
        if step.plan.ends:
            self._newest = step.plan.step
        super().prepare(step)

    def complete(self, step: "PreparedStep", result: StepResult) -> StepResult:
        work, lost = self.hybrid.take_work(), self.hybrid.take_loss()
        answers = result.answers
        if step.plan.step <= self._lost_up_to:
            on_host = {row.sequence for row in step.plan.rows if row.host is not None}
            answers = tuple(answer for answer in answers if answer.sequence not in on_host)
        if lost is not None and self._newest > step.plan.step:  # its host rows are not waited for
            self._lost_up_to = self._newest
            self.abandon()
        return msgspec.structs.replace(
            result,
            answers=answers,
            host=msgspec.structs.replace(
                result.host, cohorts=self.hybrid.progress, work=work, lost=lost
            ),
        )


def _host_rows(plan: StepPlan, sub_batch: int) -> list[Row]:
    return [row for row in plan.rows if row.host is not None and row.host.sub_batch == sub_batch]
