"""Workers are killed in the middle of generation: nobody who reads the tokens can tell."""

import os
import signal
import time
from collections.abc import Iterable, Iterator

import pytest

from nanoserve import LLM
from nanoserve.executor.workers.group import WorkerGroup
from nanoserve.executor.workers.messages import Rejoin, ToWorker
from nanoserve.request import SamplingParams, SequenceUpdate
from tests.processes import MARK, new_mark, workers

MODEL = {"dtype": "float32", "eager": True, "kv_cache_memory": 1 << 20, "max_model_len": 128}

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, max_tokens=40, seed=3, n=2)
ASKED = [
    ("Once upon a time", GREEDY),
    (
        "Once upon a time there was a little dog. He liked to run and to jump and to play in the "
        "park.",
        GREEDY,
    ),
    ("Once upon a time there was a little dog. He liked to run and to jump. One day he", SAMPLED),
    ("Lily and Ben went to the", SAMPLED),
]


class Workers:
    """A model on worker processes, and what it answers when nothing happens to them."""

    def __init__(self, **parallel: int) -> None:
        self._patch = pytest.MonkeyPatch()
        self.mark = new_mark()
        self._patch.setenv(MARK, self.mark)
        self.llm = LLM(**MODEL, max_num_batched_tokens=24, **parallel)
        self.expected = self.answers()

    def answers(self) -> list[tuple[int, ...]]:
        """The tokens of all samples."""
        prompts, params = zip(*ASKED, strict=True)
        outputs = self.llm.generate(list(prompts), list(params))
        assert not any(sample.error for output in outputs for sample in output.outputs)
        return [sample.token_ids for output in outputs for sample in output.outputs]

    def answers_while_dying(
        self, rank: int, after_tokens: int, number: signal.Signals = signal.SIGKILL, losses: int = 1
    ) -> tuple[list[tuple[int, ...]], float]:
        """Run the requests with a worker sent a signal on the way. Also returns how many seconds
        later the engine knew."""
        engine, step = self.llm.engine, self.llm.engine.step
        before, seen = engine.losses, 0
        killed = noticed = 0.0

        def disturbed(until: float | None = None) -> list[SequenceUpdate]:
            nonlocal seen, killed, noticed
            updates = step(until)
            seen += sum(len(update.new_tokens) for update in updates)
            if not killed and seen >= after_tokens:
                killed = time.monotonic()
                os.kill(workers(self.mark)[rank], number)
            if not noticed and engine.losses > before:
                noticed = time.monotonic()
            return updates

        with pytest.MonkeyPatch().context() as patch:
            patch.setattr(engine, "step", disturbed)
            answers = self.answers()
        assert engine.losses == before + losses
        return answers, noticed - killed

    def close(self) -> None:
        self.llm.close()
        assert workers(self.mark) == []
        self._patch.undo()


@pytest.fixture(scope="module")
def two_stages() -> Iterator[Workers]:
    running = Workers(pipeline_parallel=2)
    yield running
    running.close()


@pytest.mark.parametrize(
    ("rank", "after_tokens"), [pytest.param(0, 60, marks=pytest.mark.slow), (1, 3)]
)
def test_tokens_are_the_same_when_a_worker_is_killed(
    two_stages: Workers, rank: int, after_tokens: int
) -> None:
    before = workers(two_stages.mark)
    answers, _ = two_stages.answers_while_dying(rank, after_tokens)
    assert answers == two_stages.expected
    assert _replaced(before, workers(two_stages.mark)) == [rank], "the other one keeps its weights"


def _replaced(before: list[int], after: list[int]) -> list[int]:
    """Ranks whose process is another than before."""
    return [rank for rank, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]


def test_the_answers_are_those_of_one_process(two_stages: Workers) -> None:
    with LLM(**MODEL) as llm:
        prompts, params = zip(*ASKED, strict=True)
        outputs = llm.generate(list(prompts), list(params))
    assert [
        sample.token_ids for output in outputs for sample in output.outputs
    ] == two_stages.expected


@pytest.mark.slow
def test_a_stopped_worker_is_treated_like_a_dead_one(
    two_stages: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanoserve.executor.workers.group.SILENCE_SECONDS", 2.0)
    monkeypatch.setattr("nanoserve.utils.quarantine.DEATHS_SECONDS", 0.0)
    stopped = workers(two_stages.mark)[1]
    answers, _ = two_stages.answers_while_dying(1, 20, signal.SIGSTOP)
    assert answers == two_stages.expected
    assert stopped not in workers(two_stages.mark)


def test_a_tensor_parallel_rank_is_replaced_alone() -> None:
    running = Workers(tensor_parallel=2)
    before = workers(running.mark)
    answers, _ = running.answers_while_dying(1, after_tokens=30)
    assert answers == running.expected
    assert _replaced(before, workers(running.mark)) == [1]
    running.close()


@pytest.mark.slow
def test_workers_that_cannot_leave_are_replaced_with_the_lost_one(
    two_stages: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanoserve.utils.quarantine.DEATHS_SECONDS", 0.0)
    monkeypatch.setattr("nanoserve.executor.workers.group._REJOIN_SECONDS", 0.5)
    send = WorkerGroup.send

    def silent(group: WorkerGroup, message: ToWorker, *ranks: Iterable[int]) -> None:
        if not isinstance(message, Rejoin):
            send(group, message, *ranks)

    monkeypatch.setattr(WorkerGroup, "send", silent)
    before = workers(two_stages.mark)
    answers, _ = two_stages.answers_while_dying(1, 20, losses=2)
    assert answers == two_stages.expected
    assert _replaced(before, workers(two_stages.mark)) == [0, 1]


@pytest.mark.slow
def test_every_worker_of_two_stages_by_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its pipe: nobody's patience with those that are silent ends."""
    monkeypatch.setattr("nanoserve.utils.quarantine.DEATHS_SECONDS", 0.0)
    monkeypatch.setattr("nanoserve.executor.workers.group.SILENCE_SECONDS", 3600.0)
    running = Workers(pipeline_parallel=2, tensor_parallel=2)
    for rank in range(4):
        before = workers(running.mark)
        answers, seconds = running.answers_while_dying(rank, after_tokens=10 + 20 * rank)
        assert answers == running.expected
        assert _replaced(before, workers(running.mark)) == [rank]
        print(f"worker {rank}: noticed after {1000 * seconds:.0f} ms")
    running.close()
