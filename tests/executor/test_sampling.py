"""The sampler against plain references: what is kept, how it is distributed, what shares the
batch."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.executor.sampling.adjustments import GrammarMask
from nanoserve.executor.sampling.sampler import Draw, SamplingRows, SamplingState, sample
from nanoserve.executor.step.answers import LogprobColumns
from nanoserve.request import SamplingParams
from nanoserve.scheduler.plan import Begin
from tests.executor.staged_rows import penalized, sampling_rows
from triton_ops import reference_operators
from triton_ops.sampling import keep_likely


def state(
    params: SamplingParams,
    vocab_size: int,
    *,
    prompt: Sequence[int] = (1, 2, 3),
    output: Sequence[int] = (),
    seed: int = 0,
    end_tokens: tuple[int, ...] = (),
) -> SamplingState:
    begin = Begin(0, (*prompt, *output), len(prompt), 0, seed, params, end_tokens)
    return SamplingState(begin, vocab_size)


def draw_tokens(
    logits: torch.Tensor, states: Sequence[SamplingState], positions: Sequence[int]
) -> list[int]:
    sampled = sample(logits, sampling_rows(states, positions))
    assert sampled.valid.all()
    return sampled.tokens.tolist()


def random_logits(rows: int, vocab_size: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


# -------------------------------------------------------------------------------------------------
# what is kept


def kept_of(scaled: torch.Tensor, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    settings = (draw.top_k, draw.top_p, draw.min_p, draw.largest_top_k)
    return keep_likely(scaled, *settings, uses_top_p=draw.uses_top_p, uses_min_p=draw.uses_min_p)


def kept_tokens(logits: torch.Tensor, params: SamplingParams) -> set[int]:
    """The tokens that may be drawn for one row of logits [V]."""
    (draw,) = sampling_rows([state(params, len(logits))], [3]).draws
    values, tokens = kept_of(((logits - logits.max()) / params.temperature)[None], draw)
    return set(tokens.expand_as(values)[values > -torch.inf].tolist())


def sorted_reference(logits: np.ndarray, params: SamplingParams, nudge: float) -> set[int]:
    """top_k, top_p, min_p by sorting in float64. A positive `nudge` moves the thresholds towards
    keeping more."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    weights = np.exp((logits[order] - logits.max()) / params.temperature)
    if 0 < params.top_k < len(logits):
        order, weights = order[: params.top_k], weights[: params.top_k]
    better = np.concatenate(([0.0], np.cumsum(weights)[:-1])) / weights.sum()
    kept = better < params.top_p + nudge if params.top_p < 1 else better >= 0
    # without top_k everything that ties with the last one kept is kept
    if not 0 < params.top_k < len(logits):
        kept |= weights >= weights[kept].min() * (1 - max(nudge, 0))
    kept &= weights >= params.min_p * (1 - nudge)
    return {token for token, keep in zip(order, kept, strict=True) if keep}


@settings(max_examples=200, deadline=None)
@given(
    # A grid, so that what differs still differs after the division by the temperature.
    st.lists(st.integers(-768, 768).map(lambda number: number / 64), min_size=2, max_size=60),
    st.integers(0, 70),
    st.one_of(st.just(1.0), st.floats(0.01, 1.0)),
    st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
    st.floats(0.1, 3.0),
)
def test_kept_tokens_equal_the_sorted_reference(
    values: list[float], top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
    kept = kept_tokens(torch.tensor(values, dtype=torch.float32), params)
    # Tokens within rounding of a threshold may fall on either side.
    assert (
        sorted_reference(np.array(values), params, -1e-4)
        <= kept
        <= sorted_reference(np.array(values), params, 1e-4)
    )
    assert kept


def test_top_p_works_within_what_top_k_left() -> None:
    """Hugging Face's order: of 0.4, 0.3, 0.2, 0.1 the top two weigh 4/7 and 3/7, so top_p 0.55
    keeps one, 0.6 both."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert kept_tokens(logits, SamplingParams(top_k=2, top_p=0.55)) == {0}
    assert kept_tokens(logits, SamplingParams(top_k=2, top_p=0.6)) == {0, 1}
    assert kept_tokens(logits, SamplingParams(top_p=0.55)) == {0, 1}


def test_another_row_with_top_p_takes_nothing_from_a_row_without() -> None:
    """Even what is far too unlikely to be drawn stays, so that no rounding of one request reaches
    another."""
    logits = torch.tensor([[0.0, -40.0, -80.0, -90.0]] * 2)
    states = [state(SamplingParams(top_k=3, top_p=top_p), 4) for top_p in (1.0, 0.5)]
    (draw,) = sampling_rows(states, [3, 3]).draws
    values, _ = kept_of(logits, draw)
    assert (values > -torch.inf).tolist() == [[True, True, True], [True, False, False]]


def test_ties() -> None:
    logits = torch.tensor([0.0, 1.0, 1.0, 1.0])
    assert kept_tokens(logits, SamplingParams(top_k=2)) == {1, 2}
    assert kept_tokens(logits, SamplingParams(top_p=0.3)) == {1, 2, 3}


def test_temperature_applies_before_top_p() -> None:
    logits = torch.tensor([0.6, 0.3, 0.1]).log()
    assert kept_tokens(logits, SamplingParams(top_p=0.65)) == {0, 1}
    assert kept_tokens(logits, SamplingParams(top_p=0.65, temperature=0.5)) == {0}


def test_a_whole_large_vocabulary_is_kept_exactly() -> None:
    logits = random_logits(1, 150_000, seed=4)[0]
    params = SamplingParams(top_p=0.9)
    assert len(kept_tokens(logits, params)) == pytest.approx(
        len(sorted_reference(logits.double().numpy(), params, 0)), abs=1
    )


# ------------------------------------------------------------------------------------------------
# how it is drawn


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.7),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.1),
        SamplingParams(top_k=12, top_p=0.9, min_p=0.05, temperature=1.5),
        SamplingParams(logit_bias={4: 2.0, 7: -1.0}),
    ],
    ids=["plain", "temperature", "top_k", "top_p", "min_p", "all", "bias"],
)
def test_draws_follow_the_probabilities(params: SamplingParams) -> None:
    """Chi-square of 5,000 draws; seeds are fixed, and a correct sampler misses the level 1 time in
    10^4."""
    logits = random_logits(1, 20, seed=1)[0] / 2
    count = 5_000
    tokens = draw_tokens(
        logits.expand(count, -1),
        [state(params, 20, seed=seed) for seed in range(count)],
        [3] * count,
    )
    biased = logits.double().numpy().copy()
    for token, bias in params.logit_bias.items():
        biased[token] += bias
    kept = sorted(sorted_reference(biased, params, 0))
    weights = np.exp(biased[kept] / params.temperature)
    expected = count * weights / weights.sum()
    observed = np.bincount(tokens, minlength=20)
    assert observed[kept].sum() == count
    freedom = len(kept) - 1
    statistic = float(((observed[kept] - expected) ** 2 / expected).sum())
    # beyond the 1 - 10^-4 quantile for 1 to 19 degrees
    assert statistic < freedom + 3.72 * math.sqrt(2 * freedom) + 10


def test_unlikely_tokens_are_drawn_as_often_as_they_should() -> None:
    """Half the probability lies on 20,000 tokens of 2.5e-5 each: they come half of the time, nearly
    all different."""
    logits = torch.zeros(20_001)
    logits[0] = math.log(20_000)
    seeds = range(400)
    tokens = draw_tokens(
        logits.expand(len(seeds), -1),
        [state(SamplingParams(), 20_001, seed=seed) for seed in seeds],
        [3] * len(seeds),
    )
    likely = tokens.count(0)
    assert 200 - 5 * 10 < likely < 200 + 5 * 10
    assert len(set(tokens)) >= len(seeds) - likely - 6


def test_positions_and_samples_of_one_seed_are_drawn_apart() -> None:
    logits = torch.zeros(1, 1000)
    params = SamplingParams()
    by_position = {
        draw_tokens(logits, [state(params, 1000)], [position])[0] for position in range(3, 53)
    }
    by_index = set()
    for index in range(50):
        sequence = SamplingState(Begin(0, (1,), 1, index, 0, params), 1000)
        by_index.add(draw_tokens(logits, [sequence], [3])[0])
    assert len(by_position) > 40
    assert len(by_index) > 40


# ------------------------------------------------------------------------------------------ what
# shares the batch

settings_of_requests = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 4, 30, 1000]),
    top_p=st.sampled_from([0.1, 0.7, 1.0]),
    min_p=st.sampled_from([0.0, 0.2]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    logit_bias=st.sampled_from([{}, {3: 4.0, 40: -100.0}]),
    min_tokens=st.sampled_from([0, 3]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(settings_of_requests, min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_a_row_is_sampled_alike_alone_in_a_batch_and_permuted(
    params: list[SamplingParams], random: object
) -> None:
    count, vocab_size = len(params), 97
    # Quantized as bfloat16 logits are, so that ties happen.
    logits = random_logits(count, vocab_size, seed=count).bfloat16().float()
    states = [
        state(each, vocab_size, output=(5, 5, seed), seed=seed, end_tokens=(7,))
        for seed, each in enumerate(params)
    ]
    positions = [6 + row for row in range(count)]
    together = draw_tokens(logits, states, positions)
    alone = [
        draw_tokens(logits[row : row + 1], [states[row]], [positions[row]])[0]
        for row in range(count)
    ]
    order = list(range(count))
    random.shuffle(order)
    permuted = draw_tokens(
        logits[order], [states[row] for row in order], [positions[row] for row in order]
    )
    assert together == alone
    assert permuted == [alone[row] for row in order]


def test_a_plainly_greedy_batch_is_only_an_argmax() -> None:
    logits = random_logits(4, 30, seed=0)
    rows = sampling_rows([state(SamplingParams(temperature=0), 30)] * 4, [3] * 4)
    assert rows == SamplingRows(draws=(), adjustments=None, grammars=None)
    assert sample(logits, rows).tokens.tolist() == logits.argmax(1).tolist()


def test_top_k_1_and_tiny_temperatures_are_greedy() -> None:
    logits = random_logits(3, 500, seed=2) * 1e-3
    best = logits.argmax(1).tolist()
    for params in (
        SamplingParams(top_k=1),
        SamplingParams(temperature=1e-30),
        SamplingParams(top_p=1e-9),
    ):
        assert (
            draw_tokens(logits, [state(params, 500, seed=seed) for seed in range(3)], [3] * 3)
            == best
        )


def test_a_large_batch_is_drawn_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = (
        SamplingParams(top_p=0.9),
        SamplingParams(top_k=7),
        SamplingParams(),
        SamplingParams(temperature=0),
    )
    logits, states = (
        random_logits(60, 100, seed=4),
        [state(kinds[row % 4], 100, seed=row) for row in range(60)],
    )
    drawn: list[int] = []

    def counting(
        scaled: torch.Tensor, *settings: Any, **used: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        drawn.append(len(scaled))
        return keep_likely(scaled, *settings, **used)

    monkeypatch.setattr("triton_ops.sampling.keep_likely", counting)
    with reference_operators():
        whole = draw_tokens(logits, states, [3] * 60)
        assert drawn == [15] * 3
        drawn.clear()
        monkeypatch.setattr("triton_ops.sampling._CACHED_LOGITS", 450)
        assert draw_tokens(logits, states, [3] * 60) == whole
    assert drawn == [4, 4, 4, 3] * 3


# ----------------------------------------------------------------------------- penalties, bias,
# tokens that must wait


def adjusted(
    params: SamplingParams, logits: list[float], *, end_tokens: tuple[int, ...] = ()
) -> list[float]:
    """Logits after bias and penalties, for prompt 1, 1, 2 and output 2, 3, 3; the next is output
    token 3."""
    sequence = state(params, len(logits), prompt=(1, 1, 2), output=(2, 3), end_tokens=end_tokens)
    sequence.append(3)
    rows = sampling_rows([sequence], [6])
    assert rows.adjustments is not None
    return rows.adjustments.apply(torch.tensor([logits], dtype=torch.float32))[0].tolist()


def test_repetition_penalty_counts_prompt_and_output() -> None:
    assert adjusted(SamplingParams(repetition_penalty=2.0), [4, 4, -4, 4, -4]) == [4, 2, -8, 2, -4]


def test_presence_and_frequency_penalties_count_the_output_alone() -> None:
    assert adjusted(SamplingParams(presence_penalty=1.0), [4, 4, 4, 4, 4]) == [4, 4, 3, 3, 4]
    assert adjusted(SamplingParams(frequency_penalty=-1.5), [4, 4, 4, 4, 4]) == [4, 4, 5.5, 7, 4]


def test_bias_comes_before_the_penalties() -> None:
    assert adjusted(
        SamplingParams(logit_bias={1: 2.0, 4: -1.0}, repetition_penalty=2.0), [0, 2, 0, 0, 0]
    ) == [
        0,
        2,
        0,
        0,
        -1,
    ]


def test_many_adjusted_tokens_in_rows_of_different_length() -> None:
    bias = {token: float(token) for token in range(1, 60, 2)}
    states = [state(SamplingParams(logit_bias=each), 64) for each in ({3: -2.0}, {}, bias)]
    rows = sampling_rows(states, [3, 3, 3])
    assert rows.adjustments is not None
    assert len(rows.adjustments.tokens) == 1 + 0 + 30, "a long table makes no other longer"
    expected = torch.zeros(3, 64)
    expected[0, 3] = -2
    expected[2, list(bias)] = torch.tensor(list(bias.values()))
    assert torch.equal(rows.adjustments.apply(torch.zeros(3, 64)), expected)


@pytest.mark.parametrize(("min_tokens", "waits"), [(3, False), (4, True)])
def test_end_tokens_wait_for_min_tokens(min_tokens: int, *, waits: bool) -> None:
    params = SamplingParams(min_tokens=min_tokens, stop_token_ids=(0, 99))
    expected = -math.inf if waits else 1.0
    assert adjusted(params, [1, 1, 1, 1, 1], end_tokens=(4,)) == [expected, 1, 1, 1, expected]


def test_penalties_equal_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    tokens = (1, 5, 5, 9, 2, 9)
    logits = random_logits(1, 12, seed=8)
    expected = transformers.RepetitionPenaltyLogitsProcessor(1.7)(
        torch.tensor([tokens]), logits.clone()
    )
    sequence = state(
        SamplingParams(repetition_penalty=1.7), 12, prompt=tokens[:4], output=tokens[4:]
    )
    rows = sampling_rows([sequence], [6])
    assert rows.adjustments is not None
    torch.testing.assert_close(rows.adjustments.apply(logits), expected)


def test_penalties_count_all_tokens_so_far_and_no_others() -> None:
    """After each token of two sequences, which change places: as they went on, begun anew after a
    preemption, and behind draft tokens, which leave no trace."""
    kinds = (
        SamplingParams(repetition_penalty=1.5),
        SamplingParams(repetition_penalty=0.8, presence_penalty=0.25, frequency_penalty=0.75),
    )
    prompts, outputs = ((1, 1, 2), (4, 5, 6)), ((3, 7, 3, 3, 2), (5, 8, 9, 8, 8))
    going_on = [
        state(params, 12, prompt=prompt) for params, prompt in zip(kinds, prompts, strict=True)
    ]
    logits = random_logits(2, 12, seed=5)
    for known in range(6):
        so_far = [output[:known] for output in outputs]
        expected = [penalized(*each) for each in zip(kinds, logits, prompts, so_far, strict=True)]
        begun = [state(kinds[one], 12, prompt=prompts[one], output=so_far[one]) for one in (0, 1)]
        for states in (going_on, begun):
            for order in ([0, 1], [1, 0]):
                adjustments = sampling_rows(
                    [states[one] for one in order], [3 + known] * 2
                ).adjustments
                assert adjustments is not None
                torch.testing.assert_close(
                    adjustments.apply(logits[order]), torch.tensor(expected)[order]
                )
            drafted = [one.after((10, 10)) for one in states]
            adjustments = sampling_rows(drafted, [5 + known] * 2).adjustments
            assert adjustments is not None
            behind = [
                penalized(kinds[one], logits[one], prompts[one], (*so_far[one], 10, 10))
                for one in (0, 1)
            ]
            torch.testing.assert_close(adjustments.apply(logits), torch.tensor(behind))
        for one, output in zip(going_on, outputs, strict=True):
            one.append(output[known] if known < 5 else 0)


def test_raw_logits_are_left_alone() -> None:
    logits = random_logits(2, 30, seed=0)
    before = logits.clone()
    draw_tokens(logits, [state(SamplingParams(logit_bias={3: 50.0}, top_p=0.5), 30)] * 2, [3, 3])
    assert torch.equal(logits, before)


# -------------------------------------------------------------------------------------------- what
# is not a number


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "kind", [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"top_k": 3, "top_p": 0.5}], ids=str
)
def test_a_row_that_is_not_numbers_is_invalid_and_harms_no_other(
    bad: float, kind: dict[str, float]
) -> None:
    logits = random_logits(3, 40, seed=5)
    states = [state(SamplingParams(**kind), 40, seed=seed) for seed in range(3)]
    clean = draw_tokens(logits, states, [3, 3, 3])
    logits[1] = bad if bad == -math.inf else logits[1]
    logits[1, 17] = bad
    sampled = sample(logits, sampling_rows(states, [3, 3, 3]))
    assert sampled.valid.tolist() == [True, False, True]
    assert [sampled.tokens[0].item(), sampled.tokens[2].item()] == [clean[0], clean[2]]


def test_no_token_left_is_invalid() -> None:
    forbidding = state(SamplingParams(min_tokens=1, stop_token_ids=(0, 1, 2)), 3)
    assert not sample(torch.zeros(1, 3), sampling_rows([forbidding], [3])).valid.any()


def test_a_grammar_and_penalties_beside_greedy_rows_take_the_tokens_of_plain_torch() -> None:
    """Every kind of row in one batch of 600, with rows that are not numbers: equal tokens, and the
    same are valid."""
    kinds = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, repetition_penalty=1.3),
        SamplingParams(temperature=0.7, top_p=0.8, top_k=20, presence_penalty=0.5),
        SamplingParams(temperature=0.8, top_p=0.95, logit_bias={3: 4.0, 40: -100.0}),
        SamplingParams(min_p=0.1, frequency_penalty=0.5),
        SamplingParams(min_tokens=9),
    ]
    logits = random_logits(600, 97, seed=9).bfloat16().float()
    logits[7, 3], logits[20, 4], logits[33] = math.nan, math.inf, -math.inf
    states = [
        state(kinds[row % 6], 97, output=(5, 5, row % 97), seed=row, end_tokens=(7,))
        for row in range(len(logits))
    ]
    rows = sampling_rows(states, [6] * len(states))
    bits = torch.randint(256, (200, 13), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    rows = replace(rows, grammars=GrammarMask(torch.arange(0, 600, 3), bits))
    found = sample(logits, rows)
    with reference_operators():
        expected = sample(logits, rows)
    assert torch.equal(found.valid, expected.valid)
    assert torch.equal(found.tokens[found.valid], expected.tokens[found.valid])
    assert found.valid.logical_not().nonzero()[:, 0].tolist() == [7, 20, 33]


# ------------------------------------------------------------------------------------------------
# log probabilities


def test_logprobs_rank_and_top() -> None:
    logits = random_logits(3, 50, seed=6)
    tokens = torch.tensor([4, 0, 49])
    exact = logits.double().log_softmax(1)
    answers = LogprobColumns.of(logits, tokens, 50).rows([0, 2, 50])
    for row, answer in enumerate(answers):
        order = exact[row].argsort(descending=True).tolist()
        assert answer.token == tokens[row]
        assert answer.logprob == pytest.approx(exact[row, answer.token].item(), abs=1e-5)
        assert answer.rank == order.index(answer.token) + 1
        assert [token for token, _ in answer.top] == order[: (0, 2, 50)[row]]
        assert [value for _, value in answer.top] == pytest.approx(
            [exact[row, token].item() for token, _ in answer.top], abs=1e-5
        )
