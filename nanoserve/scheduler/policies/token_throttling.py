"""Token Throttling (gLLM), and our own variant of it whose reserve adapts.

WP is ``load.waiting_tokens``, RD ``load.running_decodes``, P ``load.pipeline_depth``, KVfree
``load.free_fraction``.
"""

from dataclasses import dataclass
from typing import ClassVar

from nanoserve.scheduler.load import Decision, Load, Policy, parameter

_BY_WAITING = "equation 3: #WP / #T"
_BY_FREE = "equation 3: MaxP (KVfree - KVthresh) / (1 - KVthresh)"
_AS_GOOD = 1.05
"""Fewer, larger micro-batches must be predicted faster by more than this: they leave less room for
prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Throttling(Policy):
    """Equation 3's constants T, MaxP, MinP and KVthresh, and its parts."""

    iterations: int = parameter(8, at_least=1)
    max_prefill: int = parameter(2048, at_least=1)
    min_prefill: int = parameter(32, at_least=1, up_to="max_prefill")
    threshold: float = parameter(0.05, at_least=0, below=1)

    @staticmethod
    def _runs_alone(load: Load) -> bool:
        """Whether nothing but one partly computed prompt runs: nothing decodes, and nothing else
        would free blocks."""
        return load.ready_prefills == 1 and load.running_decodes == load.steps_in_flight == 0

    def _by_waiting(self, load: Load) -> int:
        """WT, equation 1: waiting prompt tokens are spread over T steps."""
        return -(-load.waiting_tokens // self.iterations)

    def _by_free(self, load: Load, reserve: float) -> int:
        """UT, equation 2: fewer prompt tokens, the closer the free blocks come to the reserve."""
        return int(self.max_prefill * (load.free_fraction - reserve) / (1 - reserve))

    def _prefill_tokens(
        self, load: Load, wanted: int, reserve: float, term: str
    ) -> tuple[int, str]:
        """``wanted``, but at least MinP and at most what the step, the prompts and the free blocks
        hold; 0 below the reserve, unless a prompt runs alone. Also which of these bound it;
        ``term`` names what is wanted."""
        waiting, free, most = load.waiting_tokens, load.free_tokens, self.max_prefill
        if waiting == 0:
            return 0, "equation 4: #RD / P; no prompt waits"
        if load.free_fraction < reserve:
            if not self._runs_alone(load):
                return 0, "equation 3: KVfree < KVthresh, no prompt tokens"
            return min(
                most, load.first_waiting_tokens
            ), "a prompt that runs alone passes the threshold"
        tokens = min(max(wanted, self.min_prefill), most, waiting, free)
        if tokens == wanted:
            return tokens, term
        if tokens == self.min_prefill:
            return tokens, "equation 3: MinP"
        if tokens == waiting:
            return tokens, "equation 3: all #WP"
        if tokens == most:
            return tokens, "equation 3: MaxP"
        return tokens, "equation 3: the free blocks"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenThrottling(_Throttling):
    """gLLM, sections 3.1 and 3.2: every micro-batch of a pipeline gets an equal share of prompt
    tokens (equation 3) and, independently, of decodes (equation 4)::

        prefill = max(min(WP / T, MaxP * (KVfree - KVthresh) / (1 - KVthresh)), MinP)   0 while
        KVfree < KVthresh decodes = RD / P

    Our readings: the threshold is tested first, as section 3.1.3 says and equation 3 does not. RD /
    P is rounded up, or sequences would be left over. A prompt that alone holds blocks may pass the
    threshold, as nothing else would free any. The ablations of section 4.5 leave out WT (prompt
    tokens follow the free blocks alone), UT (they follow the waiting tokens alone; the threshold
    stays), or the throttling of decodes (all join, as in Sarathi-Serve).
    """

    without_wt: bool = False
    without_ut: bool = False
    without_decode_throttling: bool = False
    admission_reserve: bool = True
    """Keep a block for each running decode when a new prompt begins: ours; gLLM has the threshold
    alone."""

    def decide(self, load: Load) -> Decision:
        by_waiting = by_free = self.max_prefill
        if not self.without_wt:
            by_waiting = self._by_waiting(load)
        if not self.without_ut:
            by_free = self._by_free(load, self.threshold)
        wanted, term = by_waiting, _BY_WAITING
        if by_free < by_waiting:
            wanted, term = by_free, _BY_FREE
        prefill, bound = self._prefill_tokens(load, wanted, self.threshold, term)
        decodes = load.decode_share
        if self.without_decode_throttling:
            decodes = load.ready_decodes
        return Decision(prefill, decodes, admission_reserve=self.admission_reserve, bound=bound)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveThrottling(_Throttling):
    """Ours: Token Throttling with two constants of equation 3 adapted.

    * Prefill stops not at KVthresh but at the reserve R, the growth of running sequences expected
      before enough of them have ended. R is below 5 % of a large pool, so more of it is used, and
      above where answers are long beside the pool, so fewer are preempted. R is at most a share of
      the pool, as idle memory costs throughput.
    * MinP is what a step has room for. Up to ``fill`` tokens a step takes as long as with one,
      because it waits for the weights (16-bit products balance at 138 tokens on an L20, 295 on an
      H100), so prompt tokens that fill it up delay nothing. They are spread over T steps, like WT.
      Where decodes alone fill the steps, equation 3 rules.
    * A CPU's core does not compute while it waits for the weights: each step pays them in full.
      There a predictor of step times t says in how many steps the prompt tokens that wait and have
      room are through the P stages soonest, and, while no prompt waits, how many micro-batches of
      decodes M are best: more overlap better, but each pays the weights again, the slowest stage, a
      share q of t, sets the pace, and a stage that computes alone, which has the memory for itself,
      takes a share l of t. A decode that is ready before the others of its micro-batch waits for
      them.
    * A partly computed prompt that runs alone is computed at once, up to MaxP: there is no decode
      to delay.

    With F the tokens that the blocks above R hold, and D the decodes of the step::

        prefill = max(min(WP / T, MaxP * (KVfree - K) / (1 - K)), min(fill - D, F / T), MinP)    0
        while KVfree < R R = min(expected growth, most_reserved),  K = max(KVthresh, R) D = RD / P

    and where the weights are paid in full::

        C - D instead of min(fill - D, F / T), C = min(WP, F) / k, k from 1 to T, for which (k + P -
        1) t(C) is least D = RD / M, M from 1 to P, for which max(1, M q) (l + (1 - l) (M - 1) / (P
        - 1)) t(D) is least; M = P where a prompt waits
    """

    fill: int = parameter(128, at_least=0)
    """Tokens of a step that take no longer than one."""
    most_reserved: float = parameter(0.1, at_least=0, below=1)
    reads_forecast: ClassVar[bool] = True

    def decide(self, load: Load) -> Decision:
        if self._runs_alone(load):
            whole = min(self.max_prefill, load.first_waiting_tokens)
            return Decision(
                whole, load.decode_share, bound="ours: a prompt that runs alone delays nobody"
            )
        reserve = min(load.expected_growth / load.total_blocks, self.most_reserved)
        by_free = self._by_free(load, max(self.threshold, reserve))
        wanted, term = min(self._by_waiting(load), by_free), "equation 3 with the reserve R"
        decodes = self._decodes(load)
        room = int(load.free_tokens - reserve * load.total_blocks * load.block_size)
        filling = self._fill(load, room, decodes)
        if filling > wanted:
            wanted, term = filling, "ours: the step is filled up"
        prefill, bound = self._prefill_tokens(load, wanted, reserve, term)
        return Decision(prefill, decodes, bound=bound)

    def _fill(self, load: Load, room: int, decodes: int) -> int:
        """Prompt tokens beside this number of decodes, with ``room`` for F tokens."""
        predictor = load.predictor
        if predictor is None or predictor.overlaps:
            return min(self.fill - decodes, room // self.iterations)
        tokens = max(0, min(load.waiting_tokens, room))
        return load.chunk(tokens, range(1, self.iterations + 1)) - decodes

    def _decodes(self, load: Load) -> int:
        """D, or 0 where fewer are ready: then they wait for the others of their step."""
        predictor = load.predictor
        if predictor is None or predictor.overlaps or load.waiting_tokens:
            return load.decode_share

        def cycle(steps: int) -> float:
            rows, keys = -(-load.running_decodes // steps), load.context_tokens // steps
            # of the other stages, those that compute meanwhile
            beside = (steps - 1) / max(1, load.pipeline_depth - 1)
            shared = predictor.lone_share + beside * (1.0 - predictor.lone_share)
            slowest = max(1.0, steps * predictor.slowest_share)
            return slowest * shared * load.step_seconds(rows, keys)

        cycles = {steps: cycle(steps) for steps in range(1, load.pipeline_depth + 1)}
        as_good = _AS_GOOD * min(cycles.values())
        most = max(steps for steps, seconds in cycles.items() if seconds <= as_good)
        share = -(-load.running_decodes // most)
        if most == load.pipeline_depth:
            return load.decode_share
        if load.ready_decodes < share:
            return 0
        return share
