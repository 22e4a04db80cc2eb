"""An engine with a host tier under a decision that a test changes as it goes."""

from dataclasses import dataclass, field
from typing import Any

from nanoserve.engine.engine import Engine
from nanoserve.request import Request, SamplingParams, SequenceUpdate
from nanoserve.scheduler.assembly import make_extensions
from nanoserve.scheduler.load import Decision, Load, Policy
from nanoserve.scheduler.optional import LayoutCapacity
from nanoserve.scheduler.plan import StepPlan
from nanoserve.scheduler.scheduler import Scheduler
from tests.fakes.host_losing_executor import HostLosingExecutor
from tests.fakes.integrity import check_integrity, host_pool
from tests.fakes.reference import expected_tokens

BLOCK_SIZE = 2
CONTEXT = 16


@dataclass
class Remote(Policy):
    """Decides what it was last told, and remembers what it saw."""

    decision: Decision
    loads: list[Load] = field(default_factory=list)

    def decide(self, load: Load) -> Decision:
        self.loads.append(load)
        return self.decision


class Bench:
    """An engine, its policy and its fake executor, with blocks of two tokens."""

    def __init__(
        self,
        *,
        num_blocks: int = 8,
        host_blocks: int = 8,
        other: int = 8,
        depth: int = 1,
        swap_delay: int = 0,
        **scheduler: Any,
    ) -> None:
        self.policy = Remote(Decision(64, 64))
        self.executor = HostLosingExecutor(
            num_blocks,
            BLOCK_SIZE,
            host_blocks=host_blocks,
            depth=depth,
            other_layouts=[other],
            swap_delay=swap_delay,
        )
        self.scheduler = Scheduler(
            self.policy,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=CONTEXT,
            pipeline_depth=depth,
            extensions=make_extensions(
                host_blocks=host_blocks, other_layouts=[LayoutCapacity(other, depth)]
            ),
            **scheduler,
        )
        self.engine = Engine(self.scheduler, self.executor, vocab_size=50)
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}

    def add(self, name: str, length: int, max_tokens: int) -> None:
        """A prompt of its own, so that nothing is shared."""
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        request = Request(name, (ord(name) % 50,) * length, params, seed=0)
        self.requests[name], self.outputs[name] = request, []
        self.engine.add(request)

    def step(self, decision: Decision | None = None) -> list[SequenceUpdate]:
        """One step, under a new decision if there is one."""
        if decision is not None:
            self.policy.decision = decision
        updates = self.engine.step()
        check_integrity(self.scheduler)
        for update in updates:
            self.outputs[update.request_id] += update.new_tokens
        return updates

    def finish(self, decision: Decision | None = None) -> None:
        """To the end; every answer is what it would have been alone, and all blocks are back."""
        if decision is not None:
            self.policy.decision = decision
        for _ in range(1000):
            if not self.engine.has_work:
                break
            self.step()
        for name, request in self.requests.items():
            assert self.outputs[name] == expected_tokens(request, max_model_len=CONTEXT)[0], name
        assert self.scheduler.pool.free_blocks == self.scheduler.pool.num_blocks
        assert host_pool(self.scheduler).free_blocks == host_pool(self.scheduler).num_blocks

    def give_up(self, name: str) -> None:
        """Abort a request; nothing more is expected of it."""
        (update,) = self.engine.stop(name)
        assert update.finished
        del self.requests[name]
        check_integrity(self.scheduler)

    @property
    def plans(self) -> list[StepPlan]:
        return self.executor.plans

    @property
    def load(self) -> Load:
        """Load that the policy saw last."""
        return self.policy.loads[-1]

    def swapped(self) -> list[str]:
        """All swaps so far, as "0 out"."""
        return [
            f"{swap.sequence} {swap.direction}" for plan in self.plans for swap in plan.host.swaps
        ]
