"""Host sequences in one stage of a pipeline: they arrive, wait for their attention in its layers alone, and go on.

A group is under way in a stage while plans pass through it, and leaves its last layer with one of them: with that plan
its hidden states travel to the next stage. So stages behind learn from the header of each plan which groups follow, and
where these have their keys and values they know from the plan in which they began.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from nanoserve.runtime.host.hybrid_pass import HostGroup, HybridPass
from nanoserve.runtime.host.hybrid_rows import Beginning
from nanoserve.runtime.step.model_runner import ModelRunner, PreparedStep
from nanoserve.runtime.workers.headers import Header, Leaving
from nanoserve.scheduler.plan import StepPlan


class HybridStage:
    """Computes steps in which host sequences take part.

    Args:
        runner: of the stage, with a hybrid pass.
    """

    def __init__(self, runner: ModelRunner) -> None:
        assert runner.hybrid is not None, "a stage without attention on the CPU has no host sequences"
        self._runner = runner
        self._hybrid: HybridPass = runner.hybrid
        self._coming: dict[int, Beginning] = {}  # by sequence, those that are in a stage before

    def compute(
        self, step: PreparedStep, header: Header | None, entering: Tensor | None
    ) -> tuple[Tensor | None, list[HostGroup], Header]:
        """Run the stage's layers.

        Args:
            header: what the stage before says; None in the first stage.
            entering: hidden states that follow it, [tokens on the device + rows of its groups, hidden_size].

        Returns:
            hidden states of the tokens on the device, None without any; the groups that have passed the last layer; and
            the header for the next stage.
        """
        assert step.host is not None
        arriving: tuple[list[HostGroup], list[HostGroup]] = [], []
        if header is not None:
            for beginning in step.host.beginning:
                if beginning is not None:
                    self._coming |= dict.fromkeys((row.sequence for row in beginning.rows), beginning)
            if entering is not None:
                self._arrive(step, header, entering, arriving)
                entering = entering[: step.num_tokens] if step.num_tokens else None
        hidden, groups = self._runner.compute_hybrid(step, entering, arriving)
        before = header or Header()
        leaving = Header(
            leaving=tuple(Leaving(group.step, tuple(row.sequence for row in group.rows)) for group in groups),
            cohorts=(*before.cohorts, *self._hybrid.progress),
            host_work=(*before.host_work, *self._hybrid.take_work()),
        )
        return hidden, groups, leaving

    def take_loss(self) -> str | None:
        """Why the CPU will not end what was under way here, if that has become known since the last call."""
        return self._hybrid.take_loss()

    def forget(self) -> None:
        """No host sequence is under way any more, in no stage; nothing more is written for one."""
        self._coming.clear()
        self._hybrid.forget()
        self._hybrid.take_loss()  # of what nobody waits for any more

    @torch.inference_mode()
    def _arrive(
        self, step: PreparedStep, header: Header, entering: Tensor, arriving: tuple[list[HostGroup], list[HostGroup]]
    ) -> None:
        """Make the groups that the header names, each in its sub-batch."""
        sub_batches = _sub_batches(step.plan)
        end = step.num_tokens
        for named in header.leaving:
            # A copy: the buffer that it came in is for other hidden states soon.
            hidden = entering[end : (end := end + len(named.sequences))].clone()
            beginning = self._coming[named.sequences[0]]
            for sequence in named.sequences:
                del self._coming[sequence]
            group = beginning.arrive(named.step, self._runner.decoder, named.sequences, hidden)
            arriving[sub_batches.get(named.sequences[0], 0)].append(group)


def _sub_batches(plan: StepPlan) -> dict[int, int]:
    """Of the host sequences that a plan names; those that it does not name are carried along."""
    return {row.sequence: row.sub_batch for row in plan.rows if row.tier == "host"}


def joined(hidden: Tensor | None, groups: Sequence[HostGroup]) -> Tensor | None:
    """Hidden states of the rows on the device, then of each group: [T + rows of the groups, hidden_size]."""
    parts = [*([] if hidden is None else [hidden]), *(group.hidden for group in groups)]
    return torch.cat(parts) if len(parts) > 1 else next(iter(parts), None)
