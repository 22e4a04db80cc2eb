"""An engine process without a model: it starts in a moment, answers fast, and dies when it is told to."""

import time
from collections.abc import Sequence
from pathlib import Path

from nanoserve.engine import Engine
from nanoserve.errors import ModelError
from nanoserve.request import SamplingParams
from nanoserve.scheduler.baselines import ChunkedPrefill
from nanoserve.scheduler.plan import Begin, StepPlan, StepResult
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.server import engine_process
from nanoserve.server.messages import EngineStart, Ready
from tests.fakes.memory_checking_executor import MemoryCheckingExecutor, next_token

PROGRAM = "from tests.server.fake_engine import main; main()"
BROKEN = "broken"
"""A file of this name in the model's directory keeps the engine from starting."""
POISON_TOKEN = 666
"""A prompt that begins with it kills the engine."""
CONTEXT = 512
VOCAB_SIZE = 4096
END_TOKENS = (0, 1)
BLOCK_SIZE = 16
STEP_SECONDS = 0.004


def word(prefix: Sequence[int], begin: Begin) -> int:
    """Tokens of the storyteller's vocabulary that are ordinary text."""
    return 300 + next_token(prefix, begin, vocab_size=200)


class PacedExecutor(MemoryCheckingExecutor):
    """Takes a while for each step, on the real clock."""

    def submit(self, plan: StepPlan) -> None:
        if any(begin.tokens[0] == POISON_TOKEN for begin in plan.begin):
            raise MemoryError("poisoned")
        super().submit(plan)
        self.plans.clear()

    def collect(self, until: float | None) -> list[StepResult]:
        time.sleep(STEP_SECONDS)
        return super().collect(until)

    def now(self) -> float:
        return time.monotonic()


def build(start: EngineStart, mailbox: engine_process.Mailbox) -> Engine:
    if start.directory is not None and (Path(start.directory) / BROKEN).exists():
        raise ModelError("the weights are broken")
    config = start.config
    num_blocks = (config.kv_cache_memory or 256 * BLOCK_SIZE) // BLOCK_SIZE  # a token counts as a byte
    scheduler = Scheduler(
        ChunkedPrefill(256),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=CONTEXT,
        max_num_seqs=config.max_num_seqs,
    )
    executor = PacedExecutor(num_blocks, BLOCK_SIZE, model=word)
    mailbox.send(Ready(CONTEXT, VOCAB_SIZE, END_TOKENS, SamplingParams(), config.max_num_seqs))
    return Engine(scheduler, executor, vocab_size=VOCAB_SIZE)


def main() -> None:
    engine_process.main(build)
