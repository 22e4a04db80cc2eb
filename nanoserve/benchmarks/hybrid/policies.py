"""The compared variants: policies on one engine, whose schedulers have the KV memory of the case. No torch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from nanoserve.benchmarks.hybrid.cases import HybridCase
from nanoserve.benchmarks.policy_names import named_policy, parse_policies
from nanoserve.costs.predictor import Predictor
from nanoserve.errors import UsageError
from nanoserve.scheduler.plan import Executor
from nanoserve.scheduler.policies import POLICIES
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.simulator.pipeline import TieredTimes

DEVICE_ONLY = "sarathi"
"""The policy that the others are compared with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridEngine:
    """An engine that is ready, started once for all runs."""

    executor: Executor
    """An executor with host memory, and a CPU that attends there."""
    host_blocks: int
    """KV blocks in host memory."""
    max_model_len: int
    """Longest sequence in tokens."""
    measure_times: Callable[[], TieredTimes]
    """Measures what things take now, for the simulator."""
    predictor: Predictor
    """Predictor from the engine's profile, for the policies; nothing corrects it."""
    make_predictor: Callable[[], Predictor]
    """Makes a predictor that corrects itself, as policies use it."""
    host_threads: int
    """CPU threads that compute attention."""
    compiled: bool
    """Whether its layers run compiled."""
    close: Callable[[], None]


@dataclass(frozen=True, slots=True)
class HybridVariant:
    """A policy in a case."""

    policy: str
    """Name of the policy."""
    make_scheduler: Callable[[], Scheduler]
    make_simulated: Callable[[], Scheduler]
    """Makes a scheduler for the simulator, with the uncorrected predictor of the profile."""

    @property
    def name(self) -> str:
        return self.policy


class HybridScheduling:
    """Makes the schedulers. Each policy's predictor goes on learning from run to run, as that of a server does.

    Args:
        policies: names, perhaps with parameters; the first one is what the others are held against.
        token_budget: of a step.
    """

    def __init__(
        self, engine: HybridEngine, policies: Sequence[str], *, block_size: int, max_num_seqs: int, token_budget: int
    ) -> None:
        self._engine = engine
        self._predictors = {policy: engine.make_predictor() for policy in policies}
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._token_budget = token_budget

    def variants(self, case: HybridCase) -> Iterator[HybridVariant]:
        """Every policy with the case's KV memory."""
        feeds = self._engine.executor.feeds_tokens
        for policy, predictor in self._predictors.items():
            yield HybridVariant(
                policy,
                self._maker(case, policy, predictor, feeds_tokens=feeds),
                self._maker(case, policy, self._engine.predictor, feeds_tokens=False),
            )

    def _maker(
        self, case: HybridCase, policy: str, predictor: Predictor, *, feeds_tokens: bool
    ) -> Callable[[], Scheduler]:
        """Prompts are random: nothing is shared."""
        return lambda: Scheduler(
            named_policy(policy, self._token_budget),
            num_blocks=case.num_blocks,
            block_size=self._block_size,
            max_model_len=self._engine.max_model_len,
            max_num_seqs=self._max_num_seqs,
            prefix_caching=False,
            host_blocks=self._engine.host_blocks if attends_on_host(policy) else 0,
            predictors=(predictor,),
            feeds_tokens=feeds_tokens,
        )


def attends_on_host(policy: str) -> bool:
    """Whether the policy of that name, perhaps with parameters, has the CPU attend."""
    return POLICIES[policy.partition(":")[0]].attends_on_host


def parse_contenders(text: str, token_budget: int) -> tuple[str, ...]:
    """Names separated by commas, the device alone before those that use the CPU: "sarathi,neo,overlap:cohorts=4".

    Raises:
        UsageError: for an unknown name or parameter, one out of its range, or another order.
    """
    names = tuple(parse_policies(text, token_budget))
    if attends_on_host(names[0]):
        raise UsageError(f"--policy begins with one that leaves the CPU alone, as {DEVICE_ONLY}, not {names[0]}")
    return names
