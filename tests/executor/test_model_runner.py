"""Plans written by hand give what the dense causal forward pass gives, however the rows are cut and
shared."""

import ctypes
import threading
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from nanoserve.executor.step import forward_pass
from nanoserve.executor.step.model_runner import ModelRunner
from nanoserve.models.attention import AttentionFunction
from nanoserve.models.decoder import Decoder, DecoderLayer
from nanoserve.request import SamplingParams, TokenLogprob
from nanoserve.scheduler.optional import HostRow
from nanoserve.scheduler.plan import Answer, Begin, Copy, Row, StepPlan
from tests.executor.small_model import dense_greedy, dense_logits, small_config, small_decoder
from tests.executor.staged_rows import penalized
from triton_ops.cpu import cpu_operators

GREEDY = SamplingParams(temperature=0.0)
BLOCK_SIZE = 4
PROMPT = (7, 3, 58, 21, 9, 40, 40, 11, 2, 33, 17)


@pytest.fixture
def decoder() -> Decoder:
    return small_decoder()


@pytest.fixture
def runner(decoder: Decoder) -> ModelRunner:
    return make_runner(decoder)


def make_runner(decoder: Decoder) -> ModelRunner:
    return ModelRunner(decoder, num_blocks=24, block_size=BLOCK_SIZE, device=torch.device("cpu"))


def begin(
    sequence: int,
    tokens: Sequence[int],
    params: SamplingParams = GREEDY,
    *,
    prompt_length: int | None = None,
    seed: int = 0,
) -> Begin:
    return Begin(sequence, tuple(tokens), prompt_length or len(tokens), 0, seed, params)


def whole(sequence: int, tokens: Sequence[int], blocks: Sequence[int]) -> Row:
    return Row(sequence, 0, tuple(tokens), True, tuple(blocks))


def execute(runner: ModelRunner, **plan: tuple[object, ...]) -> dict[int, Answer]:
    answers = runner.execute(StepPlan(step=0, **plan))
    return {answer.sequence: answer for answer in answers}


def decode(
    runner: ModelRunner, tokens: dict[int, list[int]], blocks: dict[int, int], count: int
) -> list[dict[int, Answer]]:
    """Run `count` steps of one token for each sequence, appending to `tokens`.

    blocks: the next block of each sequence; they are given out from that number up.
    """
    steps = []
    for _ in range(count):
        rows = []
        for sequence, known in tokens.items():
            position = len(known) - 1
            new_blocks = (blocks[sequence],) if position % BLOCK_SIZE == 0 else ()
            blocks[sequence] += len(new_blocks)
            rows.append(Row(sequence, position, (known[-1],), True, new_blocks))
        steps.append(execute(runner, rows=tuple(rows)))
        for sequence, answer in steps[-1].items():
            tokens[sequence] += answer.tokens
    return steps


def assert_logprobs(
    answers: Sequence[TokenLogprob], logits: torch.Tensor, tokens: Sequence[int]
) -> None:
    expected = logits.log_softmax(1)
    assert [answer.token for answer in answers] == list(tokens)
    for row, answer in enumerate(answers):
        assert answer.logprob == pytest.approx(expected[row, answer.token].item(), abs=1e-4)
        best = expected[row].topk(len(answer.top))
        assert [token for token, _ in answer.top] == best.indices.tolist()
        assert [value for _, value in answer.top] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("chunks", [(11,), (4, 1, 6), (3, 8), (1,) * 11])
@pytest.mark.parametrize("sliding_window", [0, 5])
def test_a_prompt_in_chunks_equals_the_dense_forward(
    chunks: tuple[int, ...], sliding_window: int
) -> None:
    decoder = small_decoder(small_config(sliding_window=sliding_window))
    runner = make_runner(decoder)
    params = SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=5)
    begins, blocks, start = (begin(4, PROMPT, params),), [9, 2, 17], 0
    logprobs: list[TokenLogprob] = []
    for length in chunks:
        end = start + length
        num_new = -(-end // BLOCK_SIZE) - -(-start // BLOCK_SIZE)
        new_blocks, blocks = blocks[:num_new], blocks[num_new:]
        row = Row(4, start, PROMPT[start:end], end == len(PROMPT), tuple(new_blocks))
        answers = execute(runner, begin=begins, rows=(row,))
        assert all(answer.error is None for answer in answers.values())
        logprobs += answers[4].prompt_logprobs if 4 in answers else ()
        begins, start = (), end
    logits = dense_logits(decoder, PROMPT)
    assert_logprobs(logprobs, logits[:-1], PROMPT[1:])
    assert answers[4].tokens == (logits[-1].argmax().item(),)
    assert_logprobs(answers[4].logprobs, logits[-1:], answers[4].tokens)


def test_chunks_decodes_and_whole_prompts_share_a_step(
    decoder: Decoder, runner: ModelRunner
) -> None:
    first, second, third = PROMPT[:5], PROMPT[::-1], PROMPT[2:9]
    tokens = {1: list(first), 2: list(second), 3: list(third)}
    answers = execute(
        runner,
        begin=(begin(1, first), begin(2, second)),
        rows=(whole(1, first, (0, 1)), Row(2, 0, second[:6], False, (10, 11))),
    )
    assert list(answers) == [1]
    tokens[1] += answers[1].tokens
    answers = execute(
        runner,
        begin=(begin(3, third),),
        rows=(
            Row(1, 5, (tokens[1][-1],), True),
            Row(2, 6, second[6:], True, (12,)),
            whole(3, third, (20, 21)),
        ),
    )
    for sequence, answer in answers.items():
        tokens[sequence] += answer.tokens
    decode(runner, tokens, {1: 2, 2: 13, 3: 22}, 6)
    for sequence, prompt in ((1, first), (2, second), (3, third)):
        output = tokens[sequence][len(prompt) :]
        assert output == dense_greedy(decoder, prompt, len(output))


def test_blocks_are_shared_within_the_plan_that_fills_them(
    decoder: Decoder, runner: ModelRunner
) -> None:
    other = (*PROMPT[:8], 50, 51)
    answers = execute(
        runner,
        begin=(begin(1, other), begin(2, PROMPT)),
        rows=(Row(1, 8, other[8:], True, (5, 6, 8)), whole(2, PROMPT, (5, 6, 7))),
    )
    assert list(answers[1].tokens) == dense_greedy(decoder, other, 1)
    assert list(answers[2].tokens) == dense_greedy(decoder, PROMPT, 1)


def test_a_fork_continues_on_its_copy_of_the_last_block(
    decoder: Decoder, runner: ModelRunner
) -> None:
    parent = execute(runner, begin=(begin(1, PROMPT),), rows=(whole(1, PROMPT, (0, 1, 2)),))
    tokens = {1: [*PROMPT, *parent[1].tokens], 2: list(PROMPT)}
    only_fives = begin(
        2, PROMPT, SamplingParams(temperature=0.0, logit_bias={5: 100.0}, logprobs=4)
    )
    # The parent writes into its last block in the very step whose copies come first.
    first = execute(
        runner,
        begin=(only_fives,),
        copies=(Copy(2, 9),),
        rows=(Row(1, 11, (tokens[1][-1],), True), Row(2, 10, PROMPT[10:], True, (0, 1, 9))),
    )
    for sequence, answer in first.items():
        tokens[sequence] += answer.tokens
    steps = [
        first,
        *decode(runner, {2: tokens[2]}, {2: 14}, 1),
        *decode(runner, tokens, {1: 3, 2: 14}, 5),
    ]
    assert tokens[1][11:] == dense_greedy(decoder, PROMPT, 7)
    assert tokens[2][11:] == [5] * 7
    logprobs = [logprob for step in steps for logprob in step[2].logprobs]
    assert_logprobs(logprobs, dense_logits(decoder, tokens[2])[10:-1], [5] * 7)


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(temperature=1.5, top_p=0.9, frequency_penalty=0.7, repetition_penalty=1.4),
        SamplingParams(
            temperature=0.9,
            top_k=20,
            presence_penalty=2.0,
            min_tokens=6,
            stop_token_ids=tuple(range(30)),
        ),
    ],
    ids=["greedy", "penalties", "min_tokens"],
)
def test_beginning_again_after_a_preemption_changes_nothing(
    decoder: Decoder, params: SamplingParams
) -> None:
    undisturbed, preempted = [make_runner(decoder) for _ in range(2)]
    tokens: list[dict[int, list[int]]] = []
    for runner in (undisturbed, preempted):
        answers = execute(
            runner, begin=(begin(1, PROMPT, params, seed=6),), rows=(whole(1, PROMPT, (0, 1, 2)),)
        )
        tokens.append({1: [*PROMPT, *answers[1].tokens]})
    decode(undisturbed, tokens[0], {1: 3}, 9)
    decode(preempted, tokens[1], {1: 3}, 4)
    known = tokens[1][1]
    again = begin(1, known, params, prompt_length=len(PROMPT), seed=6)
    blocks = tuple(range(23, 23 - -(-len(known) // BLOCK_SIZE), -1))
    answers = execute(preempted, begin=(again,), rows=(whole(1, known, blocks),))
    known += answers[1].tokens
    assert len(known) == 17
    decode(preempted, tokens[1], {1: 5}, 4)
    assert tokens[0] == tokens[1]
    assert len(tokens[0][1]) == len(PROMPT) + 10


def penalized_greedy(
    decoder: Decoder, prompt: Sequence[int], params: SamplingParams, count: int
) -> list[int]:
    """The tokens of greedy decoding, with everything computed and counted anew for each."""
    tokens = list(prompt)
    for _ in range(count):
        logits = penalized(params, dense_logits(decoder, tokens)[-1], prompt, tokens[len(prompt) :])
        tokens.append(logits.index(max(logits)))
    return tokens[len(prompt) :]


def test_each_row_is_penalized_for_the_tokens_of_its_own_sequence(
    decoder: Decoder, runner: ModelRunner
) -> None:
    """Two sequences change places at each step, and one of them is preempted half-way."""
    params = {
        1: SamplingParams(temperature=0.0, frequency_penalty=-2.0),
        2: SamplingParams(temperature=0.0, repetition_penalty=1.3),
    }
    prompts = {1: PROMPT, 2: PROMPT[::-1]}
    expected = {one: penalized_greedy(decoder, prompts[one], params[one], 9) for one in (1, 2)}
    assert all(expected[one] != dense_greedy(decoder, prompts[one], 9) for one in (1, 2))
    answers = execute(
        runner,
        begin=tuple(begin(one, prompts[one], params[one]) for one in (1, 2)),
        rows=(whole(1, prompts[1], (0, 1, 2)), whole(2, prompts[2], (6, 7, 8))),
    )
    tokens, blocks = {one: [*prompts[one], *answers[one].tokens] for one in (1, 2)}, {1: 3, 2: 9}
    for step in range(8):
        if step == 4:  # the first begins again: what it had is computed anew, in other blocks
            known, blocks[1] = tokens[1], 12
            again = begin(1, known[:-1], params[1], prompt_length=len(PROMPT))
            count = -(-len(known[:-1]) // BLOCK_SIZE)
            row = Row(1, 0, tuple(known[:-1]), True, tuple(range(12, 12 + count)))
            assert execute(runner, begin=(again,), rows=(row,))[1].tokens == (known[-1],)
            blocks[1] += count
        tokens = dict(reversed(tokens.items()))
        decode(runner, tokens, blocks, 1)
    assert {one: tokens[one][len(PROMPT) :] for one in (1, 2)} == expected


def test_what_is_not_a_number_ends_one_sequence_alone(
    decoder: Decoder, runner: ModelRunner
) -> None:
    poison = 60
    with torch.no_grad():
        decoder.embedding.weight[poison] = float("nan")
    bad, good = (1, 2, poison, 4, 5, 6), PROMPT[:6]
    answers = execute(
        runner,
        begin=(begin(1, bad), begin(2, good)),
        rows=(whole(1, bad, (3, 4)), whole(2, good, (5, 6))),
    )
    assert answers[1].tokens == ()
    assert "not numbers" in str(answers[1].error)
    assert list(answers[2].tokens) == dense_greedy(decoder, good, 1)
    # The blocks it leaves behind are full of NaN; the next owner must not notice.
    answers = execute(runner, end=(1,), begin=(begin(3, good),), rows=(whole(3, good, (3, 4)),))
    tokens = {3: [*good, *answers[3].tokens]}
    decode(runner, tokens, {3: 7}, 3)
    assert tokens[3][6:] == dense_greedy(decoder, good, 4)


def test_prompt_logprobs_that_are_not_numbers_are_an_error(
    decoder: Decoder, runner: ModelRunner
) -> None:
    with torch.no_grad():
        decoder.embedding.weight[60] = float("nan")
    params = SamplingParams(temperature=0.0, prompt_logprobs=0)
    answers = execute(
        runner, begin=(begin(1, (1, 60, 2), params),), rows=(whole(1, (1, 60, 2), (0,)),)
    )
    assert "not numbers" in str(answers[1].error)
    assert answers[1].prompt_logprobs == ()


def test_logprobs_are_raw_and_only_for_those_who_ask(decoder: Decoder, runner: ModelRunner) -> None:
    params = SamplingParams(temperature=2.0, top_k=3, logit_bias={5: 100.0}, logprobs=0)
    answers = execute(
        runner,
        begin=(begin(1, PROMPT, params), begin(2, PROMPT)),
        rows=(whole(1, PROMPT, (0, 1, 2)), whole(2, PROMPT, (3, 4, 5))),
    )
    assert answers[1].tokens == (5,)
    assert_logprobs(answers[1].logprobs, dense_logits(decoder, PROMPT)[-1:], (5,))
    assert answers[1].logprobs[0].top == ()
    assert answers[2].logprobs == answers[2].prompt_logprobs == ()


def threads_of_a_region() -> int:
    """How many threads OpenMP gives to a region that asks for two, as compiled layers do."""
    openmp, threads = ctypes.CDLL(torch._C.__file__), set[int]()
    body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: threads.add(threading.get_ident()))
    if not hasattr(openmp, "GOMP_parallel"):
        pytest.skip("torch's OpenMP is not GNU's")
    openmp.GOMP_parallel(body, None, 2, 0)
    return len(threads)


def test_a_step_of_little_work_is_computed_by_one_thread(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not cpu_operators().wait():
        pytest.skip(f"nothing can be built: {cpu_operators().problem}")
    found, project = list[int](), decoder.lm_head.forward

    def run_layer(
        layer: DecoderLayer, hidden: Tensor, cos: Tensor, sin: Tensor, attention: AttentionFunction
    ) -> Tensor:
        found.append(threads_of_a_region())
        output: Tensor = layer(hidden, cos, sin, attention)
        return output

    def watched(hidden: Tensor) -> Tensor:
        found.append(threads_of_a_region())
        return project(hidden)

    # 2 layers: qkv, output, gate and up, down, 2 norms; embedding, head and last norm
    layers = 2 * (32 * (32 + 2 * 16) + 32 * 32 + 2 * 32 * 48 + 48 * 32 + 2 * 32)
    weights_of_layer = (layers + 2 * 61 * 32 + 32) // 3
    # and 2 heads of keys and values of 5 tokens
    most = 32 * (weights_of_layer + 2 * 2 * 8 * 5) + 5 * weights_of_layer
    monkeypatch.setattr(forward_pass, "MOST_WORK_OF_ONE_THREAD", most)
    monkeypatch.setattr(decoder.lm_head, "forward", watched)
    runner = ModelRunner(
        decoder, num_blocks=24, block_size=4, device=torch.device("cpu"), run_layer=run_layer
    )
    execute(runner, begin=(begin(1, PROMPT),), rows=(whole(1, PROMPT[:5], (0, 1)),))
    assert (found, threads_of_a_region()) == ([1, 1, 1], 2)
    found.clear()
    execute(runner, begin=(begin(2, PROMPT),), rows=(whole(2, PROMPT[:6], (2, 3)),))
    assert (found, threads_of_a_region()) == ([2, 2, 2], 2)
    found.clear()
    long = begin(3, PROMPT * 10)
    execute(runner, begin=(long,), rows=(Row(3, 0, PROMPT[:5], False, tuple(range(4, 24))),))
    execute(runner, rows=(Row(3, 70, PROMPT[:1], True),))
    assert found == [1, 1, 2, 2, 2], "a long context is much work too"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_thread_computes_whole_products(decoder: Decoder, dtype: torch.dtype) -> None:
    """A library that divides its work among two threads must not wait for the second in vain."""
    if not cpu_operators().wait():
        pytest.skip(f"nothing can be built: {cpu_operators().problem}")
    weight, hidden = torch.randn(288, 72).to(dtype), torch.randn(60, 72).to(dtype)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with forward_pass.SmallSteps(decoder).on_one_thread(5, 5):
            product = functional.linear(hidden, weight)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    expected = hidden.double() @ weight.double().T
    torch.testing.assert_close(product.double(), expected, atol=0.2, rtol=0)


def test_a_plan_without_rows_has_no_answers(runner: ModelRunner) -> None:
    assert execute(runner, begin=(begin(1, PROMPT),), end=(5,), copies=(Copy(0, 1),)) == {}


@pytest.mark.parametrize(
    ("plan", "complaint"),
    [
        ({"rows": (whole(2, (1,), (0,)),)}, "sequence 2 is in a plan without having begun"),
        (
            {"end": (1,), "rows": (whole(1, PROMPT, (0, 1, 2)),)},
            "sequence 1 is in a plan without having begun",
        ),
        ({"rows": (whole(1, PROMPT, (0, 1)),)}, "2 blocks of 4 slots do not reach position 10"),
        ({"rows": (whole(1, (*PROMPT, 4), (0, 1, 2)),)}, "beyond its 11 known tokens"),
        ({"rows": (Row(1, 0, PROMPT, True, (0, 1, 2), host=HostRow()),)}, "all in its memory"),
    ],
)
def test_impossible_plans_are_refused(
    runner: ModelRunner, plan: dict[str, tuple[object, ...]], complaint: str
) -> None:
    execute(runner, begin=(begin(1, PROMPT),))
    with pytest.raises(RuntimeError, match=complaint):
        execute(runner, **plan)
