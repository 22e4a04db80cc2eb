"""The papers' own drawings, as small runs to explain: each is a few requests on a small model, in
virtual time."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from nanoserve.config.published_shapes import load_shape
from nanoserve.costs.hardware import load_machine
from nanoserve.costs.predictor import layout_predictors
from nanoserve.costs.step_costs import StepCosts
from nanoserve.lab.explanation import ExplainedRun, explain_run
from nanoserve.lab.simulator.pipeline import TieredTimes
from nanoserve.lab.simulator.simulation import simulate
from nanoserve.lab.simulator.workload import Workload
from nanoserve.layout import ParallelLayout
from nanoserve.record.run_record import RunRecord
from nanoserve.request import Request, RequestShape
from nanoserve.scheduler.load import Policy
from nanoserve.scheduler.predictor import Predictor
from nanoserve.utils.files import read_toml

_MODEL = "qwen2.5-14b"


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A drawing: what it shows, the policies to compare, and the requests, as the file spells
    them."""

    title: str
    policies: str
    requests: tuple[tuple[float, int, int, int], ...]
    layouts: tuple[str, ...]
    num_blocks: int
    host_blocks: int = 0
    hardware: str = "gllm-l20"
    num_layers: int = 28
    token_budget: int = 2048

    def run(self, name: str, policy: Policy) -> ExplainedRun:
        """Run the drawing under one policy, with ``num_layers`` layers of a published model."""
        model, machine = (
            replace(load_shape(_MODEL), num_layers=self.num_layers),
            load_machine(self.hardware),
        )
        costs = [StepCosts(model, machine, ParallelLayout.parse(layout)) for layout in self.layouts]
        times, shapes = [], []
        for time, inputs, outputs, number in self.requests:
            times += [time] * number
            shapes += [RequestShape(inputs, outputs)] * number
        requests = Workload(iter(times), iter(shapes))
        blocks, predictors = [self.num_blocks] * len(costs), layout_predictors(costs)
        return explained_simulation(
            name, policy, requests, costs, blocks, self.host_blocks, predictors
        )


SCENARIOS = msgspec.convert(
    read_toml(Path(__file__).with_name("scenarios.toml")), dict[str, Scenario]
)


def explained_simulation(
    name: str,
    policy: Policy,
    requests: Iterable[Request],
    layouts: Sequence[TieredTimes],
    num_blocks: Sequence[int],
    host_blocks: int,
    predictors: Sequence[Predictor],
    windows: tuple[int, ...] = (0,),
    *,
    block_size: int = 16,
    max_num_seqs: int = 256,
) -> ExplainedRun:
    """A simulated run, with the KV blocks and the step times of each layout. Raises UsageError if a
    request can never run."""
    record = RunRecord(layouts[0].num_stages, keeps_tables=True)
    simulate(
        policy,
        layouts[0],
        requests,
        num_blocks=num_blocks[0],
        block_size=block_size,
        windows=windows,
        max_num_seqs=max_num_seqs,
        observers=[record],
        host_blocks=host_blocks,
        other_layouts=list(zip(layouts[1:], num_blocks[1:], strict=True)),
        predictors=predictors,
    )
    return explain_run(
        name, record, block_size, layouts[0].num_stages, lambda tokens: ("",) * len(tokens)
    )
