"""Traces with host memory and a second parallel layout, worked out by hand: every plan, row by row.

golden.py has the spelling; swaps are device>host or device<host.
"""

from dataclasses import dataclass

from nanoserve.scheduler.load import Decision, Load, Policy
from nanoserve.scheduler.optional import HostDecision
from tests.scheduler.golden import Prompt, play


class PrefillHereDecodeThere(Policy):
    """The outline of Seesaw: prompts in layout 0, parked; when none waits, decodes in layout 1."""

    def decide(self, load: Load) -> Decision:
        if load.waiting_tokens or (
            load.layouts.current == 0 and load.running_decodes + load.host.moving
        ):
            return Decision(prefill_tokens=4, decodes=0, host=HostDecision(park=True))
        return Decision(
            prefill_tokens=0,
            decodes=load.ready_decodes,
            host=HostDecision(swap_in=load.host.ready),
            layout=1,
        )


def test_prompts_are_parked_and_come_back_in_another_layout() -> None:
    prompts = [Prompt((1, 2, 3), 3), Prompt((4, 5), 2)]
    assert play(
        PrefillHereDecodeThere(), prompts, num_blocks=4, host_blocks=4, other_layouts=(4,)
    ) == [
        "step 0: begin 0 begin 1",
        # two host blocks are reserved for 1 2 3 103, two for the other
        "  0 at 0: 1 2 3 +[0, 1] *",
        "  1 at 0: 4 +[2]",
        "  0 [0, 1]>[0, 1]",
        "step 1: end 0",
        "  1 at 1: 5 *",
        "  1 [2]>[2]",
        "step 2: to layout 1 end 1",
        "step 3 in layout 1:",  # nothing but swaps: answered without a step
        "  0 [0, 1]<[0, 1]",
        "  1 [2]<[2]",
        "step 4 in layout 1: begin 0 begin 1",  # whole tables, of the new layout's blocks
        "  0 at 3: 103 +[0, 1] *",
        "  1 at 2: 102 +[2, 3] *",
        "step 5 in layout 1: end 1",
        "  0 at 4: 104 +[3] *",
    ]


@dataclass
class Then(Policy):
    """Prompts are parked; then one decision after the other, and the last for ever."""

    decisions: list[Decision]

    def decide(self, load: Load) -> Decision:
        if load.waiting_tokens or load.running_decodes or load.host.moving:
            return Decision(prefill_tokens=9, decodes=0, host=HostDecision(park=True))
        return self.decisions.pop(0) if len(self.decisions) > 1 else self.decisions[0]


def test_a_host_sequence_takes_as_many_overlapped_steps_as_there_are_layers_and_one() -> None:
    go_on = Decision(0, 0, host=HostDecision(strategy="overlap", decodes=(1, 0)))
    assert play(
        Then([go_on]),
        [Prompt((1, 2), 2), Prompt((3, 4), 2)],
        num_blocks=4,
        host_blocks=4,
        num_layers=3,
    ) == [
        "step 0: begin 0 begin 1",
        "  0 at 0: 1 2 +[0] *",
        "  1 at 0: 3 4 +[1] *",
        "  0 [0]>[0]",
        "  1 [1]>[2]",
        "step 1 overlap: end 0 end 1 begin 0",
        "  0 at 2: 102 +[0, 1] * host",
        "step 2 overlap: begin 1",  # the first advances unnamed
        "  1 at 2: 102 +[2, 3] * host",
        "step 3 overlap:",
        "step 4 overlap:",  # three layers behind it: the first has its token
        "step 5 overlap: end 0",
    ]


def test_an_asymmetric_step_finishes_first_those_that_are_under_way() -> None:
    begin_two = Decision(0, 0, host=HostDecision(strategy="overlap", decodes=(2, 0)))
    finish = Decision(0, 0, host=HostDecision(strategy="asymmetric", decodes=(1, 2)))
    prompts = [Prompt((1, 2), 2), Prompt((3, 4), 2), Prompt((5, 6), 2)]
    assert play(Then([begin_two, finish]), prompts, num_blocks=4, host_blocks=6, num_layers=3) == [
        "step 0: begin 0 begin 1 begin 2",
        "  0 at 0: 1 2 +[0] *",
        "  1 at 0: 3 4 +[1] *",
        "  2 at 0: 5 6 +[2] *",
        "  0 [0]>[0]",
        "  1 [1]>[2]",
        "  2 [2]>[4]",
        "step 1 overlap: end 0 end 1 end 2 begin 0 begin 1",
        "  0 at 2: 102 +[0, 1] * host",
        "  1 at 2: 102 +[2, 3] * host",
        "step 2 asymmetric: begin 2",
        "  0 at 3: under way * host",
        "  1 at 3: under way * host second",
        "  2 at 2: 102 +[4, 5] * host second",
    ]
