"""Associative recall: the task, the models that learn it, and the data that ships with the package."""

from itertools import product

import pytest
import torch

from nanoserve.lab.papers.associative_recall import (
    KEYS,
    LENGTH,
    MODELS,
    PAIRS,
    VALUES,
    WINDOW,
    AttentionLayer,
    ask,
    draw_texts,
    train,
)
from nanoserve.lab.papers.framework import Finding, Scale, load_paper
from nanoserve.lab.papers.recall_accuracy import RANGES, accuracy, shipped_answers
from nanoserve.lab.papers.selective_scan import TrainableMamba, selective_scan


@pytest.mark.parametrize("pairs", PAIRS)
def test_an_answer_is_in_the_text_and_nothing_else_has_its_key(pairs: int) -> None:
    texts = draw_texts(64, pairs, torch.Generator().manual_seed(3))
    for row, tokens in enumerate(texts.tokens.tolist()):
        asked = set()
        for first, second in zip(
            texts.pair_places[row].tolist(), texts.question_places[row].tolist(), strict=True
        ):
            assert 0 <= first < second < LENGTH - 1
            assert tokens[first : first + 2] == tokens[second : second + 2]
            assert [place for place, token in enumerate(tokens) if token == tokens[first]] == [
                first,
                second,
            ]
            asked.add(tokens[first])
        assert len(asked) == pairs
        assert {token for token in tokens if token < KEYS} == asked
        assert max(tokens) < KEYS + VALUES
    assert torch.equal(texts.answers, texts.tokens.gather(1, texts.pair_places + 1))


def test_a_guess_is_right_once_in_sixteen_times() -> None:
    """Of 8,192 answers each value has 512, give or take 5 standard deviations of 22."""
    texts = draw_texts(1024, 8, torch.Generator().manual_seed(4))
    counts = (texts.answers - KEYS).flatten().bincount(minlength=VALUES)
    assert len(counts) == VALUES
    assert int((counts - 512).abs().max()) < 5 * 22


def test_models_have_as_many_parameters() -> None:
    counts = {}
    for name, make in MODELS.items():
        counts[name] = sum(one.numel() for one in make().parameters())
    assert max(counts.values()) < 1.03 * min(counts.values()), counts


def test_one_layer_of_eight_attends_and_one_of_six_sees_all() -> None:
    hybrid = [*MODELS["hybrid 1:7"]().layers]
    assert (
        [isinstance(layer, AttentionLayer) for layer in hybrid].count(True) * 8 == len(hybrid) == 8
    )
    windows = [
        layer.config.sliding_window(index)
        for index, layer in enumerate(MODELS["windows 1:5"]().layers)
    ]
    assert windows == [WINDOW] * 5 + [0]
    assert [layer.config.sliding_window(0) for layer in MODELS["full attention"]().layers] == [
        0
    ] * 2


def test_the_scan_is_the_recurrence() -> None:
    """The state of a head is a matrix [size, N] here, which decays and takes an outer product in."""
    generator = torch.Generator().manual_seed(0)
    batch, length, heads, size, state = 2, 20, 2, 3, 4

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    inputs, taking, reading = (
        draw(batch, length, heads, size),
        draw(batch, length, state),
        draw(batch, length, state),
    )
    steps, decays = draw(batch, length, heads).exp(), -draw(heads).exp()
    matrix, outputs = torch.zeros(batch, heads, size, state, dtype=torch.float64), []
    for place in range(length):
        step = steps[:, place, :, None, None]
        taken = torch.einsum("bhs,bn->bhsn", inputs[:, place], taking[:, place])
        matrix = (step * decays[:, None, None]).exp() * matrix + step * taken
        outputs.append(torch.einsum("bhsn,bn->bhs", matrix, reading[:, place]))
    expected = torch.stack(outputs, 1)
    torch.testing.assert_close(selective_scan(inputs, steps, decays, taking, reading), expected)


def test_the_mixer_convolves_the_last_four_inputs() -> None:
    mixer = TrainableMamba(8, channels=16, heads=2, state_size=4)
    inputs = torch.randn(2, 9, 16)
    reference = torch.nn.Conv1d(16, 16, 4, groups=16, bias=False, padding=3)
    with torch.no_grad():
        reference.weight.copy_(mixer.taps.T[:, None])
        expected = reference(inputs.transpose(1, 2))[..., :9].transpose(1, 2)
        torch.testing.assert_close(mixer._convolve(inputs), expected)


@pytest.mark.parametrize("name", MODELS)
def test_no_model_sees_the_answer(name: str) -> None:
    """Later tokens do not change what a model says before them."""
    torch.manual_seed(0)
    model = MODELS[name]()
    tokens = draw_texts(2, 8, torch.Generator().manual_seed(0)).tokens
    changed = tokens.clone()
    changed[:, 30:] = tokens[:, 30:].flip(1)
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :30], after[:, :30], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(before[:, 30:], after[:, 30:])


@pytest.mark.parametrize("name", MODELS)
def test_a_few_steps_lower_the_loss(name: str) -> None:
    """From that of a draw among all tokens towards that of a draw among values, log 16 = 2.8."""
    losses = list[float]()
    trained = train(name, 0, lambda step, loss: losses.append(loss), steps=8, questions=64)
    assert len(losses) == 8
    assert sum(losses[-3:]) / 3 < losses[0] - 0.2
    assert trained.tokens == 8 * 24 * LENGTH
    assert sum(one.questions for one in trained.recalled) == 3 * 64


def test_questions_are_counted_by_distance() -> None:
    """A model that knows the token right after the first place of a key answers everything."""

    class Lookup(torch.nn.Module):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            logits = torch.zeros(*tokens.shape, KEYS + VALUES)
            for row, text in enumerate(tokens.tolist()):
                for place, token in enumerate(text):
                    first = text.index(token)
                    if first < place - 8:
                        logits[row, place, text[first + 1]] = 1.0
            return logits

    recalled = list(ask(Lookup(), 256))
    assert [(one.pairs, one.nearest, one.farthest) for one in recalled] == [
        (pairs, *distances) for pairs, distances in product(PAIRS, RANGES)
    ]
    for one in recalled:
        assert one.right == (one.questions if one.nearest > 8 else 0)


@pytest.fixture(scope="module")
def found() -> Finding:
    (figure,) = load_paper("lecture").chosen("recall")

    def run_nothing(jobs: object) -> None:
        raise AssertionError("the figure reads data of the package")

    return figure.make(Scale(seeds=(0,), full=False), run_nothing)


def test_the_shipped_data_has_all_runs() -> None:
    answers = shipped_answers()
    keys = [(one.model, one.seed, one.pairs, one.distances) for one in answers]
    assert keys == [*product(MODELS, range(3), PAIRS, RANGES)]
    assert len({one.tokens for one in answers}) == 1
    assert {one.chance for one in answers} == {1 / VALUES}
    assert all(0 <= one.right <= one.questions for one in answers)
    for name, make in MODELS.items():
        parameters = sum(one.numel() for one in make().parameters())
        assert {one.parameters for one in answers if one.model == name} == {parameters}
    for pairs, distances in product(PAIRS, RANGES):  # all models answer the same questions
        asked = [
            one.questions for one in answers if (one.pairs, one.distances) == (pairs, distances)
        ]
        assert len(asked) == 15
        assert len({*asked}) == 1


def test_the_figure_shows_all_models_and_chance(found: Finding) -> None:
    assert found.chart is not None
    assert [panel.title for panel in found.chart.panels] == ["1 pair", "4 pairs", "8 pairs"]
    for panel in found.chart.panels:
        assert [curve.label for curve in panel.curves] == [*MODELS]
        assert panel.marks == (100 / VALUES,)
        for curve in panel.curves:
            assert len(curve.ys) == len(curve.lows) == len(curve.highs) == len(RANGES)
    assert [(row["model"], row["pairs"]) for row in found.rows] == [*product(MODELS, PAIRS)]


def test_accuracy_is_of_each_seed_s_questions(found: Finding) -> None:
    """The mean over seeds of right answers over questions, added up by hand."""
    answers = [one for one in shipped_answers() if (one.model, one.pairs) == ("Mamba", 8)]
    shares = []
    for seed in range(3):
        own = [one for one in answers if one.seed == seed]
        shares.append(100 * sum(one.right for one in own) / sum(one.questions for one in own))
    spread = accuracy(shipped_answers(), "Mamba", 8)
    assert (spread.mean, spread.low, spread.high) == pytest.approx(
        (sum(shares) / 3, min(shares), max(shares))
    )
