"""A step finds each row's recurrent state, and leaves it where the plan says."""

from collections.abc import Callable

import pytest

from nanoserve.config.mixers import Mamba2Config, MambaConfig
from nanoserve.executor.compile.layer_runner import LayerRunner
from nanoserve.executor.local import LocalExecutor
from nanoserve.executor.start.gpu_start import run_largest_step
from nanoserve.models.decoder import Decoder, DecoderLayer
from nanoserve.request import SamplingParams
from nanoserve.scheduler.optional import NO_STATE, StatePlan, StateRow
from nanoserve.scheduler.plan import Begin, Row, StepPlan
from tests.executor.small_model import (
    dense_greedy,
    local_executor,
    small_decoder,
    state_space_config,
    stateful_config,
)
from triton_ops.cpu import cpu_operators

PROMPT = tuple(1 + (number * number) % 59 for number in range(70))
BLOCKS = tuple(range(20))
GREEDY = SamplingParams(temperature=0, max_tokens=9)


MODELS = {
    "convolutions": stateful_config(),
    "mamba": state_space_config(MambaConfig(channels=48, state_size=5, time_step_rank=3)),
    "mamba2": state_space_config(Mamba2Config(num_heads=6, head_dim=8, num_groups=2, state_size=7)),
}


def executor(
    compiled: Callable[[Decoder], LayerRunner | None] = lambda decoder: None,
    model: str = "convolutions",
) -> LocalExecutor:
    decoder = small_decoder(MODELS[model]).requires_grad_(False)
    return local_executor(
        decoder, num_blocks=60, block_size=4, state_slots=5, layers=compiled(decoder)
    )


def traced(decoder: Decoder) -> LayerRunner:
    return LayerRunner.torch_compile(decoder, backend="aot_eager")


def ahead_of_time(decoder: Decoder) -> LayerRunner:
    layers = LayerRunner.ahead_of_time(decoder, block_size=4, operators=cpu_operators())
    layers.start(waited=True)
    layers.wait()
    assert layers.loaded
    return layers


def begun(sequence: int, tokens: tuple[int, ...]) -> Begin:
    return Begin(sequence, tokens, len(tokens), 0, 1, GREEDY)


def answers(running: LocalExecutor, plan: StepPlan) -> dict[int, int]:
    running.submit(plan)
    (result,) = running.collect(None)
    return {answer.sequence: answer.tokens[0] for answer in result.answers}


def decoded(running: LocalExecutor, first_step: int, sequence: int, tokens: list[int]) -> list[int]:
    """Four tokens more of a sequence whose last token is not computed yet."""
    for step in range(first_step, first_step + 4):
        row = Row(sequence, len(tokens) - 1, (tokens[-1],), True)
        tokens.append(answers(running, StepPlan(step, rows=(row,)))[sequence])
    return tokens[-4:]


@pytest.mark.parametrize(
    "compiled", [lambda decoder: None, traced, pytest.param(ahead_of_time, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("model", MODELS)
def test_a_prompt_in_chunks_goes_on_in_its_slot(
    compiled: Callable[[Decoder], LayerRunner | None], model: str
) -> None:
    running = executor(compiled, model)
    expected = dense_greedy(small_decoder(MODELS[model]), PROMPT, 5)
    first = Row(7, 0, PROMPT[:41], False, BLOCKS)
    moved = StatePlan((StateRow(7, NO_STATE, 3),))
    answers(running, StepPlan(0, begin=(begun(7, PROMPT),), rows=(first,), state=moved))
    second = answers(running, StepPlan(1, rows=(Row(7, 41, PROMPT[41:], True),)))
    assert second[7] == expected[0]
    assert decoded(running, 2, 7, [*PROMPT, expected[0]]) == expected[1:]


def test_a_snapshot_within_a_row_begins_another_sequence() -> None:
    """A row saves its state at two positions; a second sequence reads the blocks before the second
    of them and goes on from there, while the first one goes on in its own slot."""
    running = executor()
    expected = dense_greedy(small_decoder(stateful_config()), PROMPT, 5)
    saves = ((20, 4), (64, 1))
    plan = StepPlan(
        0,
        begin=(begun(7, PROMPT),),
        rows=(Row(7, 0, PROMPT, True, BLOCKS),),
        state=StatePlan((StateRow(7, NO_STATE, 3, saves),)),
    )
    assert answers(running, plan)[7] == expected[0]
    other = (*PROMPT[:64], 5, 6, 7)
    blocks = (*BLOCKS[:16], *range(30, 34))
    plan = StepPlan(
        1,
        begin=(begun(8, other),),
        rows=(
            Row(8, 64, other[64:], True, blocks),
            Row(7, 70, (expected[0],), True),
        ),
        state=StatePlan((StateRow(8, 1, 2),)),
    )
    found = answers(running, plan)
    assert found[7] == expected[1]
    fresh = dense_greedy(small_decoder(stateful_config()), other, 5)
    assert found[8] == fresh[0]
    assert decoded(running, 2, 8, [*other, fresh[0]]) == fresh[1:]


def test_a_decode_may_leave_its_state_in_another_slot() -> None:
    """The slot that it leaves is written by another sequence before the next row."""
    running = executor()
    expected = dense_greedy(small_decoder(stateful_config()), PROMPT, 4)
    rows = (Row(7, 0, PROMPT, True, BLOCKS),)
    moved = StatePlan((StateRow(7, NO_STATE, 3),))
    answers(running, StepPlan(0, begin=(begun(7, PROMPT),), rows=rows, state=moved))
    plan = StepPlan(
        1, rows=(Row(7, 70, (expected[0],), True),), state=StatePlan((StateRow(7, 3, 0),))
    )
    assert answers(running, plan)[7] == expected[1]
    plan = StepPlan(
        2,
        begin=(begun(8, (9, 9)),),
        rows=(Row(8, 0, (9, 9), True, (40,)), Row(7, 71, (expected[1],), True)),
        state=StatePlan((StateRow(8, NO_STATE, 3),)),
    )
    assert answers(running, plan)[7] == expected[2]
    plan = StepPlan(3, rows=(Row(7, 72, (expected[2],), True),))
    assert answers(running, plan)[7] == expected[3]


def test_a_row_without_a_state_is_an_error() -> None:
    running = executor()
    running.submit(StepPlan(0, begin=(begun(7, PROMPT),), rows=(Row(7, 0, PROMPT, True, BLOCKS),)))
    with pytest.raises(RuntimeError, match="sequence 7: its recurrent state is in no slot"):
        running.collect(None)


@pytest.mark.parametrize("model", MODELS)
def test_the_largest_step_of_a_gpu_has_states(model: str) -> None:
    decoder = small_decoder(MODELS[model])
    tokens = run_largest_step(
        decoder, DecoderLayer.__call__, num_tokens=11, num_rows=4, block_size=4
    )
    assert tokens is not None
    assert len(tokens) == 11
