"""HybridPass: host sequences advance by at most a layer a step, are split and taken, and are
dropped with the CPU."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from nanoserve.config.model_config import ModelConfig
from nanoserve.config.model_parts import LayerDifferences
from nanoserve.executor.cpu_attention.cpu_attention import CpuAttention
from nanoserve.executor.cpu_attention.host_attention import HostAttentionThread
from nanoserve.executor.cpu_attention.host_processor import HostProcessor
from nanoserve.executor.kv_transfer.host_pool import HostPool
from nanoserve.models.decoder import Decoder
from nanoserve.request import SamplingParams
from nanoserve.scheduler.optional import CohortProgress, HostPlan, HostRow, Swap
from nanoserve.scheduler.plan import Begin, Row, StepPlan, StepResult
from nanoserve.scheduler.work import Strategy
from tests.executor.small_model import (
    dense_greedy,
    local_executor,
    mechanism_of,
    small_config,
    small_decoder,
)

LAYERS, BLOCK_SIZE = 3, 4
PROMPTS = {1: (7, 3, 58, 21, 9), 2: (4, 4, 17), 3: (30, 2, 11, 8, 8, 1)}


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return replace(
        small_config(), num_layers=LAYERS, layers=LayerDifferences(sliding_windows=(0, 3, 0))
    ).in_one_group()


@pytest.fixture(scope="module")
def decoder(config: ModelConfig) -> Decoder:
    return small_decoder(config)


class Driver:
    """Sends plans to an executor, with two device blocks and two host blocks for each sequence."""

    def __init__(self, decoder: Decoder) -> None:
        config = decoder.config
        pool = HostPool.of_one_process(
            config, num_blocks=8, block_size=BLOCK_SIZE, dtype=torch.float32
        )
        device = torch.device("cpu")
        self.executor = local_executor(
            decoder,
            num_blocks=8,
            block_size=BLOCK_SIZE,
            host_pool=pool,
            processor=HostProcessor.set_apart(1, device),
        )
        self.tokens = {sequence: list(prompt) for sequence, prompt in PROMPTS.items()}
        self._step = 0

    def run(
        self, *rows: Row, strategy: Strategy = "device", begin: tuple[Begin, ...] = ()
    ) -> StepResult:
        self._step += 1
        self.executor.submit(
            StepPlan(self._step, begin=begin, rows=rows, host=HostPlan(strategy=strategy))
        )
        (result,) = self.executor.collect(None)
        for answer in result.answers:
            self.tokens[answer.sequence] += answer.tokens
        return result

    def begin(self, sequence: int) -> Begin:
        tokens = self.tokens[sequence]
        params = SamplingParams(temperature=0.0)
        return Begin(sequence, tuple(tokens), len(PROMPTS[sequence]), 0, 0, params)

    def prefill(self, *sequences: int) -> None:
        rows = (Row(one, 0, PROMPTS[one], True, (2 * one, 2 * one + 1)) for one in sequences)
        self.run(*rows, begin=tuple(self.begin(one) for one in sequences))

    def move_to_host(self, *sequences: int) -> None:
        self._step += 1
        swaps = tuple(
            Swap(one, one, "out", (2 * one, 2 * one + 1), (2 * one - 1, 2 * one - 2))
            for one in sequences
        )
        self.executor.submit(StepPlan(self._step, host=HostPlan(swaps=swaps)))
        done = set[int]()
        while done < set(sequences):
            for result in self.executor.collect(None):
                done |= set(result.host.swapped)

    def begin_on_host(
        self, *sequences: int, strategy: Strategy = "overlap", sub_batch: int = 0
    ) -> StepResult:
        rows = [
            Row(
                one,
                len(self.tokens[one]) - 1,
                (self.tokens[one][-1],),
                True,
                (2 * one - 1, 2 * one - 2),
                host=HostRow(sub_batch),
            )
            for one in sequences
        ]
        return self.run(*rows, strategy=strategy, begin=tuple(self.begin(one) for one in sequences))

    def decode(self, sequence: int) -> Row:
        return Row(sequence, len(self.tokens[sequence]) - 1, (self.tokens[sequence][-1],), True)

    def settle(self) -> None:
        """Until the CPU has done what it was asked for: a step would find it ready."""
        for group in mechanism_of(self.executor, CpuAttention).hybrid.pending:
            assert group.pending is not None
            group.pending.task.wait()


@pytest.fixture
def driver(decoder: Decoder) -> Iterator[Driver]:
    made = Driver(decoder)
    yield made
    made.executor.close()


def test_a_group_advances_a_layer_a_step_and_has_its_token_after_one_step_more(
    driver: Driver, decoder: Decoder
) -> None:
    driver.prefill(1, 2)
    driver.move_to_host(1)
    result = driver.begin_on_host(1)
    assert result.host.cohorts == (CohortProgress(2 + 1, 0),)
    for layers in range(1, LAYERS + 1):
        driver.settle()
        result = driver.run(driver.decode(2), strategy="overlap")
        assert [one.layers for one in result.host.cohorts] == ([layers] if layers < LAYERS else [])
        assert sorted(answer.sequence for answer in result.answers) == (
            [2] if layers < LAYERS else [1, 2]
        )
    for sequence, more in ((1, 2), (2, 1 + LAYERS)):
        assert driver.tokens[sequence][len(PROMPTS[sequence]) :] == dense_greedy(
            decoder, PROMPTS[sequence], more
        )


def test_alone_groups_are_waited_for(driver: Driver, decoder: Decoder) -> None:
    driver.prefill(1)
    driver.move_to_host(1)
    driver.begin_on_host(1)
    results = [driver.run(strategy="overlap") for _ in range(LAYERS)]
    assert [len(result.answers) for result in results] == [0] * (LAYERS - 1) + [1]
    assert driver.tokens[1][len(PROMPTS[1]) :] == dense_greedy(decoder, PROMPTS[1], 2)
    work = [one for result in results for one in result.host.work]
    assert {(one.sequences, one.context_tokens) for one in work} == {(1, len(PROMPTS[1]) + 1)}


def test_an_asymmetric_step_ends_what_was_begun_and_what_begins(
    driver: Driver, decoder: Decoder
) -> None:
    driver.prefill(1, 2, 3)
    driver.move_to_host(1, 2)
    driver.begin_on_host(1, 2)
    driver.settle()
    driver.run(driver.decode(3), strategy="overlap")
    rest = Row(1, len(driver.tokens[1]) - 1, (), True, host=HostRow(1))
    result = driver.run(driver.decode(3), rest, strategy="asymmetric")
    assert sorted(answer.sequence for answer in result.answers) == [1, 3]
    assert [one.layers for one in result.host.cohorts] == [1], (
        "who was not taken stays where it was"
    )
    result = driver.begin_on_host(1, strategy="asymmetric", sub_batch=1)
    assert [answer.sequence for answer in result.answers] == [1]
    while len(driver.tokens[2]) < len(PROMPTS[2]) + 2:
        driver.run(strategy="overlap")
    for sequence, more in ((1, 3), (2, 2), (3, 3)):
        assert driver.tokens[sequence][len(PROMPTS[sequence]) :] == dense_greedy(
            decoder, PROMPTS[sequence], more
        )


@pytest.mark.parametrize("strategy", ["overlap", "asymmetric"])
def test_when_the_cpu_fails_the_device_goes_on_alone(
    driver: Driver, decoder: Decoder, strategy: Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.prefill(1, 3)
    driver.move_to_host(1)
    driver.begin_on_host(1)
    driver.settle()
    with monkeypatch.context() as patch:
        patch.setattr(HostAttentionThread, "problem", property(lambda _: "it is gone"))
        rest = (
            ()
            if strategy == "overlap"
            else (Row(1, len(driver.tokens[1]) - 1, (), True, host=HostRow(1)),)
        )
        result = driver.run(driver.decode(3), *rest, strategy=strategy)
    assert result.host.lost == "it is gone"
    assert ([answer.sequence for answer in result.answers], result.host.cohorts) == ([3], ())
    result = driver.begin_on_host(1)  # a new thread attends over the same blocks
    assert result.host.lost is None
    while len(driver.tokens[1]) < len(PROMPTS[1]) + 2:
        driver.run(strategy="overlap")
    assert driver.tokens[1][len(PROMPTS[1]) :] == dense_greedy(decoder, PROMPTS[1], 2)
