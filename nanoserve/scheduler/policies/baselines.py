"""The three policies that the papers compare with.

Symbols: WP = ``load.waiting_tokens``, RD = ``load.running_decodes``.
"""

from dataclasses import dataclass

from nanoserve.scheduler.load import Decision, Load, Policy


@dataclass(frozen=True, slots=True)
class _Baseline(Policy):
    """The parameters of all three."""

    token_budget: int
    """Prompt tokens of one step; ChunkedPrefill counts the decodes too."""
    admission_reserve: bool = True
    """Begin a new prompt only where a block is left for each running decode to grow into: ours, not the papers'."""

    def _whole_prompts(self, load: Load) -> Decision | None:
        """A step of whole prompts, if the next one fits."""
        if not load.first_waiting_fits(admission_reserve=self.admission_reserve):
            return None
        return Decision(self.token_budget, 0, whole_prompts=True, admission_reserve=self.admission_reserve)


@dataclass(frozen=True, slots=True)
class PrefillFirst(_Baseline):
    """Orca (OSDI 2022, section 4.2) as vLLM ran it at first.

    Whenever a waiting prompt fits, a step of whole prompts; otherwise a step of all decodes. The time to first token
    is the best of all policies, but every arriving prompt stalls all running sequences.
    """

    virtual_engines: bool = False
    """Share the decodes out over the micro-batches in flight, as vLLM's virtual engines do, which have sequences of
    their own. Otherwise every ready decode joins the next step."""

    def decide(self, load: Load) -> Decision:
        decodes = load.decode_share if self.virtual_engines else load.ready_decodes
        return self._whole_prompts(load) or Decision(prefill_tokens=0, decodes=decodes)


@dataclass(frozen=True, slots=True)
class DecodeFirst(_Baseline):
    """FasterTransformer's request-level batching (as described in Sarathi-Serve, section 2.4).

    A batch of prompts is prefilled, then decoded to its end before the next prompts are taken. The time per output
    token is the best, utilisation the worst: the batch shrinks as its sequences finish.
    """

    def decide(self, load: Load) -> Decision:
        forming = load.running_decodes == 0 or (load.previous is not None and load.previous.prefill_tokens > 0)
        prompts = self._whole_prompts(load) if forming else None
        return prompts or Decision(prefill_tokens=0, decodes=load.ready_decodes)


@dataclass(frozen=True, slots=True)
class ChunkedPrefill(_Baseline):
    """Sarathi-Serve (OSDI 2024, algorithm 3): stall-free batches under one token budget.

    All ready decodes first, one token each; what is left of the budget goes to chunks of prompts.
    """

    virtual_engines: bool = False
    """As in PrefillFirst."""

    def decide(self, load: Load) -> Decision:
        decodes = min(load.decode_share if self.virtual_engines else load.ready_decodes, self.token_budget)
        return Decision(self.token_budget - decodes, decodes, admission_reserve=self.admission_reserve)
