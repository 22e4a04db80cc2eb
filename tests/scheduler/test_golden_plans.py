"""Four traces worked out by hand: every plan, row by row. Read them beside scheduler.py; golden.py
has the spelling."""

from nanoserve.scheduler.policies.baselines import ChunkedPrefill
from nanoserve.scheduler.policies.token_throttling import TokenThrottling
from tests.scheduler.golden import Prompt, play


def test_six_requests_with_chunks_prefix_hits_reuse_and_a_fork() -> None:
    requests = [
        Prompt((1, 2, 3), 3),  # A = sequence 0
        Prompt((1, 2, 9), 2),  # B = 1, shares A's first block in the plan in which A writes it
        Prompt((5, 6, 7, 8, 9), 2),  # C = 2, in two chunks
        # D = 3 and its sibling 4, which copies the block its prompt ends in
        Prompt((4, 4), 2, n=2),
        Prompt((1, 2, 3, 1), 1),  # E = 5, finds A's first block in the cache after A is gone
        Prompt((6,), 1),  # F = 6
    ]
    assert play(ChunkedPrefill(4), requests, num_blocks=8) == [
        "step 0: begin 0 begin 1",
        "  0 at 0: 1 2 3 +[0, 1] *",
        "  1 at 2: 9 +[0, 2] *",
        # decodes first, the rest of the budget is C's: 3 blocks, and 2 are left for the decodes
        "step 1: begin 2",
        "  0 at 3: 103 *",
        "  1 at 3: 103 *",
        "  2 at 0: 5 6 +[3]",
        "step 2: end 1",  # B had its two tokens; its block 2 goes to the end of the blank ones
        "  0 at 4: 104 +[4] *",
        "  2 at 2: 7 8 9 +[5, 6] *",
        # A's full blocks 0 and 1 stay cached, its block 4 is blank
        "step 3: end 0 begin 3 begin 5",
        "  2 at 5: 105 *",
        "  3 at 0: 4 4 +[7] *",
        "  5 at 2: 3 +[0, 2]",
        # of C's blocks the last, 6, is blank, the others are cached
        "step 4: end 2 begin 4 begin 6 copy 7>6",
        "  3 at 2: 102 +[4] *",
        "  4 at 1: 4 +[6] *",
        "  5 at 3: 1 *",
        "  6 at 0: 6 +[1] *",  # no blank block is left: block 1 is the least recently used
        "step 5: end 3 end 5 end 6",
        "  4 at 2: 102 +[4] *",
    ]


def test_the_newest_is_preempted_and_recomputed() -> None:
    requests = [Prompt((1, 2), 4), Prompt((3, 4), 3)]
    assert play(ChunkedPrefill(8), requests, num_blocks=3) == [
        "step 0: begin 0 begin 1",
        "  0 at 0: 1 2 +[0] *",
        "  1 at 0: 3 4 +[1] *",
        # one block is left, and it is the older one's; the newer sits out but keeps its KV
        "step 1:",
        "  0 at 2: 102 +[2] *",
        "step 2:",
        "  0 at 3: 103 *",
        "step 3: end 1",  # now the older takes the newer one's block
        "  0 at 4: 104 +[1] *",
        "step 4: end 0 begin 1",  # prompt and the token it had are computed again
        "  1 at 0: 3 4 102 +[1, 2] *",
        "step 5:",
        "  1 at 3: 103 *",
    ]


def test_token_throttling_shares_prompts_and_decodes_out_over_two_micro_batches() -> None:
    policy = TokenThrottling(iterations=2, max_prefill=8, min_prefill=2, threshold=0.25)
    requests = [Prompt((1, 2, 3, 4), 3), Prompt((5, 6, 7, 8, 9, 9), 2), Prompt((3, 3, 3, 3), 2)]
    assert play(policy, requests, num_blocks=8, depth=2) == [
        "step 0: begin 0 begin 1",  # WP 14, all blocks free: min(14 / 2, 8 * 1) = 7 prompt tokens
        "  0 at 0: 1 2 3 4 +[0, 1] *",
        "  1 at 0: 5 6 7 +[2, 3]",
        # WP 7, 4 of 8 blocks free: min(4, 8 * 0.25 / 0.75 = 2); sequence 1 is in flight
        "step 1: begin 2",
        "  2 at 0: 3 3 +[4]",
        # RD 1: one decode; WP 5, 3 of 8 free: min(3, 8 * 0.125 / 0.75 = 1), raised to MinP 2
        "step 2:",
        "  0 at 4: 104 +[5] *",
        "  1 at 3: 8 9 +[6]",
        "step 3:",  # 1 of 8 free is below the threshold: sequences 1 and 2 wait with their prompts
        "  0 at 5: 105 *",
        "step 4: end 0",  # its three blocks came back, 4 of 8 are free: min(3 / 2, 2) = 2
        "  1 at 5: 9 *",
        "  2 at 2: 3 +[7]",
        "step 5:",
        "  1 at 6: 106 +[5] *",
        "  2 at 3: 3 *",
        "step 6: end 1",
        "  2 at 4: 104 +[5] *",
    ]


def test_a_prompt_that_runs_alone_passes_the_threshold_only_below_it() -> None:
    """One free block of 4 is below 0.5: nothing else would free any. Above it, equation 3 holds
    (MinP is 1)."""
    policy = TokenThrottling(iterations=4, max_prefill=8, min_prefill=1, threshold=0.5)
    assert play(policy, [Prompt((1,) * 8, 1)], num_blocks=4, depth=1) == [
        "step 0: begin 0",  # WP 8 / 4
        "  0 at 0: 1 1 +[0]",
        "step 1:",  # WP 6 / 4, rounded up; 3 of 4 free: 8 * 0.25 / 0.5 = 4
        "  0 at 2: 1 1 +[1]",
        "step 2:",  # 2 of 4 free are not below the threshold: 8 * 0, raised to MinP
        "  0 at 4: 1 +[2]",
        "step 3:",  # 1 of 4 is: all that is left
        "  0 at 5: 1 1 1 +[3] *",
    ]


def test_two_partly_computed_prompts_below_the_threshold_do_not_wait_for_each_other_for_ever() -> (
    None
):
    policy = TokenThrottling(iterations=1, max_prefill=4, min_prefill=2, threshold=0.5)
    requests = [Prompt((1,) * 10, 1), Prompt((2,) * 8, 1)]
    assert play(policy, requests, num_blocks=8, depth=2) == [
        "step 0: begin 0",
        "  0 at 0: 1 1 1 1 +[0, 1]",
        "step 1: begin 1",  # 6 of 8 free
        "  1 at 0: 2 2 +[2]",
        "step 2:",  # 5 of 8 free
        "  0 at 4: 1 1 +[3]",
        "step 3:",  # 4 of 8 free are not below the threshold
        "  1 at 2: 2 2 +[4]",
        # 3 of 8: both are stuck. The newer gives its blocks up. 5 of 8 free: 4 * 0.125 / 0.5, so
        # MinP
        "step 4: end 1",
        "  0 at 6: 1 1 +[5]",
        # 4 of 8 free are not below the threshold; what 1 had computed is in the prefix cache
        "step 5: begin 1",
        "  1 at 4: 2 2 +[2, 4, 6]",
        "step 6: end 1",  # 1 of 8: both are stuck again, and 0 goes on with MinP
        "  0 at 8: 1 1 +[7] *",
        "step 7: end 0 begin 1",
        "  1 at 6: 2 2 +[2, 4, 6, 7] *",
    ]
