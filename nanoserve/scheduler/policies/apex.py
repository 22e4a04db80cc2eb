"""APEX: asynchronous overlap, and the algorithm that chooses between it and NEO's asymmetric pipelining.

Symbols: NG and NC, sequences whose decode attention the device and the CPU compute per second; the others as in
placement.py.
"""

from dataclasses import dataclass, replace

from nanoserve.scheduler.load import Alternative, Decision, Load, parameter
from nanoserve.scheduler.policies.placement import DeviceStep, HybridPolicy


@dataclass(frozen=True, slots=True)
class AsynchronousOverlap(HybridPolicy):
    """APEX, section 3.3, always: one batch for the linear layers, host attention beside the steps.

    Host sequences that begin a token together are a cohort. The CPU's result for layer i is needed when a later step
    comes to layer i, so a cohort advances one layer a step and has its token after L + 1 steps. The device never waits.
    A cohort begins, with all ready host sequences, when fewer than ``cohorts`` are under way.
    """

    cohorts: int = parameter(1, at_least=1)
    """How many are under way at most: one in the paper; more is its task pool (section 6)."""

    def join(self, load: Load, plan: Decision, step: DeviceStep) -> Decision:
        return _overlapped(load, plan, self.cohorts)


def _overlapped(load: Load, plan: Decision, cohorts: int) -> Decision:
    """The plan with host tokens beside it: cohorts go on, and another begins if there are fewer than ``cohorts``."""
    begin = load.ready_host - plan.swap_in if len(load.cohorts) < cohorts else 0
    if begin == 0 and not load.cohorts:
        return plan
    return replace(plan, strategy="overlap", host_decodes=(begin, 0))


@dataclass(frozen=True, slots=True)
class ApexAlgorithm1(HybridPolicy):
    """APEX, section 3.4: algorithm 1 as printed, with its four rules.

    1. Without host sequences, the device alone; and prompts go there first.
    2. Without prompts in the step, inequality (5), which is (6): asymmetric pipelining if it holds, else overlap.
    3. With prompts, the same inequality, but the CPU has Tlin_pref + Tlin + Tgatt_pref.
    4. Host sequences that are part way through their layers go first when an asymmetric step is filled. It takes no
       more of them than the device's work on one layer hides, or the device would wait for the CPU in every layer left.

    A token on the host is begun only if there are ``minimum_ratio`` times as many host sequences as device decodes
    (section 4.2). The weaknesses of the printed rules are kept: (5) counts what the CPU could compute, whether or not
    that many host sequences exist, and compares with the device alone, never with overlap; rule 3 divides the work of
    the longer window by the time of a step without prompts, so it holds nearly always.
    """

    minimum_ratio: float = parameter(8.0, at_least=0)
    """Measured in the paper, to amortise what a Python thread costs."""

    def join(self, load: Load, plan: Decision, step: DeviceStep) -> Decision:
        if step.host == 0:
            return plan
        if not load.cohorts and load.host_decodes < self.minimum_ratio * step.decodes:
            return plan
        tlin, tgatt = step.tlin, step.tgatt
        window = step.tlin_pref + tlin + step.tgatt_pref if step.prefill else 2 * tlin + tgatt
        ng = step.decodes / tgatt if step.decodes else 0.0
        # Host sequences count as long as the mean decode: the inequality compares processors, not lengths.
        nc = step.host / step.predictor.host_attention_seconds(step.host, step.host * step.mean_keys)
        pipelined, alone = pipelined_rate(ng, nc, tlin, tgatt, window), device_rate(ng, tlin, tgatt)
        layers = step.predictor.num_layers  # the inequality's rates are those of a model of one layer
        weighed = (
            Alternative("device", step.decode_only_seconds, alone / layers),
            Alternative("asymmetric", step.whole_seconds(2 * tlin + tgatt), pipelined / layers),
        )
        plan = replace(plan, alternatives=weighed)
        if pipelined > alone:
            sizes, _ = step.pipelined(step.host)
            if sum(sizes) > 0:
                return replace(plan, strategy="asymmetric", host_decodes=sizes)
        return _overlapped(load, plan, cohorts=1)


def device_rate(ng: float, tlin: float, tgatt: float) -> float:
    """Right side of inequality (5): decodes per second and layer on the device alone."""
    return ng * tgatt / (tlin + tgatt)


def pipelined_rate(ng: float, nc: float, tlin: float, tgatt: float, window: float) -> float:
    """Left side of inequality (5), for the CPU's ``window`` 2 Tlin + Tgatt, or the longer one of algorithm 1."""
    return (ng * tgatt + nc * window) / (2 * tlin + tgatt)
