"""Small traces and their plans in a spelling that can be followed by hand.

Blocks hold 2 tokens. The "model" answers token ``100 + position``, so a sequence reads 1 2 3 103
104 105.

One trace shows all policies: four requests on seven device blocks, eight in host memory, eight
prompt tokens a step:

    sequence 0: 6 prompt tokens, 6 to answer        1: 4, 3     2: 4, 3, both come before step 1
        3: 2, 2, step 5

A prompt takes a block for every two of its tokens, and the Scheduler begins it only if one more is
free for each running decode to grow into. Parked in host memory it also takes room for its first
answer: 4, 3, 3 and 2 blocks.

Symbols in the comments, as in the policies: WP, prompt tokens that wait; RD, running decodes;
growth, the blocks by which what runs is expected to grow. No answer has ended when these begin, so
each is taken to be as long as its prompt, up to its limit: 6, 3, 3 and 2 tokens. That is renewed at
step 16 and when nothing runs; in between, who begins on the device is added, and nobody is taken
away.

The predictor's seconds of one of four layers: linear part Tlin = 1 whatever the rows; attention of
the device 0.1 a key and 3 a prompt token; of the CPU, 2 and 1 a key. Moving a token takes 0.1 s,
changing the layout 1 s.
"""

from dataclasses import dataclass

from nanoserve.engine.engine import Engine
from nanoserve.request import Request, SamplingParams
from nanoserve.scheduler import make_policy
from nanoserve.scheduler.assembly import make_extensions
from nanoserve.scheduler.load import Policy
from nanoserve.scheduler.optional import LayoutCapacity
from nanoserve.scheduler.plan import StepPlan
from nanoserve.scheduler.predictor import Predictor
from nanoserve.scheduler.scheduler import Scheduler
from tests.fakes.integrity import check_integrity
from tests.fakes.linear_predictor import LinearPredictor
from tests.fakes.memory_checking_executor import MemoryCheckingExecutor

BLOCK_SIZE = 2


@dataclass(frozen=True)
class Prompt:
    """A greedy request.

    Attributes:
        tokens: the prompt.
        answers: how many tokens are to be answered.
        n: samples.
        at: it comes when so many plans have been made.
    """

    tokens: tuple[int, ...]
    answers: int
    n: int = 1
    at: int = 0


TRACE = [
    Prompt((1,) * 6, 6),
    Prompt((2,) * 4, 3, at=1),
    Prompt((3,) * 4, 3, at=1),
    Prompt((4,) * 2, 2, at=5),
]
PREDICTOR = LinearPredictor(
    num_layers=4,
    linear=1.0,
    key=0.1,
    prompt_token=3.0,
    host_key=1.0,
    exchange=2.0,
    swap_token=0.1,
    transition=1.0,
)


def plans_of(
    policy: str,
    *,
    budget: int = 8,
    depth: int = 1,
    predictor: Predictor | None = PREDICTOR,
    **parameters: float,
) -> list[str]:
    """Spell the plans that a policy makes of the trace; one that knows no host memory, second layout or
    predictor ignores them."""
    return play(
        make_policy(policy, budget, parameters),
        TRACE,
        num_blocks=7,
        depth=depth,
        host_blocks=8,
        other_layouts=(7,),
        predictor=predictor,
        num_layers=PREDICTOR.num_layers,
    )


def play(
    policy: Policy,
    prompts: list[Prompt],
    *,
    num_blocks: int,
    depth: int = 1,
    async_scheduling: bool = False,
    host_blocks: int = 0,
    other_layouts: tuple[int, ...] = (),
    predictor: Predictor | None = None,
    num_layers: int = 2,
) -> list[str]:
    """All plans until every prompt, A, B, C and so on, has its answers.

    Args:
        num_blocks: on the device in layout 0, and in ``other_layouts`` the others.
        depth: plans in flight at most.
        async_scheduling: two may be, and a decode may be in both.
        predictor: for the policy, the same in every layout.
        num_layers: plans that a token takes under overlap, but for the one it begins in.
    """
    executor = MemoryCheckingExecutor(
        num_blocks,
        BLOCK_SIZE,
        host_blocks=host_blocks,
        depth=depth,
        async_scheduling=async_scheduling,
        other_layouts=other_layouts,
        num_layers=num_layers,
        model=lambda prefix, begin: 100 + len(prefix),
    )
    scheduler = Scheduler(
        policy,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=22,
        pipeline_depth=depth,
        async_scheduling=async_scheduling,
        extensions=make_extensions(
            host_blocks=host_blocks,
            other_layouts=[LayoutCapacity(blocks, depth) for blocks in other_layouts],
        ),
        predictors=() if predictor is None else [predictor] * (1 + len(other_layouts)),
    )
    engine = Engine(scheduler, executor, vocab_size=200)
    to_come = dict(zip("ABCDEF", prompts, strict=False))
    while engine.has_work or to_come:
        for name, prompt in list(to_come.items()):
            if prompt.at <= len(executor.plans):
                params = SamplingParams(temperature=0, max_tokens=prompt.answers, n=prompt.n)
                engine.add(Request(name, to_come.pop(name).tokens, params, seed=0))
        assert engine.has_work, "everything has ended before the next prompt comes"
        engine.step()
        check_integrity(scheduler)
    assert scheduler.forced_steps == 0, "no decision moved anything"
    return [line for plan in executor.plans for line in _spell_out(plan)]


def _spell_out(plan: StepPlan) -> list[str]:
    """One line per plan, then one per swap, device>host or device<host, and one per row; swaps that
    follow their rows come behind these.

    A row is its sequence, first position, ids or ``placeholder``, blocks added, * if it is sampled,
    and whether it is on the host; there ``second`` says that it is in sub-batch 1.
    """
    layout = f" in layout {plan.layouts.current}" if plan.layouts.current else ""
    strategy = "" if plan.host.strategy == "device" else f" {plan.host.strategy}"
    transition = "" if plan.layouts.transition is None else f" to layout {plan.layouts.transition}"
    end = "".join(f" end {sequence}" for sequence in plan.end)
    begin = "".join(f" begin {entry.sequence}" for entry in plan.begin)
    copies = "".join(f" copy {copy.source}>{copy.target}" for copy in plan.copies)
    lines = [f"step {plan.step}{layout}{strategy}:{transition}{end}{begin}{copies}"]
    swaps: dict[bool, list[str]] = {False: [], True: []}
    for swap in plan.host.swaps:
        arrow = ">" if swap.direction == "out" else "<"
        line = f"  {swap.sequence} {list(swap.device_blocks)}{arrow}{list(swap.host_blocks)}"
        swaps[swap.after_row].append(line)
    lines += swaps[False]
    for row in plan.rows:
        ids = (
            " placeholder"
            if row.placeholder
            else "".join(f" {token}" for token in row.tokens) or " under way"
        )
        blocks = f" +{list(row.new_blocks)}" if row.new_blocks else ""
        tier = "" if row.host is None else f" host{' second' if row.host.sub_batch else ''}"
        lines.append(
            f"  {row.sequence} at {row.start}:{ids}{blocks}{' *' if row.sample else ''}{tier}"
        )
    return lines + swaps[True]
