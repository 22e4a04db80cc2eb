"""Schedulers that follow the policies that ``--policy`` names. No torch."""

from collections.abc import Callable
from dataclasses import dataclass

from nanoserve.benchmarks.policy_names import named_policy
from nanoserve.scheduler.plan import Executor
from nanoserve.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineScheduling:
    """Settings that the schedulers of all engines and policies share."""

    num_blocks: int
    """KV blocks; every engine has the same number, so that none has more to work with."""
    block_size: int
    max_model_len: int
    max_num_seqs: int
    token_budget: int
    """Most tokens of a step."""

    def maker(self, policy: str, executor: Executor) -> Callable[[], Scheduler]:
        """Makes a new scheduler that follows this policy on this executor. Prompts are random: nothing is shared."""
        return lambda: Scheduler(
            named_policy(policy, self.token_budget),
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            prefix_caching=False,
            pipeline_depth=1 if executor.feeds_tokens else executor.max_in_flight,
            feeds_tokens=executor.feeds_tokens,
        )
