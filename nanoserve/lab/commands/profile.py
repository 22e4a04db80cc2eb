"""``nanoserve profile``: what the parts of a step take on this machine, and how well that predicts
a real run."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from nanoserve.commands.engine_options import EngineOptions
from nanoserve.commands.options import file_option, option
from nanoserve.commands.tables import columns, print_table
from nanoserve.commands.terminal import remark
from nanoserve.costs.counts import ModelCounts, Operator, Precision
from nanoserve.costs.curves import MeasuredCurve, MeasuredGrid
from nanoserve.costs.hardware import Device
from nanoserve.costs.profile import Prediction, Profile, check_writable, write_profile
from nanoserve.lab.benchmarks.rounds import busy_note
from nanoserve.lab.commands.bench_options import RESULTS_PANEL, JsonOptions
from nanoserve.scheduler.work import StepWork
from nanoserve.utils.threads import MOST_THREADS, physical_cores, prepare_threads

Fields = Mapping[str, Any]
_TIME_COLUMNS = columns(
    ("", "part", "size"), (",.1f", "us", ("quartiles", "low"), ("", "high")), (".0%", "of_floor")
)
_FIGURES = (
    ("seconds", "seconds", ",.2f"),
    ("TTFT ms", "ttft_ms", ",.0f"),
    ("TPOT ms", "tpot_ms", ",.2f"),
)
_PREDICTION_COLUMNS = columns(("", "workload"), ("<", ("", "route")))
for _heading, _name, _format in _FIGURES:
    _PREDICTION_COLUMNS += columns((_format, (_heading, _name)))
    _PREDICTION_COLUMNS += columns(
        (".0%", ("+-", f"{_name}_range")), ("+.0%", ("error", f"{_name}_error"))
    )


class ProfileOptions(EngineOptions, JsonOptions, panel=RESULTS_PANEL):
    host_threads: int | None = option(
        None,
        "Cores set apart for attention in host memory; a CPU that is the device keeps the others.",
        minimum=1,
        maximum=MOST_THREADS,
        variables=["NANOSERVE_HOST_THREADS"],
    )
    json: Path | None = file_option("Write the profile, for simulate --profile.")


def run(options: ProfileOptions) -> None:
    """From the times come the few factors of the cost model (docs/costs.md), and a file with which
    nanoserve simulate runs any policy over this machine. At the end two small workloads run for
    real beside their predictions. It takes about a minute for the bundled model; leave the machine
    alone meanwhile.

    Policies that attend in host memory read a profile too (--profile), one that has the same
    --host-threads.

    [bold]Examples[/bold]

      nanoserve profile --json storyteller.json
      nanoserve profile -m dummy:qwen3-0.6b --threads 1 --json qwen.json
      nanoserve profile --host-threads 1 --json hybrid.json
      nanoserve simulate --profile qwen.json --policy sarathi,throttling \\
        --rate 2 --lengths 128+32
    """
    if options.json is not None:
        check_writable(options.json)
    prepare_threads(options.threads)  # before torch is imported
    from nanoserve.executor.cpu_attention.host_processor import HostProcessor
    from nanoserve.executor.start.model_loading import usable_device
    from nanoserve.lab.benchmarks.profiling import measure_profile

    device, threads = usable_device(options.device), options.host_threads
    if threads is None and device.type == "cpu":
        # A CPU that is the device shares all cores with attention in host memory, unless some are
        # asked for.
        host = HostProcessor.divide(physical_cores())
    else:
        host = HostProcessor.set_apart(threads, device)
    with closing(host) as processor, options.open_llm() as llm:
        measured = measure_profile(llm, processor, remark)
    if options.json is not None:
        write_profile(measured, options.json)
    _show(measured)


def _show(profile: Profile) -> None:
    settings, device = profile.settings, profile.device
    print(
        f"{profile.name}: {settings['dtype']}, {str(settings['operators']).partition(' (')[0]} "
        "operators,"
        f" {settings['layers']} layers, {settings['threads']} threads and "
        f"{settings['host_threads']} in host memory;"
        f" at best {device.memory_bandwidth / 1e9:,.1f} GB/s, {device.flops / 1e9:,.0f} GFLOP/s"
    )
    if note := busy_note(profile.foreign_cores):
        print(note)
    print_table(f"medians of {settings['rounds']} rounds", _TIME_COLUMNS, _time_rows(profile))
    factors = profile.efficiency
    print(
        f"factors: matrix {factors.matrix:.2f}, attention {factors.attention:.2f}, memory "
        f"{factors.memory:.2f},"
        f" processor {factors.processor:.2f}, kernel_seconds {factors.kernel_seconds * 1e6:.1f} us,"
        f" step_seconds {factors.step_seconds * 1e3:.2f} ms, row_seconds "
        f"{factors.row_seconds * 1e6:.1f} us"
    )
    title = (
        f"{len(profile.predictions[0].real)} real runs each, and the simulator over measured times "
        "and over factors"
    )
    print_table(title, _PREDICTION_COLUMNS, _prediction_rows(profile.predictions))


def _time_rows(profile: Profile) -> Iterator[Fields]:
    """Every measured time, and its share of the least time that its bytes and operations take,
    where these count."""
    counts = ModelCounts(profile.model, precision=Precision.of(profile.bits))

    def least(reached: Device, num_bytes: float, operations: float) -> float:
        return max(num_bytes / reached.memory_bandwidth, operations / reached.flops)

    def products(operators: Iterable[Operator]) -> float:
        found = list(operators)
        return least(
            profile.device, sum(one.weight_bytes for one in found), sum(one.flops for one in found)
        )

    def linear(tokens: int) -> float:
        """A layer, the mean over all."""
        return products(counts.products(StepWork(decodes=tokens), 0)) / counts.layers(0)

    def attention(reached: Device, keys: int, pairs: float) -> float:
        return least(reached, keys * counts.layer_kv_bytes, pairs * counts.layer_flops_per_pair)

    def decodes(reached: Device, batch: int, context: int) -> float:
        return attention(reached, batch * context, batch * context)

    def prompt(tokens: int) -> float:
        return attention(profile.device, tokens, tokens * (tokens + 1) / 2)

    measured: list[tuple[str, str, MeasuredCurve | MeasuredGrid, Callable[..., float] | None]] = [
        ("layer without attention", "{:,} tokens", profile.linear, linear),
        ("attention of a prompt", "{:,} tokens", profile.prefill_attention, prompt),
        (
            "decode attention",
            "{} x {:,} keys",
            profile.decode_attention,
            partial(decodes, profile.device),
        ),
        (
            "attention in host memory",
            "{} x {:,} keys",
            profile.host_attention,
            partial(decodes, profile.host),
        ),
        (
            "head and sampling",
            "{} rows",
            profile.head,
            lambda rows: products([counts.product(counts.head, rows)]),
        ),
        ("inputs", "{} rows", profile.inputs, None),
        ("engine", "{} rows", profile.engine, None),
        ("exchange with host memory", "{} rows", profile.host_exchange, None),
        ("copy", "{1:g} MiB", profile.copy, None),
    ]
    for part, written, times, floor in measured:
        yield from _rows_of_part(part, written, times, floor)


def _rows_of_part(
    part: str,
    written: str,
    times: MeasuredCurve | MeasuredGrid,
    floor: Callable[..., float] | None,
) -> Iterator[Fields]:
    """Make a row for each size of a part. ``written`` formats a size; ``floor`` tells its least
    seconds."""
    sizes: list[tuple[int, ...]] = []
    if isinstance(times, MeasuredCurve):
        sizes += [(size,) for size in times.sizes]
    else:
        sizes += product(times.batches, times.contexts)
    measured_times = [np.ravel(several) for several in times.times.values()]
    for size, seconds, low, high in zip(sizes, *measured_times, strict=True):
        row = {"part": part, "size": written.format(*size, size[0] / 2**20), "of_floor": None}
        row |= {"us": seconds * 1e6, "low": low * 1e6, "high": high * 1e6}
        if floor is not None:
            row["of_floor"] = floor(*size) / seconds
        yield row


def _prediction_rows(predictions: tuple[Prediction, ...]) -> Iterator[Fields]:
    """Three rows for each workload: what really was, with half of the range over its runs, and both
    predictions."""
    for found in predictions:
        runs = [msgspec.structs.asdict(run) for run in found.real]
        values = {name: [run[name] for run in runs] for name in runs[0]}
        mean = {name: sum(some) / len(some) for name, some in values.items()}
        ranges = {
            f"{name}_range": (max(some) - min(some)) / 2 / mean[name]
            for name, some in values.items()
        }
        yield {"workload": found.workload, "route": "real", **mean, **ranges}
        for route, figures in (("measured times", found.by_profile), ("factors", found.by_factors)):
            predicted = msgspec.structs.asdict(figures)
            errors = {f"{name}_error": value / mean[name] - 1 for name, value in predicted.items()}
            yield {"workload": "", "route": route, **predicted, **errors}
