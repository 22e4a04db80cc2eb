"""The papers' own drawings, as small runs to explain: each is a few requests on a small model, in virtual time."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from nanoserve.config import ModelConfig
from nanoserve.costs import ParallelLayout, StepCosts, load_machine
from nanoserve.costs.predictor import Predictor, layout_predictors
from nanoserve.measures.workloads import RequestShape
from nanoserve.record.explanation import ExplainedRun, explain_run
from nanoserve.record.run_record import RunRecord
from nanoserve.request import Request
from nanoserve.scheduler.load import Policy
from nanoserve.simulator.pipeline import TieredTimes
from nanoserve.simulator.simulation import OtherLayout, simulate
from nanoserve.simulator.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A drawing: what it shows, the policies to compare, and requests as (arrival in seconds, prompt, answer)."""

    title: str
    policies: str
    requests: tuple[tuple[float, int, int], ...]
    layouts: tuple[str, ...]
    num_blocks: int
    host_blocks: int = 0
    hardware: str = "gllm-l20"
    num_layers: int = 28
    token_budget: int = 2048

    def run(self, name: str, policy: Policy, model: ModelConfig) -> ExplainedRun:
        """The drawing under one policy, with as many layers of this model."""
        model, machine = replace(model, num_layers=self.num_layers), load_machine(self.hardware)
        costs = [StepCosts(model, machine, ParallelLayout.parse(layout)) for layout in self.layouts]
        arrivals, prompts, answers = zip(*self.requests, strict=True)
        requests = Workload(arrivals, map(RequestShape, prompts, answers))
        blocks = [self.num_blocks] * len(costs)
        return explained_simulation(
            name, policy, requests, costs, blocks, self.host_blocks, predictors=layout_predictors(costs)
        )


_HYBRID = partial(Scenario, layouts=("T1",), hardware="apex-a10", num_layers=4, num_blocks=20, host_blocks=200)
SCENARIOS = {
    "gllm-7": Scenario(
        title="gLLM, figure 7: prompts come while others decode, on two stages",
        policies="sarathi,throttling:iterations=3",
        requests=((0.0, 32, 14),) * 4 + ((0.1, 400, 4),) * 3 + ((0.35, 400, 4),) * 5,
        layouts=("P2",),
        num_blocks=120,
    ),
    "gllm-8": Scenario(
        title="gLLM, figure 8: sixteen sequences decode on four stages",
        policies="sarathi,throttling",
        requests=((0.0, 16, 6),) * 16,
        layouts=("P4",),
        num_blocks=100,
        token_budget=128,
    ),
    "apex-2": _HYBRID(
        title="APEX, figure 2: asymmetric pipelining, two sub-batches in turn",
        policies="sarathi,neo",
        requests=((0.0, 60, 10),) * 12,
    ),
    "apex-4": _HYBRID(
        title="APEX, figure 4: asynchronous overlap, a host sequence has its token after L + 1 steps",
        policies="neo,overlap",
        requests=((0.0, 60, 10),) * 12,
    ),
    "seesaw-2": Scenario(
        title="Seesaw, figure 2: prompts first, decodes first, and as few transitions as the pool allows",
        policies="prefill-first,decode-first,seesaw",
        requests=((0.0, 60, 8),) * 12,
        layouts=("P2", "T2"),
        num_blocks=20,
        host_blocks=40,
    ),
}


def explained_simulation(
    name: str,
    policy: Policy,
    requests: Iterable[Request],
    layouts: Sequence[TieredTimes],
    num_blocks: Sequence[int],
    host_blocks: int,
    *,
    predictors: Sequence[Predictor],
    block_size: int = 16,
    max_num_seqs: int = 256,
) -> ExplainedRun:
    """A simulated run, with the KV blocks and the step times of each layout. Raises UsageError if a request can never
    run."""
    record = RunRecord(layouts[0].num_stages, keeps_tables=True)
    simulate(
        policy,
        layouts[0],
        requests,
        num_blocks=num_blocks[0],
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        observers=[record],
        host_blocks=host_blocks,
        other_layouts=list(map(OtherLayout, layouts[1:], num_blocks[1:])),
        predictors=predictors,
    )
    return explain_run(name, record, block_size, layouts[0].num_stages, lambda tokens: ("",) * len(tokens))
