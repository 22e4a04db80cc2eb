"""Seesaw: prompts and answers each in the parallel layout that suits them, with the KV cache
buffered in host memory.

cp is layout 0, cd layout 1, the pool the KV blocks of host memory, PP ``load.pipeline_depth``, RD
``running_decodes``.
"""

from dataclasses import dataclass
from typing import ClassVar

from nanoserve.scheduler.load import Decision, Load, Policy
from nanoserve.scheduler.optional import HostDecision

_PREFILL, _DECODE = 0, 1
_MORE_STEPS = 8
"""Most steps beyond the fewest that the budget allows in which prompts go through a pipeline."""


@dataclass(frozen=True, slots=True)
class TransitionMinimizing(Policy):
    """Seesaw, section 4.2: the layout changes only when the pool is full or empty.

    * PREFILL, in cp: chunks of prompts up to the budget; ours: of a size that fills the pipeline
      (`Load.chunk`). Each finished prompt is parked in the pool, so device memory does not bound
      the phase. When the pool cannot hold the next prompt, or none is left, the layout changes to
      cd.
    * DECODE, in cd: sequences come in from the pool as the device has room. Every step decodes RD /
      PP of those on the device (section 5.1). When the pool is empty and a prompt waits, the layout
      changes back to cp.

    The paper does not say what happens to sequences that still decode when the pool runs empty. No
    block survives a change of layout, so they are finished in small steps, or sent back through the
    pool. It turns back as soon as::

        longest_remaining * (T(b) - T(B) b / B)  >  2 (T_swap + T_transition)

    b decodes are left, B would fit the device with the waiting prompts computed, and T(b) is the
    time of a token for each of b. The bracket is what a step wastes: large batches and a few last
    tokens decode on, half empty ones turn back. Both transitions count, or a lone prompt would turn
    the layout under many decodes. The pool must hold what is on the device and the next prompt, so
    that every cycle computes one. Without a second layout or a pool, this is PrefillFirst.
    """

    token_budget: int
    reads_forecast: ClassVar[bool] = True

    def decide(self, load: Load) -> Decision:
        if load.layouts.count == 1 or load.host.total_blocks == 0:
            return self._prompts_first(load)
        if load.previous is not None and load.previous.layout != load.layouts.current:
            return Decision(0, 0, layout=load.previous.layout, bound="a transition is under way")
        if load.layouts.current == _DECODE:
            return self._decode(load)
        return self._prefill(load)

    def _prompts_first(self, load: Load) -> Decision:
        prefill, decodes = 0, load.decode_share
        if load.first_waiting_fits():
            prefill, decodes = self.token_budget, 0
        host = HostDecision(swap_in=load.host.fitting(load))
        layout, bound = load.layouts.current, "one layout, or no pool: prompts first"
        return Decision(prefill, decodes, whole_prompts=True, host=host, layout=layout, bound=bound)

    def _prefill(self, load: Load) -> Decision:
        needed = load.host.blocks_to_park(load)
        room = self._pool_room(load)
        park = needed <= load.host.total_blocks
        # a prompt that an empty pool could not hold stays on the device and is decoded there
        if not park:
            needed, room = load.first_waiting_blocks, load.free_blocks
        next_fits = load.first_waiting_tokens > 0 and needed <= room
        if not next_fits and self._has_ended(load):
            return Decision(
                0, 0, layout=_DECODE, bound="section 4.2: the pool is full, or no prompt is left"
            )
        tokens = 0
        if next_fits:
            tokens = self._chunk(load, room)
        elif load.ready_prefills:  # finish the partly computed prompt, and begin no other
            tokens = min(load.first_waiting_tokens, self.token_budget)
        host = HostDecision(swap_out=load.ready_decodes, park=park, preempt=True)
        bound = "section 4.2: prompts until the pool is full"
        return Decision(tokens, load.decode_share, host=host, layout=_PREFILL, bound=bound)

    @staticmethod
    def _has_ended(load: Load) -> bool:
        """Whether nothing of PREFILL is left, though no further prompt fits, and the pool has
        something to decode."""
        if load.host.decodes + load.host.moving == 0:
            return False
        # Moving sequences occupy slots. Prompts wait for these slots, not for the other layout.
        if load.host.moving > 0 and load.free_slots <= 0 and load.waiting_tokens > 0:
            return False
        return load.ready_prefills == load.running_decodes == load.steps_in_flight == 0

    def _decode(self, load: Load) -> Decision:
        pool_is_empty = load.host.decodes == load.host.moving == 0
        if pool_is_empty and load.first_waiting_tokens > 0 and self._is_left(load):
            return Decision(
                0, 0, layout=_PREFILL, bound="section 4.2: the pool is empty and a prompt waits"
            )
        host = HostDecision(swap_in=load.host.fitting(load), preempt=True)
        return Decision(
            0, load.decode_share, host=host, layout=_DECODE, bound="section 5.1: #RD / PP decodes"
        )

    def _is_left(self, load: Load) -> bool:
        """Whether DECODE ends: nothing decodes any more, or the sequences that do are sent back."""
        return load.running_decodes == 0 or self._turns_back(load)

    def _chunk(self, load: Load, room: int) -> int:
        """Prompt tokens of a step, out of the waiting tokens that ``room`` blocks can hold."""
        if load.predictor is None or load.pipeline_depth == 1:
            return self.token_budget
        tokens = min(load.waiting_tokens, room * load.block_size)
        fewest = -(-tokens // self.token_budget)
        return load.chunk(tokens, range(fewest, fewest + _MORE_STEPS))

    def _pool_room(self, load: Load) -> int:
        return load.host.free_blocks

    def _turns_back(self, load: Load) -> bool:
        """Whether to send sequences that still decode back through the pool, rather than finish
        them."""
        predictor = load.predictor
        if predictor is None or not device_fits_pool(load):
            return False

        def round_seconds(times: float) -> float:
            """One token for each of ``times`` as many decodes: PP micro-batches through L / PP
            layers each."""
            share = times / load.pipeline_depth
            decodes = round(load.running_decodes * share)
            keys = round(load.context_tokens * share)
            return load.step_seconds(decodes, keys)

        tokens = max(1, load.context_tokens)
        # All B pass through the pool, the present decodes included, so the pool must hold them.
        most = min(load.total_blocks, load.host.total_blocks) * load.block_size
        with_waiting = min(most, tokens + load.waiting_tokens)
        fuller = max(1.0, with_waiting / tokens)
        wasted = round_seconds(1.0) - round_seconds(fuller) / fuller
        one_way = predictor.swap_seconds(load.context_tokens) + predictor.transition_seconds(
            _PREFILL
        )
        return load.longest_remaining * wasted > 2 * one_way


def device_fits_pool(load: Load) -> bool:
    """Whether the pool holds what is on the device, and the next prompt."""
    used_blocks = load.total_blocks - load.free_blocks
    return used_blocks + load.host.blocks_to_park(load) <= load.host.free_blocks
