"""Token Throttling (gLLM), and our own variant of it whose reserve adapts.

Symbols: WP = ``load.waiting_tokens``, RD = ``load.running_decodes``, P = ``load.pipeline_depth``,
KVfree = ``load.free_fraction``.
"""

from dataclasses import dataclass
from typing import ClassVar

from nanoserve.scheduler.load import Decision, Load, check_parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenThrottling:
    """gLLM, sections 3.1 and 3.2: every micro-batch of a pipeline gets an equal share of the work there is.

    Prompt tokens (equation 3, which joins WT, equation 1, and UT, equation 2) and decodes (equation 4) are counted
    independently of each other::

        prefill = max(min(WP / T, MaxP * (KVfree - KVthresh) / (1 - KVthresh)), MinP)   0 while KVfree < KVthresh
        decodes = RD / P

    Two readings of ours: the threshold is tested first, as section 3.1.3 says and equation 3 does not; and RD / P is
    rounded up, or sequences would be left over. A prompt that alone holds blocks is let past the threshold: there is
    no decode to keep room for, and nothing would ever free a block.

    Attributes:
        iterations: T, steps over which the waiting prompt tokens are spread.
        max_prefill: MaxP, most prompt tokens of a step.
        min_prefill: MinP, fewest prompt tokens of a step while that many wait.
        threshold: KVthresh, the fraction of the blocks that prefill leaves to the running decodes.
        without_wt: ablation (section 4.5): prompt tokens follow the free blocks alone.
        without_ut: ablation: prompt tokens follow the waiting tokens alone; the threshold stays.
        without_decode_throttling: ablation: every ready decode joins the next step, as in Sarathi-Serve.
        admission_reserve: see Decision; gLLM has the threshold alone.
    """

    iterations: int = 8
    max_prefill: int = 2048
    min_prefill: int = 32
    threshold: float = 0.05
    without_wt: bool = False
    without_ut: bool = False
    without_decode_throttling: bool = False
    admission_reserve: bool = True

    def __post_init__(self) -> None:
        _check_bounds(self.iterations, self.max_prefill, self.min_prefill)
        check_parameter("threshold", self.threshold, 0, below=1)

    def decide(self, load: Load) -> Decision:
        return Decision(
            prefill_tokens=self._prefill_tokens(load),
            decodes=load.ready_decodes if self.without_decode_throttling else load.decode_share,
            admission_reserve=self.admission_reserve,
        )

    def _prefill_tokens(self, load: Load) -> int:
        if _holds_alone(load):
            return min(self.max_prefill, load.first_waiting_tokens)
        if load.free_fraction < self.threshold:
            return 0
        by_waiting = self.max_prefill if self.without_wt else -(-load.waiting_tokens // self.iterations)
        by_free = self.max_prefill if self.without_ut else _by_free(load, self.threshold, self.max_prefill)
        return _within(load, max(min(by_waiting, by_free), self.min_prefill), self.max_prefill)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveThrottling:
    """Ours: Token Throttling whose reserve and whose least prefill adapt.

    Equation 3 stays, but for two of its constants:

    * Below KVthresh prefill need not stop: it stops at the reserve R, what the running sequences are expected to grow
      by before enough of them have ended (``load.expected_growth``, from the lengths of the answers so far). That is
      less than 5 % of a large pool, so more of it is used; and more where answers are long beside the pool, so fewer
      sequences are preempted. But at most a share of the pool: idle memory costs throughput for certain, while what
      was preempted is computed again by steps that have room.
    * MinP is what a step has room for: up to ``fill`` tokens a step takes as long as with one, since it waits for the
      weights to be read (16-bit products balance at 138 tokens on an L20, 295 on an H100), and prompt tokens that fill
      it up delay nobody. They are spread over T steps as those of WT are, so that the reserve is met gently. Where
      decodes alone fill the steps, as in a large pool in overload, equation 3 rules as it does in gLLM.

    In symbols, with F the tokens that the blocks above R hold, and D = RD / P the decodes of the step::

        prefill = max(min(WP / T, MaxP * (KVfree - K) / (1 - K)), min(fill - D, F / T), MinP)    0 while KVfree < R
        R = min(expected growth, most_reserved),  K = max(KVthresh, R)

    Attributes:
        iterations: T, steps over which waiting prompt tokens and unreserved blocks are spread.
        max_prefill: MaxP, most prompt tokens of a step.
        min_prefill: MinP, fewest prompt tokens of a step while that many wait.
        threshold: KVthresh, where equation 3 has throttled prefill down to its least.
        fill: tokens of a step that take no longer than one; fewer on a CPU, 22 where it computes 280 GFLOP/s of float32
            and reads 25 GB/s.
        most_reserved: R at most, as a fraction of the blocks.
    """

    iterations: int = 8
    max_prefill: int = 2048
    min_prefill: int = 32
    threshold: float = 0.05
    fill: int = 128
    most_reserved: float = 0.1
    reads_forecast: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_bounds(self.iterations, self.max_prefill, self.min_prefill)
        check_parameter("threshold", self.threshold, 0, below=1)
        check_parameter("fill", self.fill, 0)
        check_parameter("most_reserved", self.most_reserved, 0, below=1)

    def decide(self, load: Load) -> Decision:
        decodes = load.decode_share
        return Decision(prefill_tokens=self._prefill_tokens(load, decodes), decodes=decodes)

    def _prefill_tokens(self, load: Load, decodes: int) -> int:
        if _holds_alone(load):
            return min(self.max_prefill, load.first_waiting_tokens)
        reserve = min(load.expected_growth / load.total_blocks, self.most_reserved)
        if load.free_fraction < reserve:
            return 0
        by_waiting = -(-load.waiting_tokens // self.iterations)
        by_free = _by_free(load, max(self.threshold, reserve), self.max_prefill)
        unreserved = load.free_tokens - reserve * load.total_blocks * load.block_size
        filling = min(self.fill - decodes, int(unreserved) // self.iterations)
        return _within(load, max(min(by_waiting, by_free), filling, self.min_prefill), self.max_prefill)


def _by_free(load: Load, reserve: float, max_prefill: int) -> int:
    """UT, the second part of equation 3: fewer prompt tokens, the closer the free blocks come to the reserve."""
    return int(max_prefill * (load.free_fraction - reserve) / (1 - reserve))


def _within(load: Load, tokens: int, max_prefill: int) -> int:
    """No more than a step takes, than wait, and than there are blocks for."""
    return min(tokens, max_prefill, load.waiting_tokens, load.free_tokens)


def _holds_alone(load: Load) -> bool:
    """Whether one partly computed prompt is all that runs, so that no reserve protects anybody."""
    return load.ready_prefills == 1 and load.running_decodes == 0 and load.steps_in_flight == 0


def _check_bounds(iterations: int, max_prefill: int, min_prefill: int) -> None:
    check_parameter("iterations", iterations, 1)
    check_parameter("max_prefill", max_prefill, 1)
    check_parameter("min_prefill", min_prefill, 1, up_to=max_prefill, limit="max_prefill")
