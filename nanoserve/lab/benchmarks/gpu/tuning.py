"""Measures candidate configurations of the attention programs, and puts the best ones into the
table that is read at run time (`triton_ops/gpu/configurations.py`)."""

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from functools import partial
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import torch

from nanoserve.errors import UsageError
from nanoserve.lab.benchmarks.gpu.attention import (
    TOLERANCES,
    AttentionRow,
    compared,
    decode_rows,
    make_batch,
)
from nanoserve.lab.benchmarks.gpu.cases import GpuCase, Row
from nanoserve.lab.benchmarks.gpu.device import GpuBench, TimeSpread
from nanoserve.lab.benchmarks.gpu.kernels import BLOCK_SIZE, GROUPS
from nanoserve.utils.files import replace_file
from triton_ops.gpu import configurations
from triton_ops.gpu.attention import attend
from triton_ops.gpu.configurations import ATTENTION, DecodeConfiguration, PrefillConfiguration
from triton_ops.gpu.devices import gpu_of

HEAD_DIMS = (128, 64, 256, 80)  # the commonest first, in case time runs out
WIDTH = 2  # bytes of the numbers that are tuned for
DECODE, PREFILL = "decode", "prefill"
WORK: Mapping[str, Mapping[str, tuple[AttentionRow, ...]]] = {
    DECODE: {
        f"{batch} x {keys}": decode_rows(batch, keys)
        for batch, keys in ((64, 4096), (16, 2048), (1, 32768))
    },
    PREFILL: {"8192": (AttentionRow(8192, 8192),), "512 of 4096": (AttentionRow(512, 4096),) * 4},
}

Key = tuple[int, int, int]  # generation, bytes of a number, head_dim
Configuration = DecodeConfiguration | PrefillConfiguration


def decode_candidates(now: DecodeConfiguration) -> list[DecodeConfiguration]:
    """The present one, and other ways to read a row's keys and to share them out among programs."""
    tried = product((32, 64, 128), (4,), (2, 3), (64, 128, 512), (2, 8))
    found = [DecodeConfiguration(*fields) for fields in tried]
    return [now] + [one for one in found if one.keys_per_split >= one.keys_per_tile]


def prefill_tiles(now: PrefillConfiguration) -> list[PrefillConfiguration]:
    """The present one, and tiles of 16 rows for each warp: more spill registers."""
    tried = product((4, 8), (32, 64, 128), (2, 3, 4))
    return [now] + [
        PrefillConfiguration(16 * warps, keys, warps, stages) for warps, keys, stages in tried
    ]


def part_cases(bench: GpuBench, rows: Sequence[Row]) -> Iterator[GpuCase]:
    """Every candidate, for each head_dim. Raises UsageError for a GPU that takes the lines of
    another generation."""
    generation = gpu_of(bench.device).generation
    known = sorted({generation for generation, _, _ in ATTENTION})
    if generation not in known:
        generations = ", ".join(map(str, known))
        raise UsageError(
            f"the table has lines for compute capability {generations}, not {generation}"
        )

    def cases(key: Key, program: str, candidates: Sequence[Configuration]) -> Iterator[GpuCase]:
        for candidate in dict.fromkeys(candidates):
            name = f"{program}, head_dim {key[2]}, {list(astuple(candidate))}"
            yield GpuCase(name, partial(_try, bench, key, program, candidate))

    for head_dim in HEAD_DIMS:
        key = (generation, WIDTH, head_dim)
        now = ATTENTION[key]
        yield from cases(key, DECODE, decode_candidates(now.decode))
        yield from cases(key, PREFILL, prefill_tiles(now.prefill))


@torch.inference_mode()
def _try(bench: GpuBench, key: Key, program: str, candidate: Configuration) -> Row:
    programs: dict[str, Any] = {program: candidate}
    tried, processors = replace(ATTENTION[key], **programs), gpu_of(bench.device).multiprocessors
    times, ok = dict[str, TimeSpread](), True
    for name, rows in WORK[program].items():
        batch = make_batch(
            rows, *GROUPS[4], key[2], block_size=BLOCK_SIZE, dtype=bench.dtype, device=bench.device
        )
        expected = batch.attend().clone()
        call = partial(
            attend, tried, processors, batch.tensors, scale=batch.scale, sliding_window=0
        )
        batch.out.fill_(torch.nan)  # so that what the candidate leaves unwritten shows
        call()
        ok = ok and compared(program, batch.out, expected, TOLERANCES[bench.dtype])["ok"]
        times |= bench.times({name: call})
    return {"key": key, "program": program, "candidate": candidate, "times": times, "ok": ok}


def best_configurations(rows: Sequence[Row]) -> dict[tuple[Key, str], Configuration]:
    """The fastest candidate of each table entry and program, by the geometric mean of its times
    over all work, among those that ran everything and computed rightly."""
    kinds: dict[str, type[Any]] = {DECODE: DecodeConfiguration, PREFILL: PrefillConfiguration}
    best: dict[tuple[Key, str], Configuration] = {}
    right = [row for row in rows if row.get("ok")]
    means = [
        statistics.geometric_mean(spread["us"] for spread in row["times"].values()) for row in right
    ]
    for _, row in sorted(zip(means, right, strict=True), key=itemgetter(0)):
        generation, width, head_dim = row["key"]
        candidate = msgspec.convert(row["candidate"], kinds[row["program"]])
        best.setdefault(((generation, width, head_dim), row["program"]), candidate)
    return best


def tuned_source(source: str, rows: Sequence[Row]) -> str:
    """The text of configurations.py with the entries replaced for which something was measured."""
    best = best_configurations(rows)
    for key in dict.fromkeys(key for key, _ in best):
        found = [
            best.get((key, program), getattr(ATTENTION[key], program))
            for program in (DECODE, PREFILL)
        ]
        # In the formatter's layout, with the fields by their place.
        lines = "".join(f"        {type(one).__name__}{astuple(one)},\n" for one in found)
        name = f"    {key}: AttentionConfiguration("
        entry = re.compile(
            rf"^{re.escape(name)}(?:[^\n]+\),|\n(?: {{8}}[^\n]*\n)+ {{4}}\),)$", re.MULTILINE
        )
        source, replaced = entry.subn(f"{name}\n{lines}    ),", source)
        if replaced != 1:
            raise ValueError(f"configurations.py has {replaced} entries for {key}")
    return source


def write_table(directory: Path, rows: Sequence[Row]) -> Path:
    """Write the whole of configurations.py, with what was measured until now, into the
    directory."""
    source = Path(configurations.__file__).read_text(encoding="utf-8")
    replace_file(path := directory / "configurations.py", tuned_source(source, rows))
    return path
