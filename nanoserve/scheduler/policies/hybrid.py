"""Ours, after APEX: the device alone, asymmetric pipelining or asynchronous overlap, whichever is
predicted best."""

from dataclasses import dataclass, replace

from nanoserve.scheduler.load import Decision, Load, parameter
from nanoserve.scheduler.optional import Alternative
from nanoserve.scheduler.policies.placement import (
    DeviceStep,
    HybridPolicy,
    device_alone,
    fitting_tokens,
)

_COHORTS = 4  # which share the CPU's time in a step


@dataclass(frozen=True, slots=True)
class HybridByPrediction(HybridPolicy):
    """Takes the strategy that is predicted to advance most sequences per second.

    A prompt counts as the sequences that the device could decode in its time; as one, it would make
    a host sequence seem worth a large part of its step. Host sequences are those that are there,
    not what the CPU could compute. They are weighed by their keys, as a short one is cheap on the
    device too and frees little of its memory. Otherwise the host would take the cheap beginnings of
    all answers and leave their costly ends to the device::

        work = the step's seconds on the device alone / seconds of one of its decodes without
        prompts worth = keys of a host sequence / keys of a decode, on average device alone
        work / its seconds overlap           (work + worth * host sequences under way / (L + 1)) /
        seconds asymmetric        (work + worth * host sequences taken) / seconds

    Overlap wins where host sequences are too few, or the CPU is too slow, to pay for a second pass
    of the linear layers. A sequence under way cannot come back to the device, where it would be L +
    1 times as fast, so a small gain counts as none. A prompt without room on the device is parked
    if the CPU could serve one more sequence under overlap; else it waits. If even all host
    sequences that the CPU can serve would gain too little, prompts and decodes stay on the device,
    as parked prompts take room from decodes. Preempted sequences still move.
    """

    least_gain: float = parameter(0.02, at_least=0)
    """Gain by overlap, as a share of what the device advances, for which cohorts begin."""
    worthwhile: float = parameter(0.1, at_least=0)
    """Gain for which asymmetric steps are taken and prompts parked: the host's last sequences end
    late, at a cost."""

    def join(self, load: Load, plan: Decision, step: DeviceStep) -> Decision:
        moves_out = plan.host.park or plan.host.swap_out > 0
        if moves_out and load.first_waiting_tokens and not self._pays(load, step):
            plan = device_alone(load, self.token_budget)
            remade = DeviceStep.of(load, plan)
            assert remade is not None  # as for the first plan
            step = remade
        if plan.host.park:
            with_next = load.host.decodes + load.host.moving + 1
            if step.cpu_seconds(with_next) > step.decode_only_seconds:
                tokens = fitting_tokens(load, self.token_budget, plan)
                host = replace(plan.host, park=False)
                plan = replace(plan, prefill_tokens=tokens, host=host)
                step = replace(step, prefill=tokens)
        if step.host == 0:
            return plan
        beside, overlap_seconds, overlap_tokens = self._overlap(load, plan, step)
        if step.rows == 0:
            # A host sequence that begins a token cannot come back before it is there, so none
            # begins while others move.
            others_move = plan.host.swap_in > 0 or load.host.moving > 0
            if others_move and not load.host.cohorts:
                return plan
            return beside
        return self._best(plan, step, beside, overlap_seconds, overlap_tokens)

    def _best(
        self,
        plan: Decision,
        step: DeviceStep,
        beside: Decision,
        overlap_seconds: float,
        overlap_tokens: float,
    ) -> Decision:
        """Choose between the device alone (``plan``), the overlapped step (``beside``) and
        asymmetric pipelining."""
        sizes, asymmetric_seconds = step.pipelined(step.host)
        advanced = step.step_seconds / step.token_seconds
        worth = step.host_keys / max(1, step.mean_keys)
        alone = advanced / step.step_seconds
        overlap = (advanced + worth * overlap_tokens) / overlap_seconds
        pipelined = (advanced + worth * sum(sizes)) / asymmetric_seconds
        if pipelined > max(overlap, (1 + self.worthwhile) * alone):
            host = replace(plan.host, strategy="asymmetric", decodes=sizes)
            plan = replace(plan, host=host, bound="predicted best: two sub-batches")
        elif overlap > alone:
            plan = replace(beside, bound="predicted best: the CPU beside the steps")
        weighed = (
            Alternative("device", step.step_seconds, alone),
            Alternative("overlap", overlap_seconds, overlap),
            Alternative("asymmetric", asymmetric_seconds, pipelined),
        )
        host = replace(plan.host, alternatives=weighed)
        return replace(plan, host=host)

    def _pays(self, load: Load, step: DeviceStep) -> bool:
        """Whether there is a gain with all waiting sequences on the host, or as many as the CPU
        serves."""
        if step.decodes:
            # Without prompts: else decodes would leave in one step to make room for a prompt, and
            # come back in the next.
            step = replace(step, prefill=0)
        predictor = step.predictor
        alone = step.decode_only_seconds
        longest = max(load.first_waiting_tokens, step.host_keys)
        candidates = load.host.decodes + load.waiting_tokens // longest
        parkable = load.host.total_blocks // load.host.blocks_to_park(load)
        served = step.hidden(alone, min(candidates, parkable))
        sizes, seconds = step.pipelined(served)
        asymmetric = (step.step_seconds + sum(sizes) * step.token_seconds) / seconds
        joining = step.linear_seconds(step.decodes + served) - step.linear_seconds(step.decodes)
        # Sequences come and go: on average, half of them are there.
        gained = served / 2 / (predictor.num_layers + 1) * step.token_seconds
        overlap_seconds = (alone + joining) * predictor.slowdown("overlap")
        overlap = (alone + gained) / overlap_seconds
        return max(asymmetric, overlap) > 1 + self.worthwhile

    def _overlap(
        self, load: Load, plan: Decision, step: DeviceStep
    ) -> tuple[Decision, float, float]:
        """The overlapped step with as many new host tokens as the CPU has time for; its seconds and
        host tokens."""
        predictor = step.predictor
        begin, ready = self._new_host_tokens(load, plan, step)
        sizes = [cohort.sequences for cohort in load.host.cohorts]
        sizes.append(ready)
        # Each cohort is in the linear part of one layer a step.
        alone = step.linear_seconds(step.rows)
        joining = sum(step.linear_seconds(step.rows + size) - alone for size in sizes)
        tokens = sum(sizes) / (predictor.num_layers + 1)
        layer_seconds = step.tlin_pref + step.tgatt_pref
        seconds = joining + step.whole_seconds(layer_seconds, round(tokens))
        seconds *= predictor.slowdown("overlap")
        if tokens:
            host = replace(plan.host, strategy="overlap", decodes=(begin, 0))
            plan = replace(plan, host=host)
        return plan, seconds, tokens

    def _new_host_tokens(self, load: Load, plan: Decision, step: DeviceStep) -> tuple[int, int]:
        """Return how many host sequences begin a token in this step, and for how many the CPU has
        time in all."""
        ready = load.host.ready - plan.host.swap_in
        if step.rows == 0:
            return ready, ready
        cohorts, predictor = load.host.cohorts, step.predictor
        busy = sum(
            predictor.host_attention_seconds(one.sequences, one.context_tokens) for one in cohorts
        )
        # of P plans in flight, one ends P times as often
        window = step.step_seconds / load.pipeline_depth
        served = step.hidden(window - busy, ready)
        under_way = sum(cohort.sequences for cohort in cohorts)
        if under_way + served < self.least_gain * step.decodes * (predictor.num_layers + 1):
            return 0, 0
        # Several cohorts: a single one that takes a little more than a step would advance in every
        # second.
        share = step.hidden(window / _COHORTS, served)
        return min(served, max(1, share)), served
