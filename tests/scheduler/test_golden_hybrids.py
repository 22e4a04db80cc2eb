"""The policies that decode in host memory too, on the trace of tests/scheduler/golden.py, worked out by hand."""

from tests.scheduler.golden import plans_of

ALIKE = [  # the four policies put prompts where there is room for them: to the device, else they park them
    "step 0: begin 0",
    "  0 at 0: 1 1 1 1 1 1 +[0, 1, 2] *",
    # 4 are free, growth 3: 1 and 2 are parked. While they are computed they may have all but a block of RD 1: 6 tokens.
    "step 1: begin 1 begin 2",
    "  0 at 6: 106 +[3] *",
    "  1 at 0: 2 2 2 2 +[4, 5] *",
    "  2 at 0: 3 3 +[6]",
    "step 2: end 1",  # no block is free, 2 waits with half of its prompt
    "  1 [4, 5]>[0, 1]",
    "  0 at 7: 107 *",
]


def test_neo_pipelines_while_a_prompt_gives_the_cpu_time() -> None:
    assert plans_of("neo") == [
        *ALIKE,
        # The device's part for sub-batch 0: Tlin_pref + Tgatt_pref = 1 + 0.1 * 10 keys (2's first two are counted in)
        # + 3 * 2 prompt tokens = 8 s, the CPU for 1: 2 + 4 keys = 6 s, hidden. A layer takes 8 + Tlin 1 = 9 s: 0, a
        # prompt and 1 in 9 s (a third) are more than two in 8 s (a quarter).
        "step 3 asymmetric: begin 1",
        "  0 at 8: 108 +[5] *",
        "  2 at 2: 3 3 +[4] *",
        "  1 at 4: 104 +[0, 1, 2] * host second",
        "step 4: end 2",  # no prompt: 1 + 0.9 s do not hide the 2 + 5 of 1
        "  2 [6, 4]>[3, 4]",
        "  0 at 9: 109 *",
        # 3 needs a block; 2 are free, growth 12 tokens in 6: parked. 8 s again: one of 4 keys, not two, 2 + 8 s.
        "step 5 asymmetric: begin 3",
        "  0 at 10: 110 +[4] *",
        "  3 at 0: 4 4 +[6] *",
        "  1 at 5: 105 * host second",
        "step 6: end 0 end 1 end 3",  # nothing runs, growth 0: 2 comes back
        "  3 [6]>[6]",
        "  2 [4, 5]<[3, 4]",
        "step 7: begin 2",  # and 3
        "  3 [3]<[6]",
        "  2 at 4: 104 +[4, 5, 2] *",
        "step 8: begin 3",
        "  2 at 5: 105 *",
        "  3 at 2: 102 +[3, 1] *",
    ]


def test_overlap_gives_one_cohort_a_layer_a_step() -> None:
    assert plans_of("overlap") == [
        *ALIKE,
        "step 3 overlap: begin 1",  # 1 begins a token, which takes 4 + 1 steps
        "  0 at 8: 108 +[5] *",
        "  2 at 2: 3 3 +[4] *",
        "  1 at 4: 104 +[0, 1, 2] * host",
        "step 4 overlap: end 2",  # layer 1
        "  2 [6, 4]>[3, 4]",
        "  0 at 9: 109 *",
        "step 5 overlap: begin 3",  # layer 2; 2 is ready, but one cohort is under way
        "  0 at 10: 110 +[4] *",
        "  3 at 0: 4 4 +[6] *",
        "step 6: end 0 end 3",  # nothing runs: 2 comes back. A plan of swaps alone is no step: 1 stays at layer 2
        "  3 [6]>[6]",
        "  2 [4, 5]<[3, 4]",
        "step 7 overlap:",  # layer 3, with an idle device
        "step 8 overlap: begin 2",  # layer 4: 1 has its token
        "  3 [3]<[6]",
        "  2 at 4: 104 +[4, 5, 2] *",
        "step 9 overlap: begin 3",  # 3 free, growth 1: not 1's three; it begins its next where it is
        "  2 at 5: 105 *",
        "  3 at 2: 102 +[3, 1] *",
        "  1 at 5: 105 * host",
        "step 10 overlap: end 2 end 3",
        "step 11 overlap:",
        "step 12 overlap:",
        "step 13 overlap:",
    ]


def test_apex_pipelines_by_rule_3_overlaps_by_rule_2_and_finishes_by_rule_4_what_is_under_way() -> None:
    assert plans_of("apex", minimum_ratio=1.0) == [
        *ALIKE,
        # Rule 3. Tlin = 1, Tgatt = 0.1 * 10 = 1: NG = 1; NC = 1 / (2 + 4). With the prompt the CPU has 1 + 1 + 7 = 9 s:
        # (NG Tgatt + 9 NC) / (2 Tlin + Tgatt) = 2.5 / 3 > NG Tgatt / (Tlin + Tgatt) = 1 / 2
        "step 3 asymmetric: begin 1",
        "  0 at 8: 108 +[5] *",
        "  2 at 2: 3 3 +[4] *",
        "  1 at 4: 104 +[0, 1, 2] * host second",
        # Rule 2. Tgatt = 0.9, NC = 1 / 7, and 2 Tlin + Tgatt = 2.9 s: (1 + 2.9 / 7) / 2.9 = 0.488 < 1 / 1.9 = 0.526
        "step 4 overlap: end 2",
        "  2 [6, 4]>[3, 4]",
        "  0 at 9: 109 *",
        "  1 at 5: 105 * host",
        # Rule 3 again: NC = 2 / (2 + 10), 2.5 / 3. Rule 4: 1, which is under way, goes before 2; 8 s hide no more.
        "step 5 asymmetric: begin 3",
        "  0 at 10: 110 +[4] *",
        "  3 at 0: 4 4 +[6] *",
        "  1 at 6: under way * host second",
        "step 6: end 0 end 1 end 3",  # rule 1: nothing runs, so 2 and 3 come back
        "  3 [6]>[6]",
        "  2 [4, 5]<[3, 4]",
        "step 7: begin 2",
        "  3 [3]<[6]",
        "  2 at 4: 104 +[4, 5, 2] *",
        "step 8: begin 3",
        "  2 at 5: 105 *",
        "  3 at 2: 102 +[3, 1] *",
    ]


def test_hybrid_takes_the_device_alone_asymmetric_or_overlapped_and_parks_no_more_than_the_cpu_serves() -> None:
    assert plans_of("hybrid") == [
        *ALIKE,
        # A second one would take the CPU 2 + 8 s a layer, more than a whole step of decodes, 4 (1 + 1) = 8 s: 2 ends
        # its prompt, but is not parked. Alone 0 and a prompt advance in 4 (1 + 7) = 32 s, 2 / 32 = 0.063 a second. With
        # 1 asymmetric 3 / 36 = 0.083, overlapped 2.2 / 32 = 0.069.
        "step 3 asymmetric: begin 1",
        "  0 at 8: 108 +[5] *",
        "  2 at 2: 3 3 +[4] *",
        "  1 at 4: 104 +[0, 1, 2] * host second",
        # RD 2 with 13 keys, 4 (1 + 1.3) = 9.2 s, in which the CPU can serve a layer of 1, 7 s: a fifth of a token more
        # in no more time. But 2.3 s do not hide 7. The device has no block for 2, which sits out.
        "step 4 overlap:",
        "  0 at 9: 109 *",
        "  1 at 5: 105 * host",
        "step 5: end 2",  # nor one for 0: 2 gives its two up, and moves to the host
        "  2 [6, 4]>[6, 7]",
        "step 6 overlap:",  # until they are free, 1 goes on alone: layer 1
        "step 7 overlap:",  # layer 2. 3 is not begun: three on the CPU are 2 + 15 s, and it has 8
        "  0 at 10: 110 +[4] *",
        # Nothing runs, growth 0: 2 comes back and 3 has room. Alone 1 / 28 = 0.036. Overlapped, 1 goes on to layer 3:
        # 1.2 / 28 = 0.043. Asymmetric it ends its token at once, 2 / (4 (7 + 1)) = 0.063, as the CPU's 2 + 5 s (the
        # mean of 1 and 2) hide in 7.
        "step 8 asymmetric: end 0 begin 3",
        "  2 [4, 6]<[6, 7]",
        "  3 at 0: 4 4 +[5] *",
        "  1 at 6: under way * host second",
        "step 9: end 1 begin 2",
        "  2 at 4: 104 +[4, 6, 3] *",
        "  3 at 2: 102 +[2] *",
        "step 10: end 3",
        "  2 at 5: 105 *",
    ]
