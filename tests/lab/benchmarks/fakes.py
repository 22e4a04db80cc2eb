"""An executor and peers whose time is a counter, so that every figure is known beforehand."""

from typing import Any

from nanoserve.engine.engine import Engine
from nanoserve.errors import RuntimeFailure
from nanoserve.lab.benchmarks.driving import EngineRun
from nanoserve.lab.benchmarks.peers.process import Prompts
from nanoserve.record.metrics import RequestTiming
from nanoserve.scheduler import make_policy
from nanoserve.scheduler.plan import Answer, StepPlan, StepResult
from nanoserve.scheduler.scheduler import Scheduler

SECONDS_PER_TOKEN = 0.5


class VirtualExecutor:
    """Answers every plan at once; its clock goes on by half a second per token of the plan."""

    max_in_flight = 1
    async_scheduling = False

    def __init__(self, *, error: str | None = None) -> None:
        self.clock = 100.0
        self.error = error
        self.plans: list[StepPlan] = []
        self.waiting: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self.waiting.append(plan)

    def collect(self, until: float | None) -> list[StepResult]:
        if not self.waiting:  # one of several engines that are asked in turn
            return []
        plan = self.waiting.pop()
        seconds = SECONDS_PER_TOKEN * sum(len(row.tokens) for row in plan.rows)
        self.clock += seconds
        answers = [
            Answer(row.sequence, error=self.error)
            if self.error
            else Answer(row.sequence, (row.sequence,))
            for row in plan.rows
            if row.sample
        ]
        return [StepResult(plan.step, tuple(answers), seconds=seconds)]

    def now(self) -> float:
        return self.clock

    def close(self) -> None:
        self.waiting.clear()


def virtual_engine(executor: VirtualExecutor, *, budget: int = 64) -> Engine:
    scheduler = Scheduler(
        make_policy("sarathi", budget), num_blocks=64, block_size=4, max_model_len=64
    )
    return Engine(scheduler, executor, vocab_size=1000)


class FakePeer:
    """Its first token comes after a second, each later one after ``pace`` seconds."""

    def __init__(self, name: str, pace: float, log: list[str] | None = None) -> None:
        self.name = name
        self.pace = pace
        self.description: dict[str, Any] = {"pace": pace}
        self.log = [] if log is None else log

    def run(self, prompts: Prompts, output_tokens: int) -> EngineRun:
        self.log.append(self.name)
        if output_tokens == 13:
            raise RuntimeFailure("thirteen tokens are too many")
        times = tuple(1.0 + self.pace * step for step in range(output_tokens))
        timings = tuple(RequestTiming(len(prompt), times) for prompt in prompts)
        return EngineRun(timings, tuple((sum(prompt),) for prompt in prompts))

    def close(self) -> None:
        """There is nothing to end."""
