"""Whole generations of DiffusionGemma in the engine against transformers' own generate, with the
same numbers in place of noise on both sides."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from nanoserve import LLM
from nanoserve.commands.main import main
from nanoserve.errors import UsageError
from nanoserve.executor.canvas import free_denoising
from nanoserve.executor.canvas.free_denoising import FreeCanvasDenoising
from nanoserve.models.decoder import Decoder
from nanoserve.request import Request, SamplingParams
from tests.oracle.canvas_generation import answer, make_generating
from tests.oracle.checkpoints import VOCAB_SIZE
from tests.oracle.diffusion_gemma import END_TOKEN, LENGTH, WINDOW
from tests.oracle.runs import Outputs, Run
from tests.oracle.sdar import copy_tokenizer

MOST = 15
"""Tokens of an answer: three canvases, of which the last is cut."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    directory = tmp_path_factory.mktemp("generating")
    return directory, make_generating(directory)


def prompts() -> list[tuple[int, ...]]:
    """Two that are longer than the window, of which the second begins as the first, and two shorter
    ones."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(3, VOCAB_SIZE, (90,), generator=generator).tolist()
    first = tuple(tokens[:45])
    assert len(first) > WINDOW + LENGTH
    return [first, (*first[:36], 5), tuple(tokens[50:57]), (tokens[80],)]


def requests_of(prompts: list[tuple[int, ...]], **params: Any) -> list[Request]:
    settings = {"temperature": 1.0, "max_tokens": MOST} | params
    return [
        Request(str(number), prompt, SamplingParams(**settings), number, (END_TOKEN,))
        for number, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def expected(checkpoint: tuple[Path, PreTrainedModel]) -> tuple[Outputs, int]:
    """The answers to all prompts, and the number of denoising steps."""
    _, model = checkpoint
    answers: Outputs = {}
    steps = 0
    for number, prompt in enumerate(prompts()):
        answers[str(number), 0], taken = answer(model, prompt, MOST, seed=number)
        steps += taken
    assert sum(len(each) == MOST for each in answers.values()) >= 2
    return answers, steps


POLICIES = {
    "sarathi": {"max_num_batched_tokens": 16, "block_size": 4},
    "throttling": {"max_num_batched_tokens": 24, "enable_prefix_caching": False},
    "prefill-first": {"max_num_batched_tokens": 2048, "block_size": 2},
    "decode-first": {"max_num_batched_tokens": 7, "block_size": 3, "max_num_seqs": 2},
}


@pytest.mark.parametrize("policy", POLICIES)
def test_answers_are_those_of_transformers(
    policy: str, checkpoint: tuple[Path, PreTrainedModel], expected: tuple[Outputs, int]
) -> None:
    """In chunks, with the prefix cache and without, and canvases at different steps in one
    batch."""
    settings: dict[str, Any] = POLICIES[policy]
    ran = Run(checkpoint[0], requests_of(prompts()), policy=policy, **settings)
    answers, steps = expected
    assert ran.outputs == answers
    assert ran.denoising_steps == steps
    budget = settings["max_num_batched_tokens"]
    widths = [[len(row.tokens) for row in plan.rows] for plan in ran.plans]
    assert all(sum(width) <= budget or len(width) == 1 for width in widths)
    if policy == "sarathi":
        first_rows = {row.sequence: row.start for plan in reversed(ran.plans) for row in plan.rows}
        assert first_rows[1] == 36, "the second prompt's beginning is cached"
        of_plans = [{row.canvas and row.canvas.step for row in plan.rows} for plan in ran.plans]
        assert any(len(steps) > 1 and None in steps for steps in of_plans)
        assert any(len(steps - {None}) > 1 for steps in of_plans)


def test_canvases_that_are_preempted_begin_again(
    checkpoint: tuple[Path, PreTrainedModel],
    expected: tuple[Outputs, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is kept of a canvas that is over."""
    kept = list[dict[int, Any]]()

    def close(denoising: FreeCanvasDenoising) -> None:
        kept.append(denoising._unsettled)

    monkeypatch.setattr(FreeCanvasDenoising, "close", close)
    ran = Run(
        checkpoint[0],
        requests_of(prompts()),
        policy="prefill-first",
        kv_cache_memory=26 * 2048,  # blocks: the longest sequence takes 22
        block_size=4,
        max_model_len=66,
    )
    assert ran.outputs == expected[0]
    assert ran.scheduler.table.preemptions > 0
    assert kept == [{}]


def test_an_answer_ends_with_the_first_end_token_of_a_canvas(
    checkpoint: tuple[Path, PreTrainedModel], expected: tuple[Outputs, int]
) -> None:
    prompt, whole = prompts()[0], expected[0]["0", 0]
    end = next(token for token in whole[LENGTH + 2 :] if token not in whole[: LENGTH + 2])
    request = Request("0", prompt, SamplingParams(temperature=1.0, max_tokens=MOST), 0, (end,))
    (found,) = Run(checkpoint[0], [request]).outputs.values()
    assert found == whole[: whole.index(end) + 1]


def test_a_canvas_ends_when_its_likeliest_tokens_stay_and_are_sure(
    checkpoint: tuple[Path, PreTrainedModel],
) -> None:
    directory, model = checkpoint
    settings = {"max_denoising_steps": 12, "t_min": 0.01, "t_max": 0.05}
    settings |= {"entropy_bound": 50.0, "stability_threshold": 2, "confidence_threshold": 1.0}
    denoising = ":".join(["renoise", *[f"{name}={value}" for name, value in settings.items()]])
    bound = {
        "_cls_name": "EntropyBoundSamplerConfig",
        "entropy_bound": settings.pop("entropy_bound"),
    }
    prompt = prompts()[2]
    tokens, steps = answer(
        model, prompt, MOST, seed=0, greedy=True, sampler_config=bound, **settings
    )
    request = requests_of([prompt], temperature=0.0)
    ran = Run(directory, request, denoising=denoising)
    assert ran.outputs["0", 0] == tokens
    assert ran.denoising_steps == steps < 3 * 12


def test_samples_are_those_of_their_numbers_whatever_the_batch(
    checkpoint: tuple[Path, PreTrainedModel],
) -> None:
    """Samples wait for the first canvas of the first one, and then read the end of the prompt, of
    which a window shows little."""
    directory, model = checkpoint
    prompt = prompts()[0]
    for caching in (False, True):
        ran = Run(
            directory,
            requests_of([prompt], n=2),
            enable_prefix_caching=caching,
            block_size=4,
        )
        assert ran.outputs == {
            ("0", index): answer(model, prompt, MOST, seed=0, index=index)[0] for index in range(2)
        }


def test_tokens_come_a_canvas_at_a_time(
    checkpoint: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few positions are looked at together, and with the log probabilities of the step that
    ends a canvas."""
    whole = Run(checkpoint[0], requests_of(prompts()[:1], logprobs=2, ignore_eos=True))
    computed = list[int]()
    compute_logits = Decoder.compute_logits

    def counted(decoder: Decoder, hidden: torch.Tensor) -> torch.Tensor:
        computed.append(len(hidden))
        return compute_logits(decoder, hidden)

    monkeypatch.setattr(Decoder, "compute_logits", counted)
    monkeypatch.setattr(free_denoising, "rows_per_chunk", lambda vocab_size: 4)
    ran = Run(checkpoint[0], requests_of(prompts()[:1], logprobs=2, ignore_eos=True))
    assert computed == [4, 2] * ran.denoising_steps
    assert [gain for gain in ran.gains if gain] == [6, 6, 3]
    assert ran.outputs == whole.outputs
    (found,), (logprobs,) = ran.outputs.values(), ran.logprobs.values()
    assert [one.token for one in logprobs] == found
    assert all(one.rank == 1 and one.top[0] == (one.token, one.logprob) for one in logprobs)
    assert [one.logprob for one in logprobs] == pytest.approx(
        [one.logprob for one in whole.logprobs["0", 0]], abs=1e-3
    )


REFUSED_SETTINGS: dict[str, dict[str, Any]] = {
    "--speculate ngram": {"speculate": "ngram"},
    "--host-kv-memory": {"host_kv_memory": 1 << 20},
    "--policy auto": {"policy": "auto"},
    "--device cuda": {"device": "cuda"},
    "--pp": {"pipeline_parallel": 2},
    "--tp": {"tensor_parallel": 2},
    "--max-num-batched-tokens 5": {"max_num_batched_tokens": 5},
    "--max-model-len 11": {"max_model_len": 11},
}


@pytest.mark.parametrize("named", REFUSED_SETTINGS)
def test_what_does_not_go_together_with_free_canvases_is_refused_by_name(
    named: str, checkpoint: tuple[Path, PreTrainedModel]
) -> None:
    with pytest.raises(UsageError, match=f"^{named}: [^\n]* writes 6 tokens at a time[^\n]*$"):
        Run(checkpoint[0], [], **REFUSED_SETTINGS[named])


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"denoising": "static"}, "canvases of .* begin as random tokens; choose renoise"),
        ({"denoising": "renoise:t_min=2"}, "t_max 0.9 must be above t_min 2"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    settings: dict[str, Any], problem: str, checkpoint: tuple[Path, PreTrainedModel]
) -> None:
    with pytest.raises(UsageError, match=problem):
        Run(checkpoint[0], [], **settings)


@pytest.mark.parametrize(
    "params",
    [{"prompt_logprobs": 0}, {"json_schema": "{}"}, {"min_tokens": 2}, {"logit_bias": {3: 1.0}}],
    ids=lambda params: next(iter(params)),
)
def test_requests_that_canvases_cannot_carry_out_are_refused_by_name(
    params: dict[str, Any], checkpoint: tuple[Path, PreTrainedModel]
) -> None:
    (name,) = params
    with pytest.raises(UsageError, match=f"^[^\n]*{name}[^\n]*: the model writes 6 tokens at a"):
        Run(checkpoint[0], requests_of(prompts()[:1], **params))


def test_text_is_streamed_a_canvas_at_a_time_until_a_stop_string(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_generating(tmp_path, vocab_size=4096)
    copy_tokenizer(tmp_path)
    settings = {"dtype": "float32", "eager": True, "kv_cache_memory": 1 << 22, "seed": 3}
    params: dict[str, Any] = {"max_tokens": 14, "ignore_eos": True, "seed": 5}
    with LLM(str(tmp_path), **settings) as llm:
        pieces = [piece.outputs[0] for piece in llm.stream("Once upon", SamplingParams(**params))]
        (whole,) = llm.generate(["Once upon"], SamplingParams(**params))
        text = whole.outputs[0].text
        stop = text[len(text) // 2 : len(text) // 2 + 3]
        (stopped,) = llm.generate(["Once upon"], SamplingParams(**params, stop=(stop,)))
    assert [len(piece.token_ids) for piece in pieces] == [6, 6, 2]
    assert "".join(piece.text for piece in pieces) == text
    assert stopped.outputs[0].text == text[: text.index(stop)]
    assert stopped.outputs[0].finish_reason == "stop"
    model = ["-m", str(tmp_path), "--eager", "--dtype", "float32"]
    model += ["--denoising", "renoise:max_denoising_steps=2:confidence_threshold=0"]
    assert main(["explain", "Once upon a time", "--max-tokens", "7", *model]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    steps = [line.rpartition(" ")[2] for line in lines if "denoising step" in line]
    assert steps == ["1", "2", "1", "2"]
