"""SDAR in the whole engine against transformers' Qwen3 with an explicit mask, and against the loop
of SDAR's own generate.py."""

from contextlib import ExitStack
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
import torch
from transformers import PreTrainedModel

from nanoserve import LLM
from nanoserve.commands.main import main
from nanoserve.engine.assembly import build_engine
from nanoserve.engine_config import EngineConfig
from nanoserve.errors import UsageError
from nanoserve.executor.compile.layer_runner import LayerRunner
from nanoserve.executor.profiling.layout_profile import measure_layouts
from nanoserve.lab.benchmarks.policies.engines import open_workers
from nanoserve.lab.benchmarks.profiling import measure_profile
from nanoserve.layout import ParallelLayout
from nanoserve.models.hub import ResolvedModel
from nanoserve.models.loading import load_model
from nanoserve.request import Request, SamplingParams
from tests.executor.fake_graphs import answer_calls_of_cuda, put_cpu_in_place_of_gpu
from tests.oracle.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.oracle.runs import DEFAULTS, Outputs, Run
from tests.oracle.sdar import (
    END_TOKEN,
    MASK_TOKEN,
    Generation,
    block_causal_logits,
    make_sdar,
    make_sdar_for_text,
)
from tests.oracle.test_families import TOLERANCE, dense_logits
from triton_ops.cpu import cpu_operators

LENGTH = 4
GREEDY = {"temperature": 0.0, "max_tokens": 14}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    directory = tmp_path_factory.mktemp("sdar")
    return directory, make_sdar(directory, LENGTH)


def prompts() -> list[tuple[int, ...]]:
    """Longer than a block and not whole blocks, whole blocks, less than a block, one with the
    first's beginning, and a single token."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(3, VOCAB_SIZE - 1, (90,), generator=generator).tolist()
    first = tuple(tokens[:45])
    return [first, tuple(tokens[50:58]), tuple(tokens[60:63]), (*first[:37], 5), (tokens[80],)]


def requests_of(prompts: list[tuple[int, ...]], **params: Any) -> list[Request]:
    return [
        Request(str(number), prompt, SamplingParams(**GREEDY | params), number, (END_TOKEN,))
        for number, prompt in enumerate(prompts)
    ]


def test_logits_are_those_of_transformers(checkpoint: tuple[Path, PreTrainedModel]) -> None:
    """Dense, with masks in the last block."""
    directory, model = checkpoint
    decoder, config = load_model(directory, "fp32")
    tokens = [*prompts()[0][:38], MASK_TOKEN, MASK_TOKEN]
    found = dense_logits(decoder, config, torch.tensor(tokens))
    expected = block_causal_logits(model, tokens, LENGTH)
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


STRATEGIES = {
    "confidence": Generation(None, LENGTH),  # type: ignore[arg-type]
    "confidence:threshold=0.1": Generation(None, LENGTH, 0.1),  # type: ignore[arg-type]
    "confidence:threshold=0.1:steps=2": Generation(None, LENGTH, 0.1, 2),  # type: ignore[arg-type]
    "entropy:bound=5": Generation(None, LENGTH, bound=5.0),  # type: ignore[arg-type]
    "static": Generation(None, LENGTH, None),  # type: ignore[arg-type]
    "static:steps=3": Generation(None, LENGTH, None, 3),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("denoising", STRATEGIES)
def test_greedy_answers_are_those_of_sdars_own_loop(
    denoising: str, checkpoint: tuple[Path, PreTrainedModel]
) -> None:
    directory, model = checkpoint
    loop = STRATEGIES[denoising]
    loop.model, loop.passes = model, 0
    expected = {(str(n), 0): loop.answer(prompt, 14) for n, prompt in enumerate(prompts())}
    ran = Run(directory, requests_of(prompts()), denoising=denoising)
    assert ran.outputs == expected
    assert ran.denoising_steps == loop.passes


@cache
def expected_answers(model: PreTrainedModel, most: int = 14) -> Outputs:
    loop = Generation(model, LENGTH, 0.1)
    return {(str(n), 0): loop.answer(prompt, most) for n, prompt in enumerate(prompts())}


SMALL_STEPS = {
    "sarathi": {
        "max_num_batched_tokens": 16,
        "block_size": 4,
        "denoising": "confidence:threshold=0.1",
    },
    "throttling": {"max_num_batched_tokens": 24, "block_size": 16, "enable_prefix_caching": False},
    "prefill-first": {"max_num_batched_tokens": 2048, "block_size": 2},
    "decode-first": {"max_num_batched_tokens": 32, "block_size": 3, "max_num_seqs": 2},
}


@pytest.mark.parametrize("policy", SMALL_STEPS)
def test_answers_do_not_depend_on_how_they_are_scheduled(
    policy: str, checkpoint: tuple[Path, PreTrainedModel]
) -> None:
    """Chunks, the prefix cache, and canvases of some sequences beside prompts of others."""
    directory, model = checkpoint
    settings = {"denoising": "confidence:threshold=0.1", **SMALL_STEPS[policy]}
    ran = Run(directory, requests_of(prompts()), policy=policy, **settings)
    assert ran.outputs == expected_answers(model)
    budget = settings["max_num_batched_tokens"]
    widths = [[len(row.tokens) for row in plan.rows] for plan in ran.plans]
    assert all(sum(width) <= budget or len(width) == 1 for width in widths)
    assert policy != "sarathi" or any(
        {row.canvas is None for row in plan.rows} == {True, False} for plan in ran.plans
    )


def test_canvases_that_are_preempted_begin_again(checkpoint: tuple[Path, PreTrainedModel]) -> None:
    directory, model = checkpoint
    memory = 5 * 16 * 2 * 3 * 2 * 32 * 4  # blocks, tokens, keys and values, layers, heads, numbers
    settings = {"denoising": "confidence:threshold=0.1", "kv_cache_memory": memory}
    settings |= {"max_model_len": 64, "policy": "prefill-first"}
    ran = Run(directory, requests_of(prompts()), **settings)
    assert ran.scheduler.pool.num_blocks == 5
    assert ran.outputs == expected_answers(model)
    assert ran.scheduler.table.preemptions > 0


def test_an_answer_ends_with_the_first_end_token_of_a_canvas(
    checkpoint: tuple[Path, PreTrainedModel],
) -> None:
    directory, model = checkpoint
    prompt = prompts()[0]
    whole = Generation(model, LENGTH).answer(prompt, 14, end=None)
    end = next(token for place, token in enumerate(whole[:-1]) if (len(prompt) + place) % 4 == 1)
    request = Request("0", prompt, SamplingParams(**GREEDY), 0, (end,))
    (answer,) = Run(directory, [request]).outputs.values()
    assert answer == whole[: whole.index(end) + 1]
    ignoring = Request("0", prompt, SamplingParams(**GREEDY, ignore_eos=True), 0, (end,))
    assert list(Run(directory, [ignoring]).outputs.values()) == [whole]


def test_tokens_come_a_canvas_at_a_time(checkpoint: tuple[Path, PreTrainedModel]) -> None:
    """The first brings what is left of the span in which the prompt ends."""
    ran = Run(checkpoint[0], [Request("0", prompts()[0], SamplingParams(**GREEDY), 0)])
    assert [gain for gain in ran.gains if gain] == [3, 4, 4, 3]
    assert len(ran.gains) == ran.denoising_steps == 3 + 4 * 3


def test_log_probabilities_are_those_of_the_step_that_settles_a_token(
    checkpoint: tuple[Path, PreTrainedModel],
) -> None:
    directory, model = checkpoint
    loop = Generation(model, LENGTH, 0.1)
    requests = requests_of(prompts()[:2], logprobs=2)
    ran = Run(directory, requests, denoising="confidence:threshold=0.1")
    for request in requests:
        answer = loop.answer(request.prompt, 14)
        found = ran.logprobs[request.request_id, 0]
        assert [one.token for one in found] == answer
        assert [one.logprob for one in found] == pytest.approx(loop.logprobs[:14], abs=TOLERANCE)
        assert all(one.rank == 1 and len(one.top) == 2 for one in found)


def test_text_is_streamed_a_canvas_at_a_time_until_a_stop_string(tmp_path: Path) -> None:
    make_sdar_for_text(tmp_path)
    settings = {"dtype": "float32", "eager": True, "kv_cache_memory": 1 << 22}
    params = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
    with LLM(str(tmp_path), **settings) as llm:
        pieces = [piece.outputs[0] for piece in llm.stream("Once upon", SamplingParams(**params))]
        (whole,) = llm.generate(["Once upon"], SamplingParams(**params))
        text = whole.outputs[0].text
        stop = text[len(text) // 2 : len(text) // 2 + 3]
        (stopped,) = llm.generate(["Once upon"], SamplingParams(**params, stop=(stop,)))
    prompt = len(whole.prompt_token_ids)
    first = LENGTH - prompt % LENGTH
    assert [len(piece.token_ids) for piece in pieces][:4] == [first, 4, 4, 4]
    assert "".join(piece.text for piece in pieces) == text
    assert stopped.outputs[0].text == text[: text.index(stop)]
    assert stopped.outputs[0].finish_reason == "stop"


def test_drafts_show_each_step_of_a_canvas_and_change_nothing(tmp_path: Path) -> None:
    """The texts of these tokens do not depend on their neighbours. The last canvas is cut."""
    loop = Generation(make_sdar_for_text(tmp_path), LENGTH)
    spelling = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    params = SamplingParams(temperature=0.0, max_tokens=13, ignore_eos=True)
    with LLM(str(tmp_path), **DEFAULTS) as llm:
        drafted = list(llm.stream("Once upon", params, drafts=True))
        plain = list(llm.stream("Once upon", params))
    prompt = plain[0].prompt_token_ids
    loop.answer(prompt, 13, end=None)
    expected = [
        "".join(" _" if token == MASK_TOKEN else spelling.decode([token]) for token in state)
        for state in (state[len(prompt) : len(prompt) + 13] for state in loop.states)
    ]
    shown, final = list[str](), ""
    for output in drafted:
        shown.append(final + output.outputs[0].text)
        if not output.draft:
            final = shown[-1]
    assert shown == expected
    texts = [output.outputs[0].text for output in drafted if not output.draft]
    assert texts == [output.outputs[0].text for output in plain]
    assert not any(output.draft for output in plain)


def test_explain_shows_a_canvas_step_by_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A prompt of 5 tokens: the first canvas has three masks, and each step settles one."""
    make_sdar_for_text(tmp_path)
    model = ["-m", str(tmp_path), "--denoising", "static", "--eager", "--dtype", "float32"]
    assert main(["explain", "Once upon a time", "--max-tokens", "5", *model]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    answers = [line.split()[0] for line in lines if line.startswith(("canvas  0", "answer  0"))]
    assert answers == ["canvas"] * 2 + ["answer"] + ["canvas"] * 3 + ["answer"]
    steps = [line.rpartition(" ")[2] for line in lines if "denoising step" in line]
    assert steps == ["1", "2", "3", "1", "2", "3", "4"]


SAMPLED = {"temperature": 1.0, "max_tokens": 10, "n": 2}


@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}], ids=str)
def test_samples_do_not_depend_on_the_batch(
    params: dict[str, Any], checkpoint: tuple[Path, PreTrainedModel]
) -> None:
    """Samples of a request differ. Each has the tokens that it has alone, again after a
    preemption."""
    directory, _ = checkpoint
    requests = requests_of(prompts()[:3], **SAMPLED | params)
    together = Run(directory, requests, max_num_batched_tokens=16, block_size=4)
    alone = {}
    for request in requests:
        alone |= Run(directory, [request]).outputs
    assert together.outputs == alone
    assert alone["0", 0] != alone["0", 1]


@pytest.mark.parametrize(
    "degree", ["pipeline_parallel", pytest.param("tensor_parallel", marks=pytest.mark.slow)]
)
def test_two_workers_give_the_same_answers(
    degree: str, checkpoint: tuple[Path, PreTrainedModel]
) -> None:
    directory, model = checkpoint
    settings = {"denoising": "confidence:threshold=0.1", "max_num_batched_tokens": 32}
    ran = Run(directory, requests_of(prompts()), **{degree: 2}, **settings)
    assert ran.outputs == expected_answers(model)


def test_compiled_pieces_give_the_same_answers(checkpoint: tuple[Path, PreTrainedModel]) -> None:
    directory, _ = checkpoint
    decoder, _ = load_model(directory, "fp32")
    layers = LayerRunner.ahead_of_time(decoder, block_size=16, operators=cpu_operators())
    assert set(layers._compiled) == {"pre_attention", "post_attention"}


def test_an_engine_on_a_gpu_gives_the_same_answers(
    checkpoint: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that is done for a GPU, with the CPU in its place. Layers are compiled in pieces, since a
    compiled layer has causal attention. No decode step is captured."""
    directory, model = checkpoint
    recorder = answer_calls_of_cuda(monkeypatch)
    put_cpu_in_place_of_gpu(monkeypatch)
    settings = {"denoising": "confidence:threshold=0.1", "max_num_batched_tokens": 32}
    ran = Run(directory, requests_of(prompts()), device="cuda", eager=False, **settings)
    torch._dynamo.reset()
    assert ran.outputs == expected_answers(model)
    assert recorder.recorded == []


REFUSED_SETTINGS = {
    "--speculate ngram": {"speculate": "ngram"},
    "--host-kv-memory": {"host_kv_memory": 1 << 20},
    "--policy neo": {"policy": "neo"},
    "--policy auto": {"policy": "auto"},
    "--parallel auto": {"parallel": "auto", "devices": 2},
    "--decode-parallel": {
        "tensor_parallel": 2,
        "decode_layout": ParallelLayout(pipeline_parallel=2),
    },
    "--max-num-batched-tokens 15": {"max_num_batched_tokens": 15},
    "--max-model-len 4": {"max_model_len": 4},
}


@pytest.mark.parametrize("named", REFUSED_SETTINGS)
def test_what_does_not_go_together_with_canvases_is_refused_by_name(
    named: str, checkpoint: tuple[Path, PreTrainedModel]
) -> None:
    with pytest.raises(UsageError, match=f"^{named}: sdar writes 4 tokens at a time[^\n]*$"):
        Run(checkpoint[0], [], **REFUSED_SETTINGS[named])


def test_denoising_for_random_tokens_is_refused(
    checkpoint: tuple[Path, PreTrainedModel],
) -> None:
    problem = "canvases of sdar begin as masks; choose one of confidence, static, entropy$"
    with pytest.raises(UsageError, match=f"^--denoising renoise: {problem}"):
        Run(checkpoint[0], [], denoising="renoise")


def test_what_measures_decode_steps_refuses_canvases(
    checkpoint: tuple[Path, PreTrainedModel],
) -> None:
    resolved = ResolvedModel("sdar", checkpoint[0], checkpoint[0])
    with pytest.raises(UsageError, match="measuring layouts: sdar writes 4 tokens at a time"):
        measure_layouts(resolved, EngineConfig(), 2, lambda *_: None)
    config = EngineConfig(pipeline_parallel=2, speculate="ngram")
    model = load_model(checkpoint[0], "fp32")[1]
    with pytest.raises(UsageError, match="--speculate ngram: sdar writes 4 tokens at a time"):
        open_workers(ExitStack(), "P2", resolved, config, model, None)
    built = build_engine(resolved, EngineConfig(**DEFAULTS))
    llm: Any = SimpleNamespace(engine=built.engine, built=built)
    processor: Any = None  # nothing is measured
    with pytest.raises(UsageError, match="nanoserve profile: sdar writes 4 tokens at a time"):
        measure_profile(llm, processor, print)
    built.engine.close()


@pytest.mark.parametrize(
    "params",
    [{"prompt_logprobs": 0}, {"json_schema": "{}"}, {"min_tokens": 2}, {"logit_bias": {3: 1.0}}],
    ids=lambda params: next(iter(params)),
)
def test_requests_that_canvases_cannot_carry_out_are_refused_by_name(
    params: dict[str, Any], checkpoint: tuple[Path, PreTrainedModel]
) -> None:
    (name,) = params
    with pytest.raises(UsageError, match=f"^[^\n]*{name}[^\n]*: the model writes 4 tokens at a"):
        Run(checkpoint[0], requests_of(prompts()[:1], **params))


def test_a_model_without_canvases_is_not_denoised(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path)
    with pytest.raises(
        UsageError, match="--denoising static: qwen3 writes one token after the oth"
    ):
        Run(tmp_path, [], denoising="static")
