"""Random lives with a host tier, several parallel layouts and draft tokens, perhaps of workers that
die, and policies for them."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial

from hypothesis import strategies as st

from nanoserve.engine.engine import Engine
from nanoserve.scheduler.assembly import make_extensions
from nanoserve.scheduler.load import Decision, Load, Policy
from nanoserve.scheduler.optional import HostDecision, LayoutCapacity
from nanoserve.scheduler.recurrent_state.recurrent_state import RecurrentState
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.scheduler.speculation.draft_proposer import DraftProposer
from nanoserve.scheduler.windows import most_tokens
from nanoserve.scheduler.work import Strategy
from tests.fakes.host_losing_executor import HostLosingExecutor
from tests.fakes.integrity import host_pool
from tests.scheduler.drafters import DRAFTERS
from tests.scheduler.lives import check_outputs, live
from tests.scheduler.states import check_states

COUNTS = st.sampled_from([0, 0, 1, 1, 2, 9])


DECISIONS = st.builds(
    Decision,
    prefill_tokens=st.sampled_from([0, 1, 3, 8, 64]),
    decodes=COUNTS,
    whole_prompts=st.booleans(),
    host=st.builds(
        HostDecision,
        strategy=st.sampled_from(["device", "asymmetric", "overlap"]),
        decodes=st.tuples(COUNTS, COUNTS),
        swap_out=COUNTS,
        swap_in=COUNTS,
        park=st.booleans(),
        preempt=st.booleans(),
    ),
    layout=st.sampled_from([0, 0, 0, 1, 2]),
    draft_tokens=st.sampled_from([None, None, 0, 1, 3]),
)
DECIDED = st.lists(DECISIONS, min_size=1, max_size=6)


@dataclass
class AtRandom(Policy):
    """Answers with one decision after the other, round and round, whatever the load."""

    decisions: list[Decision]
    asked: int = 0

    def decide(self, load: Load) -> Decision:
        self.asked += 1
        return self.decisions[self.asked % len(self.decisions)]


@dataclass(frozen=True)
class AlsoUsingTheHost(Policy):
    """A policy's decision, and what two tiers add to it: prompts are parked, half of the host
    sequences decode."""

    inner: Policy

    def decide(self, load: Load) -> Decision:
        decision = self.inner.decide(load)
        halves = (load.host.ready // 2, load.host.ready // 4)
        return replace(
            decision,
            host=replace(
                decision.host,
                strategy="overlap" if load.free_blocks % 2 else "asymmetric",
                decodes=halves,
                swap_in=load.host.ready // 2,
                park=load.free_fraction < 0.5,
                preempt=True,
            ),
        )


@dataclass(frozen=True)
class Times:
    """A Predictor with one time for everything of a kind; seconds."""

    linear: float
    attention: float
    host_attention: float
    moving: float
    num_layers: int = 2
    slowest_share: float = 0.5
    lone_share: float = 1.0
    overlaps: bool = False

    def linear_seconds(self, tokens: int) -> float:
        return self.linear * (10 + tokens)

    def attention_seconds(self, context_tokens: int) -> float:
        return self.attention * context_tokens

    def prefill_attention_seconds(self, tokens: int) -> float:
        return self.attention * tokens

    def host_attention_seconds(self, sequences: int, context_tokens: int) -> float:
        return self.host_attention * (sequences + context_tokens)

    def step_overhead_seconds(self, rows: int = 1) -> float:
        return 0.0

    def slowdown(self, strategy: Strategy) -> float:
        return 1.0

    def swap_seconds(self, context_tokens: int) -> float:
        return self.moving * context_tokens

    def transition_seconds(self, layout: int) -> float:
        return self.moving * 100


SECONDS = st.sampled_from([0.01, 1.0, 30.0])


TIERS = st.fixed_dictionaries(
    {
        "host_blocks": st.sampled_from([0, 1, 3, 8, 40]),
        "other_layouts": st.lists(
            st.builds(LayoutCapacity, st.integers(3, 14), st.integers(1, 3)), max_size=2
        ),
        "swap_delay": st.integers(0, 3),
        "num_layers": st.integers(1, 3),
        "cpu_is_done": st.lists(st.booleans(), max_size=4).map(lambda later: [True, *later]),
        "times": st.one_of(st.none(), st.builds(Times, SECONDS, SECONDS, SECONDS, SECONDS)),
        "drafter": st.sampled_from([None, None, None, *DRAFTERS]),
        "state_slots": st.just(0),
    }
)


def check(
    policy: Policy,
    life: dict,
    tiers: dict,
    deaths: Collection[int] = (),
    host_losses: Collection[int] = (),
    watch: Callable[[Engine], None] = lambda engine: None,
) -> None:
    """Every request gets the tokens that it would get alone, and all blocks come back. ``watch``
    gets the engine before it runs."""
    layouts = [LayoutCapacity(life["num_blocks"], life["depth"]), *tiers["other_layouts"]]
    if life["async_scheduling"]:
        layouts = [replace(layout, pipeline_depth=1) for layout in layouts]
    drafter = tiers["drafter"]
    proposer = None
    if drafter is not None:
        proposer = DraftProposer(
            looks_up=drafter == "ngram",
            token_budget=life["token_budget"] + 8,
            async_scheduling=life["async_scheduling"],
        )
    executor = HostLosingExecutor(
        life["num_blocks"],
        life["block_size"],
        host_blocks=tiers["host_blocks"],
        depth=max(layout.pipeline_depth for layout in layouts),
        async_scheduling=life["async_scheduling"],
        other_layouts=[layout.num_blocks for layout in layouts[1:]],
        swap_delay=tiers["swap_delay"],
        num_layers=tiers["num_layers"],
        cpu_is_done=tiers["cpu_is_done"],
        windows=life["windows"],
        drafter=DRAFTERS[drafter or "ngram"],
        deaths=deaths,
        host_losses=host_losses if tiers["host_blocks"] else (),  # what is not there cannot be lost
        state_slots=tiers["state_slots"],
    )
    fewest = min(layout.num_blocks for layout in layouts)
    longest = most_tokens(life["windows"], fewest, life["block_size"], life["max_model_len"])
    # the last token's KV is never needed
    longest = min(life["max_model_len"], longest + (life["windows"] == (0,)))
    arrivals = [
        one
        for one in life["arrivals"]
        if len(one.request.prompt) + one.request.params.min_tokens <= longest
    ]
    arrivals = [one for one in arrivals if len(one.request.prompt) < longest]
    extensions = make_extensions(
        host_blocks=tiers["host_blocks"], other_layouts=layouts[1:], proposer=proposer
    )
    if tiers["state_slots"]:
        state = RecurrentState(tiers["state_slots"], chunk=tiers["state_chunk"])
        extensions = replace(extensions, state=state)
    scheduler = Scheduler(
        policy,
        num_blocks=life["num_blocks"],
        block_size=life["block_size"],
        max_model_len=longest,
        max_num_seqs=life["max_num_seqs"],
        prefix_caching=life["prefix_caching"],
        pipeline_depth=life["depth"],
        extensions=extensions,
        async_scheduling=life["async_scheduling"],
        predictors=[tiers["times"]] * len(layouts) if tiers["times"] else (),
        windows=life["windows"],
    )
    if not arrivals:
        return
    engine = Engine(scheduler, executor, vocab_size=50)
    watch(engine)
    outputs, reasons = live(engine, arrivals, partial(check_states, engine))
    check_outputs(arrivals, longest, outputs, reasons, executor.losses)
    assert scheduler.pool.free_blocks == layouts[engine.status.layouts[0]].num_blocks
    assert tiers["state_slots"] == 0 or extensions.state.pool.free_slots == tiers["state_slots"]
    assert host_pool(scheduler).free_blocks == tiers["host_blocks"]
    assert engine.status.host_losses == executor.times_host_was_lost
    assert proposer is None or not proposer._records
