"""Swapping as preemption, for policies that know nothing of host memory."""

from dataclasses import dataclass, replace
from typing import ClassVar

from nanoserve.scheduler.load import Decision, Load, Policy, Predictor


@dataclass(frozen=True, slots=True)
class PreemptingBySwap:
    """Another policy, whose preempted sequences move to host memory and back where that is cheaper (vLLM, SOSP 2023,
    section 4.5, compares the two ways).

    With t the tokens that a running decode has on average, and L layers, a sequence that must give way moves if::

        2 T_swap(t)  <  L (T_linear(t) + T_prefill_attention(t)) + T_overhead

    the right side being one step that computes it again; without a predictor nobody knows, and it is computed again.

    What has moved comes back as soon as the device has room, beside what the running sequences are expected to grow by,
    and before any new prompt is begun: it is older than most that wait, and each new prompt would take the room that it
    waits for. Prompts that are partly computed go on.

    Attributes:
        inner: decides everything else. It sees no new prompts while sequences are on the host or on their way.
    """

    inner: Policy
    reads_forecast: ClassVar[bool] = True

    def decide(self, load: Load) -> Decision:
        if load.host_decodes == load.moving == 0:
            return replace(self.inner.decide(load), preempt_to_host=_swapping_is_cheaper(load))
        unfinished = load.first_waiting_tokens if load.ready_prefills else 0
        decision = self.inner.decide(replace(load, waiting_tokens=unfinished, first_waiting_tokens=unfinished))
        return replace(
            decision,
            prefill_tokens=min(decision.prefill_tokens, unfinished),
            swap_in=load.fitting_host,
            preempt_to_host=_swapping_is_cheaper(load),
        )


def _swapping_is_cheaper(load: Load) -> bool:
    """For a sequence of mean length. Not asked while every decode finds a free block: nobody has to give way then."""
    if load.predictor is None or load.free_blocks > load.ready_decodes:
        return False
    tokens = load.context_tokens // max(1, load.running_decodes)
    return 2 * load.predictor.swap_seconds(tokens) < _recomputing_seconds(load.predictor, tokens)


def _recomputing_seconds(predictor: Predictor, tokens: int) -> float:
    layer = predictor.linear_seconds(tokens) + predictor.prefill_attention_seconds(tokens)
    return predictor.num_layers * layer + predictor.step_overhead_seconds()
