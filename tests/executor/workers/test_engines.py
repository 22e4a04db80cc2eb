"""Two whole engines with workers of their own: they answer what one process answers, also when
workers are killed."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nanoserve import LLM, SamplingParams
from nanoserve.engine.dispatcher import Dispatcher
from nanoserve.errors import UsageError
from nanoserve.layout import ParallelLayout
from nanoserve.request import RequestOutput, RequestShape, SequenceUpdate
from nanoserve.text.tokenizer import Tokenizer
from tests.processes import MARK, kill, new_mark, workers
from triton_ops.cpu import cpu_operators

pytestmark = pytest.mark.slow

MODEL = {"dtype": "float32", "eager": True, "kv_cache_memory": 1 << 20, "max_model_len": 128}
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=40, seed=3, n=2)
PROMPTS = [
    ("Once upon a time", GREEDY),
    (
        "Once upon a time there was a little dog. He liked to run and to jump and to play in the "
        "park.",
        GREEDY,
    ),
    ("Once upon a time there was a little dog. He liked to run and to jump. One day he", SAMPLED),
    ("Lily and Ben went to the", SAMPLED),
    ("The sun", GREEDY),
    ("A boat", GREEDY),
]


def ask(llm: LLM) -> list[RequestOutput]:
    prompts, params = zip(*PROMPTS, strict=True)
    return llm.generate(list(prompts), list(params))


def tokens(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [sample.token_ids for output in outputs for sample in output.outputs]


def dispatcher(llm: LLM) -> Dispatcher:
    assert isinstance(llm.built.engine, Dispatcher)
    return llm.built.engine


def disturb(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, after_tokens: int, action: Callable[[], object]
) -> dict[str, int]:
    """Act once so many tokens have come; returns how many came behind that, by request, filled as
    they come."""
    step = llm.built.engine.step
    seen, later = 0, dict[str, int]()

    def disturbed(until: float | None = None) -> list[SequenceUpdate]:
        nonlocal seen
        updates = step(until)
        if seen < after_tokens <= seen + len(updates):
            action()
        seen += len(updates)
        if seen >= after_tokens:
            for update in updates:
                later[update.request_id] = later.get(update.request_id, 0) + len(update.new_tokens)
        return updates

    monkeypatch.setattr(llm.built.engine, "step", disturbed)
    return later


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    with LLM(**MODEL) as llm:
        return tokens(ask(llm))


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A mark on everything that the test starts; nothing with it is left behind."""
    value = new_mark()
    monkeypatch.setenv(MARK, value)
    yield value
    assert workers(value) == []


@pytest.mark.parametrize("layout", [{}, {"pipeline_parallel": 2}], ids=str)
def test_two_engines_answer_what_one_process_answers(
    expected: list[tuple[int, ...]], layout: dict[str, int], mark: str, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.json"
    with LLM(**MODEL, **layout, data_parallel=2, trace=str(trace)) as llm:
        assert len(workers(mark)) == 2 * layout.get("pipeline_parallel", 1)
        for _ in range(2):
            assert tokens(ask(llm)) == expected
        parts = [engine.status for engine in dispatcher(llm).engines]
        assert min(part.output_tokens for part in parts) > 0
        assert llm.status.output_tokens == 2 * sum(map(len, expected))
        assert (
            llm.status.free_blocks
            == llm.status.total_blocks
            == sum(part.total_blocks for part in parts)
        )
        with pytest.raises(UsageError, match="for one engine, not 2"):
            llm.engine  # noqa: B018
    groups = {
        event["args"]["name"]
        for event in json.loads(trace.read_text())
        if event["name"] == "process_name"
    }
    assert groups == {
        f"engine {number}: {what}" for number in range(2) for what in ("scheduler", "workers")
    }


def test_two_workers_in_a_layout_that_is_chosen_answer_what_one_process_answers(
    expected: list[tuple[int, ...]], mark: str
) -> None:
    """Whichever it is on this machine; the batch is known, so that it may be a pair."""
    asked: list[int] = []

    def lengths(tokenizer: Tokenizer, longest: int) -> list[RequestShape]:
        asked.append(longest)
        return [RequestShape(len(tokenizer.encode(prompt)), 40) for prompt, _ in PROMPTS]

    with LLM(**MODEL, parallel="auto", devices=2, host_kv_memory=1 << 20, expected=lengths) as llm:
        config, names = (
            llm.built.config,
            "->".join(layout.name for layout in llm.built.config.whole_layouts),
        )
        assert asked == [128]
        assert len(workers(mark)) == config.data_parallel * config.num_workers == 2
        assert llm.built.choice is not None and llm.built.choice.startswith(
            f"{names} with {config.policy}: predicted "
        )
        assert tokens(ask(llm)) == expected


def test_a_worker_that_is_killed_is_missed_by_nobody(
    expected: list[tuple[int, ...]], mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(**MODEL, data_parallel=2) as llm:
        disturb(llm, monkeypatch, 30, lambda: kill(workers(mark)[1]))
        assert tokens(ask(llm)) == expected
        assert [engine.losses for engine in dispatcher(llm).engines] == [0, 1]
        assert tokens(ask(llm)) == expected


def test_two_engines_under_two_layouts_answer_the_same_also_when_a_worker_is_killed(
    expected: list[tuple[int, ...]], mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D2P2 for prompts and D2T2 for decodes."""
    layouts = {
        "pipeline_parallel": 2,
        "decode_layout": ParallelLayout(tensor_parallel=2),
        "data_parallel": 2,
    }
    with LLM(**MODEL, **layouts, host_kv_memory=4 << 20) as llm:
        assert tokens(ask(llm)) == expected
        parts = [engine.status for engine in dispatcher(llm).engines]
        assert min(part.transitions for part in parts) > 0
        assert [part.total_host_blocks for part in parts] == [llm.status.total_host_blocks // 2] * 2
        disturb(llm, monkeypatch, 30, lambda: kill(workers(mark)[3]))
        assert tokens(ask(llm)) == expected
        assert [engine.losses for engine in dispatcher(llm).engines] == [0, 1]


def test_an_engine_without_workers_fails_alone(
    expected: list[tuple[int, ...]], mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanoserve.utils.quarantine.MAX_DEATHS", 1)
    with LLM(**MODEL, data_parallel=2) as llm:
        disturb(llm, monkeypatch, 30, lambda: kill(workers(mark)[0]))
        outputs = ask(llm)
        failed = [
            sample
            for output in outputs
            for sample in output.outputs
            if sample.finish_reason == "error"
        ]
        assert 0 < len(failed) < len(expected)
        assert {sample.error for sample in failed} == {dispatcher(llm).engines[0].failure}
        assert "worker 0 was killed by SIGKILL" in str(failed[0].error)
        for found, wanted in zip(tokens(outputs), expected, strict=True):
            assert found == wanted[: len(found)]
        assert llm.built.engine.failure is None
        assert tokens(ask(llm)) == expected
        kill(workers(mark)[0])
        assert {sample.finish_reason for output in ask(llm) for sample in output.outputs} == {
            "error"
        }
        assert llm.built.engine.failure is not None


def test_an_answer_that_nobody_wants_ends_in_its_engine(
    expected: list[tuple[int, ...]], mark: str
) -> None:
    with LLM(**MODEL, data_parallel=2) as llm:
        streams = [llm.stream(prompt, GREEDY) for prompt, _ in PROMPTS[:4]]
        for stream in streams:
            next(stream)
        streams[1].close()
        streams[2].close()
        whole = [
            "".join(delta.outputs[0].text for delta in stream)
            for stream in (streams[0], streams[3])
        ]
        assert all(whole)
        assert [engine.scheduler.table.outstanding for engine in dispatcher(llm).engines] == [0, 0]
        assert tokens(ask(llm)) == expected


def test_layers_are_prepared_for_all_engines(mark: str) -> None:
    if not cpu_operators().wait():
        pytest.skip(f"nothing can be built: {cpu_operators().problem}")
    with LLM(**{**MODEL, "eager": False}, data_parallel=2) as llm:
        assert not llm.built.compiled
        llm.built.start_preparing()
        first = tokens(ask(llm))
        llm.built.prepare()
        assert llm.built.compiled
        assert tokens(ask(llm)) == first


def test_what_does_not_fit_is_said_in_one_line_and_leaves_nothing(mark: str) -> None:
    with pytest.raises(
        UsageError, match=r"--kv-cache-memory .* is more than the .* of memory that is free"
    ) as caught:
        LLM(**{**MODEL, "kv_cache_memory": 1 << 45}, data_parallel=2)
    assert "\n" not in str(caught.value)
