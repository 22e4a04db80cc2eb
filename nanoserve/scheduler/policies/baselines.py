"""The three policies that the papers compare with. ChunkedPrefill, named sarathi, is the engine's
default."""

from dataclasses import dataclass

from nanoserve.scheduler.load import Decision, Load, Policy


@dataclass(frozen=True, slots=True)
class _Baseline(Policy):
    token_budget: int
    """Prompt tokens of one step; ChunkedPrefill counts the decodes too."""
    admission_reserve: bool = True
    """Begin a new prompt only where a block is left for each running decode to grow into: ours, not
    the papers'."""

    def _whole_prompts(self, load: Load) -> Decision | None:
        if not load.first_waiting_fits(admission_reserve=self.admission_reserve):
            return None
        bound, reserve = "the next prompt fits: prompts alone", self.admission_reserve
        return Decision(
            self.token_budget, 0, whole_prompts=True, admission_reserve=reserve, bound=bound
        )


@dataclass(frozen=True, slots=True)
class PrefillFirst(_Baseline):
    """Orca (OSDI 2022, section 4.2) as vLLM ran it at first: a step of whole prompts whenever the
    next one fits, else one of all decodes. The time to first token is the best, but every arriving
    prompt stalls all running sequences."""

    virtual_engines: bool = False
    """Divide the decodes among the micro-batches in flight, as vLLM's virtual engines do; else all
    join the next."""

    def decide(self, load: Load) -> Decision:
        prompts = self._whole_prompts(load)
        if prompts is not None:
            return prompts
        decodes = load.ready_decodes
        if self.virtual_engines:
            decodes = load.decode_share
        return Decision(0, decodes, bound="no prompt waits or fits: decodes alone")


@dataclass(frozen=True, slots=True)
class DecodeFirst(_Baseline):
    """FasterTransformer's request-level batching (Sarathi-Serve, section 2.4): each batch of
    prompts is decoded to its end before the next. The time per output token is the best,
    utilisation the worst, as batches only shrink."""

    def decide(self, load: Load) -> Decision:
        forming = load.running_decodes == 0 or (
            load.previous is not None and load.previous.prefill_tokens > 0
        )
        if forming:
            prompts = self._whole_prompts(load)
            if prompts is not None:
                return prompts
        return Decision(0, load.ready_decodes, bound="the batch decodes to its end")


@dataclass(frozen=True, slots=True)
class ChunkedPrefill(_Baseline):
    """Sarathi-Serve (OSDI 2024, algorithm 3): all ready decodes first, then chunks of prompts up to
    the budget."""

    virtual_engines: bool = False

    def decide(self, load: Load) -> Decision:
        decodes = load.ready_decodes
        if self.virtual_engines:
            decodes = load.decode_share
        decodes = min(decodes, self.token_budget)
        bound = "all ready decodes; prompts get the rest of the token budget"
        return Decision(
            self.token_budget - decodes,
            decodes,
            admission_reserve=self.admission_reserve,
            bound=bound,
        )
