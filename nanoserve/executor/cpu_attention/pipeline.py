"""WorkerCpuAttention: attention on the CPU in a stage of a pipeline.

A header tells later stages which groups of host sequences follow a plan. The plan in which a group
began says where its keys and values are.
"""

from typing import TYPE_CHECKING

import msgspec
from torch import Tensor

from nanoserve.executor.cpu_attention.cpu_attention import (
    Beginning,
    CpuAttention,
    Halves,
    HybridForward,
)
from nanoserve.executor.cpu_attention.headers import Header, Leaving
from nanoserve.scheduler.plan import StepResult

if TYPE_CHECKING:
    from nanoserve.executor.step.model_runner import ModelRunner, PreparedStep
    from nanoserve.executor.workers.distributed import Activations
    from nanoserve.executor.workers.worker import Worker


class WorkerCpuAttention(CpuAttention):
    """The CpuAttention of a worker, to which it reports a loss."""

    def attach(self, runner: "ModelRunner") -> None:
        super().attach(runner)
        self._coming: dict[int, Beginning] = {}  # by sequence, those that are in a stage before

    def connect(self, worker: "Worker") -> None:
        self._worker = worker

    def expect(self, step: "PreparedStep", activations: "Activations") -> int:
        """Wait for the header of the stage before, which says how many hidden states of host
        sequences come."""
        if not isinstance(step.forward, HybridForward):
            return 0
        step.forward.arriving = activations.receive_header()
        return 0 if step.forward.arriving is None else step.forward.arriving.num_rows

    def run(
        self, forward: HybridForward, intermediate_hidden_states: Tensor | None
    ) -> Tensor | None:
        """Run the layers with the groups that the header names, and make the header for the next
        stage."""
        halves: Halves = [], []
        if forward.arriving is not None:
            intermediate_hidden_states = self._arrive(
                forward, forward.arriving, intermediate_hidden_states, halves
            )
        hidden = self.advance(forward, intermediate_hidden_states, halves)
        before = forward.arriving or Header()
        leaving = [
            Leaving(group.step, tuple(row.sequence for row in group.rows))
            for group in forward.groups
        ]
        forward.leaving = Header(
            leaving=tuple(leaving),
            cohorts=before.cohorts + self.hybrid.progress,
            host_work=before.host_work + self.hybrid.take_work(),
        )
        return hidden

    def send(self, step: "PreparedStep", hidden: Tensor | None, activations: "Activations") -> bool:
        if not isinstance(step.forward, HybridForward):
            return False
        activations.send_with_header(step.forward.leaving, hidden)
        return True

    def report(self) -> None:
        loss = self.hybrid.take_loss()
        if loss is not None:
            self._worker.report_loss(loss)

    def complete(self, step: "PreparedStep", result: StepResult) -> StepResult:
        if not isinstance(step.forward, HybridForward):
            return result
        header = step.forward.leaving
        return msgspec.structs.replace(
            result,
            host=msgspec.structs.replace(
                result.host, cohorts=header.cohorts, work=header.host_work
            ),
        )

    def abandon(self) -> None:
        """Drop all host sequences under way, in any stage."""
        self._coming.clear()
        super().abandon()

    def _arrive(
        self,
        forward: HybridForward,
        header: Header,
        intermediate_hidden_states: Tensor | None,
        halves: Halves,
    ) -> Tensor | None:
        """Put the groups that the header names into their sub-batches; returns the other hidden
        states."""
        for beginning in forward.beginning:
            if beginning is not None:
                self._coming.update(
                    dict.fromkeys((row.sequence for row in beginning.rows), beginning)
                )
        if intermediate_hidden_states is None:
            return None
        # Sequences that the plan does not name are carried along.
        sub_batches = {
            row.sequence: row.host.sub_batch
            for row in forward.step.plan.rows
            if row.host is not None
        }
        first = own = forward.step.num_tokens
        for named in header.leaving:
            end = first + len(named.sequences)
            # The buffer that they came in is for other hidden states soon.
            hidden = intermediate_hidden_states[first:end].clone()
            first = end
            beginning = self._coming[named.sequences[0]]
            for sequence in named.sequences:
                del self._coming[sequence]
            group = beginning.arrive(self._decoder, named.sequences, hidden)
            halves[sub_batches.get(named.sequences[0], 0)].append(group)
        return intermediate_hidden_states[:own] if own else None
