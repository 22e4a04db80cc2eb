"""Random lives of an engine: requests that come, fork, share prefixes and are given up, on tiny
pools."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

from hypothesis import strategies as st

from nanoserve.engine.engine import Engine
from nanoserve.request import FinishReason, Request, SamplingParams
from nanoserve.scheduler.windows import most_blocks, most_tokens
from tests.fakes.integrity import check_integrity
from tests.fakes.memory_checking_executor import NextToken, next_token
from tests.fakes.reference import expected_tokens

END_TOKEN = 0

# Strategies are made once: Hypothesis checks each new one before it draws from it, which takes
# longer than drawing.
SAMPLES = st.sampled_from([1, 1, 1, 2, 3])
TEMPERATURES = st.sampled_from([0.0, 0.0, 1.0])
PENALTIES = st.sampled_from([0.0, 0.5])
STOP_TOKENS = st.sampled_from([(), (7,)])
SALTS = st.sampled_from(["", "", "tenant"])
BLOCK_SIZES = st.sampled_from([1, 2, 3, 4])
ABORTS = st.one_of(st.none(), st.none(), st.integers(0, 15))
ABORTED_SAMPLES = st.sampled_from([None, 0, 1])
DEPTHS = st.sampled_from([1, 1, 1, 2, 3, 4])
MOST_SEQUENCES = st.sampled_from([1, 2, 3, 256])
ONE_GROUP = st.just((0,))
WINDOWS = st.sampled_from([(0,), (0,), (1,), (3,), (0, 4), (0, 2, 2), (5, 0, 1), (0, 0)])
"""Windows of cache groups: most models have one that keeps all."""
TOKEN_BUDGETS = st.sampled_from([1, 3, 8, 64])


@cache
def _prompts(longest: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(1, 3), min_size=1, max_size=max(1, longest // 2))


@cache
def _limits(longest: int) -> st.SearchStrategy[int | None]:
    return st.one_of(st.none(), st.integers(1, longest))


@dataclass(frozen=True)
class Arrival:
    """A request, the step at which it comes, and perhaps the step at which somebody gives up on it
    or on a sample."""

    step: int
    request: Request
    abort_step: int | None
    abort_index: int | None


@st.composite
def _requests(draw: st.DrawFn, name: str, longest: int) -> Request:
    shared = draw(st.integers(0, longest // 2))
    own = draw(_prompts(longest))
    prompt = ([1] * shared + own)[: longest - 1]
    max_tokens = draw(_limits(longest))
    adjusted = draw(st.booleans())  # what is not is scheduled asynchronously, where that is on
    params = SamplingParams(
        n=draw(SAMPLES),
        temperature=draw(TEMPERATURES),
        presence_penalty=draw(PENALTIES) if adjusted else 0.0,
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, min(3, max_tokens or 3, longest - len(prompt))))
        if adjusted
        else 0,
        ignore_eos=draw(st.booleans()),
        stop_token_ids=draw(STOP_TOKENS),
    )
    salt = draw(SALTS)
    return Request(
        name,
        tuple(prompt),
        params,
        seed=draw(st.integers(0, 5)),
        end_tokens=(END_TOKEN,),
        cache_salt=salt,
    )


@st.composite
def lives(
    draw: st.DrawFn, windows: st.SearchStrategy[tuple[int, ...]] = ONE_GROUP
) -> dict[str, object]:
    """windows: of the model's cache groups. The pool holds the longest sequence, and hardly
    more."""
    block_size, cut = draw(BLOCK_SIZES), draw(windows)
    least = most_blocks(cut, 3, block_size)
    num_blocks = draw(st.integers(max(3, least), 14 * len(cut)))
    longest = draw(
        st.integers(3, most_tokens(cut, num_blocks, block_size, 40 if any(cut) else 100) + 1)
    )
    arrivals = []
    for number in range(draw(st.integers(1, 7))):
        request = draw(_requests(f"r{number}", longest))
        step = draw(st.integers(0, 12))
        abort = draw(ABORTS)
        index = draw(ABORTED_SAMPLES)
        arrivals.append(Arrival(step, request, None if abort is None else step + abort, index))
    depth = draw(DEPTHS)
    return {
        "block_size": block_size,
        "num_blocks": num_blocks,
        "windows": cut,
        "max_model_len": longest,
        "arrivals": arrivals,
        "prefix_caching": draw(st.booleans()),
        "depth": depth,
        "async_scheduling": depth == 1 and draw(st.booleans()),
        "max_num_seqs": draw(MOST_SEQUENCES),
        "token_budget": draw(TOKEN_BUDGETS),
    }


def live(
    engine: Engine, arrivals: list[Arrival], check: Callable[[], None] | None = None
) -> tuple[dict, dict]:
    """Run all arrivals and aborts to the end, checking the invariants after every step."""
    check = check or partial(check_integrity, engine.scheduler)
    outputs: dict[tuple[str, int], list[int]] = {
        (arrival.request.request_id, index): []
        for arrival in arrivals
        for index in range(arrival.request.params.n)
    }
    reasons: dict[tuple[str, int], FinishReason] = {}
    last_event = max(max(arrival.step, arrival.abort_step or 0) for arrival in arrivals)
    step = 0
    while step <= last_event or engine.has_work:
        updates = []
        for arrival in arrivals:
            if arrival.step == step:
                engine.add(arrival.request)
            if arrival.abort_step == step:
                updates += engine.stop(arrival.request.request_id, index=arrival.abort_index)
        updates += engine.step()
        for update in updates:
            key = (update.request_id, update.index)
            assert key not in reasons, "an update after the last one"
            outputs[key] += update.new_tokens
            if update.finished:
                reasons[key] = update.sequence.finish_reason
        check()
        step += 1
        assert step < 3000, "some request starves"
    return outputs, reasons


def check_outputs(
    arrivals: list[Arrival],
    max_model_len: int,
    outputs: dict,
    reasons: dict,
    deaths: int = 0,
    model: NextToken = next_token,
) -> None:
    """Every request got the tokens it would have got alone.

    Whoever was there whenever workers died, the last of three times alone, may have ended there.
    """
    failed = {name for (name, _), reason in reasons.items() if reason is FinishReason.ERROR}
    assert len(failed) <= max(0, deaths - 2)
    for arrival in arrivals:
        request = arrival.request
        for index in range(request.params.n):
            key = (request.request_id, index)
            expected, reason = expected_tokens(
                request, index=index, max_model_len=max_model_len, model=model
            )
            if reasons[key] in (FinishReason.ABORT, FinishReason.ERROR):
                aborted = arrival.abort_step is not None and arrival.abort_index in (None, index)
                assert aborted or request.request_id in failed
                assert outputs[key] == expected[: len(outputs[key])]
            else:
                assert (outputs[key], reasons[key].value) == (expected, reason)
