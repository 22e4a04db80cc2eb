"""An engine process without a model: it starts in a moment, answers fast, and dies when it is told
to."""

import time
from collections.abc import Sequence

from nanoserve.engine.engine import Engine
from nanoserve.errors import ModelError, WorkersFailed
from nanoserve.request import SamplingParams
from nanoserve.scheduler.plan import Begin, StepPlan, StepResult
from nanoserve.scheduler.policies.baselines import ChunkedPrefill
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.server import engine_process
from nanoserve.server.messages import Command, EngineFacts, EngineStart, Mailbox
from tests.fakes.dying_executor import CAUSE, DyingExecutor
from tests.fakes.memory_checking_executor import next_token

BROKEN = "broken"
"""A file of this name in the model's directory keeps the engine from starting."""
POISON_TOKEN = 4094
"""A prompt that begins with it kills the engine. No prompt that is drawn by lot does: those end at
4000."""
WORKER_POISON_TOKEN = 4095
"""A prompt that begins with it kills workers as often as its second token says; at the third time
none come again."""
MAX_LOSSES = 3
WORKER_START_SECONDS = 0.5
CONTEXT = 512
VOCAB_SIZE = 4096
END_TOKENS = (0, 1)
BLOCK_SIZE = 16
STEP_SECONDS = 0.004


def word(prefix: Sequence[int], begin: Begin) -> int:
    """Tokens of the storyteller's vocabulary that are ordinary text."""
    return 300 + next_token(prefix, begin, vocab_size=200)


class PacedExecutor(DyingExecutor):
    """Takes a while for each step, and for new workers to come, on the real clock."""

    _workers_come = 0.0

    def submit(self, plan: StepPlan) -> None:
        for begin in plan.begin:
            if begin.tokens[0] == POISON_TOKEN:
                raise MemoryError("poisoned")
            if begin.tokens[0] == WORKER_POISON_TOKEN and self.losses < begin.tokens[1]:
                self.die()
        super().submit(plan)
        self.plans.clear()

    def die(self) -> None:
        super().die()
        self._workers_come = self.now() + WORKER_START_SECONDS

    def collect(self, until: float | None) -> list[StepResult]:
        if self.losses == MAX_LOSSES:
            raise WorkersFailed(f"the workers died {MAX_LOSSES} times; the last time {CAUSE}")
        time.sleep(STEP_SECONDS)
        if self.dead or self.now() >= self._workers_come:
            return super().collect(until)
        assert until is not None, "whoever waits for ever hears no command"
        time.sleep(max(0.0, min(until, self._workers_come) - self.now()))
        return []

    def now(self) -> float:
        return time.monotonic()


def build(start: EngineStart, mailbox: Mailbox[Command]) -> Engine:
    if start.model.directory is not None and (start.model.directory / BROKEN).exists():
        raise ModelError("the weights are broken")
    config = start.config
    # a token counts as a byte
    num_blocks = (config.kv_cache_memory or 256 * BLOCK_SIZE) // BLOCK_SIZE
    scheduler = Scheduler(
        ChunkedPrefill(256),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=CONTEXT,
        max_num_seqs=config.max_num_seqs,
    )
    executor = PacedExecutor(num_blocks, BLOCK_SIZE, model=word)
    mailbox.send(
        EngineFacts(CONTEXT, VOCAB_SIZE, END_TOKENS, SamplingParams(), config.max_num_seqs)
    )
    return Engine(scheduler, executor, vocab_size=VOCAB_SIZE)


def main() -> None:
    engine_process.main(build)
