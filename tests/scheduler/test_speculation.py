"""Speculative decoding of real models: token for token what plain decoding answers, in float32,
whatever is drafted."""

import json
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

import nanoserve
from nanoserve.commands.answers import stream_answer
from nanoserve.errors import UsageError
from nanoserve.executor.drafting.drafting import Drafting
from nanoserve.lab.explanation import explain_run
from nanoserve.layout import ParallelLayout
from nanoserve.record.chrome_trace import ChromeTraceFile
from nanoserve.record.recorder import recorder_of
from nanoserve.record.run_record import RunRecord
from nanoserve.record.trace import RunTrace
from nanoserve.request import RequestOutput, SamplingParams, Sequence
from nanoserve.scheduler.speculation.draft_proposer import DraftProposer
from tests.executor.small_model import mechanism_of

PROMPTS = [
    "Once upon a time",
    "The dog the dog the dog the",
    "Tom said: I like red, I like blue, I like",
]
SCHEMA = '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]}'
SETTINGS = {
    "greedy": SamplingParams(temperature=0, max_tokens=40),
    "random": SamplingParams(temperature=0.8, top_p=0.95, seed=5, max_tokens=40),
    "cut": SamplingParams(
        temperature=1, top_k=20, min_p=0.02, seed=6, max_tokens=23, ignore_eos=True, n=2
    ),
    "penalties": SamplingParams(
        temperature=0.7, repetition_penalty=1.2, presence_penalty=0.3, seed=7, max_tokens=30
    ),
    "counts": SamplingParams(
        temperature=0, frequency_penalty=0.7, max_tokens=30, logit_bias={5: 4.0}
    ),
    "late end": SamplingParams(temperature=1.2, min_tokens=25, seed=8, max_tokens=40),
    "stops": SamplingParams(
        temperature=0, stop=(" was", "the"), stop_token_ids=(20, 21), max_tokens=40
    ),
    "log probabilities": SamplingParams(
        temperature=0, logprobs=3, prompt_logprobs=1, max_tokens=12
    ),
    "grammar": SamplingParams(temperature=0.9, json_schema=SCHEMA, seed=9, max_tokens=40),
    "grammar with counts": SamplingParams(
        temperature=0.5, json_schema=SCHEMA, presence_penalty=0.5, seed=9, max_tokens=40
    ),
}


Plain = Callable[[str], list[RequestOutput]]
"""Gives the answers of plain decoding to the prompts, with the settings of a name."""


class Scripted(DraftProposer):
    """Draft tokens what plain decoding answers, with an error in each place that ``errs`` has,
    counted round and round."""

    def __init__(self, answers: list[tuple[int, ...]], errs: tuple[bool, ...]) -> None:
        super().__init__(looks_up=True, token_budget=512)
        self._answers, self._errs = answers, errs

    def _find(self, sequence: Sequence, record: object, most: int) -> tuple[int, ...]:
        output = tuple(sequence.output_tokens)
        known = next((one for one in self._answers if one[: len(output)] == output), ())
        draft_tokens = known[len(output) : len(output) + max(0, most)]
        wrong = [
            self._errs[place % len(self._errs)]
            for place in range(len(output), len(output) + len(draft_tokens))
        ]
        return tuple((token + err) % 1000 for token, err in zip(draft_tokens, wrong, strict=True))


@pytest.fixture(scope="module")
def plain() -> Iterator[Plain]:
    with nanoserve.LLM(dtype="float32", eager=True, seed=0) as llm:
        yield cache(lambda name: llm.generate(PROMPTS, SETTINGS[name]))


@pytest.fixture(scope="module")
def speculating() -> Iterator[nanoserve.LLM]:
    """Prompts are cut, and run beside draft tokens."""
    with nanoserve.LLM(
        dtype="float32", eager=True, seed=0, speculate="ngram", max_num_batched_tokens=24
    ) as llm:
        yield llm


def _facts(outputs: list[RequestOutput]) -> list[object]:
    completions = list(chain.from_iterable(output.outputs for output in outputs))
    told = [
        tuple((one.token, one.rank, round(one.logprob, 3)) for one in completion.logprobs or ())
        for completion in completions
    ]
    return [
        [
            (one.text, one.token_ids, one.finish_reason, one.stop_reason, one.error)
            for one in completions
        ],
        told,
        [len(output.prompt_logprobs or ()) for output in outputs],
    ]


DRAFTS = {"itself": "draft:storyteller", "a smaller one": "draft:storyteller-draft"}


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_draft_model_changes_no_answer_and_draft_tokens_right_where_it_is_the_model(
    draft: str, plain: Plain
) -> None:
    settings = {
        "dtype": "float32",
        "eager": True,
        "seed": 0,
        "kv_cache_memory": 2**20,
        "max_model_len": 96,
    }
    with nanoserve.LLM(
        speculate=DRAFTS[draft], max_num_batched_tokens=24, **settings
    ) as speculating:  # sequences are preempted
        table, drafts = (
            speculating.engine.scheduler.table,
            speculating.engine.scheduler.extensions.drafts,
        )
        speculating.engine.scheduler.predictors = ()  # so that all that may be is drafted
        for name in ("greedy", "random", "cut", "penalties", "grammar"):
            before = sum(drafts.proposer.counts.accepted), drafts.proposer.counts.draft_tokens
            assert _facts(speculating.generate(PROMPTS, SETTINGS[name])) == _facts(plain(name)), (
                name
            )
            accepted, draft_tokens = (
                sum(drafts.proposer.counts.accepted) - before[0],
                drafts.proposer.counts.draft_tokens - before[1],
            )
            assert 0 < accepted <= draft_tokens
            if draft == "itself" and name in ("greedy", "random", "cut"):
                assert accepted == draft_tokens
        assert table.preemptions > 0


def test_a_drafter_that_raises_ends_nothing(plain: Plain, caplog: pytest.LogCaptureFixture) -> None:
    with nanoserve.LLM(
        dtype="float32", eager=True, seed=0, speculate="draft:storyteller-draft"
    ) as speculating:
        mechanism_of(speculating.engine.executor, Drafting).drafter._decoder = None
        assert _facts(speculating.generate(PROMPTS, SETTINGS["greedy"])) == _facts(plain("greedy"))
    (told,) = [record.message for record in caplog.records if "drafted" in record.message]  # once
    assert "nothing is drafted any more: 'NoneType'" in told


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"speculate": "eagle3"}, "none of ngram"),
        ({"speculate": "draft"}, "draft:MODEL"),
        ({"speculate": "ngram:3"}, "none of ngram"),
        ({"speculate": "ngram", "policy": "hybrid"}, "leave one out"),
        ({"speculate": "eagle:somewhere", "policy": "neo"}, "leave one out"),
        (
            {
                "speculate": "medusa:somewhere",
                "tensor_parallel": 2,
                "decode_layout": ParallelLayout(pipeline_parallel=2),
            },
            "leave it out with --prefill-parallel and --decode-parallel",
        ),
    ],
)
def test_what_cannot_draft_token_is_refused_in_one_line(
    settings: dict[str, str], told: str
) -> None:
    with pytest.raises(UsageError, match=told) as refused:
        nanoserve.LLM(**settings)
    assert "\n" not in str(refused.value)


def test_a_draft_with_more_tokens_is_refused_in_one_line(tmp_path: Path) -> None:
    shape = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    draft = tmp_path / "config.json"
    draft.write_text(json.dumps({"model_type": "llama", "vocab_size": 4097, **shape}))
    with pytest.raises(
        UsageError, match="it has 4097 tokens and the model 4096; choose a draft with"
    ) as refused:
        nanoserve.LLM(speculate=f"draft:dummy:{draft}", eager=True)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", SETTINGS)
def test_whatever_is_drafted_the_answers_are_those_of_plain_decoding(
    name: str, plain: Plain, speculating: nanoserve.LLM
) -> None:
    params, drafts = SETTINGS[name], speculating.engine.scheduler.extensions.drafts
    outputs = plain(name)
    answers = [completion.token_ids for output in outputs for completion in output.outputs]
    by_ngrams, predictors = drafts.proposer, speculating.engine.scheduler.predictors
    assert _facts(speculating.generate(PROMPTS, params)) == _facts(outputs)
    speculating.engine.scheduler.predictors = ()  # so that all there is is drafted
    for errs in [(False,), (True,), (False, False, True, False, False, False, False, True, False)]:
        drafts.proposer = Scripted(answers, errs)
        assert _facts(speculating.generate(PROMPTS, params)) == _facts(outputs), errs
        counts = drafts.proposer.counts
        assert counts.draft_tokens > 0
        assert (sum(counts.accepted) == 0) == (errs == (True,))
    drafts.proposer, speculating.engine.scheduler.predictors = by_ngrams, predictors


def test_draft_tokens_are_told_as_draft_tokens(tmp_path: Path) -> None:
    with nanoserve.LLM(dtype="float32", eager=True, seed=0, speculate="ngram") as speculating:
        engine, path = speculating.engine, tmp_path / "trace.json"
        engine.scheduler.predictors = ()  # so that all there is is drafted
        file, record = ChromeTraceFile(path), RunRecord(1, keeps_tables=True)
        recorder_of(engine).add(
            record, RunTrace(file, engine.now(), reports_times=False, close=file.close)
        )
        *_, answer = stream_answer(
            speculating, PROMPTS[1], {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
        )
        counts = engine.status.drafts
    checked, accepted = counts.draft_tokens, sum(counts.accepted)
    assert checked > 0
    run = explain_run("", record, 16, 1, lambda tokens: tuple(map(str, tokens)))
    found = [row for step in run.steps for row in step.rows]
    assert {row.kind for row in found if row.draft_tokens} == {"decode"}
    assert (sum(row.draft_tokens > 0 for row in found), sum(row.draft_tokens for row in found)) == (
        counts.rows,
        checked,
    )
    assert all(row.count == 1 + row.draft_tokens for row in found if row.kind == "decode")
    bars = [
        event for event in json.loads(path.read_text()) if "draft_tokens" in event.get("args", {})
    ]
    assert sum(bar["args"]["draft_tokens"] for bar in bars) == checked
    assert all(f"+ {bar['args']['draft_tokens']} draft tokens" in bar["name"] for bar in bars)
    assert answer.usage.steps == 40 - accepted
    assert f"{40 / (40 - accepted):.2f} tokens a step" in answer.details(None, None)
