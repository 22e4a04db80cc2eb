"""Where sequences are placed with a host tier: what the hybrid policies share, and preemption by
swapping.

As in APEX, section 3.2, Tlin = T_glinear and Tgatt = T_gatt are the device's linear and attention
seconds of one layer for its decodes, Tlin_pref and Tgatt_pref the same with prompts in the step. L
is ``predictor.num_layers``.
"""

from abc import abstractmethod
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Self

from nanoserve.scheduler.load import Decision, Load, Policy
from nanoserve.scheduler.optional import HostDecision
from nanoserve.scheduler.predictor import Predictor


@dataclass(frozen=True, slots=True)
class PreemptingBySwap(Policy):
    """Another policy, whose preempted sequences are copied to host memory and back if that is
    faster than recomputing.

    vLLM (SOSP 2023, section 4.5) compares the two ways. With t the mean tokens of a running decode,
    a victim moves if this is less than one step that recomputes it::

        2 T_swap(t)  <  L (T_linear(t) + T_prefill_attention(t)) + T_overhead

    A moved sequence comes back as soon as the device has room beside the expected growth, before
    any new prompt begins, as it is older than most that wait. Until then the inner policy sees no
    new prompts, only partly computed ones.
    """

    inner: Policy
    reads_forecast: ClassVar[bool] = True

    def decide(self, load: Load) -> Decision:
        is_cheaper = _swapping_is_cheaper(load)
        if load.host.decodes == load.host.moving == 0:
            decision = self.inner.decide(load)
            host = replace(decision.host, preempt=is_cheaper)
            return replace(decision, host=host)
        unfinished = 0
        if load.ready_prefills:
            unfinished = load.first_waiting_tokens
        seen = replace(load, waiting_tokens=unfinished, first_waiting_tokens=unfinished)
        decision = self.inner.decide(seen)
        prefill = min(decision.prefill_tokens, unfinished)
        host = replace(decision.host, swap_in=load.host.fitting(load), preempt=is_cheaper)
        return replace(decision, prefill_tokens=prefill, host=host)

    @property
    def ranking(self) -> Policy:
        return self.inner


def _swapping_is_cheaper(load: Load) -> bool:
    predictor = load.predictor
    if predictor is None or load.free_blocks > load.ready_decodes:
        return False  # with a free block for each decode there is no preemption
    tokens = load.context_tokens // max(1, load.running_decodes)
    layer = predictor.linear_seconds(tokens) + predictor.prefill_attention_seconds(tokens)
    recompute = predictor.num_layers * layer + predictor.step_overhead_seconds()
    return 2 * predictor.swap_seconds(tokens) < recompute


@dataclass(frozen=True, slots=True)
class HybridPolicy(Policy):
    """A policy that has the CPU attend to KV in host memory."""

    token_budget: int
    """Device decodes and prompt tokens of one step together."""
    reads_forecast: ClassVar[bool] = True

    def decide(self, load: Load) -> Decision:
        plan = device_first(load, self.token_budget)
        step = DeviceStep.of(load, plan)
        if step is None:
            return plan
        return self.join(load, plan, step)

    @abstractmethod
    def join(self, load: Load, plan: Decision, step: "DeviceStep") -> Decision:
        """Let host sequences join the step on the device, if that pays."""


def device_first(load: Load, token_budget: int) -> Decision:
    """GPU-first (APEX, section 3.4, rule 1): the step on the device alone, and where prompts and
    host sequences go.

    While the device can hold all prompts that wait and all host sequences, with a block for each
    decode, all go there. Else prompts go there if it can hold them beside the expected growth of
    running sequences, and host sequences come back as soon as it has room beside that. Only the
    rest is parked. Without a host tier this is ChunkedPrefill.

    If the host could hold the next prompt, the device then keeps a bay of its size free, in which
    parked prompts are computed. If decodes have outgrown the forecast and the next prompt does not
    fit beside a block for each, the newest move to host memory: a waiting prompt costs more than
    their tokens, and a partly computed one holds blocks. While no prompt waits, host sequences come
    back until one block is left for each decode, even if the newest may have to leave again: the
    growth may be overestimated until the first answers have ended.
    """
    decodes = min(load.decode_share, token_budget)
    plan = Decision(token_budget - decodes, decodes, bound="rule 1: the device first")
    if load.host.total_blocks == 0:
        return plan
    host = HostDecision(swap_in=load.host.fitting(load), preempt=True)
    if load.predictor is None:
        return replace(plan, host=host)
    prompt = load.first_waiting_blocks
    host_has_room = load.host.blocks_to_park(load) <= load.host.free_blocks
    kept, bay = load.running_decodes, 0
    is_short = _memory_is_short(load)
    if is_short:
        kept = load.expected_growth
        if load.running_decodes and host_has_room:
            bay = prompt
    if load.running_decodes:
        returning = _returning(load, load.free_blocks - kept - bay)
        host = replace(host, swap_in=returning)
    left = load.free_blocks - host.swap_in * load.host.sequence_blocks(load)
    room = max(0, left - kept)
    park = is_short and prompt + bay > room
    if park:
        room = max(0, left - load.running_decodes)
        # a begun prompt has reserved its host blocks
        may_park = host_has_room or load.ready_prefills > 0
        if prompt > room or not may_park:
            leave = _leaving(load, prompt - room)
            host = replace(host, swap_out=leave)
            decodes = min(decodes, load.ready_decodes - leave)
            return Decision(0, decodes, host=host, bound="rule 1: no room for the next prompt")
    tokens = _prompt_tokens(load, plan.prefill_tokens, room)
    host = replace(host, park=park)
    return replace(plan, prefill_tokens=tokens, host=host)


def _memory_is_short(load: Load) -> bool:
    """Whether prompts wait, and the device cannot hold all of them, all host sequences and a block
    for each decode."""
    waiting = -(-load.waiting_tokens // load.block_size)
    from_host = load.host.decodes * (load.host.sequence_blocks(load) + 1)
    return waiting > 0 and waiting + from_host + load.running_decodes > load.free_blocks


def device_alone(load: Load, token_budget: int) -> Decision:
    """ChunkedPrefill, while host sequences come back until one block is left for each decode."""
    returning = _returning(load, load.free_blocks - load.running_decodes)
    back = max(load.host.fitting(load), returning)
    decodes = min(load.ready_decodes, token_budget)
    host = HostDecision(swap_in=back, preempt=True)
    plan = Decision(0, decodes, host=host, bound="the host would gain too little: the device alone")
    tokens = fitting_tokens(load, token_budget, plan)
    return replace(plan, prefill_tokens=tokens)


def fitting_tokens(load: Load, token_budget: int, plan: Decision) -> int:
    """Prompt tokens that fit beside the plan's decodes, its returning host sequences and a block
    for each decode. A prompt that does not fit would not begin, so it must not count in the step's
    predicted time."""
    returning = plan.host.swap_in * load.host.sequence_blocks(load)
    room = max(0, load.free_blocks - returning - load.running_decodes)
    if load.first_waiting_tokens == 0:
        return 0
    if load.first_waiting_blocks > room and not load.ready_prefills:
        return 0
    return _prompt_tokens(load, token_budget - plan.decodes, room)


def _prompt_tokens(load: Load, budget: int, room: int) -> int:
    """Tokens of waiting prompts within the budget and ``room`` blocks; a begun prompt may have room
    in its last one."""
    blocks = room + load.ready_prefills
    return min(budget, load.waiting_tokens, blocks * load.block_size)


def _returning(load: Load, spare: int) -> int:
    """Ready host sequences that fit into the spare blocks, each with one to grow into."""
    blocks_each = load.host.sequence_blocks(load) + 1
    return min(load.host.ready, max(0, spare) // blocks_each)


def _leaving(load: Load, blocks: int) -> int:
    """How many decodes, at most all but one, hold this many blocks; 0 if the host has no room or
    others are moving."""
    if load.host.moving or load.host.blocks_to_park(load) > load.host.free_blocks:
        return 0
    slots = load.block_size * max(1, load.running_decodes)
    held = max(1, load.context_tokens // slots)
    leaving = -(-blocks // held)
    return max(0, min(leaving, load.ready_decodes - 1))


@dataclass(frozen=True)
class DeviceStep:
    """Predicted times of a step on the device alone, per layer unless a name says otherwise, and
    the host sequences that could join it. Each prediction is made once: on small models deciding
    takes a considerable part of a step."""

    predictor: Predictor
    decodes: int
    prefill: int
    keys: int
    """Keys that the device's decodes read."""
    host: int
    """Host sequences that are ready or under way."""
    host_keys: int
    """Mean keys that each of them reads."""

    @classmethod
    def of(cls, load: Load, plan: Decision) -> Self | None:
        """None where nothing can be predicted or the host has no memory."""
        if load.predictor is None or load.host.total_blocks == 0:
            return None
        prefill = 0
        if load.first_waiting_tokens:
            prefill = min(plan.prefill_tokens, load.waiting_tokens)
        keys = load.context_tokens * plan.decodes // max(1, load.running_decodes)
        under_way = sum(cohort.sequences for cohort in load.host.cohorts)
        host = load.host.ready - plan.host.swap_in + under_way
        host_keys = load.first_waiting_tokens
        if load.host.decodes:
            host_keys = load.host.context_tokens // load.host.decodes
        return cls(load.predictor, plan.decodes, prefill, keys, host, host_keys)

    @property
    def rows(self) -> int:
        return self.decodes + self.prefill

    @property
    def mean_keys(self) -> int:
        """Mean keys of a decode on the device; of a host sequence if nothing decodes."""
        if self.decodes == 0:
            return self.host_keys
        return self.keys // self.decodes

    @cached_property
    def tlin(self) -> float:
        """Tlin; of one row where nothing decodes."""
        return self.predictor.linear_seconds(max(1, self.decodes))

    @cached_property
    def tgatt(self) -> float:
        return self.predictor.attention_seconds(self.keys)

    @cached_property
    def tlin_pref(self) -> float:
        if self.decodes and not self.prefill:
            return self.tlin
        return self.linear_seconds(self.rows)

    @cached_property
    def tgatt_pref(self) -> float:
        if self.prefill == 0:
            return self.tgatt
        return self.tgatt + self.predictor.prefill_attention_seconds(self.prefill)

    @cached_property
    def step_seconds(self) -> float:
        return self.whole_seconds(self.tlin_pref + self.tgatt_pref)

    @cached_property
    def decode_only_seconds(self) -> float:
        return self.whole_seconds(self.tlin + self.tgatt)

    @property
    def token_seconds(self) -> float:
        return self.decode_only_seconds / max(1, self.decodes)

    def whole_seconds(self, layer_seconds: float, host: int = 0) -> float:
        """A step's seconds from those of a layer; with a large vocabulary, the head of ``host``
        more rows counts."""
        overhead = self._overhead
        if host:
            overhead = self.predictor.step_overhead_seconds(self.decodes + host)
        return self.predictor.num_layers * layer_seconds + overhead

    @cached_property
    def _overhead(self) -> float:
        return self.predictor.step_overhead_seconds(max(1, self.decodes))

    def linear_seconds(self, rows: int) -> float:
        if rows == 0:
            return 0.0  # the weights are not read
        return self.predictor.linear_seconds(rows)

    def cpu_seconds(self, sequences: int) -> float:
        if sequences == 0:
            return 0.0
        return self.predictor.host_attention_seconds(sequences, sequences * self.host_keys)

    def hidden(self, window: float, most: int) -> int:
        """How many host sequences, at most ``most``, the CPU serves within the window."""
        return bisect_right(range(1, most + 1), window, key=self.cpu_seconds)

    def pipelined(self, most: int) -> tuple[tuple[int, int], float]:
        """NEO's greedy choice: host sequences of sub-batches 0 and 1, ``most`` in all, and the
        whole step's seconds."""
        first = second = 0
        if self.rows:
            second = self.hidden(self.tlin_pref + self.tgatt_pref, most)
        tlin_second = self.linear_seconds(second)
        if second:
            first = self.hidden(tlin_second, most - second)
        layer = self.linear_seconds(self.rows + first) + self.tgatt_pref + tlin_second
        seconds = self.whole_seconds(layer, first + second)
        seconds *= self.predictor.slowdown("asymmetric")
        return (first, second), seconds
