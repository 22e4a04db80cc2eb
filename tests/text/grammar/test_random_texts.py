"""Random logits through the real sampler: whatever a model says, the text meets its schema."""

import json
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.executor.sampling.adjustments import SequenceGrammar
from nanoserve.executor.sampling.sampler import SamplingState, sample
from nanoserve.request import SamplingParams
from nanoserve.scheduler.plan import Begin
from nanoserve.text.backends import Backend
from nanoserve.text.grammar.compiler import GrammarCompiler
from nanoserve.text.tokenizer import load_backend
from tests.executor.staged_rows import sampling_rows
from tests.text.building import PATIENT
from tests.text.grammar.schemas import PERSON, SCHEMAS, meets

PROMPT = (40, 41, 42)
PADDING = 13
"""Rows of the logits that no token has."""
END = 2
LONGEST = 400


@dataclass
class Model:
    """A vocabulary, and logits at random that favour what must not come."""

    backend: Backend
    compiler: GrammarCompiler
    width: int

    @classmethod
    def of(cls, directory: Path) -> "Model":
        backend = load_backend(directory)
        width = backend.vocab_size + PADDING
        return cls(backend, GrammarCompiler(directory, width), width)

    def text(self, tokens: list[int]) -> str:
        return self.backend.decode([*PROMPT, *tokens], skip_special_tokens=True).removeprefix(
            self.backend.decode(PROMPT, skip_special_tokens=True)
        )

    def state(
        self, params: SamplingParams, *, output: tuple[int, ...] = (), seed: int = 0
    ) -> SamplingState:
        begin = Begin(0, (*PROMPT, *output), len(PROMPT), 0, seed, params, (END,))
        assert params.json_schema is not None
        return SamplingState(
            begin, self.width, SequenceGrammar(begin, params.json_schema, self.width, self.compiler)
        )

    def logits(self, rows: int, seed: int) -> torch.Tensor:
        logits = torch.randn(rows, self.width, generator=torch.Generator().manual_seed(seed)) * 4
        logits[:, [0, 1, END]] += 30
        logits[:, -PADDING:] += 30
        return logits

    def draw(self, states: list[SamplingState], seed: int, lengths: list[int]) -> list[int]:
        positions = [len(PROMPT) + length for length in lengths]
        sampled = sample(self.logits(len(states), seed), sampling_rows(states, positions))
        assert sampled.valid.all()
        return sampled.tokens.tolist()

    def write(self, params: SamplingParams, seed: int) -> list[int]:
        """One text to its end."""
        state, tokens = self.state(params, seed=seed), []
        while not _grammar(state).complete:
            tokens += self.draw([state], seed + len(tokens), [len(tokens)])
            state.append(tokens[-1])
            assert _grammar(state).error is None
            assert len(tokens) < LONGEST, self.text(tokens)
        return tokens


def _grammar(state: SamplingState) -> SequenceGrammar:
    assert state.grammar is not None
    return state.grammar


@pytest.fixture(scope="module")
def models(vocabularies: dict[str, Path]) -> dict[str, Model]:
    return {kind: Model.of(directory) for kind, directory in vocabularies.items()}


@pytest.mark.parametrize("kind", ["byte-level", "metaspace", "sentencepiece", "storyteller"])
def test_every_text_meets_its_schema(models: dict[str, Model], kind: str) -> None:
    model = models[kind]

    @settings(PATIENT, max_examples=25)
    @given(
        SCHEMAS,
        st.integers(0, 2**31),
        st.sampled_from([{"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}, {}]),
    )
    def check(schema: dict[str, Any], seed: int, choice: dict[str, Any]) -> None:
        params = SamplingParams(json_schema=json.dumps(schema), **choice)
        text = model.text(model.write(params, seed))
        assert meets(json.loads(text), schema), text

    check()


@pytest.mark.parametrize("kind", ["byte-level", "metaspace", "sentencepiece", "storyteller"])
def test_control_tokens_and_rows_of_padding_never_come(models: dict[str, Model], kind: str) -> None:
    model = models[kind]
    tokens = [token for seed in range(5) for token in model.write(_params(PERSON), seed)]
    assert not {*tokens} & {*model.backend.control_ids.values()}
    assert max(tokens) < model.backend.vocab_size


def _params(schema: dict[str, Any], **settings: Any) -> SamplingParams:
    return SamplingParams(json_schema=json.dumps(schema), **settings)


def test_a_text_goes_on_from_any_place(models: dict[str, Model]) -> None:
    """A grammar that is made of the tokens so far allows the same, as after a preemption or in
    another engine."""
    model = models["storyteller"]
    whole = model.write(_params(PERSON), seed=3)
    for done in range(len(whole)):
        state = model.state(_params(PERSON), output=tuple(whole[:done]), seed=3)
        assert model.draw([state], 3 + done, [done]) == whole[done : done + 1]


def test_a_text_depends_on_nothing_that_shares_its_batch(models: dict[str, Model]) -> None:
    model = models["storyteller"]
    with_grammar = model.state(_params(PERSON, temperature=1.0), seed=1)
    begin = Begin(1, PROMPT, len(PROMPT), 0, 2, SamplingParams(temperature=1.0), (END,))
    without = SamplingState(begin, model.width)
    both = model.draw([with_grammar, without], 9, [0, 0])
    logits = model.logits(2, 9)
    for place, state in enumerate([with_grammar, without]):
        rows = sampling_rows([state], [len(PROMPT)])
        assert sample(logits[place : place + 1], rows).tokens.tolist() == both[place : place + 1]
    before = logits.clone()
    sample(logits, sampling_rows([with_grammar, without], [len(PROMPT)] * 2))
    assert torch.equal(before, logits), "the model's own logits are reported as they were"


def test_an_end_token_that_is_text_ends_no_text_too_early(models: dict[str, Model]) -> None:
    model = models["storyteller"]
    params = _params({"enum": ["a", "c"]})
    quote, a, c = (model.backend.encode([letter], add_special_tokens=False)[0] for letter in '"ac')
    begin = Begin(0, (*PROMPT, quote), len(PROMPT), 0, 0, params, (a,))
    mask = SequenceGrammar(begin, str(params.json_schema), model.width, model.compiler).mask(1)
    assert mask is not None
    assert [bool(mask[token // 8] >> (token % 8) & 1) for token in (a, c)] == [False, True]


def test_rows_without_a_grammar_have_no_mask(models: dict[str, Model]) -> None:
    begin = Begin(1, PROMPT, len(PROMPT), 0, 2, SamplingParams(), (END,))
    state = SamplingState(begin, models["storyteller"].width)
    assert sampling_rows([state], [len(PROMPT)]).grammars is None


@pytest.mark.parametrize(("min_tokens", "shortest"), [(0, 1), (5, 5)])
def test_min_tokens_waits_while_anything_else_may_come(
    models: dict[str, Model], min_tokens: int, shortest: int
) -> None:
    """The end token is by far the likeliest: a number ends as soon as it may."""
    model = models["storyteller"]
    tokens = model.write(_params({"type": "integer", "minimum": 1}, min_tokens=min_tokens), seed=0)
    assert tokens[-1] == END and len(tokens) == shortest + 1


def test_the_grammar_wins_over_min_tokens(models: dict[str, Model]) -> None:
    """Also where all that may come is a token that ends the sequence, which min_tokens would keep
    away."""
    model = models["storyteller"]
    (five,) = model.backend.encode(["5"], add_special_tokens=False)
    for schema in (
        {"const": "no"},
        {"type": "integer", "minimum": 10, "maximum": 99},
        {"const": 5},
    ):
        tokens = model.write(_params(schema, min_tokens=50, stop_token_ids=(five,)), seed=0)
        assert meets(json.loads(model.text(tokens)), schema)


def test_bias_chooses_among_what_is_allowed(models: dict[str, Model]) -> None:
    model = models["storyteller"]
    schema = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 6, "maxItems": 6}
    two = model.backend.encode(["2"], add_special_tokens=False)[0]
    biased = model.write(_params(schema, temperature=0.0, logit_bias={two: 100.0}), seed=0)
    assert json.loads(model.text(biased)) == [2] * 6
    assert (
        json.loads(model.text(model.write(_params(schema, logit_bias={two: -100.0}), seed=0)))
        == [1] * 6
    )


def test_a_grammar_that_cannot_go_on_ends_its_own_row_alone(models: dict[str, Model]) -> None:
    model = models["storyteller"]
    # Within the limits when it is compiled, and beyond them when its text is written.
    bomb = model.state(_params({"type": "string", "pattern": "^(hello world ){100000}$"}))
    good = model.state(_params(PERSON), seed=1)
    wrong = model.state(_params(PERSON), output=(7,))
    assert "cannot be followed" in str(_grammar(wrong).error)
    lengths = [0, 0, 0]
    for step in range(200):
        tokens = model.draw([bomb, good, wrong], step, lengths)
        for state, token in zip([bomb, good, wrong], tokens, strict=True):
            state.append(token)
        if _grammar(bomb).error is not None:
            break
    assert "cannot be followed" in str(_grammar(bomb).error)
    assert _grammar(good).error is None


def test_few_compiled_grammars_are_kept(models: dict[str, Model]) -> None:
    compiler = models["storyteller"].compiler
    for number in range(40):
        compiler.matcher(json.dumps({"const": number}))
    assert len(compiler._compiled) <= 16


class Text(str):
    """In place of a matcher."""

    def copy(self) -> "Text":
        return self


def test_one_thread_forgets_while_another_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker prepares a step while it takes in the answers of another."""
    compiler = GrammarCompiler(Path())
    monkeypatch.setattr(compiler, "_compile", Text)
    over = threading.Event()

    def forget() -> None:
        while not over.is_set():
            compiler.forget("{}")

    forgetting = threading.Thread(target=forget)
    forgetting.start()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(20_000):
            assert compiler.matcher("{}") == "{}"
    finally:
        sys.setswitchinterval(before)
        over.set()
        forgetting.join()
