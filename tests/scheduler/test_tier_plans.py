"""Traces with host memory and a second parallel layout, worked out by hand: every plan, row by row.

Blocks hold 2 tokens. The "model" answers token ``100 + position``. Swaps are written device>host or device<host.
"""

from dataclasses import dataclass

from nanoserve.engine import Engine
from nanoserve.request import Request, SamplingParams
from nanoserve.scheduler.layouts import LayoutCapacity
from nanoserve.scheduler.load import Decision, Load, Policy
from nanoserve.scheduler.plan import StepPlan
from nanoserve.scheduler.scheduler import Scheduler
from tests.fakes.memory_checking_executor import MemoryCheckingExecutor

Prompt = tuple[tuple[int, ...], int]
"""Its tokens, and how many are to be answered."""


def run(
    policy: Policy, prompts: list[Prompt], *, num_blocks: int, host_blocks: int, num_layers: int = 2, other: int = 4
) -> list[str]:
    executor = MemoryCheckingExecutor(
        num_blocks,
        2,
        host_blocks=host_blocks,
        other_layouts=[other],
        num_layers=num_layers,
        model=lambda prefix, begin: 100 + len(prefix),
    )
    scheduler = Scheduler(
        policy,
        num_blocks=num_blocks,
        block_size=2,
        max_model_len=8,
        host_blocks=host_blocks,
        other_layouts=[LayoutCapacity(other)],
    )
    engine = Engine(scheduler, executor, vocab_size=200)
    for name, (prompt, max_tokens) in zip("ABCDEF", prompts, strict=False):
        engine.add(Request(name, prompt, SamplingParams(temperature=0, max_tokens=max_tokens), seed=0))
    while engine.has_work:
        engine.step()
        scheduler.check_integrity()
    return [line for plan in executor.plans for line in _spell_out(plan)]


def _spell_out(plan: StepPlan) -> list[str]:
    """One line per plan, then one per swap and row; rows of the host say so, and their sub-batch if it is 1."""
    end = "".join(f" end {sequence}" for sequence in plan.end)
    begin = "".join(f" begin {entry.sequence}" for entry in plan.begin)
    strategy = "" if plan.strategy == "device" else f" {plan.strategy}"
    transition = "" if plan.transition is None else f" to layout {plan.transition}"
    lines = [f"step {plan.step} in layout {plan.layout}{strategy}:{transition}{end}{begin}"]
    for swap in plan.swaps:
        arrow = ">" if swap.direction == "out" else "<"
        lines.append(f"  {swap.sequence} {list(swap.device_blocks)}{arrow}{list(swap.host_blocks)}")
    for row in plan.rows:
        ids = "".join(f" {token}" for token in row.tokens) or " under way"
        blocks = f" +{list(row.new_blocks)}" if row.new_blocks else ""
        tier = "" if row.tier == "device" else f" host{' second' if row.sub_batch else ''}"
        lines.append(f"  {row.sequence} at {row.start}:{ids}{blocks}{' *' if row.sample else ''}{tier}")
    return lines


class PrefillHereDecodeThere:
    """The outline of Seesaw: prompts in layout 0, parked; when none waits, decodes in layout 1."""

    def decide(self, load: Load) -> Decision:
        if load.waiting_tokens or (load.layout == 0 and load.running_decodes + load.moving):
            return Decision(prefill_tokens=4, decodes=0, park=True)
        return Decision(prefill_tokens=0, decodes=load.ready_decodes, swap_in=load.ready_host, layout=1)


def test_prompts_are_parked_and_come_back_in_another_layout() -> None:
    assert run(PrefillHereDecodeThere(), [((1, 2, 3), 3), ((4, 5), 2)], num_blocks=4, host_blocks=4) == [
        "step 0 in layout 0: begin 0 begin 1",
        "  0 at 0: 1 2 3 +[0, 1] *",  # two host blocks are reserved for 1 2 3 103, two for the other
        "  1 at 0: 4 +[2]",
        "step 1 in layout 0: end 0",
        "  0 [0, 1]>[0, 1]",
        "  1 at 1: 5 *",
        "step 2 in layout 0: end 1",  # nothing but a swap: answered without a step
        "  1 [2]>[2]",
        "step 3 in layout 0: to layout 1",
        "step 4 in layout 1:",
        "  0 [0, 1]<[0, 1]",
        "  1 [2]<[2]",
        "step 5 in layout 1: begin 0 begin 1",  # whole tables, of the new layout's blocks
        "  0 at 3: 103 +[0, 1] *",
        "  1 at 2: 102 +[2, 3] *",
        "step 6 in layout 1: end 1",
        "  0 at 4: 104 +[3] *",
    ]


@dataclass
class Then:
    """Prompts are parked; then one decision after the other, and the last for ever."""

    decisions: list[Decision]

    def decide(self, load: Load) -> Decision:
        if load.waiting_tokens or load.running_decodes or load.moving:
            return Decision(prefill_tokens=9, decodes=0, park=True)
        return self.decisions.pop(0) if len(self.decisions) > 1 else self.decisions[0]


def test_a_host_sequence_takes_as_many_overlapped_steps_as_there_are_layers_and_one() -> None:
    go_on = Decision(0, 0, strategy="overlap", host_decodes=(1, 0))
    assert run(Then([go_on]), [((1, 2), 2), ((3, 4), 2)], num_blocks=4, host_blocks=4, num_layers=3) == [
        "step 0 in layout 0: begin 0 begin 1",
        "  0 at 0: 1 2 +[0] *",
        "  1 at 0: 3 4 +[1] *",
        "step 1 in layout 0: end 0 end 1",
        "  0 [0]>[0]",
        "  1 [1]>[2]",
        "step 2 in layout 0 overlap: begin 0",
        "  0 at 2: 102 +[0, 1] * host",
        "step 3 in layout 0 overlap: begin 1",  # the first advances unnamed
        "  1 at 2: 102 +[2, 3] * host",
        "step 4 in layout 0 overlap:",
        "step 5 in layout 0 overlap:",  # three layers behind it: the first has its token
        "step 6 in layout 0 overlap: end 0",
    ]


def test_an_asymmetric_step_finishes_first_those_that_are_under_way() -> None:
    begin_two = Decision(0, 0, strategy="overlap", host_decodes=(2, 0))
    finish = Decision(0, 0, strategy="asymmetric", host_decodes=(1, 2))
    prompts = [((1, 2), 2), ((3, 4), 2), ((5, 6), 2)]
    assert run(Then([begin_two, finish]), prompts, num_blocks=4, host_blocks=6, num_layers=3) == [
        "step 0 in layout 0: begin 0 begin 1 begin 2",
        "  0 at 0: 1 2 +[0] *",
        "  1 at 0: 3 4 +[1] *",
        "  2 at 0: 5 6 +[2] *",
        "step 1 in layout 0: end 0 end 1 end 2",
        "  0 [0]>[0]",
        "  1 [1]>[2]",
        "  2 [2]>[4]",
        "step 2 in layout 0 overlap: begin 0 begin 1",
        "  0 at 2: 102 +[0, 1] * host",
        "  1 at 2: 102 +[2, 3] * host",
        "step 3 in layout 0 asymmetric: begin 2",
        "  0 at 3: under way * host",
        "  1 at 3: under way * host second",
        "  2 at 2: 102 +[4, 5] * host second",
    ]
