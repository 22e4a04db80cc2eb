"""Measure the gain of cache groups: the same requests in equal KV memory, with groups and with one
table for all layers.

``python -m scripts.cache_groups`` opens a model with sliding windows twice in one process. One
engine gives back what windows leave behind, the other keeps all positions and hides them by masks.
Both answer the same requests in turns. It prints how many sequences each had at once, output tokens
per second of the whole run and of its steps without prompts, what steps reached of their floor, and
which share of the tokens is equal.
"""

import argparse
import sys
from contextlib import ExitStack
from unittest import mock

from nanoserve.utils.threads import prepare_threads

prepare_threads()

from nanoserve.executor.start import model_loading
from nanoserve.lab.benchmarks.driving import EngineDriver, EngineRun, summarize_steps
from nanoserve.lab.benchmarks.floors import Limits, ModelCost
from nanoserve.lab.benchmarks.machine import ForeignLoad
from nanoserve.lab.benchmarks.roofline import BandwidthProbe, machine_limits
from nanoserve.lab.benchmarks.settling import settle
from nanoserve.lab.workloads import parse_lengths, random_prompts
from nanoserve.llm import LLM
from nanoserve.models.dtypes import DTYPES
from nanoserve.scheduler.work import StepWork
from nanoserve.utils.sizes import parse_size

ENGINES = ("groups", "one table")


class Measured:
    """An open engine, and the most sequences that it had at once."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.cost = ModelCost(llm.built.model, DTYPES[settle(llm, say)["dtype"]].itemsize)
        self.driver = EngineDriver(llm.engine, self._look, self.cost.windows)
        self.resident = 0

    def _look(self, _: StepWork) -> None:
        self.resident = max(self.resident, len(self.llm.engine.scheduler.running))

    def run(self, prompts: list[tuple[int, ...]], output_tokens: int) -> EngineRun:
        self.resident = 0
        return self.driver.run(prompts, [output_tokens] * len(prompts))


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def show(
    name: str,
    number: int,
    measured: Measured,
    run: EngineRun,
    limits: Limits,
    foreign: float | None,
) -> None:
    steps = summarize_steps(run.steps, measured.cost, limits)
    seconds = max(timing.e2el for timing in run.timings)
    decodes = [step for step in run.steps if not step.work.chunks]
    decoding = sum(step.step_seconds for step in decodes)
    print(
        f"round {number} {name}: {measured.resident} sequences at once, {seconds:.1f} s,"
        f" {sum(map(len, run.tokens)) / seconds:.2f} output tokens/s;"
        f" {len(decodes)} steps without prompts: {decoding:.1f} s,"
        f" {sum(step.work.decodes for step in decodes) / decoding:.2f} tokens/s;"
        " of floor: "
        f"{', '.join(f'{kind} {found.of_floor or 0:.0%}' for kind, found in steps.items())};"
        f" foreign cores {foreign}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="dummy:gemma-3-1b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-cache-memory", default="450MiB")
    parser.add_argument("--lengths", default="7600+400", help="tokens of each prompt and answer")
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--batch-invariant", action="store_true", help="equal tokens in 16 bits, and slower prompts"
    )
    options = parser.parse_args()
    (shape,) = parse_lengths(options.lengths, "--lengths")
    settings = {"dtype": options.dtype, "kv_cache_memory": parse_size(options.kv_cache_memory)}
    settings |= {"max_model_len": shape.total_tokens, "batch_invariant": options.batch_invariant}
    with ExitStack() as opened:
        grouped = Measured(opened.enter_context(LLM(options.model, **settings)))
        with mock.patch.object(model_loading, "keeps_all_positions", lambda *_: "the comparison"):
            kept = Measured(opened.enter_context(LLM(options.model, **settings)))
        engines = dict(zip(ENGINES, (grouped, kept), strict=True))
        for name, one in engines.items():
            pool = one.llm.engine.scheduler.pool
            print(f"{name}: {pool.num_blocks} blocks, {pool.groups} to a column")
        probe = BandwidthProbe()
        limits = machine_limits(DTYPES[options.dtype], probe, progress=lambda *_: None)
        print(
            f"limits: {limits.bytes_per_second / 1e9:.1f} GB/s, "
            f"{limits.operations_per_second / 1e9:.0f} GFLOP/s"
        )
        for one in engines.values():
            one.run(random_prompts([64] * 2, one.llm.built.model.vocab_size, 0), 4)
        for number in range(1, options.rounds + 1):
            vocab_size = grouped.llm.built.model.vocab_size
            prompts = random_prompts([shape.input_tokens] * options.requests, vocab_size, number)
            found = {}
            for name in ENGINES if number % 2 else reversed(ENGINES):
                foreign = ForeignLoad()
                foreign.read()
                found[name] = engines[name].run(prompts, shape.output_tokens)
                show(name, number, engines[name], found[name], limits, foreign.read())
            ours, theirs = (found[name] for name in ENGINES)
            answers = zip(ours.tokens, theirs.tokens, strict=True)
            same = [one == other for pair in answers for one, other in zip(*pair, strict=True)]
            before, after = (max(timing.e2el for timing in run.timings) for run in (theirs, ours))
            equal = f"{sum(same)} of {len(same)} tokens equal"
            print(
                f"round {number}: groups are {before / after:.2f} times as fast, {equal}",
                flush=True,
            )


if __name__ == "__main__":
    main()
