"""Engines with recurrent states on a fake executor, for tests."""

from typing import Any

from hypothesis import strategies as st

from nanoserve.engine.engine import Engine
from nanoserve.request import Request, SamplingParams, SequenceUpdate
from nanoserve.scheduler.extension import Extensions
from nanoserve.scheduler.kv import CachedColumn
from nanoserve.scheduler.load import Policy
from nanoserve.scheduler.plan import Row, StepPlan
from nanoserve.scheduler.policies.baselines import ChunkedPrefill
from nanoserve.scheduler.recurrent_state.recurrent_state import CHUNK, RecurrentState
from nanoserve.scheduler.scheduler import Scheduler
from tests.fakes.dying_executor import DyingExecutor
from tests.fakes.integrity import check_integrity

STATES = st.fixed_dictionaries(
    {"state_slots": st.integers(1, 12), "state_chunk": st.sampled_from([1, 2, 3, 4, 8])}
)
"""Few slots, often less than sequences would take, and short chunks, so that snapshots are met."""


def prefix_of(column: CachedColumn) -> tuple[int, ...]:
    """The tokens of a column and of all before it."""
    previous, tokens = column.address
    if isinstance(previous, str):
        return tokens
    return prefix_of(previous) + tokens


def check_states(engine: Engine) -> None:
    """Check blocks and slots, and that every snapshot holds the state of the prefix that leads to
    it."""
    check_integrity(engine.scheduler)
    executor, state = engine.executor, engine.scheduler.extensions.state
    if state is None or executor.dead:  # type: ignore[attr-defined]
        return  # dead: the scheduler does not know yet that all is lost
    slots = executor.states.slots  # type: ignore[attr-defined]
    for column, slot in state.pool.snapshots.items():
        assert slots[slot] == prefix_of(column), f"slot {slot} is the snapshot of another prefix"


class StatefulBench:
    """An engine of a model with recurrent states; its answers depend on what its slots hold.
    Everything is checked when it has come to its end, and after each step if it ``checks_steps``,
    which takes long with prompts of thousands of tokens."""

    def __init__(
        self,
        *,
        num_slots: int = 16,
        num_blocks: int = 1024,
        block_size: int = 16,
        chunk: int = CHUNK,
        budget: int = 512,
        policy: Policy | None = None,
        checks_steps: bool = True,
        **settings: Any,
    ) -> None:
        self.checks_steps = checks_steps
        extensions = Extensions(state=RecurrentState(num_slots, chunk=chunk))
        self.scheduler = Scheduler(
            policy or ChunkedPrefill(budget),
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=num_blocks * block_size,
            extensions=extensions,
            **settings,
        )
        self.executor = DyingExecutor(
            num_blocks,
            block_size,
            depth=self.scheduler.pipeline_depth,
            async_scheduling=self.scheduler.async_scheduling,
            state_slots=num_slots,
        )
        self.engine = Engine(self.scheduler, self.executor, vocab_size=2000)
        assert extensions.state is not None
        self.pool = extensions.state.pool
        self.names: dict[int, str] = {}

    def add(
        self, name: str, prompt: tuple[int, ...], end_tokens: tuple[int, ...] = (), **params: Any
    ) -> None:
        settings = {"temperature": 0, "max_tokens": 4, "ignore_eos": True} | params
        self.engine.add(Request(name, prompt, SamplingParams(**settings), 0, end_tokens))
        for sequence in self.scheduler.table.unfinished(name):
            self.names[sequence.sequence_id] = name

    def step(self) -> list[SequenceUpdate]:
        """Go on by a step."""
        updates = self.engine.step()
        if self.checks_steps:
            check_states(self.engine)
        return updates

    def finish(self) -> dict[str, list[int]]:
        """Go on until nothing is left to do; returns the tokens of each request's first sample."""
        tokens = dict[str, list[int]]()
        while self.engine.has_work:
            for update in self.step():
                if update.index == 0:
                    tokens.setdefault(update.request_id, []).extend(update.new_tokens)
        check_states(self.engine)
        assert self.pool.free_slots == self.pool.num_slots
        return tokens

    @property
    def plans(self) -> list[StepPlan]:
        return self.executor.plans

    def rows(self, name: str) -> list[Row]:
        """The rows of a request, in order."""
        return [row for plan in self.plans for row in plan.rows if self.names[row.sequence] == name]
