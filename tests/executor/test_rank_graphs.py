"""Graphs of the stages of a pipeline, and of ranks that are threads: all ranks of a group have a
graph, or none has."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from nanoserve.errors import RuntimeFailure
from nanoserve.executor.step.decode_graphs import DecodeGraphs, StaticInputs, graph_sizes
from nanoserve.executor.step.forward_pass import ForwardPass, StepInputs, make_caches
from nanoserve.executor.step.rank_graphs import RanksRecorder, on_all_ranks
from nanoserve.models.decoder import Decoder
from nanoserve.models.shards import make_shards
from tests.executor.fake_graphs import CPU, FakeRecorder
from tests.executor.small_model import small_config
from tests.executor.test_decode_graphs import (
    BLOCK_SIZE,
    MOST_BLOCKS,
    NUM_BLOCKS,
    decode_step,
    drafting_step,
)
from tests.models.thread_ranks import ThreadGroup, on_every_rank


def forward_of(decoder: Decoder) -> ForwardPass:
    """A forward pass over zeros."""
    sizes = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE}
    caches = make_caches(decoder.config, dtype=torch.float32, device=CPU, **sizes)
    for cache in (*caches.keys, *caches.values):
        cache.zero_()
    return ForwardPass(decoder, caches)


def second_stage() -> Decoder:
    torch.manual_seed(2)
    shards = make_shards(small_config(), pipeline_parallel=2, tensor_parallel=1)
    return Decoder(small_config(), shard=shards[1]).eval()


def with_hidden_states(step: StepInputs, seed: int) -> StepInputs:
    generator, shape = torch.Generator().manual_seed(seed), (len(step.token_ids), 32)
    step.intermediate_hidden_states = torch.randn(shape, generator=generator)
    return step


@torch.inference_mode()
def test_a_later_stage_begins_with_the_hidden_states_of_the_stage_before() -> None:
    """Also where rows with draft tokens are padded, and behind a step with more rows."""
    decoder, recorder = second_stage(), FakeRecorder()
    static = StaticInputs(
        graph_sizes((1, 2, 4), draft_tokens=True),
        most_blocks=MOST_BLOCKS,
        device=CPU,
        hidden_states=(32, torch.float32),
    )
    graphs = DecodeGraphs(forward_of(decoder), static)
    graphs.capture(recorder)
    plain = forward_of(decoder)
    steps = [
        *(decode_step(rows, seed=rows) for rows in (4, 3, 1, 2)),
        drafting_step((1, 3), (4, 12)),
        drafting_step((2, 2), (2, 5)),
    ]
    for seed, step in enumerate(steps):
        step = with_hidden_states(step, seed)
        torch.testing.assert_close(graphs(step), plain(step))
    assert recorder.replayed == [4, 4, 1, 2, 8, 4]


@pytest.mark.parametrize("sends", [True, False])
@torch.inference_mode()
def test_hidden_states_that_are_sent_outlast_the_next_replay(*, sends: bool) -> None:
    decoder = second_stage()
    static = StaticInputs(
        [(4, 1)], most_blocks=MOST_BLOCKS, device=CPU, hidden_states=(32, torch.float32)
    )
    graphs = DecodeGraphs(forward_of(decoder), static, sends=sends)
    graphs.capture(FakeRecorder())
    first = graphs(with_hidden_states(decode_step(4, seed=1), seed=1))
    as_it_was = first.clone()
    graphs(with_hidden_states(decode_step(4, seed=2), seed=2))
    assert torch.equal(first, as_it_was) == sends


class FailingRecorder(FakeRecorder):
    """Fails at one of its recordings: in the step, or behind it."""

    def __init__(self, at: int, error: Exception, *, in_step: bool = False) -> None:
        super().__init__()
        self._at, self._error, self._in_step = at, error, in_step

    def record(self, step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        fails = len(self.recorded) == self._at
        if fails and self._in_step:
            raise self._error
        recorded = super().record(step)
        if fails:
            raise self._error
        return recorded


def capture_on_two_ranks(failing: FailingRecorder) -> tuple[Sequence[str], FakeRecorder]:
    """Return what two ranks say of their captures, of which the second one's fail, and what the
    first one recorded."""
    shards = make_shards(small_config(), pipeline_parallel=1, tensor_parallel=2)
    recorders = [FakeRecorder(), failing]

    def run(rank: int, group: ThreadGroup) -> str:
        decoder = Decoder(small_config(), shard=shards[rank], group=group).eval()
        static = StaticInputs([(1, 1), (2, 1), (3, 1)], most_blocks=MOST_BLOCKS, device=CPU)
        graphs = DecodeGraphs(forward_of(decoder), static)
        try:
            graphs.capture(RanksRecorder(recorders[rank], decoder))
        except RuntimeError as error:
            return str(error)
        return ""

    return on_every_rank(run, 2), recorders[0]


def test_no_rank_goes_on_if_one_cannot_record() -> None:
    refusal = RuntimeError("operation not permitted when stream is capturing")
    told, recorder = capture_on_two_ranks(FailingRecorder(1, refusal))
    assert told == ["another rank of the stage cannot record them", str(refusal)]
    assert recorder.recorded == [3, 2], "all stop at the same graph"


def test_all_ranks_record_all_graphs() -> None:
    told, recorder = capture_on_two_ranks(FailingRecorder(99, RuntimeError()))
    assert told == ["", ""]
    assert recorder.recorded == [3, 2, 1]


def test_a_rank_whose_step_fails_ends_and_does_not_answer_the_others() -> None:
    """They wait for it in a sum of the step, and must not take its refusal for that."""
    failing = FailingRecorder(1, RuntimeError("a kernel is broken"), in_step=True)
    with pytest.raises(RuntimeFailure, match="a decode step failed: a kernel is broken"):
        capture_on_two_ranks(failing)


def test_a_rank_without_memory_ends() -> None:
    failing = FailingRecorder(1, torch.OutOfMemoryError("CUDA out of memory"))
    decoder = Decoder(
        small_config(),
        shard=make_shards(small_config(), pipeline_parallel=1, tensor_parallel=2)[0],
        group=ThreadGroup.alone(),
    )
    recorder = RanksRecorder(failing, decoder)
    recorder.record(lambda: torch.zeros(1))
    with pytest.raises(torch.OutOfMemoryError):
        recorder.record(lambda: torch.zeros(1))


def test_ranks_agree_on_what_holds_for_all() -> None:
    shards = make_shards(small_config(), pipeline_parallel=1, tensor_parallel=2)

    def run(rank: int, group: ThreadGroup) -> list[bool]:
        decoder = Decoder(small_config(), shard=shards[rank], group=group)
        return [on_all_ranks(decoder, holds=holds) for holds in (True, rank == 0, rank == 1, False)]

    assert on_every_rank(run, 2) == [[True, False, False, False]] * 2
