"""Every policy on one trace, worked out by hand: all plans, and why they are so. golden.py has
trace and spelling.

Here those without host memory, and Seesaw; NEO, APEX and our own choice between them are in
test_golden_hybrids.py.
"""

from nanoserve.scheduler import POLICIES, make_policy
from tests.scheduler import test_golden_hybrids
from tests.scheduler.golden import PREDICTOR, Prompt, plans_of, play


def test_no_policy_of_the_registry_is_without_its_plans() -> None:
    tests = [*globals(), *vars(test_golden_hybrids)]
    begins = (f"test_{policy.replace('-', '_')}_" for policy in POLICIES)
    assert all(any(test.startswith(begin) for test in tests) for begin in begins)


# ---------------------------------------------------------------------------------------------- one
# tier, one layout


def test_prefill_first_lets_the_decodes_stand_whenever_a_prompt_fits() -> None:
    assert plans_of("prefill-first") == [
        "step 0: begin 0",
        "  0 at 0: 1 1 1 1 1 1 +[0, 1, 2] *",
        "step 1: begin 1",  # 2 blocks and one for RD 1 are not more than the 4 free: 0 stands
        "  1 at 0: 2 2 2 2 +[3, 4] *",
        "step 2:",  # for 2, 2 and RD 2 are more than the 2 free: all decodes
        "  0 at 6: 106 +[5] *",
        "  1 at 4: 104 +[6] *",
        "step 3:",
        "  0 at 7: 107 *",
        "  1 at 5: 105 *",
        "step 4: end 1 begin 2",  # 3 are free again, 2 and RD 1: 0 stands once more
        "  2 at 0: 3 3 3 3 +[6, 4] *",
        "step 5:",  # 1 is free: 3 waits. 0 takes that block, and none is left for 2, which sits out
        "  0 at 8: 108 +[3] *",
        "step 6:",
        "  0 at 9: 109 *",
        "step 7: end 2",  # the older needs a block: 2 gives its two up
        "  0 at 10: 110 +[4] *",
        "step 8: end 0 begin 2 begin 3",  # 5 and 2 tokens; block 6 still holds 2's first two
        "  2 at 2: 3 3 104 +[6, 4, 3] *",
        "  3 at 0: 4 4 +[5] *",
        "step 9:",
        "  2 at 5: 105 *",
        "  3 at 2: 102 +[2] *",
    ]


def test_decode_first_ends_a_batch_before_it_forms_the_next() -> None:
    assert plans_of("decode-first") == [
        "step 0: begin 0",
        "  0 at 0: 1 1 1 1 1 1 +[0, 1, 2] *",
        "step 1: begin 1",  # the last step held prompts: the batch is still forming
        "  1 at 0: 2 2 2 2 +[3, 4] *",
        "step 2:",  # 2 does not fit beside it: the batch is closed
        "  0 at 6: 106 +[5] *",
        "  1 at 4: 104 +[6] *",
        "step 3:",
        "  0 at 7: 107 *",
        "  1 at 5: 105 *",
        "step 4: end 1",  # here prefill-first begins 2
        "  0 at 8: 108 +[6] *",
        "step 5:",
        "  0 at 9: 109 *",
        "step 6:",
        "  0 at 10: 110 +[4] *",
        "step 7: end 0 begin 2 begin 3",  # RD 0: the next batch
        "  2 at 0: 3 3 3 3 +[4, 3] *",
        "  3 at 0: 4 4 +[6] *",
        "step 8:",
        "  2 at 4: 104 +[5] *",
        "  3 at 2: 102 +[2] *",
        "step 9: end 3",
        "  2 at 5: 105 *",
    ]


def test_sarathi_fills_four_tokens_with_decodes_and_chunks() -> None:
    assert plans_of("sarathi", budget=4) == [
        "step 0: begin 0",  # 4 - RD 0: a chunk of 4
        "  0 at 0: 1 1 1 1 +[0, 1]",
        "step 1: begin 1",  # 2 of 0, and 2 are left for the next
        "  0 at 4: 1 1 +[2] *",
        "  1 at 0: 2 2 +[3]",
        # 4 - 1: 2 that 1 still has; one more of 2, but its 2 blocks and RD 1 are more than the 1
        # left
        "step 2:",
        "  0 at 6: 106 +[4] *",
        "  1 at 2: 2 2 +[5] *",
        "step 3:",  # 4 - 2, but 2 does not fit
        "  0 at 7: 107 *",
        "  1 at 4: 104 +[6] *",
        # no block is left for the older: 1 gives its three up, and nobody begins in such a step
        "step 4: end 1",
        "  0 at 8: 108 +[6] *",
        "step 5:",  # 1 would need 3 for its 4 + 2 tokens, and RD 1; 2 are free
        "  0 at 9: 109 *",
        "step 6:",
        "  0 at 10: 110 +[5] *",
        "step 7: end 0 begin 1",  # 2 of its tokens are in the cache, the other 4 are computed again
        "  1 at 2: 2 2 104 105 +[3, 5, 6] *",
        "step 8: end 1 begin 2",
        "  2 at 0: 3 3 3 3 +[4, 2] *",
        "step 9: begin 3",  # 4 - 1
        "  2 at 4: 104 +[1] *",
        "  3 at 0: 4 4 +[0] *",
        "step 10:",
        "  2 at 5: 105 *",
        "  3 at 2: 102 +[6] *",
    ]


def test_throttling_spreads_prompts_over_two_steps_and_decodes_over_two_stages() -> None:
    # T = 2, MaxP = 8, MinP = 2, KVthresh = 0.2: below 1.4 of 7 free blocks no prompt goes on
    assert plans_of("throttling", depth=2, iterations=2, min_prefill=2, threshold=0.2) == [
        "step 0: begin 0",  # all blocks free: min(WP 6 / 2, 8 * 1)
        "  0 at 0: 1 1 1 +[0, 1]",
        "step 1: begin 1",  # WP 11, 5 of 7 free: min(11 / 2, 8 * (0.714 - 0.2) / 0.8 = 5.1)
        "  0 at 3: 1 1 1 +[2] *",
        "  1 at 0: 2 2 +[3]",
        "step 2: begin 2",  # 3 of 7 free: 8 * 0.229 / 0.8 = 2.3; 0 and 1 are in flight
        "  2 at 0: 3 3 +[4]",
        "step 3:",  # 2 of 7: 8 * 0.086 / 0.8 = 0.86, raised to MinP 2; 2 is in flight
        "  0 at 6: 106 +[5] *",
        "  1 at 2: 2 2 +[6] *",
        "step 4:",  # no block is free: 2 waits with half of its prompt
        "  0 at 7: 107 *",
        "step 5: end 2",  # RD 2 / 2 stages: 1, which needs a block. 2, the newest, gives its one up
        "  1 at 4: 104 +[4] *",
        "step 6: end 1",  # 0 needs a block: 1 gives its three up
        "  0 at 8: 108 +[4] *",
        "step 7:",  # 1 would need 3 for its 4 + 2 tokens, and RD 1; 2 are free
        "  0 at 9: 109 *",
        "step 8:",
        "  0 at 10: 110 +[6] *",
        # WP 12: 6, of which 1 takes 4 (the others are cached) and 2 takes 2
        "step 9: end 0 begin 1 begin 2",
        "  1 at 2: 2 2 104 105 +[3, 6, 4] *",
        "  2 at 0: 3 3 +[5]",
        "step 10: begin 3",  # 3 of 7 free: 2.3; 2 is in flight
        "  3 at 0: 4 4 +[2] *",
        "step 11: end 1",  # WP 2 / 2, raised to MinP 2
        "  2 at 2: 3 3 +[1] *",
        "step 12:",  # RD 1: 2 is in flight
        "  3 at 2: 102 +[0] *",
        "step 13:",  # RD 2 / 2 stages, and 3 is in flight
        "  2 at 4: 104 +[4] *",
        "step 14: end 3",
        "  2 at 5: 105 *",
    ]


def test_adaptive_fills_steps_up_and_keeps_the_expected_growth_free() -> None:
    # T = 2, MaxP = 8, MinP = 2, KVthresh = 0.2, fill = 4; R = growth, but at most 0.6 * 7 = 4.2
    # blocks. Here growth is more than KVthresh, so that UT = 8 * (free - R) / (7 - R).
    parameters = {
        "iterations": 2,
        "min_prefill": 2,
        "threshold": 0.2,
        "fill": 4,
        "most_reserved": 0.6,
    }
    assert plans_of("adaptive", depth=2, predictor=None, **parameters) == [
        # nothing runs, R = 0: equation 3 as in throttling gives 3, filling up 4 - RD 0
        "step 0: begin 0",
        "  0 at 0: 1 1 1 1 +[0, 1]",
        "step 1:",  # growth: 6 tokens in 3 blocks. 0 alone holds blocks: it may end its prompt
        "  0 at 4: 1 1 +[2] *",
        "step 2: begin 1",  # 4 free, R = 3: min(WP 8 / 2, 8 * 1 / 4) = 2, where throttling gives 3
        "  1 at 0: 2 2 +[3]",
        # growth: 6 + 3 tokens in 5 blocks, R = 4.2, and 3 are free: 1 waits with half of its prompt
        "step 3:",
        "  0 at 6: 106 +[4] *",
        "step 4:",
        "  0 at 7: 107 *",
        "step 5:",
        "  0 at 8: 108 +[5] *",
        "step 6:",
        "  0 at 9: 109 *",
        # what was kept is what 0 needs: under throttling 1 is preempted here, and begins again
        "step 7:",
        "  0 at 10: 110 +[6] *",
        "step 8: end 0",  # 1 alone holds blocks
        "  1 at 2: 2 2 +[6] *",
        "step 9: begin 2",  # 5 free, R = 4.2: min(WP 6 / 2, 8 * 0.8 / 2.8 = 2.3)
        "  2 at 0: 3 3 +[5]",
        "step 10:",  # 4 are free
        "  1 at 4: 104 +[4] *",
        "step 11:",
        "  1 at 5: 105 *",
        "step 12: end 1",  # 2 alone holds blocks
        "  2 at 2: 3 3 +[4] *",
        "step 13: begin 3",  # 5 free: min(WP 2 / 2, 2.3) = 1, raised to MinP 2
        "  3 at 0: 4 4 +[2] *",
        "step 14:",  # RD 1
        "  2 at 4: 104 +[1] *",
        "step 15:",  # RD 2 / 2 stages
        "  3 at 2: 102 +[0] *",
        "step 16:",
        "  2 at 5: 105 *",
    ]


def test_adaptive_takes_what_waits_at_once_where_a_steps_time_does_not_grow() -> None:
    # As above, but t is 4 whatever the tokens, and one stage takes all of it: fill = WP / 1, and
    # decodes do not divide.
    parameters = {"iterations": 2, "min_prefill": 2, "threshold": 0.2, "most_reserved": 0.6}
    assert plans_of("adaptive", depth=2, **parameters) == [
        "step 0: begin 0",  # F / T = 7 * 2 / 2
        "  0 at 0: 1 1 1 1 1 1 +[0, 1, 2] *",
        # 4 free, R = 3: min(WP 8 / 2, 8 * 1 / 4) = 2 and F / T = 1, whatever fill is
        "step 1: begin 1",
        "  0 at 6: 106 +[3] *",
        "  1 at 0: 2 2 +[4]",
        "step 2:",
        "  0 at 7: 107 *",
        "step 3:",
        "  0 at 8: 108 +[5] *",
        "step 4:",
        "  0 at 9: 109 *",
        "step 5:",
        "  0 at 10: 110 +[6] *",
        "step 6: end 0",  # 1 alone holds blocks
        "  1 at 2: 2 2 +[6] *",
        "step 7: begin 2",
        "  2 at 0: 3 3 +[5]",
        "step 8:",
        "  1 at 4: 104 +[3] *",
        "step 9:",
        "  1 at 5: 105 *",
        "step 10: end 1",
        "  2 at 2: 3 3 +[3] *",
        "step 11: begin 3",
        "  3 at 0: 4 4 +[2] *",
        "step 12:",  # nothing waits, and 3 is no decode yet
        "  2 at 4: 104 +[1] *",
        "step 13:",  # 3 has waited for 2
        "  2 at 5: 105 *",
        "  3 at 2: 102 +[0] *",
    ]


# --------------------------------------------------------------------------------------------------
# two layouts


def test_seesaw_fills_the_pool_in_one_layout_and_empties_it_in_the_other() -> None:
    assert plans_of("seesaw") == [
        "step 0: begin 0",  # PREFILL: 4 host blocks are kept for its 7 tokens
        "  0 at 0: 1 1 1 1 1 1 +[0, 1, 2] *",
        "  0 [0, 1, 2]>[0, 1, 2]",
        "step 1: end 0 begin 1",  # 3 more, of the 4 left
        "  1 at 0: 2 2 2 2 +[3, 4] *",
        "  1 [3, 4]>[4, 5]",
        # the pool cannot hold 2, which needs 3 and finds 1: over to layout 1
        "step 2: to layout 1 end 1",
        "step 3 in layout 1:",  # DECODE: 10 tokens of two, 3 blocks each; 7 free / 3: both come in
        "  0 [0, 1, 2]<[0, 1, 2]",
        "  1 [3, 4]<[4, 5]",
        "step 4 in layout 1: begin 0 begin 1",
        "  0 at 6: 106 +[0, 1, 2, 5] *",
        "  1 at 4: 104 +[3, 4, 6] *",
        "step 5 in layout 1:",
        "  0 at 7: 107 *",
        "  1 at 5: 105 *",
        # 2 and 3 wait, but 0 is finished first: nothing was foretold of it yet
        "step 6 in layout 1: end 1",
        "  0 at 8: 108 +[6] *",
        "step 7 in layout 1:",
        "  0 at 9: 109 *",
        "step 8 in layout 1:",
        "  0 at 10: 110 +[4] *",
        "step 9 in layout 1: to layout 0 end 0",  # pool and device are empty: back
        "step 10: begin 2 begin 3",
        "  2 at 0: 3 3 3 3 +[0, 1] *",
        "  3 at 0: 4 4 +[2] *",
        "  2 [0, 1]>[7, 3]",
        "  3 [2]>[1]",
        "step 11: to layout 1 end 2 end 3",  # no prompt is left
        "step 12 in layout 1:",
        "  2 [0, 1]<[7, 3]",
        "  3 [2]<[1]",
        "step 13 in layout 1: begin 2 begin 3",
        "  2 at 4: 104 +[0, 1, 3] *",
        "  3 at 2: 102 +[2, 4] *",
        "step 14 in layout 1: end 3",
        "  2 at 5: 105 *",
    ]


def test_seesaw_turns_back_when_what_the_steps_waste_is_more_than_the_way_there_and_back() -> None:
    prompts = [Prompt((1,) * 2, 18), Prompt((2,) * 10, 2, at=6)]
    plans = play(
        make_policy("seesaw", 8),
        prompts,
        num_blocks=11,
        host_blocks=14,
        other_layouts=(16,),
        predictor=PREDICTOR,
    )
    assert plans[plans.index("step 15 in layout 1:") :] == [
        "step 15 in layout 1:",  # 0 decodes alone since step 3, and 1 waits since step 6
        "  0 at 14: 114 +[7] *",
        # Step 16 foretells 4 more tokens, of which 0 needs no more. A round takes T(1) = 4 (1 + 0.1
        # * 15) = 10 s. With 10 more tokens there would be 25 / 15 as many decodes: T = 4 (1 + 0.1 *
        # 25) = 14 s, of which this one has 14 * 15 / 25 = 8.4 s. Four times the 1.6 s wasted is 6.4
        # s, above 2 (0.1 * 15 + 1) = 5 s. The pool holds 0's 8 blocks and the 6 of the prompt.
        "step 16 in layout 1: end 0",
        "  0 [0, 1, 2, 3, 4, 5, 6, 7]>[2, 3, 4, 5, 6, 7, 8, 9]",
        "step 17 in layout 1: to layout 0",
        "step 18: begin 1",
        "  1 at 0: 2 2 2 2 2 2 2 2 +[0, 1, 2, 3]",
        "step 19:",
        "  1 at 8: 2 2 +[4] *",
        "  1 [0, 1, 2, 3, 4]>[10, 11, 12, 13, 1]",
        "step 20: to layout 1 end 1",
        "step 21 in layout 1:",
        "  0 [0, 1, 2, 3, 4, 5, 6, 7]<[2, 3, 4, 5, 6, 7, 8, 9]",
        "  1 [8, 9, 10, 11, 12]<[10, 11, 12, 13, 1]",
        "step 22 in layout 1: begin 0 begin 1",
        "  0 at 15: 115 +[0, 1, 2, 3, 4, 5, 6, 7] *",
        "  1 at 10: 110 +[8, 9, 10, 11, 12, 13] *",
        "step 23 in layout 1: end 1",
        "  0 at 16: 116 +[14] *",
        "step 24 in layout 1:",
        "  0 at 17: 117 *",
        "step 25 in layout 1:",
        "  0 at 18: 118 +[15] *",
    ]
