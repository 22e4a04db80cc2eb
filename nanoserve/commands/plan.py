"""``nanoserve plan``: which parallel layout and policy serve a model best on so many devices."""

import math
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from nanoserve.commands.bench_options import MOST_REQUESTS, RESULTS_PANEL, WORK_PANEL, kept, work_option
from nanoserve.commands.failures import EXIT_OK
from nanoserve.commands.options import option
from nanoserve.commands.simulate_options import MOST_AT_A_TIME, hardware_option
from nanoserve.commands.terminal import remark

if TYPE_CHECKING:
    from nanoserve.benchmarks.report import Report
    from nanoserve.scheduler.load import Policy
    from nanoserve.simulator.planning import Candidate, PlannedWork
    from nanoserve.simulator.result import SimulationResult

_PAIR_POLICY = "seesaw"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What the layouts are to serve, and with which policies."""

    workload: Annotated[
        str, work_option("--workload", help="Lengths: IN+OUT tokens, or a name as in simulate.", metavar="NAME")
    ] = "sharegpt-gllm"
    requests: Annotated[int, work_option("--requests", help="How many.", min=1, max=MOST_REQUESTS)] = 500
    rate: Annotated[
        float | None, work_option("--rate", help="Requests per second; default: all at once, for throughput.")
    ] = None
    seed: Annotated[int, option("--seed", panel=WORK_PANEL, help="Of arrivals and lengths.", envvar=None, min=0)] = 0
    policy_names: Annotated[
        str,
        work_option("--policies", help="For one layout; see nanoserve policies.", metavar="NAME,NAME,..."),
    ] = "sarathi,throttling"
    token_budget: Annotated[
        int, work_option("--max-num-batched-tokens", help="Token budget of a step.", min=1, max=MOST_AT_A_TIME)
    ] = 2048
    max_num_seqs: Annotated[
        int, work_option("--max-num-seqs", help="Most sequences of a replica.", min=1, max=MOST_AT_A_TIME)
    ] = 2048
    top: Annotated[
        int,
        option(
            "--top", panel=WORK_PANEL, help="Layouts to simulate, and pairs, best estimates first.", min=1, envvar=None
        ),
    ] = 3

    def policies(self) -> "dict[str, Policy]":
        """Those that were named.

        Raises:
            UsageError: for an unknown policy.
        """
        from nanoserve.benchmarks.policy_names import parse_policies

        return parse_policies(self.policy_names, self.token_budget)

    def settings(self) -> dict[str, Any]:
        """For the report."""
        return {
            "workload": self.workload,
            "requests": self.requests,
            "rate": self.rate,
            "seed": self.seed,
            "policies": list(self.policies()),
            "top": self.top,
            "max_num_batched_tokens": self.token_budget,
            "max_num_seqs": self.max_num_seqs,
        }

    def work(self) -> "PlannedWork":
        """The requests.

        Raises:
            UsageError: for lengths or a rate that make no sense.
        """
        from nanoserve.simulator.named_lengths import named_lengths
        from nanoserve.simulator.planning import PlannedWork

        shapes = islice(named_lengths(self.workload, self.seed), self.requests)
        return PlannedWork(tuple(shapes), self.rate, self.seed)


def plan(
    *,
    model: Annotated[str, hardware_option("--model", "A model's name, or its config.json.", "MODEL")],
    hardware: Annotated[str, hardware_option("--hardware", "A machine or device, or a TOML file.", "NAME")],
    gpus: Annotated[int, hardware_option("--gpus", "Devices to use, all of them.", minimum=1)],
    asked: PlanOptions,
    json_file: Annotated[
        Path | None,
        option("--json", panel=RESULTS_PANEL, help="Write all figures to this file.", metavar="FILE", envvar=None),
    ] = None,
) -> int:
    """Rank all ways to spread a model over devices: data, tensor and pipeline parallel (D2T2P2), and policies for each.

    For a closed batch, the default, the order is that of throughput, and pairs of layouts (P4->T4: prompts in one,
    answers in the other) are among them; with --rate it is that of latency. Every layout is estimated by the cost
    model; the best --top of them are simulated with every policy, one replica with its share of the requests.

    [bold]Examples[/bold]

      nanoserve plan --model qwen2.5-32b --hardware gllm-l20 --gpus 4
      nanoserve plan --model llama-2-70b --hardware seesaw-a10 --gpus 8 --workload arxiv --requests 200
      nanoserve plan --model qwen3-8b --hardware l4 --gpus 4 --workload azure-conv --rate 2
    """
    from nanoserve.benchmarks.policy_names import parse_policies
    from nanoserve.benchmarks.report import Report
    from nanoserve.costs import load_machine, load_shape
    from nanoserve.simulator.planning import find_candidates

    policies, work = asked.policies(), asked.work()
    of_pairs = parse_policies(_PAIR_POLICY, asked.token_budget)
    shape, machine = load_shape(model), load_machine(hardware)
    candidates = find_candidates(shape, machine, gpus, work, step_tokens=asked.token_budget).best(asked.top)
    settings = {"model": model, "hardware": hardware, "gpus": gpus, **asked.settings()}
    report = Report("plan", settings, json_file)
    report.put("left_out", [asdict(one) for one in candidates.left_out])
    with kept(report, lambda: _show(report, work)):
        for candidate in candidates.fitting:
            for name, policy in (of_pairs if candidate.is_pair else policies).items():
                remark(f"simulating {candidate.name} with {name}, {candidate.estimate_text} ...")
                result = candidate.simulate(policy, asked.max_num_seqs)
                report.add({**_fields(candidate, result), "policy": name})
    return EXIT_OK


def _fields(candidate: "Candidate", result: "SimulationResult") -> dict[str, Any]:
    """A row; its throughput is that of all replicas, the rest that of one."""
    return {
        **msgspec.to_builtins(result),
        "layout": candidate.name,
        "tokens_per_second": candidate.work.tokens / result.seconds,
        "estimated_tokens_per_second": candidate.tokens_per_second,
        "estimated_e2el_s": None if candidate.work.rate is None else _finite(candidate.latency),
        "kv_blocks": list(candidate.kv_blocks),
        "host_blocks": candidate.host_blocks,
    }


def _finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None


def _show(report: "Report", work: "PlannedWork") -> None:
    from nanoserve.benchmarks.tables import Column, print_table

    closed = work.rate is None
    throughput_estimate = [Column("estimated", "estimated_tokens_per_second", ",.0f")] if closed else []
    latency_estimate = [] if closed else [Column("estimated", "estimated_e2el_s", ",.1f")]
    columns = [
        Column("layout", "layout"),
        Column("policy", "policy", justify="left"),
        Column("tok/s", "tokens_per_second", ",.0f"),
        *throughput_estimate,
        Column("TTFT ms", "ttft_ms.mean", ",.0f"),
        Column("p99", "ttft_ms.p99", ",.0f"),
        Column("TPOT ms", "tpot_ms.mean", ",.1f"),
        Column("p99", "tpot_ms.p99", ",.1f"),
        Column("E2EL s", "seconds_each", ",.1f"),
        *latency_estimate,
        Column("KV blocks", "blocks"),
        Column("transitions", "transitions", ",d"),
    ]
    rows = [
        {
            **row,
            "seconds_each": row["e2el_ms"]["mean"] / 1000,
            "blocks": "->".join(f"{blocks:,d}" for blocks in row["kv_blocks"]),
        }
        for row in report.rows
    ]
    rows.sort(key=lambda row: row["tokens_per_second" if closed else "seconds_each"], reverse=closed)
    settings = report.document["settings"]
    order = "all at once; the best throughput first" if closed else f"{work.rate:g} a second; the best latency first"
    print(f"simulated: {settings['model']} on {settings['gpus']} of {settings['hardware']}; KV blocks are a replica's")
    requests = f"{len(work.shapes)} requests of {settings['workload']}"
    print_table(f"{requests}, {order}", columns, rows)
    left_out = report.document["left_out"]
    if left_out:
        brief = [{**one, "reason": one["reason"].partition("; what would fit")[0]} for one in left_out]
        print_table("left out", [Column("layout", "name"), Column("why", "reason", justify="left")], brief)
