"""NEO: decode attention of host sequences on the CPU, by asymmetric pipelining."""

from dataclasses import dataclass, replace

from nanoserve.scheduler.load import Alternative, Decision, Load
from nanoserve.scheduler.policies.placement import DeviceStep, HybridPolicy


@dataclass(frozen=True, slots=True)
class AsymmetricPipelining(HybridPolicy):
    """NEO (arXiv:2411.01142), as APEX, sections 2.3, 2.4 and figure 2, describes it.

    A step is two sub-batches that alternate: while the device runs the linear layers of one, the CPU computes the
    attention of the other. Sub-batch 0 holds prompts, device decodes and host sequences, sub-batch 1 host sequences
    only. Greedily, each takes as many host sequences as the device's work for the other hides::

        CPU attention of sub-batch 1  <=  Tlin_pref + Tgatt_pref
        CPU attention of the host sequences in sub-batch 0  <=  Tlin of sub-batch 1

    The linear layers run twice, so the step is taken only if more sequences advance per second than on the device
    alone, a prompt counting as one. Without prompts in the step that is seldom so.
    """

    def join(self, load: Load, plan: Decision, step: DeviceStep) -> Decision:
        if step.host == 0 or step.rows == 0:
            return plan
        advanced = step.decodes + step.prefill / max(1, load.first_waiting_tokens)
        sizes, seconds = step.pipelined(step.host)
        alone, pipelined = advanced / step.step_seconds, (advanced + sum(sizes)) / seconds
        weighed = Alternative("device", step.step_seconds, alone), Alternative("asymmetric", seconds, pipelined)
        if pipelined > alone:
            return replace(plan, strategy="asymmetric", host_decodes=sizes, alternatives=weighed)
        return replace(plan, alternatives=weighed)
