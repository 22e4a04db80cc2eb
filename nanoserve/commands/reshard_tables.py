"""What ``nanoserve bench reshard`` prints."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nanoserve.commands.bench_options import print_head

if TYPE_CHECKING:
    from nanoserve.benchmarks.report import Report
    from nanoserve.benchmarks.tables import Column
    from nanoserve.benchmarks.variants import Ratio

_MOVES = {"re-sharding": "reshards", "swaps out": "swaps_out", "swaps in": "swaps_in"}


def show_reshard(report: "Report", held: Sequence[tuple[str, str, str]]) -> str:
    """Print the tables of a report with rows, and put their figures into it; returns what they are about, in short.

    Args:
        held: the pairs that ratios are formed of.
    """
    import msgspec

    from nanoserve.benchmarks.resharding.rounds import RATIOS, ReshardRound
    from nanoserve.benchmarks.tables import print_table
    from nanoserve.benchmarks.variants import ratios, samples, summarize

    rounds = [msgspec.convert(row["round"], ReshardRound) for row in report.rows]
    summary, compared = summarize(rounds), ratios(rounds, held, RATIOS)
    report.put("summary", summary)
    report.put("ratios", compared)
    report.put("samples", samples(rounds, RATIOS))
    settings, facts = report.document["settings"], report.document["engine"]
    title = f"{settings['requests']} requests of {settings['work']}; {facts['model']}, {facts['dtype']}"
    print_head(report)
    print(f"{sum(one.counts for one in rounds)} of {len(rounds)} rounds count (read bandwidth drift below 10 %)")
    if not summary:
        return title
    print_table(f"{title}, {_how(facts)}", _run_columns(), summary, keys=2)
    in_turn = [row for row in summary if row["phases"] is not None]
    print_table("where the time of re-sharding runs went, in seconds", _phase_columns(), in_turn, keys=2)
    print_table("what was moved between device and host memory", _move_columns(), _move_rows(in_turn), keys=3)
    print_table("output tok/s within a round: median (lowest-highest)", _ratio_columns(), _ratio_rows(compared), keys=2)
    simulated = [row for row in summary if row["simulated"]]
    if simulated:
        heading = "simulated, with what steps and moves of the real runs took; makespan is simulated over real"
        print_table(heading, _simulated_columns(), simulated, keys=2)
    return title


def _how(facts: Mapping[str, Any]) -> str:
    """The engine ran."""
    layers = f"{facts['operators'].partition(' (')[0]} operators, {facts['layers']} layers"
    threads = f"{facts['threads']} threads, {facts['threads_of_a_worker']} of them for each worker"
    blocks = f"KV blocks: {facts['kv_blocks']} on the devices, {facts['host_blocks']:,} in the host pool"
    return f"{layers}, {threads}; {blocks}"


def _columns(*columns: tuple[str, ...]) -> "list[Column]":
    from nanoserve.benchmarks.tables import Column

    return [Column(*column) for column in columns]  # type: ignore[arg-type]  # headings, paths and formats


def _run_columns() -> "list[Column]":
    return _columns(
        ("policy, layouts", "variant"),
        ("read", "state"),
        ("rounds", "rounds"),
        ("seconds", "seconds", ",.2f"),
        ("output tok/s", "output_tokens_per_s", ",.1f"),
        ("total tok/s", "total_tokens_per_s", ",.1f"),
        ("steps", "steps", ",.0f"),
        ("preempted", "preemptions", ",.0f"),
        ("transitions", "transitions", ",.0f"),
        ("pool peak", "pool_peak", ".0%"),
        ("foreign cores", "foreign_cores", ".2f"),
    )


def _phase_columns() -> "list[Column]":
    return _columns(
        ("policy, layouts", "variant"),
        ("read", "state"),
        ("prefill", "phases.prefill", ",.2f"),
        ("decode", "phases.decode", ",.2f"),
        ("draining", "phases.draining", ",.3f"),
        ("re-sharding", "phases.resharding", ",.3f"),
        ("prefill tok/s", "phases.prefill_tokens_per_s", ",.1f"),
        ("decode tok/s", "phases.decode_tokens_per_s", ",.1f"),
        ("through the pool", "phases.through_pool", ",.0f"),
        ("finished", "phases.finished", ",.0f"),
        ("recomputed", "phases.recomputed", ",.0f"),
    )


def _move_columns() -> "list[Column]":
    return _columns(
        ("policy, layouts", "variant"),
        ("read", "state"),
        ("moves", "moves"),
        ("number", "count", ",.0f"),
        ("MB", "megabytes", ",.1f"),
        ("seconds", "seconds", ",.3f"),
        ("GB/s of a worker", "gb_per_s", ",.2f"),
        ("of host link", "share_of_link", ".0%"),
        ("behind computing", "hidden", ".0%"),
    )


def _move_rows(summary: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One for each kind of moves."""
    return [
        {
            "variant": row["variant"],
            "state": row["state"],
            "moves": moves,
            "megabytes": row[field]["num_bytes"] / 1e6,
            **row[field],
        }
        for row in summary
        for moves, field in _MOVES.items()
    ]


def _ratio_columns() -> "list[Column]":
    return _columns(("variants", "variants"), ("read", "state"), ("rounds", "rounds"), ("tok/s", "text"))


def _ratio_rows(compared: "Sequence[Ratio]") -> list[dict[str, Any]]:
    return [
        {
            "variants": one.variants,
            "state": one.state,
            "rounds": one.rounds,
            "text": f"{one.median:.2f} ({one.low:.2f}-{one.high:.2f})",
        }
        for one in compared
    ]


def _simulated_columns() -> "list[Column]":
    return _columns(
        ("policy, layouts", "variant"),
        ("read", "state"),
        ("makespan", "simulated.makespan", ".3f"),
        ("transitions", "simulated.simulated_transitions", ",.0f"),
        ("plans", "simulated.plans", ",.0f"),
        ("replayed", "simulated.replayed", ",.0f"),
        ("others when simulated", "simulated.others", ",.0f"),
    )
