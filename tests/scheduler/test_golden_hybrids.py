"""The policies that decode in host memory too, on the trace of tests/scheduler/golden.py, worked
out by hand."""

from tests.scheduler.golden import plans_of

# the four policies put prompts where there is room for them: to the device, else they park them
ALIKE = [
    "step 0: begin 0",
    "  0 at 0: 1 1 1 1 1 1 +[0, 1, 2] *",
    # 4 are free, growth 3: 1 and 2 are parked. While they are computed they may have all but a
    # block of RD 1: 6 tokens.
    "step 1: begin 1 begin 2",
    "  0 at 6: 106 +[3] *",
    "  1 at 0: 2 2 2 2 +[4, 5] *",
    "  2 at 0: 3 3 +[6]",
    # layer by layer, as they are computed: before the next step its two blocks are free again
    "  1 [4, 5]>[0, 1]",
]


def test_neo_pipelines_while_a_prompt_gives_the_cpu_time() -> None:
    assert plans_of("neo") == [
        *ALIKE,
        # The device's part for sub-batch 0: Tlin_pref + Tgatt_pref = 1 + 0.1 * 9 keys (2's first
        # two are counted in) + 3 * 2 prompt tokens = 7.9 s, the CPU for 1: 2 + 4 keys = 6 s,
        # hidden. A layer takes 7.9 + Tlin 1 = 8.9 s: 0, a prompt and 1 in 8.9 s (a third) are more
        # than two in 7.9 s (a quarter).
        "step 2 asymmetric: end 1 begin 1",
        "  0 at 7: 107 *",
        "  2 at 2: 3 3 +[5] *",
        "  1 at 4: 104 +[0, 1, 2] * host second",
        "  2 [6, 5]>[3, 4]",
        "step 3: end 2",  # no prompt: 1 + 0.8 s do not hide two, 2 + 8, nor one, 2 + 4
        "  0 at 8: 108 +[4] *",
        "step 4:",
        "  0 at 9: 109 *",
        # 3 needs a block; 2 are free, growth 12 tokens in 6: parked. 8 s again: one of 4 keys, not
        # two, 2 + 8 s.
        "step 5 asymmetric: begin 3",
        "  0 at 10: 110 +[5] *",
        "  3 at 0: 4 4 +[6] *",
        "  1 at 5: 105 * host second",
        "  3 [6]>[6]",
        "step 6: end 0 end 1 end 3",  # nothing runs, growth 0: 2 and 3 come back
        "  2 [5, 4]<[3, 4]",
        "  3 [3]<[6]",
        "step 7: begin 2 begin 3",
        "  2 at 4: 104 +[5, 4, 2] *",
        "  3 at 2: 102 +[3, 1] *",
        "step 8: end 3",
        "  2 at 5: 105 *",
    ]


def test_overlap_gives_one_cohort_a_layer_a_step() -> None:
    assert plans_of("overlap") == [
        *ALIKE,
        "step 2 overlap: end 1 begin 1",  # 1 begins a token, which takes 4 + 1 steps
        "  0 at 7: 107 *",
        "  2 at 2: 3 3 +[5] *",
        "  1 at 4: 104 +[0, 1, 2] * host",
        "  2 [6, 5]>[3, 4]",
        "step 3 overlap: end 2",  # layer 1; 2 is ready, but one cohort is under way
        "  0 at 8: 108 +[4] *",
        "step 4 overlap:",  # layer 2
        "  0 at 9: 109 *",
        "step 5 overlap: begin 3",  # layer 3
        "  0 at 10: 110 +[5] *",
        "  3 at 0: 4 4 +[6] *",
        "  3 [6]>[6]",
        # nothing runs: 2 and 3 come back. A plan of swaps alone is no step: 1 stays at layer 3
        "step 6: end 0 end 3",
        "  2 [5, 4]<[3, 4]",
        "  3 [3]<[6]",
        "step 7 overlap:",  # layer 4, with an idle device: 1 has its token
        # 4 free, one for each of RD 2: not 1's three; it begins its next there
        "step 8 overlap: begin 2 begin 3",
        "  2 at 4: 104 +[5, 4, 2] *",
        "  3 at 2: 102 +[3, 1] *",
        "  1 at 5: 105 * host",
        "step 9 overlap: end 3",
        "  2 at 5: 105 *",
        "step 10 overlap: end 2",
        "step 11 overlap:",
        "step 12 overlap:",
    ]


def test_apex_pipelines_by_rule_3_overlaps_by_rule_2_and_finishes_by_rule_4_what_is_under_way() -> (
    None
):
    assert plans_of("apex", minimum_ratio=1.0) == [
        *ALIKE,
        # Rule 3. Tlin = 1, Tgatt = 0.1 * 9 = 0.9; NC = 1 / (2 + 4). With the prompt the CPU has 1 +
        # 1 + 6.9 = 8.9 s: (NG Tgatt + 8.9 NC) / (2 Tlin + Tgatt) = 2.48 / 2.9 = 0.856 > NG Tgatt /
        # (Tlin + Tgatt) = 1 / 1.9 = 0.526
        "step 2 asymmetric: end 1 begin 1",
        "  0 at 7: 107 *",
        "  2 at 2: 3 3 +[5] *",
        "  1 at 4: 104 +[0, 1, 2] * host second",
        "  2 [6, 5]>[3, 4]",
        # Tgatt = 0.8, NC = 2 / (2 + 8), and 2 Tlin + Tgatt = 2.8 s: (1 + 2.8 / 5) / 2.8 = 0.557 > 1
        # / 1.8 = 0.556. But rule 4: 1.8 s of the device do not hide even one of them, 2 + 4 s, so
        # that there is no second sub-batch.
        "step 3 overlap: end 2 begin 2",
        "  0 at 8: 108 +[4] *",
        "  1 at 5: 105 * host",
        "  2 at 4: 104 +[3, 4, 5] * host",
        # Rule 2. Tgatt = 0.9, NC = 2 / (2 + 10), and 2 Tlin + Tgatt = 2.9 s: (1 + 2.9 / 6) / 2.9 =
        # 0.511 < 0.526
        "step 4 overlap:",
        "  0 at 9: 109 *",
        # Rule 3 again: (1 + 9 / 6) / 3. Rule 4: 1 is finished in the step, and 2 not: 8 s hide one
        # of 5 keys.
        "step 5 asymmetric: begin 3",
        "  0 at 10: 110 +[5] *",
        "  3 at 0: 4 4 +[6] *",
        "  1 at 6: under way * host second",
        "  3 [6]>[6]",
        # rule 1: nothing runs, so 3 comes back; 2 has one of 4 layers behind it
        "step 6: end 0 end 1 end 3",
        "  3 [5]<[6]",
        "step 7 overlap:",
        "step 8 overlap: begin 3",
        "  3 at 2: 102 +[5, 4] *",
        "step 9 overlap: end 3",  # 2 has its token
        "step 10: end 2",
        "  2 [4, 5, 3]<[3, 4, 5]",
        "step 11: begin 2",
        "  2 at 5: 105 +[4, 5, 3] *",
    ]


def test_hybrid_overlaps_what_is_short_beside_a_longer_decode_and_parks_no_more_than_the_cpu_serves() -> (
    None
):
    assert plans_of("hybrid", worthwhile=0.0) == [
        *ALIKE,
        # A second one would take the CPU 2 + 8 s a layer, more than a whole step of decodes, 4 (1 +
        # 1) = 8 s: 2 ends its prompt, but is not parked. Alone 0 and a prompt take 4 (1 + 6.9) =
        # 31.6 s, in which steps without prompts, of 4 (1 + 0.9) = 7.6 s, would decode 4.16: 0.132 a
        # second. A token of 1 with its 4 keys is worth 4 / 9 of one of the device: asymmetric 4.6 /
        # 35.6 = 0.129, overlapped (4.16 + 0.44 / 5) / 31.6 = 0.134.
        "step 2 overlap: end 1 begin 1",
        "  0 at 7: 107 *",
        "  2 at 2: 3 3 +[5] *",
        "  1 at 4: 104 +[0, 1, 2] * host",
        "step 3 overlap:",  # layer 1
        "  0 at 8: 108 +[4] *",
        "step 4 overlap:",  # layer 2
        "  0 at 9: 109 *",
        "step 5: end 2",  # there is no block for 0: 2 gives its two up, and moves to the host
        "  2 [6, 5]>[6, 7]",
        "step 6 overlap:",  # until they are free, 1 goes on alone: layer 3
        # 1 has its token. 3 is not begun: three on the CPU are 2 + 15 s, and it has 8
        "step 7 overlap:",
        "  0 at 10: 110 +[5] *",
        "step 8: end 0 end 1 begin 3",  # nothing runs, growth 0: 1 and 2 come back and 3 has room
        "  1 [5, 6, 4]<[0, 1, 2]",
        "  2 [3, 2]<[6, 7]",
        "  3 at 0: 4 4 +[1] *",
        "step 9: begin 1 begin 2",
        "  1 at 5: 105 +[5, 6, 4] *",
        "  2 at 4: 104 +[3, 2, 0] *",
        "step 10: end 1",
        "  2 at 5: 105 *",
        "  3 at 2: 102 +[4] *",
    ]
