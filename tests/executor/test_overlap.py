"""Steps launched before the answers of the ones before are read: no token changes, and nothing
waits in between."""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.engine.engine import Engine
from nanoserve.errors import RuntimeFailure
from nanoserve.executor.async_scheduling.placeholder_tokens import PlaceholderTokens
from nanoserve.executor.step.model_runner import ModelRunner, PreparedStep
from nanoserve.models.decoder import Decoder
from nanoserve.request import FinishReason, Request, SamplingParams, SequenceUpdate, TokenLogprob
from nanoserve.scheduler import make_policy
from nanoserve.scheduler.plan import Begin, Copy, Row, StepPlan
from nanoserve.scheduler.scheduler import Scheduler
from tests.executor.small_model import VOCAB_SIZE, dense_greedy, local_executor, small_decoder
from tests.fakes.integrity import check_integrity

BLOCK_SIZE = 4
PROMPT = (7, 3, 58, 21, 9)
OTHER = (1, 2, 3, 4, 5, 6)


def begin(sequence: int, tokens: tuple[int, ...], **params: object) -> Begin:
    return Begin(
        sequence, tokens, len(tokens), 0, 5, SamplingParams(**{"temperature": 0.0, **params})
    )


def placeholder(sequence: int, start: int, blocks: tuple[int, ...] = ()) -> Row:
    return Row(sequence, start, (0,), True, blocks, placeholder=True)


def make_runner(decoder: Decoder, device: str = "cpu") -> ModelRunner:
    return ModelRunner(
        decoder,
        num_blocks=24,
        block_size=BLOCK_SIZE,
        device=torch.device(device),
        mechanisms=[PlaceholderTokens()],
    )


def launch(runner: ModelRunner, plan: StepPlan) -> PreparedStep:
    step = runner.prepare(plan)
    runner.begin(step)
    return runner.sample(step, runner.compute(step))


# --------------------------------------------------------------------------------------------------
# plans by hand


def test_fed_rows_take_the_tokens_of_the_plan_before_whatever_its_order() -> None:
    decoder = small_decoder()
    runner = make_runner(decoder)
    prompts = (
        Row(1, 0, PROMPT, True, (0, 1)),
        Row(2, 0, OTHER, True, (2, 3)),
        Row(3, 0, OTHER[:3], False, (4,)),
    )
    steps = [
        launch(
            runner,
            StepPlan(0, begin=(begin(1, PROMPT), begin(2, OTHER), begin(3, OTHER)), rows=prompts),
        ),
        launch(
            runner,
            StepPlan(
                1, rows=(Row(3, 3, OTHER[3:], True, (5,)), placeholder(2, 6), placeholder(1, 5))
            ),
        ),
        launch(runner, StepPlan(2, rows=(placeholder(1, 6), placeholder(3, 6)))),
    ]
    answers = [{answer.sequence: answer.tokens for answer in step.answers()} for step in steps]
    for sequence, prompt, places in (
        (1, PROMPT, (0, 1, 2)),
        (2, OTHER, (0, 1)),
        (3, OTHER, (1, 2)),
    ):
        tokens = [token for place in places for token in answers[place][sequence]]
        assert tokens == dense_greedy(decoder, prompt, len(places))


@pytest.mark.parametrize(
    "between", [StepPlan(1, rows=(Row(2, 0, OTHER, True, (2, 3)),)), None], ids=["left out", ""]
)
def test_a_token_that_is_not_on_the_device_cannot_be_placeholder(between: StepPlan | None) -> None:
    runner = make_runner(small_decoder())
    first = Row(1, 0, PROMPT, between is not None, (0, 1))
    runner.execute(StepPlan(0, begin=(begin(1, (*PROMPT, 8)), begin(2, OTHER)), rows=(first,)))
    if between is not None:
        runner.execute(between)
    with pytest.raises(
        RuntimeError,
        match="sequence 1 has a placeholder for a token that the plan before it does not sample",
    ):
        runner.execute(StepPlan(2, rows=(placeholder(1, 5),)))


def test_what_follows_a_token_that_is_none_harms_no_other() -> None:
    decoder = small_decoder()
    with torch.no_grad():
        decoder.embedding.weight[60] = float("nan")
    runner = make_runner(decoder)
    bad = (1, 60, 2)
    rows = (Row(1, 0, bad, True, (3,)), Row(2, 0, PROMPT, True, (5, 6)))
    first = launch(
        runner, StepPlan(0, begin=(begin(1, bad, logprobs=2), begin(2, PROMPT)), rows=rows)
    )
    second = launch(runner, StepPlan(1, rows=(placeholder(1, 3), placeholder(2, 5))))
    bad_answer, good_answer = first.answers()
    assert "not numbers" in str(bad_answer.error)
    thrown_away, next_answer = second.answers()
    assert (thrown_away.sequence, next_answer.sequence) == (1, 2)
    assert [*good_answer.tokens, *next_answer.tokens] == dense_greedy(decoder, PROMPT, 2)


def test_launching_never_looks_at_what_the_device_computes() -> None:
    """On a device without any memory, where looking at a number is an error."""
    runner = make_runner(small_decoder().to("meta"), "meta")
    kinds: list[dict[str, object]] = [
        {"logprobs": 2, "prompt_logprobs": 3},
        {"temperature": 1.0, "top_k": 4, "top_p": 0.5, "min_p": 0.1},
        {
            "temperature": 0.7,
            "top_p": 0.6,
            "frequency_penalty": 1.0,
            "logit_bias": {3: 1.0},
            "min_tokens": 2,
        },
        {"temperature": 1.0, "repetition_penalty": 1.2},
    ]
    begins = tuple(begin(sequence, OTHER, **params) for sequence, params in enumerate(kinds))
    whole = tuple(
        Row(sequence, 0, OTHER, True, (2 * sequence, 2 * sequence + 1)) for sequence in range(4)
    )
    step = launch(runner, StepPlan(0, begin=begins, rows=whole, copies=(Copy(20, 21),)))
    launch(runner, StepPlan(1, rows=(placeholder(1, 6), placeholder(0, 6), Row(2, 6, (9,), True))))
    with pytest.raises(RuntimeError, match="meta"):
        step.answers()


def test_no_memory_for_a_step_forgets_the_one_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = small_decoder()
    executor = local_executor(decoder, num_blocks=8, block_size=BLOCK_SIZE, async_scheduling=True)
    executor.submit(StepPlan(0, begin=(begin(1, PROMPT),), rows=(Row(1, 0, PROMPT, True, (0, 1)),)))

    def fail(hidden: torch.Tensor) -> torch.Tensor:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(decoder, "compute_logits", fail)
        with pytest.raises(
            RuntimeFailure, match=r"a step of 1 tokens .* lower --max-num-batched-tokens$"
        ):
            executor.submit(StepPlan(1, rows=(placeholder(1, 5),)))
    assert executor.collect(None) == []
    again = StepPlan(
        2, end=(1,), begin=(begin(2, PROMPT),), rows=(Row(2, 0, PROMPT, True, (0, 1)),)
    )
    executor.submit(again)
    (result,) = executor.collect(None)
    assert list(result.answers[0].tokens) == dense_greedy(decoder, PROMPT, 1)


def test_two_plans_may_be_in_flight_where_tokens_are_placeholder() -> None:
    executor = local_executor(
        small_decoder(), num_blocks=8, block_size=BLOCK_SIZE, async_scheduling=True
    )
    executor.submit(StepPlan(0, begin=(begin(1, PROMPT),), rows=(Row(1, 0, PROMPT, True, (0, 1)),)))
    executor.submit(StepPlan(1, rows=(placeholder(1, 5),)))
    with pytest.raises(RuntimeError, match="at most 2"):
        executor.submit(StepPlan(2, rows=(placeholder(1, 6),)))
    assert [executor.collect(None)[0].step for _ in range(2)] == [0, 1]


# -------------------------------------------------------------------------------------------- with
# a real scheduler


@dataclass
class Life:
    """Outcome of one sample."""

    tokens: tuple[int, ...] = ()
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: FinishReason | None = None


def run(
    requests: list[Request],
    *,
    async_scheduling: bool,
    num_blocks: int = 32,
    budget: int = 64,
    stops: dict[str, int] | None = None,
) -> tuple[dict[tuple[str, int], Life], Scheduler, int]:
    """All samples; ``stops`` names requests that end when their first sample has so many tokens, as
    a stop string does.

    Returns:
        the lives, the scheduler, and how many rows were placeholders.
    """
    executor = local_executor(
        small_decoder(),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        async_scheduling=async_scheduling,
    )
    placeholder_rows = 0
    submit = executor.submit

    def counting(plan: StepPlan) -> None:
        nonlocal placeholder_rows
        placeholder_rows += sum(row.placeholder for row in plan.rows)
        submit(plan)

    executor.submit = counting  # type: ignore[method-assign]
    scheduler = Scheduler(
        make_policy("sarathi", budget),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=32,
        max_num_seqs=8,
        async_scheduling=async_scheduling,
    )
    engine = Engine(scheduler, executor, vocab_size=VOCAB_SIZE)
    lives: dict[tuple[str, int], Life] = {}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        updates: list[SequenceUpdate] = engine.step()
        for update in updates:
            life = lives.setdefault((update.request_id, update.index), Life())
            assert life.reason is None, "an update after the last one"
            life.tokens += update.new_tokens
            if stops and len(life.tokens) == stops.get(update.request_id) and not update.finished:
                engine.stop(update.request_id, index=update.index, reason=FinishReason.STOP)
            life.reason, life.logprobs = (
                update.sequence.finish_reason,
                list(update.sequence.logprobs),
            )
            assert update.sequence.error is None
        check_integrity(scheduler)
    assert scheduler.pool.free_blocks == num_blocks
    return lives, scheduler, placeholder_rows


REQUESTS = [
    (PROMPT, SamplingParams(temperature=0.0, max_tokens=12, logprobs=2)),
    (PROMPT[:2], SamplingParams(temperature=1.3, max_tokens=9, frequency_penalty=0.5)),
    ((*PROMPT, *PROMPT, 4), SamplingParams(temperature=0.8, top_k=9, top_p=0.9, max_tokens=7, n=2)),
    ((*PROMPT, *PROMPT, 8), SamplingParams(temperature=1.0, min_p=0.05)),
    ((*PROMPT, *PROMPT, 8, 1), SamplingParams(temperature=1.0, max_tokens=1)),
    (OTHER, SamplingParams(temperature=1.0, top_p=0.8, max_tokens=2)),
    (
        (*OTHER, *OTHER),
        SamplingParams(temperature=0.0, max_tokens=8, presence_penalty=1.0, prompt_logprobs=1),
    ),
    (
        OTHER[::-1],
        SamplingParams(temperature=1.0, max_tokens=15, stop_token_ids=tuple(range(20, 28))),
    ),
]


@pytest.mark.parametrize(
    ("num_blocks", "budget"), [(64, 64), (12, 5)], ids=["plenty", "preemptions and chunks"]
)
def test_overlapped_steps_give_the_plain_ones_tokens(num_blocks: int, budget: int) -> None:
    requests = [
        Request(str(number), prompt, params, seed=40 + number, end_tokens=(3,))
        for number, (prompt, params) in enumerate(REQUESTS)
    ]
    stops = {"3": 6}
    plain, _, placeholder_rows = run(requests, async_scheduling=False, stops=stops)
    assert placeholder_rows == 0
    overlapped, scheduler, placeholder_rows = run(
        requests, async_scheduling=True, num_blocks=num_blocks, budget=budget, stops=stops
    )
    assert placeholder_rows > 20
    assert (scheduler.table.preemptions > 0) == (num_blocks == 12)
    for name, life in plain.items():
        assert (overlapped[name].tokens, overlapped[name].reason) == (life.tokens, life.reason)
        assert [one.token for one in overlapped[name].logprobs] == [
            one.token for one in life.logprobs
        ]
        for one, other in zip(overlapped[name].logprobs, life.logprobs, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert one.rank == other.rank


@st.composite
def _requests(draw: st.DrawFn) -> list[Request]:
    requests = []
    for number in range(draw(st.integers(1, 5))):
        prompt = PROMPT[: draw(st.integers(1, 5))] + OTHER[: draw(st.integers(0, 6))]
        params = SamplingParams(
            n=draw(st.sampled_from([1, 1, 2])),
            temperature=draw(st.sampled_from([0.0, 1.0, 1.5])),
            top_k=draw(st.sampled_from([0, 5])),
            max_tokens=draw(st.integers(1, 12)),
            stop_token_ids=draw(st.sampled_from([(), tuple(range(0, 61, 6))])),
            presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.0])),
            logprobs=draw(st.sampled_from([None, 1])),
        )
        requests.append(
            Request(str(number), prompt, params, seed=draw(st.integers(0, 9)), end_tokens=(3,))
        )
    return requests


@settings(max_examples=30, deadline=None)
@given(
    requests=_requests(),
    num_blocks=st.integers(8, 20),
    budget=st.sampled_from([3, 8, 64]),
    stops=st.dictionaries(st.sampled_from("01234"), st.integers(1, 12)),
)
def test_whatever_the_requests_overlap_changes_no_token(
    requests: list[Request], num_blocks: int, budget: int, stops: dict[str, int]
) -> None:
    plain, _, _ = run(requests, async_scheduling=False, stops=stops)
    overlapped, _, _ = run(
        requests, async_scheduling=True, num_blocks=num_blocks, budget=budget, stops=stops
    )
    assert {name: life.tokens for name, life in overlapped.items()} == {
        name: life.tokens for name, life in plain.items()
    }
