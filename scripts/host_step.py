"""Measure what the host does in a decode step, with a forward pass that does nothing.

``python -m scripts.host_step`` prints microseconds of the processor for each part of a step at 1
and 256 rows, greedily and at temperature 0.6. Steps are scheduled and staged as for a GPU: the next
one is planned before the tokens of the last are known, and arrays are packed for one copy. What the
device would do (layers, logits, sampling) is not counted. The time of the thread is measured, so
that other processes disturb it little. Two trees are compared by running the script of one with
PYTHONPATH set to each of them in turn.
"""

import argparse
import json
import time
from collections.abc import Callable
from itertools import cycle
from typing import Any

from nanoserve.utils.threads import prepare_threads

prepare_threads()

import torch

from nanoserve.config.model_config import ModelConfig
from nanoserve.config.model_parts import RopeConfig
from nanoserve.engine.engine import Engine
from nanoserve.engine.outputs import RequestTracker
from nanoserve.executor.async_scheduling.placeholder_tokens import PlaceholderTokens
from nanoserve.executor.local import LocalExecutor
from nanoserve.executor.stage import Stage
from nanoserve.executor.step.model_runner import ModelRunner
from nanoserve.executor.step.staging import HostBuffer
from nanoserve.models.decoder import Decoder
from nanoserve.models.hub import resolve_model
from nanoserve.request import Request, SamplingParams
from nanoserve.scheduler import make_policy
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.text.tokenizer import Tokenizer, load_tokenizer

BLOCK_SIZE = 16
VOCAB_SIZE = 1024
TOKEN_BUDGET = 8192
STEPS = 40
"""Steps of a round; each prompt is of another length, so that blocks fill in all of them."""
PARTS = ("scheduler", "prepare", "answers", "engine", "outputs")
"""Schedule a plan and take its result in; stage its inputs; answer for its rows; the loop around
them; text."""


class PartClock:
    """Time of this thread by part. A part that calls another waits while that one runs."""

    def __init__(self) -> None:
        self._part, self._since = "outputs", time.thread_time()
        self.restart()

    def restart(self) -> None:
        self.seconds = dict.fromkeys([*PARTS, "device"], 0.0)

    def watch(self, owner: Any, method: str, part: str) -> None:
        """Have an object's method count as that part."""
        function: Callable[..., Any] = getattr(owner, method)

        def run(*arguments: Any) -> Any:
            before = self._switch(part)
            try:
                return function(*arguments)
            finally:
                self._switch(before)

        setattr(owner, method, run)

    def _switch(self, part: str) -> str:
        now, before = time.thread_time(), self._part
        self.seconds[before] += now - self._since
        self._part, self._since = part, now
        return before


def make_engine(rows: int, context: int, steps: int) -> tuple[Engine, ModelRunner]:
    """An engine of a tiny model whose layers are not computed."""
    config = ModelConfig(
        family="llama",
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=32,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=32,
        max_position_embeddings=1 << 16,
        rope=RopeConfig(rotary_dim=32),
    )
    decoder = Decoder(config)
    longest = context + BLOCK_SIZE + steps
    num_blocks = rows * (longest // BLOCK_SIZE + 2)
    stage = Stage.build(
        decoder,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        device="cpu",
        mechanisms=[PlaceholderTokens()],
    )
    with torch.inference_mode():
        for parameter in decoder.parameters():
            parameter.normal_()
    # as many rows as the step of most tokens has
    hidden = torch.randn(TOKEN_BUDGET, config.hidden_size)
    stage.runner.forward = lambda inputs: hidden[: len(inputs.token_ids)]
    # as on a GPU; a CPU reads the arrays where they are
    buffers = [HostBuffer(stage.runner.device) for _ in range(2)]
    stage.runner.staging._buffers = cycle(buffers)
    scheduler = Scheduler(
        make_policy("sarathi", TOKEN_BUDGET),
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=longest,
        max_num_seqs=rows,
        async_scheduling=True,
    )
    executor = LocalExecutor(stage, async_scheduling=True)
    return Engine(scheduler, executor, vocab_size=VOCAB_SIZE), stage.runner


def measure(
    rows: int, temperature: float, *, context: int, rounds: int, tokenizer: Tokenizer
) -> dict[str, float]:
    """Microseconds of each part of a step with so many decode rows: the mean over the steps of the
    fastest round, as nothing can make a round faster than it is."""
    prefill_steps = -(-rows * (context + BLOCK_SIZE) // (TOKEN_BUDGET - rows)) + 2
    engine, runner = make_engine(rows, context, prefill_steps + STEPS * (rounds + 1))
    clock = PartClock()
    clock.watch(engine.scheduler, "schedule", "scheduler")
    clock.watch(engine.scheduler, "apply", "scheduler")
    clock.watch(runner, "prepare", "prepare")
    for method in ("begin", "compute", "sample"):
        clock.watch(runner, method, "device")
    clock.watch(engine.executor, "collect", "answers")
    clock.watch(engine, "step", "engine")
    trackers = add_requests(engine, rows, temperature, context, tokenizer)

    def step() -> int:
        updates = engine.step()
        for update in updates:
            trackers[update.request_id].take(update, 0.0)
        return len(updates)

    while step() < rows:
        pass
    found = list[dict[str, float]]()
    for _ in range(rounds + 1):  # the first warms up
        clock.restart()
        for _ in range(STEPS):
            assert step() == rows, "each sequence gets a token in each step"
        found.append({part: clock.seconds[part] / STEPS * 1e6 for part in PARTS})
    engine.close()
    return min(found[1:], key=lambda parts: sum(parts.values()))


def add_requests(
    engine: Engine, rows: int, temperature: float, context: int, tokenizer: Tokenizer
) -> dict[str, RequestTracker]:
    """Give the engine as many requests, and make what turns their tokens into text."""
    params = SamplingParams(temperature=temperature, ignore_eos=True)
    trackers = dict[str, RequestTracker]()
    for index in range(rows):
        length = context + index % BLOCK_SIZE
        prompt = tuple((index * 31 + place) % VOCAB_SIZE for place in range(length))
        request = Request(f"request-{index}", prompt, params, seed=index)
        trackers[request.request_id] = RequestTracker(request, tokenizer)
        engine.add(request)
    return trackers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 256])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.6])
    parser.add_argument("--context", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--rounds", type=int, default=5, help=f"of {STEPS} steps each")
    parser.add_argument("--json", action="store_true", help="one line for each measurement")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(resolve_model(None).tokenizer_directory)
    if not options.json:
        print("rows  temperature  " + "".join(f"{part:>11}" for part in PARTS) + "  microseconds")
    for rows in options.rows:
        for temperature in options.temperatures:
            found = measure(
                rows,
                temperature,
                context=options.context,
                rounds=options.rounds,
                tokenizer=tokenizer,
            )
            if options.json:
                print(json.dumps({"rows": rows, "temperature": temperature, **found}), flush=True)
                continue
            columns = "".join(f"{found[part]:11.0f}" for part in PARTS)
            print(f"{rows:4}  {temperature:11}  {columns}  {sum(found.values()):.0f}", flush=True)
    tokenizer.close()


if __name__ == "__main__":
    main()
