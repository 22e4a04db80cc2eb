"""What ``nanoserve bench hybrid`` prints."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nanoserve.commands.bench_options import print_head

if TYPE_CHECKING:
    from nanoserve.benchmarks.hybrid.picture import Measured
    from nanoserve.benchmarks.hybrid.rounds import HybridRound
    from nanoserve.benchmarks.report import Report
    from nanoserve.benchmarks.tables import Column

_NEVER_WORSE, _PREDICTING = 0.98, "hybrid"
"""What the policy that chooses by prediction is to reach of the device alone, in every case."""


def show_hybrid(report: "Report", policies: Sequence[str]) -> str:
    """Print the tables of a report with rows, and put their figures into it; returns what they are about, in short.

    Args:
        policies: the first is what the others are held against.
    """
    from nanoserve.benchmarks.tables import print_table

    settings, facts = report.document["settings"], report.document["engine"]
    title = f"{settings['work']}; {facts['model']}, {facts['dtype']}"
    summary = _put_figures(report, policies)
    print_head(report)
    counting = sum(row["counts"] for row in report.rows)
    print(f"{counting} of {len(report.rows)} rounds count (read bandwidth drift below 10 %)")
    for remark in _remarks(report):
        print(remark)
    if not summary:
        return title
    print_table(f"{title}, {_how(facts)}", _run_columns(policies[0]), summary, keys=2)
    print_table("steps, what was moved, and what the engine takes per step", _step_columns(), summary, keys=2)
    print_table("latencies, in ms: tokens apart by where their KV was", _latency_columns(), summary, keys=2)
    heading = "errors: of the predicted time of steps (median of their sizes), of the simulated output tok/s"
    print_table(heading, _error_columns(), summary, keys=2)
    if bounded := list(_gain_rows(summary)):
        heading = f"steps without prompts: gain over {policies[0]} with the same rows, and the closed forms' bound"
        print_table(heading, _gain_columns(), bounded, keys=2)
    return title


def measured_cases(report: "Report") -> "list[Measured]":
    """What the picture shows: every round, that its bars tell how far they lie apart."""
    from nanoserve.benchmarks.hybrid.picture import Measured

    found = []
    for rows, rounds in _by_case(report).values():
        throughputs = {
            name: [done.variants[name].output_tokens_per_s for done in rounds] for name in rounds[0].variants
        }
        found.append(Measured(rows[0]["share"], rows[0]["output"], throughputs))
    return found


def _put_figures(report: "Report", policies: Sequence[str]) -> list[dict[str, Any]]:
    """Into the report: medians, ratios, samples and findings of each case; returns the medians with the ratios."""
    from nanoserve.benchmarks.hybrid.rounds import RATIOS, findings, pairs
    from nanoserve.benchmarks.variants import ratios, samples, summarize

    summary: list[dict[str, Any]] = []
    compared: list[dict[str, Any]] = []
    kept: dict[str, Any] = {}
    found: dict[str, Any] = {}
    for case, (rows, rounds) in _by_case(report).items():
        held = ratios(rounds, pairs(policies), RATIOS)
        texts = {(one.variants.partition(" over ")[0], one.state): one for one in held}
        for row in summarize(rounds):
            ratio = texts.get((row["variant"], row["state"]))
            text = None if ratio is None else f"{ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"
            summary.append({"case": case, **row, "ratio": text})
        compared += [{"case": case, "ratio": one} for one in held]
        kept |= {f"{case}, {name}": figures for name, figures in samples(rounds, RATIOS).items()}
        found[case] = findings(rounds, holds_everything=rows[0]["share"] >= 1)
    report.put("summary", summary)
    report.put("ratios", compared)
    report.put("samples", kept)
    report.put("findings", found)
    report.put("means", _means(report, policies))
    return summary


def _means(report: "Report", policies: Sequence[str]) -> dict[str, dict[str, float]]:
    """By KV limit, over all lengths of answers: geometric means of the ratios within rounds."""
    from operator import attrgetter
    from statistics import geometric_mean

    from nanoserve.benchmarks.hybrid.rounds import RATIOS, pairs
    from nanoserve.benchmarks.variants import ratios_within

    found: dict[str, dict[str, list[float]]] = {}
    for rows, rounds in _by_case(report).values():
        for done in filter(attrgetter("counts"), rounds):
            for (called, _), ratio in ratios_within(done.variants, pairs(policies), RATIOS).items():
                found.setdefault(f"KV {rows[0]['share']:.0%}", {}).setdefault(called, []).append(ratio)
    return {share: {name: geometric_mean(held) for name, held in of.items()} for share, of in found.items()}


def _by_case(report: "Report") -> "dict[str, tuple[list[dict[str, Any]], list[HybridRound]]]":
    import msgspec

    from nanoserve.benchmarks.hybrid.rounds import HybridRound

    found: dict[str, tuple[list[dict[str, Any]], list[HybridRound]]] = {}
    for row in report.rows:
        rows, rounds = found.setdefault(row["case"], ([], []))
        rows.append(row)
        rounds.append(msgspec.convert(row["round"], HybridRound))
    return found


def _remarks(report: "Report") -> Iterator[str]:
    """What was promised, and whether it held."""
    found = report.document["findings"]
    fitting = {row["case"] for row in report.rows if row["share"] >= 1}
    broken = [f"{name} in {case}" for case in fitting for name in found[case]["hybrid_although_it_fits"]]
    if broken:
        yield f"HYBRID STEPS although the device holds everything: {'; '.join(broken)}"
    elif fitting:
        yield "where the device holds everything, no step was hybrid"
    beyond = [f"{name} in {case}" for case in found for name in found[case]["beyond_bound"]]
    if beyond:
        yield f"beyond the closed forms' bounds in some round: {'; '.join(beyond)}"
    for share, means in report.document["means"].items():
        each = ", ".join(f"{name} {mean:.3f}" for name, mean in means.items())
        yield f"geometric means of all rounds that count, {share}: {each}"
    held = [one for one in report.document["ratios"] if one["ratio"]["variants"].startswith(f"{_PREDICTING} over")]
    worse = [f"{one['ratio']['median']:.2f} in {one['case']}" for one in held if one["ratio"]["median"] < _NEVER_WORSE]
    if held:
        below = f"; below: {'; '.join(worse)}" if worse else ""
        reached = f"{len(held) - len(worse)} of {len(held)} cases with rounds that count"
        yield f"{_PREDICTING} is at {_NEVER_WORSE:.0%} of the device alone or above in {reached}{below}"


def _how(facts: Mapping[str, Any]) -> str:
    """The engine ran."""
    layers = f"{facts['operators'].partition(' (')[0]} operators, {facts['layers']} layers"
    threads = f"{facts['threads']} threads for the device, {facts['host_threads']} for attention in host memory"
    return f"{layers}, {threads}"


def _columns(*columns: tuple[str, ...]) -> "list[Column]":
    """Behind those that say which row it is."""
    from nanoserve.benchmarks.tables import Column

    keys = (("case", "case"), ("policy", "variant"))
    return [Column(*column) for column in (*keys, *columns)]  # type: ignore[arg-type]  # headings, paths and formats


def _run_columns(device_only: str) -> "list[Column]":
    return _columns(
        ("read", "state"),
        ("rounds", "rounds"),
        ("seconds", "seconds", ",.2f"),
        ("output tok/s", "output_tokens_per_s", ",.1f"),
        (f"over {device_only}", "ratio"),
        ("TTFT ms", "latencies.ttft_ms.mean", ",.0f"),
        ("ms/token", "latencies.token_ms.mean", ",.1f"),
        ("device", "device_share", ".0%"),
        ("CPU", "processor_share", ".0%"),
        ("foreign cores", "foreign_cores", ".2f"),
    )


def _step_columns() -> "list[Column]":
    return _columns(
        ("device", "steps.device", ",.0f"),
        ("asymmetric", "steps.asymmetric", ",.0f"),
        ("overlap", "steps.overlap", ",.0f"),
        ("tokens on device", "latencies.device.tokens", ",.0f"),
        ("on host", "latencies.host.tokens", ",.0f"),
        ("swaps out", "swaps_out", ",.0f"),
        ("swaps in", "swaps_in", ",.0f"),
        ("preempted", "preemptions", ",.0f"),
        ("engine ms", "engine_ms", ".2f"),
    )


def _latency_columns() -> "list[Column]":
    return _columns(
        ("TTFT p50", "latencies.ttft_ms.p50", ",.0f"),
        ("p99", "latencies.ttft_ms.p99", ",.0f"),
        ("ms/token p50", "latencies.token_ms.p50", ",.1f"),
        ("p99", "latencies.token_ms.p99", ",.1f"),
        ("ITL device p50", "latencies.device.itl_ms.p50", ",.2f"),
        ("p99", "latencies.device.itl_ms.p99", ",.2f"),
        ("ITL host p50", "latencies.host.itl_ms.p50", ",.2f"),
        ("p99", "latencies.host.itl_ms.p99", ",.2f"),
    )


def _error_columns() -> "list[Column]":
    return _columns(
        ("steps", "errors.all.steps", ",.0f"),
        ("all", "errors.all.median", ".1%"),
        ("p90", "errors.all.p90", ".0%"),
        ("bias", "errors.all.bias", "+.1%"),
        ("device", "errors.device.median", ".1%"),
        ("asymmetric", "errors.asymmetric.median", ".1%"),
        ("overlap", "errors.overlap.median", ".1%"),
        ("simulated s", "simulated.seconds", ",.2f"),
        ("simulated tok/s", "simulation_error", "+.0%"),
    )


def _gain_columns() -> "list[Column]":
    return _columns(
        ("strategy", "strategy"),
        ("steps", "steps", ",.0f"),
        ("gain", "gain", "+.1%"),
        ("bound", "bound", "+.1%"),
        ("reached", "reached", ".0%"),
    )


def _gain_rows(summary: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """One for each strategy that had steps without prompts."""
    for row in summary:
        for strategy in ("asymmetric", "overlap"):
            if row["gains"] is not None and row["gains"][strategy] is not None:
                yield {
                    "case": row["case"],
                    "variant": row["variant"],
                    "strategy": strategy,
                    **row["gains"][strategy],
                }
