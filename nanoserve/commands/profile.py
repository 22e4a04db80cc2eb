"""``nanoserve profile``: what the parts of a step take on this machine, and how well that predicts a real run."""

from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from nanoserve.benchmarks.profiling.prediction import prediction_rows, time_rows
from nanoserve.benchmarks.rounds import busy_note
from nanoserve.benchmarks.tables import Column, print_table
from nanoserve.commands.bench_options import RESULTS_PANEL, JsonOptions
from nanoserve.commands.engine_options import EngineOptions
from nanoserve.commands.options import option
from nanoserve.commands.terminal import remark
from nanoserve.costs.profile import Profile, check_writable, write_profile
from nanoserve.processes.threads import MOST_THREADS, physical_cores, prepare_threads

_TIME_COLUMNS = [
    Column("part", "part"),
    Column("size", "size"),
    Column("us", "us", ",.1f"),
    Column("quartiles", "low", ",.1f"),
    Column("", "high", ",.1f"),
    Column("of floor", "of_floor", ".0%"),
]
_PREDICTION_COLUMNS = [
    Column("workload", "workload"),
    Column("", "route", justify="left"),
    Column("seconds", "seconds", ",.2f"),
    Column("+-", "seconds_range", ".0%"),
    Column("error", "seconds_error", "+.0%"),
    Column("TTFT ms", "ttft_ms", ",.0f"),
    Column("+-", "ttft_ms_range", ".0%"),
    Column("error", "ttft_ms_error", "+.0%"),
    Column("TPOT ms", "tpot_ms", ",.2f"),
    Column("+-", "tpot_ms_range", ".0%"),
    Column("error", "tpot_ms_error", "+.0%"),
]


class ProfileOptions(EngineOptions, JsonOptions, panel=RESULTS_PANEL):
    """All options of the command."""

    host_threads: int | None = option(
        None,
        "Cores set apart for attention in host memory; a CPU that is the device keeps the others.",
        minimum=1,
        maximum=MOST_THREADS,
        variables=["NANOSERVE_HOST_THREADS"],
    )
    json: Path | None = option(None, "Write the profile, for simulate --profile.", metavar="FILE")


def run(options: ProfileOptions) -> None:
    """From the times come the few factors of the cost model (docs/costs.md), and a file with which nanoserve simulate
    runs any policy over this machine. At the end two small workloads run for real beside their predictions. It takes
    about a minute for the bundled model; leave the machine alone meanwhile.

    Policies that attend in host memory read a profile too (--profile), one that has the same --host-threads.

    [bold]Examples[/bold]

      nanoserve profile --json storyteller.json
      nanoserve profile -m dummy:qwen3-0.6b --threads 1 --json qwen.json
      nanoserve profile --host-threads 1 --json hybrid.json
      nanoserve simulate --profile qwen.json --policy sarathi,throttling \\
        --rate 2 --lengths 128+32
    """
    if options.json is not None:
        check_writable(options.json)
    prepare_threads(options.threads)
    with closing(_set_apart(options.host_threads, options.device)) as processor, options.open_llm() as llm:
        from nanoserve.benchmarks.profiling.measuring import measure_profile
        from nanoserve.benchmarks.profiling.prediction import predict_and_run

        measured = measure_profile(llm, processor, remark)
        measured = msgspec.structs.replace(
            measured, predictions=tuple(predict_and_run(llm.engine, llm.engine_config, measured, remark))
        )
    if options.json is not None:
        write_profile(measured, options.json)
    _show(measured)


def _set_apart(host_threads: int | None, device: str) -> Any:
    """The HostProcessor; a CPU that is the device shares all cores with it, unless some are asked for."""
    from nanoserve.runtime.host.host_processor import HostProcessor  # imports torch: the threads are set
    from nanoserve.runtime.launch.model_loading import usable_device

    found = usable_device(device)
    if host_threads is None and found.type == "cpu":
        return HostProcessor.divide(physical_cores())
    return HostProcessor.set_apart(host_threads, found)


def _show(profile: Profile) -> None:
    settings, device = profile.settings, profile.device
    print(
        f"{profile.name}: {settings['dtype']}, {str(settings['operators']).partition(' (')[0]} operators,"
        f" {settings['layers']} layers, {settings['threads']} threads and {settings['host_threads']} in host memory;"
        f" at best {device.memory_bandwidth / 1e9:,.1f} GB/s, {device.flops / 1e9:,.0f} GFLOP/s"
    )
    if note := busy_note(profile.foreign_cores):
        print(note)
    print_table(f"medians of {settings['rounds']} rounds", _TIME_COLUMNS, time_rows(profile))
    factors = profile.efficiency
    print(
        f"factors: matrix {factors.matrix:.2f}, attention {factors.attention:.2f}, memory {factors.memory:.2f},"
        f" processor {factors.processor:.2f}, kernel_seconds {factors.kernel_seconds * 1e6:.1f} us,"
        f" step_seconds {factors.step_seconds * 1e3:.2f} ms, row_seconds {factors.row_seconds * 1e6:.1f} us"
    )
    title = f"{len(profile.predictions[0].real)} real runs each, and the simulator over measured times and over factors"
    print_table(title, _PREDICTION_COLUMNS, prediction_rows(profile.predictions))
