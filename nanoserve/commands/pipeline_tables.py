"""What ``nanoserve bench pipeline`` prints."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nanoserve.commands.bench_options import print_head

if TYPE_CHECKING:
    from nanoserve.benchmarks.report import Report
    from nanoserve.benchmarks.tables import Column
    from nanoserve.benchmarks.variants import Ratio

_METRICS = {"output_tokens_per_s": "tok/s", "ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2el_ms": "E2EL"}


def show_pipeline(report: "Report") -> str:
    """Print the tables of a report with rows, and put their figures into it; returns what they are about."""
    import msgspec

    from nanoserve.benchmarks.pipeline.rounds import RATIOS, PipelineRound, pairs
    from nanoserve.benchmarks.tables import print_table
    from nanoserve.benchmarks.variants import ratios, samples, summarize

    rounds = [msgspec.convert(row["round"], PipelineRound) for row in report.rows]
    summary, compared = summarize(rounds), ratios(rounds, pairs(list(rounds[0].variants)), RATIOS)
    report.put("summary", summary)
    report.put("ratios", compared)
    report.put("samples", samples(rounds, RATIOS))
    title = _title(report)
    print_head(report)
    print(f"{sum(one.counts for one in rounds)} of {len(rounds)} rounds count (read bandwidth drift below 10 %)")
    if not summary:
        return title
    print_table(title, _request_columns(), summary, keys=2)
    print_table(
        "micro-batches, and what the time of the stages went into", _stage_columns(), _stage_rows(summary), keys=3
    )
    if compared:
        heading = "ratios within a round: median (lowest-highest)"
        print_table(heading, _ratio_columns(), _ratio_rows(compared), keys=2)
    simulated = [row for row in summary if row["simulated"]]
    if simulated:
        heading = "simulated, with the stage times of the real runs; ratios are simulated over real"
        print_table(heading, _simulated_columns(), simulated, keys=2)
    return title


def _title(report: "Report") -> str:
    settings, facts = report.document["settings"], report.document["engine"]
    together = "all at once" if settings["request_rate"] == "inf" else f"{settings['request_rate']} a second"
    how = f"{facts['dtype']}, {facts['operators'].partition(' (')[0]} operators, {facts['layers']} layers"
    threads = f"{facts['threads']} threads, {facts['threads_of_a_worker']} of them for each worker"
    return f"{settings['requests']} requests of {settings['work']}, {together}; {facts['model']}, {how}, {threads}"


def _columns(*columns: tuple[str, ...]) -> "list[Column]":
    from nanoserve.benchmarks.tables import Column

    return [Column(*column) for column in columns]  # type: ignore[arg-type]  # headings, paths and formats


def _request_columns() -> "list[Column]":
    latencies = [
        (f"{name.removesuffix('_ms').upper()} {called}", f"{name}.{field}", ",.1f")
        for name in ("ttft_ms", "tpot_ms", "e2el_ms")
        for field, called in (("mean", "ms"), ("p99", "p99"))
    ]
    return _columns(
        ("policy, engine", "variant"),
        ("read", "state"),
        ("rounds", "rounds"),
        ("seconds", "seconds", ",.2f"),
        ("output tok/s", "output_tokens_per_s", ",.1f"),
        ("total tok/s", "total_tokens_per_s", ",.1f"),
        *latencies,
        ("preempted", "preemptions", ",.0f"),
        ("floor s", "floor_seconds", ",.2f"),
        ("engine ms", "engine_ms", ".3f"),
        ("engine share", "engine_share", ".1%"),
        ("foreign cores", "foreign_cores", ".2f"),
    )


def _stage_columns() -> "list[Column]":
    return _columns(
        ("policy, engine", "variant"),
        ("read", "state"),
        ("stage", "stage"),
        ("micro-batches", "steps", ",.0f"),
        ("tokens", "tokens.mean", ",.1f"),
        ("variation", "variation", ".2f"),
        ("prompt tokens", "prompt_tokens.mean", ",.1f"),
        ("decodes", "decodes.mean", ",.1f"),
        ("bubbles", "bubbles", ".1%"),
        ("sending", "sending", ".1%"),
        ("for inputs", "metadata", ".1%"),
        ("for work", "waiting", ".1%"),
        ("inputs of step", "metadata_of_step", ".2%"),
    )


def _stage_rows(summary: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One for each stage; a single process has one without shares."""
    rows: list[dict[str, Any]] = []
    for row in summary:
        for stage, shares in (row["stages"] or {"-": {}}).items():
            bubbles = 1 - shares["computing"] if shares else None
            rows.append({**row, **shares, "stage": stage, "bubbles": bubbles})
    return rows


def _ratio_columns() -> "list[Column]":
    return _columns(
        ("variants", "variants"),
        ("read", "state"),
        ("rounds", "rounds"),
        *((name, name) for name in _METRICS.values()),
    )


def _ratio_rows(compared: "Sequence[Ratio]") -> list[dict[str, Any]]:
    """One for each pair and state, with all metrics."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for one in compared:
        row = rows.setdefault((one.variants, one.state), {"variants": one.variants, "state": one.state})
        row["rounds"] = one.rounds
        row[_METRICS[one.metric]] = f"{one.median:.2f} ({one.low:.2f}-{one.high:.2f})"
    return list(rows.values())


def _simulated_columns() -> "list[Column]":
    return _columns(
        ("policy, engine", "variant"),
        ("read", "state"),
        ("makespan", "simulated.makespan", ".3f"),
        ("TTFT", "simulated.ttft", ".3f"),
        ("TPOT", "simulated.tpot", ".3f"),
        ("plans", "simulated.plans", ",.0f"),
        ("replayed", "simulated.replayed", ",.0f"),
        ("others when simulated", "simulated.others", ",.0f"),
    )
