"""Decisions of each policy in situations that its paper names, and rules that hold for all of them."""

import ast
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import nanoserve.scheduler.policies
from nanoserve.errors import UsageError
from nanoserve.scheduler import POLICIES, make_policy
from nanoserve.scheduler.load import Decision, Load
from nanoserve.scheduler.policies.baselines import ChunkedPrefill, DecodeFirst, PrefillFirst
from nanoserve.scheduler.policies.token_throttling import AdaptiveThrottling, TokenThrottling
from tests.fakes.linear_predictor import LinearPredictor
from tests.scheduler.loads import IDLE

BUSY = replace(
    IDLE,
    waiting_tokens=5000,
    first_waiting_tokens=300,
    running_decodes=40,
    ready_decodes=40,
    free_blocks=60,
)


def test_sarathi_fills_its_budget_with_decodes_first() -> None:
    assert ChunkedPrefill(512).decide(BUSY) == Decision(prefill_tokens=472, decodes=40)
    assert ChunkedPrefill(32).decide(BUSY) == Decision(prefill_tokens=0, decodes=32)


def test_prefill_first_stalls_decodes_while_a_prompt_fits() -> None:
    assert PrefillFirst(512).decide(BUSY) == Decision(
        prefill_tokens=512, decodes=0, whole_prompts=True
    )
    # 21 blocks, and one for each of 40 decodes to grow into
    too_long = replace(BUSY, first_waiting_tokens=321)
    assert PrefillFirst(512).decide(too_long) == Decision(prefill_tokens=0, decodes=40)


def test_decode_first_takes_no_prompt_until_the_batch_has_ended() -> None:
    policy = DecodeFirst(512)
    decoding = replace(BUSY, previous=Decision(prefill_tokens=0, decodes=40))
    assert policy.decide(decoding) == Decision(prefill_tokens=0, decodes=40)
    ended = replace(decoding, running_decodes=0, ready_decodes=0)
    assert policy.decide(ended) == Decision(prefill_tokens=512, decodes=0, whole_prompts=True)
    forming = replace(BUSY, previous=Decision(prefill_tokens=512, decodes=0, whole_prompts=True))
    assert policy.decide(forming) == Decision(prefill_tokens=512, decodes=0, whole_prompts=True)


FREE = replace(
    IDLE,
    waiting_tokens=8192,
    first_waiting_tokens=800,
    free_slots=9,
    total_blocks=1000,
    block_size=16,
)
"""Deep enough a pipeline and pool; the tables below vary one thing each."""


@pytest.mark.parametrize(
    ("waiting", "free", "tokens"),
    [  # T = 8, MaxP = 2048, MinP = 32, KVthresh = 0.05
        (8192, 1000, 1024),  # WT: 8192 / 8; UT would allow 2048
        (16384, 1000, 2048),  # both say 2048
        (99999, 1000, 2048),  # 12500 by WT, and UT never gives more than MaxP
        (99999, 525, 1024),  # UT: 2048 * (0.525 - 0.05) / 0.95 = 2048 * 0.5
        (99999, 240, 409),  # UT: 2048 * 0.19 / 0.95 = 409.6
        (4096, 525, 512),  # WT: 4096 / 8, less than UT's 1024
        (4097, 525, 513),  # rounded up: what waits is gone after T steps
        (80, 1000, 32),  # WT: 10, raised to MinP
        (20, 1000, 20),  # but no more than what waits
        (99999, 55, 32),  # UT: 2048 * 0.005 / 0.95 = 10, raised to MinP
        (99999, 50, 32),  # exactly at the threshold is not below it
        (99999, 49, 0),  # below: suspended, where equation 3 as printed would say MinP
    ],
)
def test_token_throttling_counts_prompt_tokens_by_equation_3(
    waiting: int, free: int, tokens: int
) -> None:
    load = replace(FREE, waiting_tokens=waiting, free_blocks=free, running_decodes=1)
    assert TokenThrottling().decide(load).prefill_tokens == tokens


@pytest.mark.parametrize(
    ("running", "ready", "depth", "decodes"),
    [
        (40, 40, 4, 10),
        (41, 41, 4, 11),  # floor would leave one over
        (41, 8, 4, 8),  # the last of four micro-batches takes what the others left
        (3, 3, 4, 1),
        (7, 7, 1, 7),  # no pipeline: all
        (5, 0, 4, 0),
    ],
)
def test_token_throttling_counts_decodes_by_equation_4(
    running: int, ready: int, depth: int, decodes: int
) -> None:
    load = replace(FREE, running_decodes=running, ready_decodes=ready, pipeline_depth=depth)
    assert TokenThrottling().decide(load).decodes == decodes
    assert AdaptiveThrottling().decide(load).decodes == decodes


def test_the_ablations_of_token_throttling_each_switch_one_term_off() -> None:
    load = replace(FREE, free_blocks=525, running_decodes=40, ready_decodes=40, pipeline_depth=4)
    assert TokenThrottling().decide(load) == Decision(prefill_tokens=1024, decodes=10)
    assert TokenThrottling().decide(replace(load, waiting_tokens=800)).prefill_tokens == 100
    assert (
        TokenThrottling(without_wt=True).decide(replace(load, waiting_tokens=800)).prefill_tokens
        == 800
    )
    assert TokenThrottling(without_wt=True).decide(load).prefill_tokens == 1024
    tight = replace(load, waiting_tokens=99999, free_blocks=145)
    assert TokenThrottling().decide(tight).prefill_tokens == 204
    assert TokenThrottling(without_ut=True).decide(tight).prefill_tokens == 2048
    assert (
        TokenThrottling(without_ut=True).decide(replace(tight, free_blocks=49)).prefill_tokens == 0
    )
    assert TokenThrottling(without_decode_throttling=True).decide(load) == Decision(
        prefill_tokens=1024, decodes=40
    )


def test_a_prompt_that_alone_holds_blocks_is_let_past_the_reserve() -> None:
    alone = replace(
        FREE, free_blocks=49, ready_prefills=1, first_waiting_tokens=500, expected_growth=60
    )
    for policy in (TokenThrottling(), AdaptiveThrottling()):
        assert policy.decide(alone).prefill_tokens == 500
        for others in ({"ready_prefills": 2}, {"running_decodes": 1}, {"steps_in_flight": 1}):
            assert policy.decide(replace(alone, **others)).prefill_tokens == 0


@pytest.mark.parametrize(
    ("waiting", "free", "growth", "decodes", "tokens"),
    # T = 8, MaxP = 2048, MinP = 32, KVthresh = 0.05, fill = 128, at most a tenth reserved; 1000
    # blocks of 16
    [
        (99999, 1000, 0, 8, 2048),
        (99999, 525, 20, 8, 1024),  # equation 3 as in gLLM: 2048 * (0.525 - 0.05) / 0.95
        # by equation 3: 64; but 128 - 8 delay nobody, and (80 - 20) * 16 / 8 are 120 as well
        (99999, 80, 20, 8, 120),
        (99999, 80, 20, 90, 64),  # decodes fill the step: equation 3 again
        (99999, 40, 20, 8, 40),  # below KVthresh, where gLLM suspends: (40 - 20) * 16 / 8
        (99999, 24, 20, 8, 32),  # 8, raised to MinP
        (99999, 20, 20, 8, 32),  # exactly at the reserve is not below it
        (99999, 19, 20, 8, 0),  # all that is free is spoken for
        (99999, 150, 300, 8, 113),  # a tenth is reserved, not 300: 2048 * (0.15 - 0.1) / 0.9
        (99999, 99, 300, 8, 0),
        (300, 1000, 0, 8, 120),  # WT: 300 / 8, less than what delays nobody
        (300, 1000, 0, 100, 38),
        (50, 1000, 0, 8, 50),  # no more than what waits
    ],
)
def test_adaptive_throttling_fills_steps_up_and_stops_at_the_reserve(
    waiting: int, free: int, growth: int, decodes: int, tokens: int
) -> None:
    load = replace(
        FREE,
        waiting_tokens=waiting,
        free_blocks=free,
        expected_growth=growth,
        running_decodes=decodes,
        ready_decodes=decodes,
    )
    assert AdaptiveThrottling().decide(load) == Decision(prefill_tokens=tokens, decodes=decodes)


@pytest.mark.parametrize(
    ("waiting", "decodes", "row", "tokens"),
    [  # t = 100 + row a token; P = 4. Time is (k + 3) t(WP / k)
        # k = 5: 8 * 340, 6: 9 * 300, 7: 10 * 272; the square root of 3 * 1200 / 100
        (1200, 0, 1.0, 200),
        (1200, 40, 1.0, 190),  # beside 40 / 4 decodes
        (1200, 0, 0.0, 1200),  # bound by the weights: all at once
        (1200, 0, 9.0, 150),  # k would be 18, but gLLM's T is 8
        (200, 0, 1.0, 100),  # k = 2: 5 * 200, beside 4 * 300 and 6 * 167
        (40, 0, 1.0, 40),
    ],
)
def test_adaptive_throttling_computes_what_waits_in_the_predicted_number_of_steps(
    waiting: int, decodes: int, row: float, tokens: int
) -> None:
    predictor = LinearPredictor(num_layers=1, linear=100.0, row=row)
    load = replace(
        FREE, waiting_tokens=waiting, free_blocks=1000, pipeline_depth=4, predictor=predictor
    )
    load = replace(load, running_decodes=decodes, ready_decodes=decodes)
    assert AdaptiveThrottling().decide(load).prefill_tokens == tokens


@pytest.mark.parametrize(
    ("slowest", "row", "lone", "ready", "decodes"),
    # 40 decodes, P = 4. Between two tokens: max(1, m slowest) (lone + (1 - lone) (m - 1) / 3) t(40
    # / m)
    [
        (0.25, 0.0, 1.0, 10, 10),  # as many micro-batches as stages cost nothing: gLLM's equation 4
        (0.25, 0.0, 1.0, 6, 6),
        (0.3, 0.0, 1.0, 40, 14),  # 1.2 * 100 for four; three come round in 100
        (0.3, 0.0, 1.0, 13, 0),  # they wait for the fourteenth
        (0.3, 1.0, 1.0, 40, 14),  # 140, 120, 114 and 132
        (0.3, 3.0, 1.0, 40, 14),  # 220, 160, 142 and 156
        (0.3, 9.0, 1.0, 40, 10),  # bound by operations: 226 and 228, which is as good
        (0.3, 0.0, 0.7, 40, 40),  # a stage alone has the memory for itself: 70, 80, 90 and 120 ...
        (0.3, 1.0, 0.7, 40, 20),  # ... 98, 96, 103 and 132 ...
        (0.3, 3.0, 0.7, 40, 14),  # ... 154, 128, 127 and 156
        (1.0, 0.0, 1.0, 39, 0),  # stages that share one processor: 100, 200, 300 and 400
        (1.0, 0.0, 1.0, 40, 40),
    ],
)
def test_adaptive_throttling_gathers_decodes_where_micro_batches_pay_the_weights_again(
    slowest: float, row: float, lone: float, ready: int, decodes: int
) -> None:
    predictor = LinearPredictor(
        num_layers=1, linear=100.0, row=row, key=0.0, slowest_share=slowest, lone_share=lone
    )
    load = replace(
        FREE, waiting_tokens=0, running_decodes=40, ready_decodes=ready, pipeline_depth=4
    )
    load = replace(load, predictor=predictor)
    assert AdaptiveThrottling().decide(load).decodes == decodes
    # equation 4
    assert AdaptiveThrottling().decide(replace(load, waiting_tokens=9)).decodes == min(10, ready)


@st.composite
def _loads(draw: st.DrawFn) -> Load:
    total = draw(st.integers(1, 1000))
    running = draw(st.integers(0, 300))
    waiting = draw(st.integers(0, 10**6))
    return Load(
        previous=draw(st.sampled_from([None, Decision(0, 5), Decision(64, 0, whole_prompts=True)])),
        waiting_tokens=waiting,
        first_waiting_tokens=draw(st.integers(0, waiting)),
        running_decodes=running,
        ready_decodes=draw(st.integers(0, running)),
        ready_prefills=draw(st.integers(0, 4)),
        context_tokens=draw(st.integers(0, 10**6)),
        free_blocks=draw(st.integers(0, total)),
        total_blocks=total,
        block_size=draw(st.sampled_from([1, 16, 32])),
        free_slots=draw(st.integers(0, 256)),
        steps_in_flight=draw(st.integers(0, 3)),
        pipeline_depth=draw(st.integers(1, 4)),
        expected_growth=draw(st.integers(0, total - 1)),
    )


@pytest.mark.parametrize("name", POLICIES)
@given(load=_loads(), budget=st.integers(1, 4096))
def test_budgets_are_never_negative_and_never_above_what_there_is(
    name: str, load: Load, budget: int
) -> None:
    policy = make_policy(name, budget)
    decision = policy.decide(load)
    assert 0 <= decision.prefill_tokens <= budget
    assert 0 <= decision.decodes <= load.ready_decodes
    assert policy.decide(load) == decision, "a policy is a pure function"


class _Foretold(Load):
    """Tells that the forecast was read."""

    def __getattribute__(self, name: str) -> object:
        assert name not in ("expected_growth", "longest_remaining"), (
            f"reads {name} without reads_forecast"
        )
        return super().__getattribute__(name)


@pytest.mark.parametrize(
    "name", [name for name, entry in POLICIES.items() if not entry.kind.reads_forecast]
)
@given(load=_loads())
def test_whoever_reads_the_forecast_says_so(name: str, load: Load) -> None:
    make_policy(name, 512).decide(
        _Foretold(**{field.name: getattr(load, field.name) for field in fields(load)})
    )


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"iterations": 0}, "iterations must be at least 1, not 0"),
        (
            {"min_prefill": 4096},
            r"min_prefill must be at least 1 and at most max_prefill \(2048\), not 4096",
        ),
        ({"threshold": 1.0}, "threshold must be at least 0 and below 1, not 1.0"),
        ({"threshold": float("nan")}, "threshold must be"),
        (
            {"patience": 3},
            "no parameter 'patience'; it has iterations, min_prefill, threshold, without_wt",
        ),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(
    parameters: dict[str, float], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        make_policy("throttling", 2048, parameters)


@pytest.mark.parametrize(
    "parameters", [{"fill": -1}, {"most_reserved": 1}, {"threshold": -0.1}, {"iterations": 0}]
)
def test_parameters_of_adaptive_out_of_range_are_refused_by_name(
    parameters: dict[str, float],
) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(parameters))} must be at least"):
        make_policy("adaptive", 2048, parameters)


def test_a_budget_below_the_default_of_min_prefill_lowers_it() -> None:
    assert make_policy("throttling", 8) == TokenThrottling(max_prefill=8, min_prefill=8)
    assert make_policy("adaptive", 100, {"iterations": 2}) == AdaptiveThrottling(
        max_prefill=100, iterations=2
    )


def test_policies_import_nothing_but_the_load() -> None:
    folder = Path(nanoserve.scheduler.policies.__file__).parent
    placement, predictor = "nanoserve.scheduler.policies.placement", "nanoserve.scheduler.predictor"
    for path in folder.glob("[a-z]*.py"):
        modules = {
            node.module
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom)
        }
        modules -= {"abc", "bisect", "dataclasses", "functools", "typing"}
        assert modules <= {
            "nanoserve.scheduler.load",
            "nanoserve.scheduler.optional",
            placement,
            predictor,
        }


def test_unknown_policies_and_empty_budgets_are_refused() -> None:
    with pytest.raises(
        UsageError, match="throttling, adaptive, seesaw, neo, overlap, apex, hybrid"
    ):
        make_policy("fifo", 2048)
    with pytest.raises(UsageError, match="at least 1"):
        make_policy("sarathi", 0)
