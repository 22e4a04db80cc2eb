"""The answers to the tour's exercises, computed.

    python -m scripts.exercises 4

Predict first, then run the number of the section. Each function is its exercise's experiment, to be
read and changed.
"""

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanoserve import LLM, SamplingParams
from nanoserve.config.cache_groups import CacheGroups
from nanoserve.config.model_config import ModelConfig
from nanoserve.engine.outputs import StopStrings
from nanoserve.executor.step.forward_pass import BlockTables, InputBuilder, row_ends
from nanoserve.lab.papers.s4d import S4D
from nanoserve.models.hub import resolve_model
from nanoserve.models.shards import make_shards, shard_config
from nanoserve.record.recorder import recorded
from nanoserve.record.run_record import RunRecord
from nanoserve.request import Request, Sequence
from nanoserve.scheduler.kv import BlockPool
from nanoserve.scheduler.plan import Row
from nanoserve.scheduler.policies.baselines import ChunkedPrefill
from nanoserve.scheduler.recurrent_state.recurrent_state import CHUNK, lasting_positions
from nanoserve.scheduler.windows import WindowedBlocks
from nanoserve.text.tokenizer import load_tokenizer
from tests.scheduler.golden import Prompt, play


def storyteller() -> Path:
    directory = resolve_model(None).directory
    assert directory is not None, "the bundled model has one"
    return directory


def typed_control_tokens() -> None:
    """1. A user types the end token into a question."""
    tokenizer = load_tokenizer(storyteller())
    for question in ("Hello", "Hello<|end|>"):
        ids = tokenizer.encode_chat([{"role": "user", "content": question}])
        print(f"{question!r}: {ids.count(1)} end tokens among {ids}")
    tokenizer.close()


def steps_of_a_request() -> None:
    """2. A prompt of 10 tokens, 8 tokens to answer, at most 4 tokens in a step."""
    with LLM(eager=True, max_num_batched_tokens=4, kv_cache_memory=64 << 20) as llm:
        llm.generate(list(range(10, 20)), SamplingParams(max_tokens=8, ignore_eos=True))
        print(f"{llm.status.steps} steps")


def blocks_of_a_prompt() -> None:
    """4. The most blocks in use while 100 prompt tokens get an answer of 30, and what the same
    prompt finds again."""
    prompt, params = list(range(10, 110)), SamplingParams(max_tokens=30, ignore_eos=True)
    with LLM(eager=True, kv_cache_memory=64 << 20) as llm:
        record = RunRecord(llm.engine.executor.max_in_flight)
        with recorded(llm.engine, record):
            llm.generate(prompt, params)
        (again,) = llm.generate(prompt, params)
    print(f"{max(blocks.used_device for _, blocks in record.blocks)} blocks of 16 tokens")
    print(f"{again.cached_tokens} of the prompt's tokens are found when it comes again")


def plans_of_two_prompts() -> None:
    """5. Two prompts, four tokens a step, blocks of two tokens; the model answers 100 +
    position."""
    print(
        "\n".join(
            play(ChunkedPrefill(4), [Prompt((1, 2, 3, 4, 5), 3), Prompt((6, 7), 2)], num_blocks=8)
        )
    )


def slots_of_two_rows() -> None:
    """6. A decode at position 37 with blocks 5, 2, 9, and a chunk of positions 15 to 17 with blocks
    7, 4."""
    rows = [Row(0, 37, (11,), True), Row(1, 15, (21, 22, 23), True)]
    every = BlockTables()
    tables = [every.open(), every.open()]
    for table, blocks in zip(tables, ((5, 2, 9), (7, 4)), strict=True):
        table.extend(blocks)
    inputs = InputBuilder(16).build(
        rows, row_ends(rows), tables, add=lambda array: torch.from_numpy(np.array(array))
    )
    print(f"positions {inputs.positions.tolist()}, slots {inputs.batch.slot_mapping.tolist()}")


def stop_string_in_pieces() -> None:
    """8. The stop string is "END", and the text comes in four pieces."""
    stops = StopStrings(("END",))
    for piece in ("the E", "N", "ough E", "ND."):
        print(f"{piece!r} comes, {stops.push(piece)} goes on")


def shards_of_the_storyteller() -> None:
    """10. What each of four workers has, as two stages of two ranks."""
    model = ModelConfig.from_directory(storyteller())
    for rank, shard in enumerate(make_shards(model, pipeline_parallel=2, tensor_parallel=2)):
        part = shard_config(model, shard)
        layers = f"layers {shard.layers.start} to {shard.layers.stop - 1}"
        heads = f"{part.num_heads} query heads, {part.num_kv_heads} key heads"
        print(
            f"worker {rank}: stage {shard.stage}, {layers}, {heads}, {part.intermediate_size} "
            "inner columns"
        )


def steps_of_a_host_token() -> None:
    """11. How many steps a token takes whose attention is the CPU's; the model has 4 layers."""
    sizes: dict[str, Any] = {
        "max_model_len": 96,
        "kv_cache_memory": 700_000,
        "host_kv_memory": 16_000_000,
    }
    with LLM(eager=True, policy="overlap", host_threads=1, **sizes) as llm:
        record = RunRecord(llm.engine.executor.max_in_flight)
        with recorded(llm.engine, record):
            llm.generate(
                [[number] * 30 for number in range(10, 26)],
                SamplingParams(max_tokens=24, ignore_eos=True),
            )
    begun: dict[int, int] = {}
    taken: Counter[int] = Counter()
    for step, result in record.result_of.items():
        begun |= {
            row.sequence: step for row in record.planned[step].plan.rows if row.host is not None
        }
        taken.update(
            step - begun.pop(one.sequence) + 1 for one in result.answers if one.sequence in begun
        )
    print("\n".join(f"{steps} steps: {tokens} tokens" for steps, tokens in sorted(taken.items())))


def blocks_behind_windows() -> None:
    """13. Eight layers, all but every fourth with a window of 32; 100 tokens in blocks of 16."""
    groups = CacheGroups.cut((32, 32, 32, 0) * 2, sources=(), longest=1024, numbers=(1,) * 8)
    pool = BlockPool(64, 16, groups=len(groups.windows))
    blocks = WindowedBlocks(pool, groups.windows)
    request = Request("one", tuple(range(100)), SamplingParams(), seed=0)
    sequence = Sequence(0, request, 0, list(request.prompt))
    blocks.grow(sequence, 100)
    before = 64 - pool.free_blocks
    blocks.slide(sequence, 100)
    print(f"{len(groups.windows)} groups of {groups.num_tensors} layers")
    print(
        f"{before} blocks, and {64 - pool.free_blocks} once those behind the windows are given back"
    )


def snapshots_of_a_prompt() -> None:
    """14. A prompt of 500 tokens whose messages end at positions 199, 333 and 489."""
    text, end = 5, 1
    prompt = [text] * 500
    for position in (199, 333, 489):
        prompt[position] = end
    found = lasting_positions(tuple(prompt), (end,), CHUNK)
    print(f"snapshots at {sorted(found)}")


def two_ways_of_a_state_space_model() -> None:
    """15. S4D with 8 channels and 64 numbers each, over 500 positions."""
    model = S4D(channels=8, state_size=64)
    inputs = torch.randn(1, 8, 500)
    outputs, state = [], model.first_state(1)
    with torch.no_grad():
        for position in range(500):
            output, state = model.step(inputs[..., position], state)
            outputs.append(output)
        at_once = model.convolve(inputs)
    difference = (at_once - torch.stack(outputs, -1)).abs().max() / at_once.abs().max()
    kept = torch.view_as_real(state).numel()
    print(f"{kept} numbers are kept; attention would keep {2 * 8 * 500}")
    print(f"equal to 1e-5 of the largest: {bool(difference < 1e-5)}")


EXERCISES: dict[int, Callable[[], None]] = {
    1: typed_control_tokens,
    2: steps_of_a_request,
    4: blocks_of_a_prompt,
    5: plans_of_two_prompts,
    6: slots_of_two_rows,
    8: stop_string_in_pieces,
    10: shards_of_the_storyteller,
    11: steps_of_a_host_token,
    13: blocks_behind_windows,
    14: snapshots_of_a_prompt,
    15: two_ways_of_a_state_space_model,
}


if __name__ == "__main__":
    chosen = sys.argv[1] if len(sys.argv) == 2 else ""
    if not chosen.isdigit() or int(chosen) not in EXERCISES:
        sys.exit(f"give the number of an exercise: {', '.join(map(str, EXERCISES))}")
    EXERCISES[int(chosen)]()
