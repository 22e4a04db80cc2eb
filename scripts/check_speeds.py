"""Compare the cost model's predictions, from a second's measuring (measuring_speeds.py), with the
times of a model's steps.

``python scripts/check_speeds.py dummy:smollm2-135m float32`` measures both in turn, in one process
without compiled layers, so that other programs disturb both alike. It prints the medians of both,
and of the ratios of the rounds. It takes a minute or two.
"""

import random
import statistics
import sys

from nanoserve.utils.threads import prepare_threads

prepare_threads()

import torch

from nanoserve.costs.counts import Precision
from nanoserve.costs.predictor import CostPredictor
from nanoserve.costs.step_costs import StepCosts
from nanoserve.engine_config import EngineConfig
from nanoserve.executor.profiling.measuring_speeds import measure_speeds
from nanoserve.executor.profiling.timers import Stopwatch
from nanoserve.executor.start.model_loading import load_decoder
from nanoserve.executor.step.model_runner import ModelRunner
from nanoserve.models.hub import resolve_model
from nanoserve.request import SamplingParams
from nanoserve.scheduler.plan import Begin, Row, StepPlan
from triton_ops.cpu import cpu_operators

ROUNDS = 7
BATCH, CONTEXT = 8, 512
STEPS = 4
"""Decode steps of a round."""
CPU = torch.device("cpu")


def main(name: str, dtype_name: str) -> None:
    decoder, model = load_decoder(resolve_model(name), EngineConfig(dtype=dtype_name), CPU, None)
    cpu_operators().wait()
    blocks = -(-(CONTEXT + 1) // 16)
    runner = ModelRunner(decoder, num_blocks=BATCH * blocks, block_size=16, device=CPU)
    prefill, decode = begin_batch(runner, model.vocab_size, blocks)
    rounds: dict[str, list[tuple[float, float]]] = {"prefill": [], "decode": []}
    for _ in range(ROUNDS):
        machine = measure_speeds(CPU, decoder.dtype).machine(devices=1, memory_bytes=2**40)
        costs = StepCosts(model, machine, precision=Precision.of(8 * decoder.dtype.itemsize))
        predictor = CostPredictor(costs)
        layers, beside = predictor.num_layers, predictor.step_overhead_seconds()
        prompt = (
            layers
            * (predictor.linear_seconds(CONTEXT) + predictor.prefill_attention_seconds(CONTEXT))
            + beside
        )
        tokens = (
            layers
            * (predictor.linear_seconds(BATCH) + predictor.attention_seconds(BATCH * CONTEXT))
            + beside
        )
        rounds["prefill"].append((prompt, mean_seconds(runner, prefill, 1)))
        rounds["decode"].append((tokens, mean_seconds(runner, decode, STEPS)))
    print(f"{name}, {dtype_name}, {torch.get_num_threads()} threads")
    print("| step | predicted | measured | ratio |\n|---|---|---|---|")
    for step, found in rounds.items():
        predicted, measured = (
            1000 * statistics.median(column) for column in zip(*found, strict=True)
        )
        ratio = statistics.median(first / second for first, second in found)
        print(f"| {step} | {predicted:.0f} ms | {measured:.0f} ms | {ratio:.2f} |")


def begin_batch(runner: ModelRunner, vocabulary: int, blocks: int) -> tuple[StepPlan, StepPlan]:
    """Run a batch of equal prompts; plans of one of them again, and of the next token of each."""
    generator = random.Random(0)
    text = tuple(generator.randrange(vocabulary) for _ in range(CONTEXT + 1))
    for number in range(BATCH):
        begin = Begin(number, text, CONTEXT, 0, 0, SamplingParams(temperature=0.0))
        own = tuple(range(number * blocks, (number + 1) * blocks))
        runner.execute(
            StepPlan(
                0, (begin,), rows=(Row(number, 0, text[:CONTEXT], sample=True, new_blocks=own),)
            )
        )
    decodes = tuple(Row(number, CONTEXT, text[CONTEXT:], sample=True) for number in range(BATCH))
    return StepPlan(0, rows=(Row(0, 0, text[:CONTEXT], sample=True),)), StepPlan(0, rows=decodes)


def mean_seconds(runner: ModelRunner, plan: StepPlan, count: int) -> float:
    """Seconds of one of `count` equal steps, after a first, unmeasured one."""
    runner.execute(plan)
    return Stopwatch(CPU).seconds(lambda: [runner.execute(plan) for _ in range(count)]) / count


if __name__ == "__main__":
    main(*sys.argv[1:])
