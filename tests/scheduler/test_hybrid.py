"""NEO, APEX and ours: inequalities by hand, who is parked, and which strategy each takes."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from nanoserve.costs.closed_forms import (
    overlap_gain_bound,
    pipelining_break_even,
    pipelining_speedup_bound,
)
from nanoserve.errors import UsageError
from nanoserve.scheduler.load import Decision, Load, Policy
from nanoserve.scheduler.optional import Alternative, Cohort, HostDecision
from nanoserve.scheduler.policies.apex import (
    ApexAlgorithm1,
    AsymmetricPipelining,
    AsynchronousOverlap,
    device_rate,
    pipelined_rate,
)
from nanoserve.scheduler.policies.hybrid import HybridByPrediction
from tests.fakes.distorted_predictor import DistortedPredictor
from tests.fakes.linear_predictor import LinearPredictor
from tests.scheduler.loads import IDLE

ALL = [
    AsymmetricPipelining(512),
    AsynchronousOverlap(512),
    ApexAlgorithm1(512),
    HybridByPrediction(512, worthwhile=0.0),
]

# Ten decodes of 100 keys: Tlin = Tgatt = 1 s, so NG = 10. A host sequence of 100 keys takes 0.5 s
# of CPU: NC = 2.
PREDICTOR = LinearPredictor(num_layers=4, linear=1.0, key=0.001, prompt_token=0.01, host_key=0.005)
DECODES = replace(
    IDLE,
    running_decodes=10,
    ready_decodes=10,
    context_tokens=1000,
    free_blocks=0,
    total_blocks=70,
    host=replace(IDLE.host, free_blocks=1000, total_blocks=2000),
    predictor=PREDICTOR,
)
PLAN = Decision(0, 10, host=HostDecision(preempt=True))
"""Decision of the device alone."""


def hosting(load: Load, sequences: int, *cohorts: Cohort, ready: int | None = None) -> Load:
    """With so many host sequences of 100 keys, of which those in no cohort are ready."""
    under_way = sum(cohort.sequences for cohort in cohorts)
    return replace(
        load,
        host=replace(
            load.host,
            decodes=sequences,
            ready=sequences - under_way if ready is None else ready,
            context_tokens=100 * sequences,
            cohorts=cohorts,
        ),
    )


def prefilling(load: Load) -> Load:
    """With a prompt of 64 tokens and room for its four blocks and one of each decode, all of it
    kept for growth."""
    return replace(
        load, waiting_tokens=64, first_waiting_tokens=64, free_blocks=14, expected_growth=14
    )


def backlog(load: Load) -> Load:
    """Ten such prompts, which the device cannot hold."""
    return replace(prefilling(load), waiting_tokens=640)


def with_host_blocks(load: Load, free: int) -> Load:
    """With so many free blocks in host memory."""
    return replace(load, host=replace(load.host, free_blocks=free))


# ---------------------------------------------------------------------------------------------- the
# inequalities


@pytest.mark.parametrize(
    ("ng", "nc", "tlin", "tgatt", "pipelined", "alone"),
    [
        (10, 2, 1, 1, 16 / 3, 5),  # (10 + 2 * 3) / 3; the ratio 5 is below 2 + 3 + 1
        (12, 2, 1, 1, 6, 6),  # at 6 both are the same
        (14, 2, 1, 1, 20 / 3, 7),
        (10, 1, 2, 1, 3, 10 / 3),  # (10 + 5) / 5, the ratio 10 is above 4 + 3 + 0.5 = 7.5
        (10, 2, 2, 1, 4, 10 / 3),
    ],
)
def test_both_sides_of_inequality_5(
    ng: float, nc: float, tlin: float, tgatt: float, pipelined: float, alone: float
) -> None:
    assert pipelined_rate(ng, nc, tlin, tgatt, window=2 * tlin + tgatt) == pytest.approx(pipelined)
    assert device_rate(ng, tlin, tgatt) == pytest.approx(alone)


def test_the_papers_measured_processors_do_not_satisfy_inequality_6() -> None:
    measured = 3031 / 170  # figure 1b, batch 4: CPU over device
    assert measured > pipelining_break_even(1.0, 0.5)
    # "at least about 13 %"
    assert 1 / pipelining_break_even(1.0, 0.5) == pytest.approx(0.13, abs=0.005)


_positive = st.floats(1e-3, 1e3)


@given(ng=_positive, nc=_positive, tlin=_positive, tgatt=_positive)
def test_inequalities_5_and_6_are_the_same(ng: float, nc: float, tlin: float, tgatt: float) -> None:
    left, right = (
        pipelined_rate(ng, nc, tlin, tgatt, window=2 * tlin + tgatt),
        device_rate(ng, tlin, tgatt),
    )
    assume(abs(left - right) > 1e-9 * right)
    assert (left > right) == (ng / nc < pipelining_break_even(tlin, tgatt))


@given(ratio=st.floats(0.001, 1), tlin=_positive, tgatt=_positive, decodes=st.integers(1, 200))
def test_with_hosts_without_end_the_speedup_bound_is_inequality_5(
    ratio: float, tlin: float, tgatt: float, decodes: int
) -> None:
    ng = decodes / tgatt
    both = pipelined_rate(ng, ratio * ng, tlin, tgatt, window=2 * tlin + tgatt) / device_rate(
        ng, tlin, tgatt
    )
    bound = pipelining_speedup_bound(
        tlin, tgatt, speed_ratio=ratio, decodes=decodes, host_sequences=1e12
    )
    assert bound == pytest.approx(both)
    none = pipelining_speedup_bound(
        tlin, tgatt, speed_ratio=ratio, decodes=decodes, host_sequences=0
    )
    assert none < 1  # the second pass over the linear layers is all there is


# --------------------------------------------------------------------------------------------------
# placement


@pytest.mark.parametrize("policy", ALL)
def test_the_device_takes_all_that_it_can_hold_whatever_is_expected_to_grow(policy: Policy) -> None:
    assert policy.decide(prefilling(DECODES)) == Decision(64, 10, host=HostDecision(preempt=True))
    assert policy.decide(replace(backlog(DECODES), free_blocks=50)) == Decision(
        502, 10, host=HostDecision(preempt=True)
    )
    # A host sequence has seven blocks and one to grow into: with ten for the decodes and four for
    # the prompt, 22.
    with_host = replace(hosting(prefilling(DECODES), 1), free_blocks=22)
    assert policy.decide(with_host) == Decision(64, 10, host=HostDecision(swap_in=1, preempt=True))
    # now 14 are kept, and four for a prompt
    assert policy.decide(replace(with_host, free_blocks=21)).host.swap_in == 0


@pytest.mark.parametrize("policy", ALL)
def test_what_the_device_cannot_hold_is_parked_where_the_host_can(policy: Policy) -> None:
    tight = policy.decide(backlog(DECODES))
    assert (tight.prefill_tokens, tight.host.park) == (64, True)
    # its first answer needs a fifth
    assert policy.decide(with_host_blocks(backlog(DECODES), 4)) == PLAN
    assert policy.decide(with_host_blocks(backlog(DECODES), 5)).host.park


@pytest.mark.parametrize("policy", ALL)
def test_a_bay_stays_free_in_which_prompts_are_computed_before_they_are_parked(
    policy: Policy,
) -> None:
    # 14 blocks are kept for growth, the prompt takes four, the bay four more
    assert not policy.decide(replace(backlog(DECODES), free_blocks=22)).host.park
    assert policy.decide(replace(backlog(DECODES), free_blocks=21)).host.park
    assert not policy.decide(
        replace(with_host_blocks(backlog(DECODES), 3), free_blocks=21)
    ).host.park
    # 13 blocks leave three beside one for each decode: the newest, which holds six, has to leave
    outgrown = replace(prefilling(DECODES), free_blocks=13)
    assert policy.decide(outgrown) == replace(PLAN, decodes=9, host=replace(PLAN.host, swap_out=1))
    assert policy.decide(replace(outgrown, host=replace(outgrown.host, moving=1))) == PLAN
    assert policy.decide(replace(outgrown, host=replace(outgrown.host, free_blocks=3))) == PLAN
    assert (
        policy.decide(
            replace(outgrown, running_decodes=1, ready_decodes=1, free_blocks=4)
        ).host.swap_out
        == 0
    )


@pytest.mark.parametrize("policy", ALL)
def test_host_sequences_come_back_before_new_prompts_take_the_room(policy: Policy) -> None:
    # seven blocks each; 34 free, 14 for growth, 4 for prompts that pass: two come back, the prompt
    # of 4 must pass too
    load = replace(hosting(prefilling(DECODES), 5), free_blocks=34)
    decision = policy.decide(load)
    assert (decision.host.swap_in, decision.host.park, decision.prefill_tokens) == (2, True, 64)
    assert sum(decision.host.decodes) <= 3
    two_left = policy.decide(
        replace(load, host=replace(load.host, ready=1, decodes=1, context_tokens=100))
    )
    assert (two_left.host.swap_in, two_left.host.park) == (1, False)


@pytest.mark.parametrize("policy", ALL)
def test_with_no_prompt_waiting_only_a_block_of_each_decode_is_kept_from_those_that_come_back(
    policy: Policy,
) -> None:
    # seven blocks each and one to grow into; 34 free, 10 for the decodes, though 30 are expected to
    # be theirs one day
    load = replace(hosting(DECODES, 5), free_blocks=34, expected_growth=30)
    assert policy.decide(load).host.swap_in == 3
    assert (
        policy.decide(replace(load, waiting_tokens=64, first_waiting_tokens=64)).host.swap_in == 0
    )
    assert [policy.decide(replace(load, free_blocks=free)).host.swap_in for free in (17, 18)] == [
        0,
        1,
    ]


@pytest.mark.parametrize("policy", ALL)
def test_decodes_leave_for_the_rest_of_a_prompt_that_has_begun_too(policy: Policy) -> None:
    # 13 blocks leave three beside one for each decode, and what is left of the prompt takes four
    begun = replace(prefilling(DECODES), free_blocks=13, ready_prefills=1)
    assert policy.decide(begun) == replace(PLAN, decodes=9, host=replace(PLAN.host, swap_out=1))
    fits = policy.decide(replace(begun, free_blocks=14))
    assert (fits.prefill_tokens, fits.host.swap_out) == (64, 0)
    # it goes on beside a full host: its place there was taken when it began
    assert (
        policy.decide(
            replace(begun, free_blocks=14, host=replace(begun.host, free_blocks=0))
        ).prefill_tokens
        == 64
    )


@pytest.mark.parametrize("policy", ALL)
def test_without_a_host_or_a_predictor_it_is_chunked_prefill(policy: Policy) -> None:
    no_host = replace(
        prefilling(DECODES), host=replace(prefilling(DECODES).host, total_blocks=0, free_blocks=0)
    )
    assert policy.decide(no_host) == Decision(502, 10)
    blind = replace(hosting(prefilling(DECODES), 5), predictor=None, free_blocks=70)
    assert policy.decide(blind) == Decision(502, 10, host=HostDecision(swap_in=5, preempt=True))


# --------------------------------------------------------------------------------------------------
# NEO


def test_neo_hides_the_cpu_behind_the_device_or_stays_there() -> None:
    # Decodes only: sub-batch 1 hides 4 in Tlin + Tgatt = 2 s, sub-batch 0 then 2 in Tlin = 1 s: 16
    # in 3 s, 10 in 2 s.
    assert AsymmetricPipelining(512).decide(hosting(DECODES, 100)) == replace(
        PLAN, host=replace(PLAN.host, strategy="asymmetric", decodes=(2, 4))
    )
    # Five host sequences: 4 + 1, and 15 in 3 s is no more than 10 in 2 s.
    assert AsymmetricPipelining(512).decide(hosting(DECODES, 5)) == PLAN
    slow = replace(hosting(DECODES, 100), predictor=replace(PREDICTOR, host_key=0.05))
    assert AsymmetricPipelining(512).decide(slow) == PLAN


def test_neo_gives_the_cpu_the_time_of_the_prompts_too() -> None:
    # 64 prompt tokens at 0.01 s: sub-batch 0 takes 2.64 s, which hides 5; 11 + 7 in 3.64 s against
    # 11 in 2.64 s.
    decision = AsymmetricPipelining(512).decide(hosting(prefilling(DECODES), 100))
    assert (decision.host.strategy, decision.host.decodes, decision.prefill_tokens) == (
        "asymmetric",
        (2, 5),
        64,
    )


# --------------------------------------------------------------------------------------------------
# overlap


def test_a_cohort_begins_when_none_is_under_way_and_goes_on_otherwise() -> None:
    begun = replace(PLAN, host=replace(PLAN.host, strategy="overlap", decodes=(100, 0)))
    assert AsynchronousOverlap(512).decide(hosting(DECODES, 100)) == begun
    later = hosting(DECODES, 100, Cohort(layers=1, sequences=70, context_tokens=7000))
    assert AsynchronousOverlap(512).decide(later) == replace(
        PLAN, host=replace(PLAN.host, strategy="overlap", decodes=(0, 0))
    )
    assert AsynchronousOverlap(512, cohorts=2).decide(later) == replace(
        begun, host=replace(begun.host, decodes=(30, 0))
    )
    assert AsynchronousOverlap(512).decide(hosting(DECODES, 9, ready=0)) == PLAN


# --------------------------------------------------------------------------------------------------
# APEX


def test_apex_rules_1_and_2() -> None:
    apex = ApexAlgorithm1(512)
    assert apex.decide(DECODES) == PLAN
    # NG / NC = 10 / 2 = 5 < 6
    assert apex.decide(hosting(DECODES, 100)) == replace(
        PLAN, host=replace(PLAN.host, strategy="asymmetric", decodes=(2, 4))
    )
    # NG / NC = 7 > 6
    slower = replace(hosting(DECODES, 100), predictor=replace(PREDICTOR, host_key=0.007))
    assert apex.decide(slower) == replace(
        PLAN, host=replace(PLAN.host, strategy="overlap", decodes=(100, 0))
    )


def test_short_host_sequences_do_not_make_the_cpu_look_fast_to_apex() -> None:
    """NG and NC are rates of equal sequences: hosts of 50 keys are served twice as fast, by the
    device as well."""
    slower = replace(
        hosting(DECODES, 100),
        predictor=replace(PREDICTOR, host_key=0.007),
        host=replace(hosting(DECODES, 100).host, context_tokens=5000),
    )
    assert ApexAlgorithm1(512).decide(slower).host.strategy == "overlap"
    faster = replace(slower, predictor=PREDICTOR, host=replace(slower.host, context_tokens=20000))
    assert ApexAlgorithm1(512).decide(faster).host.strategy == "asymmetric"


def test_apex_rule_3_takes_asymmetric_pipelining_more_often_with_prompts() -> None:
    slower = replace(hosting(DECODES, 100), predictor=replace(PREDICTOR, host_key=0.007))
    # 64 prompt tokens add 0.64 s: (10 + 1.43 * 3.64) / 3 = 5.07 > 10 / 2, where (10 + 1.43 * 3) / 3
    # is 4.76
    assert ApexAlgorithm1(512).decide(prefilling(slower)).host.strategy == "asymmetric"
    crawling = replace(slower, predictor=replace(PREDICTOR, host_key=0.05))
    assert ApexAlgorithm1(512).decide(prefilling(crawling)).host.strategy == "overlap"


def test_apex_rule_4_takes_no_more_of_a_cohort_than_one_layer_hides() -> None:
    under_way = hosting(DECODES, 100, Cohort(layers=3, sequences=60, context_tokens=6000))
    decision = ApexAlgorithm1(512).decide(under_way)
    assert (decision.host.strategy, decision.host.decodes) == ("asymmetric", (2, 4))


def test_apex_engages_the_cpu_only_for_many() -> None:
    slower = replace(DECODES, predictor=replace(PREDICTOR, host_key=0.007))
    apex = ApexAlgorithm1(512)
    assert apex.decide(hosting(slower, 79)) == PLAN
    assert apex.decide(hosting(slower, 80)).host.strategy == "overlap"
    assert (
        ApexAlgorithm1(512, minimum_ratio=1).decide(hosting(slower, 10)).host.strategy == "overlap"
    )
    begun = hosting(slower, 40, Cohort(layers=1, sequences=40, context_tokens=4000))
    assert apex.decide(begun).host.strategy == "overlap"  # what has begun goes on


# --------------------------------------------------------------------------------------------------
# ours


def test_hybrid_counts_the_host_sequences_there_are() -> None:
    hybrid = HybridByPrediction(512)
    assert hybrid.decide(DECODES) == PLAN
    # 10 + 6 in 12 s is 1.33 a second; overlapped, a step of 8 s serves 16 of the 100: 10 + 16 / 5
    # in 8 s is 1.65.
    assert hybrid.decide(hosting(DECODES, 100)) == replace(
        PLAN, host=replace(PLAN.host, strategy="overlap", decodes=(4, 0))
    )
    # With a twentieth of the CPU time: 10 + 80 + 20 in 12 s is 9.2; 10 + 100 / 5 in 8 s is 3.8.
    fast = replace(hosting(DECODES, 100), predictor=replace(PREDICTOR, host_key=0.00025))
    assert hybrid.decide(fast) == replace(
        PLAN, host=replace(PLAN.host, strategy="asymmetric", decodes=(20, 80))
    )
    # Where only two are there, a second pass over the linear layers is not worth it, whatever the
    # CPU could do.
    assert hybrid.decide(hosting(fast, 2)) == replace(
        PLAN, host=replace(PLAN.host, strategy="overlap", decodes=(2, 0))
    )
    assert (
        ApexAlgorithm1(512, minimum_ratio=0).decide(hosting(fast, 2)).host.strategy == "asymmetric"
    )


def test_hybrid_begins_cohorts_while_the_cpu_has_time_in_a_step() -> None:
    # 12 under way take 6 s of the 8 s of a step
    load = hosting(DECODES, 100, Cohort(layers=2, sequences=12, context_tokens=1200))
    assert HybridByPrediction(512).decide(load).host.decodes == (4, 0)
    full = hosting(DECODES, 100, Cohort(layers=2, sequences=16, context_tokens=1600))
    assert HybridByPrediction(512).decide(full) == replace(
        PLAN, host=replace(PLAN.host, strategy="overlap", decodes=(0, 0))
    )


def test_no_cohort_of_hybrid_takes_all_of_the_cpus_time_in_a_step() -> None:
    """The oldest go first and are longer than the mean: one that was to take a step would take two
    for each layer."""
    begun: list[Cohort] = []
    for _ in range(6):
        ready = 100 - sum(cohort.sequences for cohort in begun)
        decision = HybridByPrediction(512).decide(hosting(DECODES, 100, *begun, ready=ready))
        assert decision.host.decodes[0] <= 4  # 2 s of the 8 s of a step
        if decision.host.decodes[0]:
            size = decision.host.decodes[0]
            begun.append(Cohort(layers=0, sequences=size, context_tokens=100 * size))
    assert sum(cohort.sequences for cohort in begun) == 16  # together they take all of it


def test_hybrid_values_host_tokens_by_their_keys() -> None:
    """Twelve sequences of a tenth of the keys are no reason to compute the linear layers twice,
    twelve of all are."""
    fast = replace(hosting(DECODES, 12), predictor=replace(PREDICTOR, host_key=0.0005))
    # 22 in 12 s, 10 in 8 s
    assert HybridByPrediction(512).decide(fast).host.strategy == "asymmetric"
    short = HybridByPrediction(512).decide(
        replace(fast, host=replace(fast.host, context_tokens=120))
    )
    assert short.host.strategy != "asymmetric"  # 10 + 1.2 in 12 s


def test_hybrid_begins_no_cohort_for_a_small_gain() -> None:
    # A token takes 5 steps: one host sequence adds a fiftieth to ten decodes, and two a
    # twenty-fifth.
    careful = HybridByPrediction(512, least_gain=0.03)
    assert careful.decide(hosting(DECODES, 1)) == PLAN
    assert careful.decide(hosting(DECODES, 2)) == replace(
        PLAN, host=replace(PLAN.host, strategy="overlap", decodes=(2, 0))
    )
    # What has begun goes on.
    last = hosting(DECODES, 1, Cohort(layers=3, sequences=1, context_tokens=100))
    assert careful.decide(last) == replace(
        PLAN, host=replace(PLAN.host, strategy="overlap", decodes=(0, 0))
    )


def test_hybrid_leaves_a_hopeless_cpu_alone() -> None:
    # one layer of one sequence takes 8.1 s of the CPU, a step 8 s
    hopeless = replace(hosting(DECODES, 100), predictor=replace(PREDICTOR, host_key=0.081))
    assert HybridByPrediction(512).decide(hopeless) == PLAN
    # Nor is a prompt brought there: it goes to the device, or waits until that has room for it
    # beside the decodes.
    waiting = replace(prefilling(DECODES), predictor=replace(PREDICTOR, host_key=0.2))
    assert HybridByPrediction(512).decide(waiting) == Decision(
        64, 10, host=HostDecision(preempt=True)
    )
    full = replace(waiting, free_blocks=13)
    assert HybridByPrediction(512).decide(full) == Decision(0, 10, host=HostDecision(preempt=True))


def test_hybrid_parks_no_prompt_where_steps_with_the_host_take_longer_than_it_gains() -> None:
    predictor = DistortedPredictor(PREDICTOR)
    load = replace(prefilling(DECODES), waiting_tokens=6400)
    for hybrid, parks in ((1.0, True), (2.0, False)):
        decision = HybridByPrediction(512).decide(
            replace(load, predictor=replace(predictor, hybrid=hybrid))
        )
        assert decision.host.park == parks


def test_a_prompt_counts_as_what_the_device_could_decode_in_its_time() -> None:
    # Ten decodes take 8 s, 0.8 s each, and a prompt of 64 tokens 4 * 0.64 s more: 13.2 decodes in
    # all. Asymmetric, five on the host are five decodes more in 4 s more: no gain. Overlapped, they
    # are a fifth of a token each, for nothing.
    decision = HybridByPrediction(512).decide(hosting(prefilling(DECODES), 5))
    weighed = {one.strategy: one for one in decision.host.alternatives}
    assert weighed["device"] == Alternative("device", pytest.approx(10.56), pytest.approx(10 / 8))
    assert weighed["asymmetric"] == Alternative(
        "asymmetric", pytest.approx(14.56), pytest.approx(18.2 / 14.56)
    )
    assert weighed["overlap"] == Alternative(
        "overlap", pytest.approx(10.56), pytest.approx(14.2 / 10.56)
    )


def test_hybrid_parks_no_more_than_the_cpu_can_serve() -> None:
    hybrid = HybridByPrediction(512)
    # a step of decodes takes 8 s, in which the CPU serves 16
    assert hybrid.decide(hosting(prefilling(DECODES), 15)).host.park
    saturated = hybrid.decide(hosting(prefilling(DECODES), 16))
    assert (saturated.host.park, saturated.prefill_tokens) == (False, 64), (
        "the device has room for it"
    )
    full = hybrid.decide(replace(hosting(prefilling(DECODES), 16), free_blocks=13))
    assert (full.host.park, full.prefill_tokens) == (False, 0), "not beside a block for each decode"
    begun = hybrid.decide(replace(hosting(prefilling(DECODES), 16), ready_prefills=1))
    assert (begun.host.park, begun.prefill_tokens) == (False, 64)


def test_host_sequences_go_on_where_the_device_has_nothing() -> None:
    idle = replace(DECODES, running_decodes=0, ready_decodes=0, context_tokens=0, free_blocks=0)
    decision = HybridByPrediction(512).decide(hosting(idle, 9, Cohort(1, 3, 300)))
    assert (decision.host.strategy, decision.host.decodes, decision.host.swap_in) == (
        "overlap",
        (5, 0),
        1,
    )


def test_nobody_begins_on_the_host_while_others_come_back_to_a_device_that_has_nothing() -> None:
    idle = replace(
        DECODES,
        running_decodes=0,
        ready_decodes=0,
        context_tokens=0,
        host=replace(DECODES.host, moving=1),
    )
    decision = HybridByPrediction(512).decide(hosting(idle, 9))
    assert (decision.host.strategy, decision.host.decodes) == ("device", (0, 0))


def test_the_head_counts_for_every_row_that_a_step_samples() -> None:
    """Among 40 sequences on the host the CPU serves 4 + 2 in a layer's time, and some in a step's: a fifth of
    these has a token."""
    predictor = replace(PREDICTOR, overhead=1.0, sampled_row=0.25)
    decision = HybridByPrediction(512).decide(replace(hosting(DECODES, 40), predictor=predictor))
    seconds = {one.strategy: one.seconds for one in decision.host.alternatives}
    assert seconds["device"] == pytest.approx(4 * 2 + 1 + 0.25 * 10)
    assert seconds["asymmetric"] == pytest.approx(4 * 3 + 1 + 0.25 * (10 + 6))
    served = int(seconds["device"] / 0.5)  # by the CPU in the time of a step
    assert seconds["overlap"] == pytest.approx(4 * 2 + 1 + 0.25 * (10 + round(served / 5)))


@given(
    hosts=st.integers(1, 400),
    host_key=st.floats(1e-5, 0.1),
    linear=st.floats(0.1, 10),
    policy=st.sampled_from(ALL),
)
def test_what_is_predicted_of_decodes_alone_stays_within_the_closed_form_bounds(
    hosts: int, host_key: float, linear: float, policy: Policy
) -> None:
    predictor = replace(PREDICTOR, host_key=host_key, linear=linear)
    decision = policy.decide(replace(hosting(DECODES, hosts), predictor=predictor))
    ratio = 0.001 / host_key  # seconds per key: NC / NG
    known = {"speed_ratio": ratio, "decodes": 10, "host_sequences": hosts}
    if decision.host.strategy == "asymmetric":
        speedup = (10 + sum(decision.host.decodes)) / (2 * linear + 1) * (linear + 1) / 10
        assert speedup <= pipelining_speedup_bound(linear, 1.0, **known) * 1.000001
    elif decision.host.strategy == "overlap" and isinstance(policy, HybridByPrediction):
        gain = decision.host.decodes[0] / 5 / 10
        assert (
            gain
            <= 4
            / 5
            * overlap_gain_bound(linear, 1.0, layers=4, **known | {"host_sequences": 1e9})
            * 1.000001
        )
        assert (
            gain
            <= overlap_gain_bound(linear, 1.0, layers=4, **known | {"speed_ratio": 1e9}) * 1.000001
        )


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: AsynchronousOverlap(512, cohorts=0), "cohorts must be at least 1, not 0"),
        (
            lambda: ApexAlgorithm1(512, minimum_ratio=-1.0),
            "minimum_ratio must be at least 0, not -1.0",
        ),
        (
            lambda: HybridByPrediction(512, least_gain=-0.1),
            "least_gain must be at least 0, not -0.1",
        ),
    ],
)
def test_parameters_out_of_range(make: object, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make()  # type: ignore[operator]
