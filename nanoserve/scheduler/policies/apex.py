"""NEO's asymmetric pipelining, APEX's asynchronous overlap, and the algorithm that chooses between
the two.

NG and NC are the sequences whose decode attention device and CPU compute per second. placement.py
has other symbols.
"""

from dataclasses import dataclass, replace

from nanoserve.scheduler.load import Decision, Load, parameter
from nanoserve.scheduler.optional import Alternative
from nanoserve.scheduler.policies.placement import DeviceStep, HybridPolicy


@dataclass(frozen=True, slots=True)
class AsymmetricPipelining(HybridPolicy):
    """NEO (arXiv:2411.01142), as APEX, sections 2.3, 2.4 and figure 2, describes it.

    Two sub-batches alternate: while the device runs the linear layers of one, the CPU computes the
    attention of the other. Sub-batch 0 holds prompts, device decodes and host sequences, sub-batch
    1 host sequences only. Greedily, each takes as many host sequences as the device's work for the
    other hides::

        CPU attention of sub-batch 1  <=  Tlin_pref + Tgatt_pref
        CPU attention of the host sequences in sub-batch 0  <=  Tlin of sub-batch 1

    The linear layers run twice, so the step must advance more sequences per second than the device
    alone, a prompt counting as one. Without prompts it rarely does.
    """

    def join(self, load: Load, plan: Decision, step: DeviceStep) -> Decision:
        if step.host == 0 or step.rows == 0:
            return plan
        advanced = step.decodes + step.prefill / max(1, load.first_waiting_tokens)
        sizes, seconds = step.pipelined(step.host)
        alone = advanced / step.step_seconds
        pipelined = (advanced + sum(sizes)) / seconds
        on_device = Alternative("device", step.step_seconds, alone)
        in_turn = Alternative("asymmetric", seconds, pipelined)
        host = replace(plan.host, alternatives=(on_device, in_turn))
        bound = "NEO: the device alone advances more sequences a second"
        if pipelined > alone:
            host = replace(host, strategy="asymmetric", decodes=sizes)
            bound = "NEO: two sub-batches advance more sequences a second"
        return replace(plan, host=host, bound=bound)


@dataclass(frozen=True, slots=True)
class AsynchronousOverlap(HybridPolicy):
    """APEX, section 3.3, always: one batch for the linear layers, host attention beside the steps.

    Host sequences that begin a token together are a cohort. A later step needs the CPU's result for
    layer i when it comes to layer i, so a cohort has its token after L + 1 steps, and the device
    never waits. A cohort of all ready host sequences begins when fewer than ``cohorts`` are under
    way: one in the paper, more in its task pool, section 6.
    """

    cohorts: int = parameter(1, at_least=1)

    def join(self, load: Load, plan: Decision, step: DeviceStep) -> Decision:
        return _overlapped(
            load, plan, self.cohorts, "section 3.3: a cohort has its token after L + 1 steps"
        )


def _overlapped(load: Load, plan: Decision, cohorts: int, bound: str) -> Decision:
    begin = 0
    if len(load.host.cohorts) < cohorts:
        begin = load.host.ready - plan.host.swap_in
    if begin == 0 and not load.host.cohorts:
        return plan
    host = replace(plan.host, strategy="overlap", decodes=(begin, 0))
    return replace(plan, host=host, bound=bound)


@dataclass(frozen=True, slots=True)
class ApexAlgorithm1(HybridPolicy):
    """APEX, section 3.4: algorithm 1 as printed, with its four rules.

    1. Without host sequences, the device alone; and prompts go there first.
    2. Without prompts in the step, inequality (5), which is (6): asymmetric pipelining if it holds,
       else overlap.
    3. With prompts, the same inequality, but the CPU has Tlin_pref + Tlin + Tgatt_pref.
    4. Host sequences part way through their layers enter an asymmetric step first, but no more than
       the device's work on one layer hides, or the device would wait for the CPU in every layer
       left.

    The weaknesses of the printed rules are kept: (5) counts what the CPU could compute even if
    fewer host sequences exist, and compares with the device alone, never with overlap. Rule 3
    divides the work of the longer window by the time of a step without prompts, so it holds nearly
    always.
    """

    minimum_ratio: float = parameter(8.0, at_least=0)
    """Host sequences per device decode that a host token needs to begin (section 4.2, for the cost
    of a thread)."""

    def join(self, load: Load, plan: Decision, step: DeviceStep) -> Decision:
        if step.host == 0:
            return plan
        if not load.host.cohorts and load.host.decodes < self.minimum_ratio * step.decodes:
            return plan
        tlin, tgatt, layers = step.tlin, step.tgatt, step.predictor.num_layers
        in_turn_layer = window = 2 * tlin + tgatt
        if step.prefill:
            window = step.tlin_pref + tlin + step.tgatt_pref
        ng = 0.0
        if step.decodes:
            ng = step.decodes / tgatt
        # Host sequences count as long as the mean decode: the inequality compares processors, not
        # lengths.
        host_keys = step.host * step.mean_keys
        nc = step.host / step.predictor.host_attention_seconds(step.host, host_keys)
        pipelined = pipelined_rate(ng, nc, tlin, tgatt, window)
        alone = device_rate(ng, tlin, tgatt)
        # The inequality's rates are the rates of a model of one layer.
        on_device = Alternative("device", step.decode_only_seconds, alone / layers)
        in_turn = Alternative("asymmetric", step.whole_seconds(in_turn_layer), pipelined / layers)
        host = replace(plan.host, alternatives=(on_device, in_turn))
        if pipelined > alone:
            sizes, _ = step.pipelined(step.host)
            if sum(sizes) > 0:
                host = replace(host, strategy="asymmetric", decodes=sizes)
                return replace(plan, host=host, bound="inequality 5 holds")
        bound = "inequality 5 does not hold, or the CPU would end too late"
        return _overlapped(load, replace(plan, host=host), 1, bound)


def device_rate(ng: float, tlin: float, tgatt: float) -> float:
    """Right side of inequality (5): decodes per second and layer on the device alone."""
    return ng * tgatt / (tlin + tgatt)


def pipelined_rate(ng: float, nc: float, tlin: float, tgatt: float, window: float) -> float:
    """Left side of inequality (5), for the CPU's ``window`` 2 Tlin + Tgatt, or the longer one of
    algorithm 1."""
    return (ng * tgatt + nc * window) / (2 * tlin + tgatt)
