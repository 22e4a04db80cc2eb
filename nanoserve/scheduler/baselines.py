"""The three policies that the papers compare with.

Symbols: WP = ``load.waiting_tokens``, RD = ``load.running_decodes``.
"""

from dataclasses import dataclass

from nanoserve.scheduler.load import Decision, Load


@dataclass(frozen=True, slots=True)
class PrefillFirst:
    """Orca (OSDI 2022, section 4.2) as vLLM ran it at first.

    Whenever a waiting prompt fits, a step of whole prompts; otherwise a step of all decodes. Best time to first
    token, but every arriving prompt stalls all running sequences.

    Attributes:
        token_budget: prompt tokens of one step.
        admission_reserve: see Decision; the papers' systems have none.
        virtual_engines: decodes are shared out over the micro-batches in flight, as vLLM's virtual engines share them,
            each of which has sequences of its own; else every ready decode joins the next step.
    """

    token_budget: int
    admission_reserve: bool = True
    virtual_engines: bool = False

    def decide(self, load: Load) -> Decision:
        if load.first_waiting_fits(admission_reserve=self.admission_reserve):
            return _whole_prompts(self.token_budget, admission_reserve=self.admission_reserve)
        return Decision(prefill_tokens=0, decodes=load.decode_share if self.virtual_engines else load.ready_decodes)


@dataclass(frozen=True, slots=True)
class DecodeFirst:
    """FasterTransformer's request-level batching (as described in Sarathi-Serve, section 2.4).

    A batch of prompts is prefilled, then decoded to its end before the next prompts are taken. Best time per output
    token, worst utilisation: the batch shrinks as its sequences finish.

    Attributes:
        token_budget: prompt tokens of one step while a batch is formed.
        admission_reserve: see Decision; the papers' systems have none.
    """

    token_budget: int
    admission_reserve: bool = True

    def decide(self, load: Load) -> Decision:
        forming = load.running_decodes == 0 or (load.previous is not None and load.previous.prefill_tokens > 0)
        if forming and load.first_waiting_fits(admission_reserve=self.admission_reserve):
            return _whole_prompts(self.token_budget, admission_reserve=self.admission_reserve)
        return Decision(prefill_tokens=0, decodes=load.ready_decodes)


@dataclass(frozen=True, slots=True)
class ChunkedPrefill:
    """Sarathi-Serve (OSDI 2024, algorithm 3): stall-free batches under one token budget.

    All ready decodes first, one token each; what is left of the budget goes to chunks of prompts.

    Attributes:
        token_budget: decode and prompt tokens of one step together.
        admission_reserve: see Decision; the papers' systems have none.
        virtual_engines: decodes are shared out over the micro-batches in flight, as vLLM's virtual engines share them,
            each of which has sequences of its own; else every ready decode joins the next step.
    """

    token_budget: int
    admission_reserve: bool = True
    virtual_engines: bool = False

    def decide(self, load: Load) -> Decision:
        decodes = min(load.decode_share if self.virtual_engines else load.ready_decodes, self.token_budget)
        return Decision(self.token_budget - decodes, decodes, admission_reserve=self.admission_reserve)


def _whole_prompts(token_budget: int, *, admission_reserve: bool) -> Decision:
    return Decision(prefill_tokens=token_budget, decodes=0, whole_prompts=True, admission_reserve=admission_reserve)
