"""``nanoserve plan``: which parallel layout and policy serve a model best on so many devices."""

import math
from collections.abc import Callable
from functools import partial
from itertools import islice

import msgspec

from nanoserve.commands.engine_options import locate_model, quantization_option
from nanoserve.commands.options import HARDWARE_PANEL, option
from nanoserve.commands.progress import show_progress
from nanoserve.commands.tables import Column, columns, print_table
from nanoserve.commands.terminal import remark
from nanoserve.costs.hardware import load_machine
from nanoserve.costs.step_costs import StepCosts
from nanoserve.engine_config import EngineConfig
from nanoserve.lab.benchmarks.report import Report
from nanoserve.lab.commands.bench_options import MOST_REQUESTS, JsonOptions
from nanoserve.lab.commands.simulate import StepLimitOptions
from nanoserve.lab.simulator.planning import PlannedWork, find_candidates
from nanoserve.lab.simulator.workload import GLLMS_SHAREGPT, named_lengths
from nanoserve.layout import ParallelLayout
from nanoserve.models.hub import find_shape
from nanoserve.scheduler.policies import parse_policies
from nanoserve.utils.threads import prepare_threads

MEASURED = "measured"
_PAIR_POLICY = "seesaw"
_REPORTED = (
    "quantization",
    "model",
    "hardware",
    "gpus",
    "requests",
    "rate",
    "seed",
    "top",
    "max_num_batched_tokens",
    "max_num_seqs",
)


class PlanOptions(StepLimitOptions, JsonOptions):
    lengths: str = option(
        GLLMS_SHAREGPT, "IN+OUT tokens, or a name as in simulate.", metavar="NAME"
    )
    requests: int = option(500, "How many.", minimum=1, maximum=MOST_REQUESTS)
    rate: float | None = option(None, "Requests per second; default: all at once, for throughput.")
    seed: int = option(0, "Seed of arrivals and lengths.", minimum=0)
    policy: str = option(
        "sarathi,throttling", "For one layout; see nanoserve policies.", metavar="NAME,NAME,..."
    )
    top: int = option(3, "Layouts to simulate, and pairs, best estimates first.", minimum=1)
    model: str = option(
        "qwen3-32b", "Name, config.json or .gguf file.", "-m", metavar="MODEL", panel=HARDWARE_PANEL
    )
    quantization: str | None = quantization_option(panel=HARDWARE_PANEL)
    hardware: str = option(
        "l4", "A machine or device, a TOML file, or measured.", metavar="NAME", panel=HARDWARE_PANEL
    )
    gpus: int = option(8, "Devices to use, all of them.", minimum=1, panel=HARDWARE_PANEL)


def run(options: PlanOptions) -> None:
    """For a closed batch, the default, the order is that of throughput, and pairs of layouts
    (P4->T4: prompts in one, answers in the other) are among them; with --rate it is that of
    latency. Every layout is estimated by the cost model; the best --top of them are simulated with
    every policy, one replica with its share of the requests. With --hardware measured, that many
    worker processes of this machine measure themselves first, unless they have.

    [bold]Examples[/bold]

      nanoserve plan -m qwen2.5-32b --hardware gllm-l20 --gpus 4
      nanoserve plan -m llama-2-70b --hardware seesaw-a10 --gpus 8 \\
        --lengths arxiv --requests 200
      nanoserve plan -m qwen3-8b --hardware l4 --gpus 4 \\
        --lengths azure-conv --rate 2
      nanoserve plan -m dummy:qwen3-0.6b --hardware measured --gpus 2
    """
    budget = options.max_num_batched_tokens
    policies, of_pairs = (
        parse_policies(options.policy, budget),
        parse_policies(_PAIR_POLICY, budget),
    )
    shapes = islice(named_lengths(options.lengths, options.seed), options.requests)
    work = PlannedWork(tuple(shapes), options.rate, options.seed)
    candidates = find_candidates(_costs_of(options), options.gpus, work, step_tokens=budget).best(
        options.top
    )
    settings = {name: getattr(options, name) for name in _REPORTED}
    settings |= {"workload": options.lengths, "policies": list(policies)}
    with options.reported("plan", settings, lambda report, _: _show(report, work)) as report:
        report.put("left_out", [one._asdict() for one in candidates.left_out])
        for candidate in candidates.fitting:
            tried = policies
            if candidate.is_pair:
                tried = of_pairs
            for name, policy in tried.items():
                remark(f"simulating {candidate.name} with {name}, {candidate.estimate_text} ...")
                result, latency = (
                    candidate.simulate(policy, options.max_num_seqs),
                    candidate.latency,
                )
                # of all replicas, the rest of one
                throughput = {"tokens_per_second": work.tokens / result.seconds}
                throughput["estimated_tokens_per_second"] = candidate.tokens_per_second
                row = (
                    msgspec.to_builtins(result)
                    | throughput
                    | {"layout": candidate.name, "policy": name}
                )
                row["estimated_e2el_s"] = None
                if work.rate and math.isfinite(latency):
                    row["estimated_e2el_s"] = latency
                row |= {"kv_blocks": candidate.kv_blocks, "host_blocks": candidate.host_blocks}
                row["states"] = candidate.states
                report.add(row)


def _costs_of(options: PlanOptions) -> Callable[[ParallelLayout], StepCosts]:
    if options.hardware != MEASURED:
        return partial(
            StepCosts,
            find_shape(options.model, options.quantization),
            load_machine(options.hardware),
        )
    prepare_threads()
    # These import torch.
    from nanoserve.executor.profiling.layout_profile import measure_layouts
    from nanoserve.executor.start.model_loading import read_config

    resolved = locate_model(options.model)
    with show_progress() as progress:
        config = EngineConfig(quantization=options.quantization)
        profile = measure_layouts(resolved, config, options.gpus, progress)
    return partial(profile.costs, read_config(resolved, options.quantization))


def _columns(*, closed: bool, pairs: bool, states: bool) -> list[Column]:
    """The estimate stands beside what the layouts are ordered by: throughput of a closed batch,
    else latency. Only pairs of layouts have transitions, and only some models states."""
    found = columns(
        ("", "layout"),
        ("<", "policy"),
        (",.0f", ("tok/s", "tokens_per_second"), ("estimated", "estimated_tokens_per_second")),
        (",.0f", ("TTFT ms", "ttft_ms.mean"), ("p99", "ttft_ms.p99")),
        (",.1f", ("TPOT ms", "tpot_ms.mean"), ("p99", "tpot_ms.p99"), ("E2EL s", "seconds_each")),
        (",.1f", ("estimated", "estimated_e2el_s")),
        ("", ("KV blocks", "blocks")),
        (",d", "states", "transitions"),
    )
    unused = ["estimated_tokens_per_second"]
    if closed:
        unused = ["estimated_e2el_s"]
    if not pairs:
        unused.append("transitions")
    if not states:
        unused.append("states")
    return [column for column in found if column.path not in unused]


def _show(report: Report, work: PlannedWork) -> None:
    closed = work.rate is None
    rows = []
    for row in report.rows:
        blocks = "->".join(f"{number:,d}" for number in row["kv_blocks"])
        rows.append({**row, "seconds_each": row["e2el_ms"]["mean"] / 1000, "blocks": blocks})
    if closed:
        rows.sort(key=lambda row: row["tokens_per_second"], reverse=True)
        order = "all at once; the best throughput first"
    else:
        rows.sort(key=lambda row: row["seconds_each"])
        order = f"{work.rate:g} a second; the best latency first"
    settings = report.document["settings"]
    model = " in ".join(filter(None, (settings["model"], settings["quantization"])))
    print(
        f"simulated: {model} on {settings['gpus']} of {settings['hardware']}; KV blocks are a "
        "replica's"
    )
    requests = f"{len(work.shapes)} requests of {settings['workload']}"
    pairs = any(len(row["kv_blocks"]) > 1 for row in rows)
    states = any(row["states"] is not None for row in rows)
    shown = _columns(closed=closed, pairs=pairs, states=states)
    print_table(f"{requests}, {order}", shown, rows, keys=2)
    if left_out := report.document["left_out"]:
        brief = [
            {**one, "reason": one["reason"].partition("; what would fit")[0]} for one in left_out
        ]
        print_table("left out", columns(("", ("layout", "name")), ("<", ("why", "reason"))), brief)
