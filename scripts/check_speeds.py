"""What the cost model predicts from a second's measuring (measuring_speeds.py) beside what steps of a model take.

``python scripts/check_speeds.py dummy:smollm2-135m float32`` measures both in turn, in one process without compiled
layers, so that other programs disturb both alike, and prints the medians and that of the rounds' ratios. It takes a
minute or two.
"""

import random
import statistics
import sys
import time
from typing import TYPE_CHECKING

from nanoserve.processes.threads import prepare_threads

if TYPE_CHECKING:
    from nanoserve.runtime.step.model_runner import ModelRunner
    from nanoserve.scheduler.plan import StepPlan

ROUNDS = 7
BATCH, CONTEXT = 8, 512
STEPS = 4
"""Decode steps of a round."""


def main(name: str, dtype_name: str) -> None:
    prepare_threads()
    import torch

    from nanoserve.costs import Precision, StepCosts
    from nanoserve.costs.predictor import CostPredictor
    from nanoserve.engine_config import EngineConfig
    from nanoserve.models.hub import resolve_model
    from nanoserve.runtime.launch.measuring_speeds import measure_speeds
    from nanoserve.runtime.launch.model_loading import load_decoder
    from nanoserve.runtime.step.model_runner import ModelRunner
    from triton_ops.cpu import cpu_operators

    device = torch.device("cpu")
    decoder, model = load_decoder(resolve_model(name), EngineConfig(dtype=dtype_name), device, None)
    cpu_operators().wait()
    blocks = -(-BATCH * (CONTEXT + 1) // 16) + BATCH
    runner = ModelRunner(decoder, num_blocks=blocks, block_size=16, device=device)
    steps = Steps(runner, model.vocab_size)
    found: dict[str, list[tuple[float, float]]] = {"prefill": [], "decode": []}
    for _ in range(ROUNDS):
        speeds = measure_speeds(device, decoder.dtype)
        machine, precision = speeds.machine(devices=1, memory_bytes=2**40), Precision.of(8 * decoder.dtype.itemsize)
        predictor = CostPredictor(StepCosts(model, machine, precision=precision))
        layers, beside = predictor.num_layers, predictor.step_overhead_seconds()
        prefill = layers * (predictor.linear_seconds(CONTEXT) + predictor.prefill_attention_seconds(CONTEXT)) + beside
        decode = layers * (predictor.linear_seconds(BATCH) + predictor.attention_seconds(BATCH * CONTEXT)) + beside
        found["prefill"].append((prefill, steps.prefill_seconds()))
        found["decode"].append((decode, steps.decode_seconds()))
    print(f"{name}, {dtype_name}, {torch.get_num_threads()} threads")
    print("| step | predicted | measured | ratio |\n|---|---|---|---|")
    for what, rounds in found.items():
        predicted, measured = (statistics.median(column) for column in zip(*rounds, strict=True))
        ratio = statistics.median(first / second for first, second in rounds)
        print(f"| {what} | {1000 * predicted:.0f} ms | {1000 * measured:.0f} ms | {ratio:.2f} |")


class Steps:
    """A batch of equal prompts in the cache of a ModelRunner."""

    def __init__(self, runner: "ModelRunner", vocabulary: int) -> None:
        from nanoserve.request import SamplingParams
        from nanoserve.scheduler.plan import Begin, Row, StepPlan

        self._runner = runner
        generator = random.Random(0)
        text = tuple(generator.randrange(vocabulary) for _ in range(CONTEXT + 1))
        each = -(-(CONTEXT + 1) // 16)
        greedy = SamplingParams(temperature=0.0)
        prompts = [
            StepPlan(
                0,
                begin=(Begin(number, text, CONTEXT, 0, 0, greedy),),
                rows=(Row(number, 0, text[:CONTEXT], sample=True, new_blocks=blocks),),
            )
            for number in range(BATCH)
            for blocks in (tuple(range(number * each, (number + 1) * each)),)
        ]
        for prompt in prompts:
            runner.execute(prompt)
        self._prompt = StepPlan(0, rows=(Row(0, 0, text[:CONTEXT], sample=True),))
        self._decodes = StepPlan(
            0, rows=tuple(Row(number, CONTEXT, text[CONTEXT:], sample=True) for number in range(BATCH))
        )

    def prefill_seconds(self) -> float:
        """A prompt."""
        return self._seconds(self._prompt, 1)

    def decode_seconds(self) -> float:
        """A token of each."""
        return self._seconds(self._decodes, STEPS)

    def _seconds(self, plan: "StepPlan", count: int) -> float:
        self._runner.execute(plan)
        began = time.perf_counter()
        for _ in range(count):
            self._runner.execute(plan)
        return (time.perf_counter() - began) / count


if __name__ == "__main__":
    main(*sys.argv[1:])
