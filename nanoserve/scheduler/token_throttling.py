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
    """

    iterations: int = 8
    max_prefill: int = 2048
    min_prefill: int = 32
    threshold: float = 0.05
    without_wt: bool = False
    without_ut: bool = False
    without_decode_throttling: bool = False

    def __post_init__(self) -> None:
        _check_bounds(self.iterations, self.max_prefill, self.min_prefill)
        check_parameter("threshold", self.threshold, 0, below=1)

    def decide(self, load: Load) -> Decision:
        return Decision(
            prefill_tokens=self._prefill_tokens(load),
            decodes=load.ready_decodes if self.without_decode_throttling else load.decode_share,
        )

    def _prefill_tokens(self, load: Load) -> int:
        if _holds_alone(load):
            return min(self.max_prefill, load.first_waiting_tokens)
        if load.free_fraction < self.threshold:
            return 0
        by_waiting = self.max_prefill if self.without_wt else -(-load.waiting_tokens // self.iterations)
        above_threshold = (load.free_fraction - self.threshold) / (1 - self.threshold)
        by_free = self.max_prefill if self.without_ut else int(self.max_prefill * above_threshold)
        tokens = min(max(min(by_waiting, by_free), self.min_prefill), self.max_prefill)
        return min(tokens, load.waiting_tokens, load.free_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveThrottling:
    """Ours: Token Throttling whose threshold is what the running sequences are expected to grow by.

    A fixed threshold is too small where answers are long beside the pool (running sequences are preempted, and what
    they had is computed again) and idle memory where answers are short. Here the reserve is ``load.expected_growth``,
    the Scheduler's estimate from the lengths of the answers that have ended so far; KVthresh is that over all blocks.

    Attributes:
        iterations: T, steps over which the waiting prompt tokens are spread.
        max_prefill: MaxP, most prompt tokens of a step.
        min_prefill: MinP, fewest prompt tokens of a step while that many wait.
    """

    iterations: int = 8
    max_prefill: int = 2048
    min_prefill: int = 32

    reads_forecast: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _check_bounds(self.iterations, self.max_prefill, self.min_prefill)

    def decide(self, load: Load) -> Decision:
        throttling = TokenThrottling(
            iterations=self.iterations,
            max_prefill=self.max_prefill,
            min_prefill=self.min_prefill,
            threshold=load.expected_growth / load.total_blocks,
        )
        return throttling.decide(load)


def _holds_alone(load: Load) -> bool:
    """Whether one partly computed prompt is all that runs, so that no reserve protects anybody."""
    return load.ready_prefills == 1 and load.running_decodes == 0 and load.steps_in_flight == 0


def _check_bounds(iterations: int, max_prefill: int, min_prefill: int) -> None:
    check_parameter("iterations", iterations, 1)
    check_parameter("max_prefill", max_prefill, 1)
    check_parameter("min_prefill", min_prefill, 1, up_to=max_prefill, limit="max_prefill")
