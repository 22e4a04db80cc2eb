"""The results of a run as tables in Markdown, with targets for an H200, which are never
asserted."""

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from nanoserve.commands.tables import Column, columns, markdown_table
from nanoserve.lab.benchmarks.gpu.running import BUDGET_SPENT, Document
from nanoserve.lab.benchmarks.verdicts import spread_text

TARGET_DEVICE = "H200"
Row = Mapping[str, Any]


class Target(msgspec.Struct, frozen=True):
    """A line of targets.csv: a bound of a figure that a row gives; `aim` would be better still."""

    name: str
    case: str
    field: str  # path of the figure within the row
    bound: float  # the least that is wanted, or the most if `most`
    most: bool = False
    aim: float | None = None
    over: str | None = None  # case whose figure of that name this one is divided by
    beside: str = ""  # a case; what `remark` tells of its row stands beside the verdict
    remark: str = ""

    def outcome(self, rows: Mapping[str, Row]) -> dict[str, Any]:
        """The row of the target, from the rows of all parts by the name of their case. `share` is
        measured over wanted, or wanted over measured where less is better."""
        wanted = f"at least {self.bound:g}"
        if self.most:
            wanted = f"at most {self.bound:g}"
        if self.aim is not None:
            wanted += f" (aim {self.aim:g})"
        nothing = {"measured": None, "share": None, "verdict": "not measured"}
        found: dict[str, Any] = {"target": self.name, "wanted": wanted, **nothing}
        figures = [
            Column("", self.field).value(rows.get(case, {}))
            for case in (self.case, self.over)
            if case
        ]
        if None in figures:  # a row is missing, or its case failed
            return found
        measured = float(figures[0])
        if self.over:
            measured = float(figures[0] / figures[1])
        share = measured / self.bound
        if self.most:
            share = self.bound / max(measured, 1e-9)
        found |= {"measured": measured, "share": share, "verdict": "missed"}
        if share >= 1:
            found["verdict"] = "met"
        row, remark = rows.get(self.beside, {}), self.remark
        if row.get("cut"):
            remark += "; cut off after {requests_done} requests, so the ratio is too high"
        try:
            return found | {"remark": remark.format_map(row)}
        except KeyError:  # the other case is missing, or failed
            return found


with Path(__file__).with_name("targets.csv").open(encoding="utf-8", newline="") as _table:
    _STATED = [
        {name: value for name, value in row.items() if value} for row in csv.DictReader(_table)
    ]
TARGETS = msgspec.convert(_STATED, list[Target], strict=False)


def outcomes(results: Document) -> Sequence[dict[str, Any]]:
    """Every target against the results of a run; a dry run measures none."""
    rows: dict[str, Row] = {}
    if not results["dry_run"]:
        rows = {row["case"]: row for part in results["parts"].values() for row in part["rows"]}
    return [target.outcome(rows) for target in TARGETS]


_DIFFERENCES = (
    "unwanted_nans",
    "largest_difference",
    "median_difference",
    "tolerance",
    "different_requests",
    "different_rows",
)
"""Fields that the row of a failed check may report."""
_CHECKS = columns(
    ("", "check", "right", "wrong", "not_run"), (".2f", ("largest share of the tolerance", "share"))
)
_KERNEL_COLUMNS = columns(
    ("", ("kernel", "case"), ("us (low-high)", "spread")),
    (".0%", "of_copy_bandwidth", "of_matmul_peak", "of_floor"),
)
_ENGINE_COLUMNS = {
    "decode, batch 1": columns(
        ("", ("decoding at batch 1", "case")),
        (",.1f", ("tokens/s", "tokens_per_s")),
        (".0%", "of_floor"),
    ),
    "prefill": columns(
        ("", ("prefill", "case")), (",.0f", ("tokens/s", "tokens_per_s")), (".0%", "of_floor")
    ),
    "steps of": columns(
        ("", ("steps", "case")),
        (",.0f", ("us per step, unprofiled", "unprofiled_step_us.us")),
        (".0f", "kernels_per_step"),
        (".1f", ("us per kernel", "kernel_us")),
        (".1%", ("device idle between steps", "idle_between_steps"), "idle_within_steps"),
        (".1%", ("idle, without the profiler", "idle_without_profiler")),
    ),
    "preset": columns(
        ("", ("preset", "case")),
        (",.0f", ("output tok/s", "output_tokens_per_s")),
        (",.0f", ("floor", "floor_output_tokens_per_s")),
        (".0%", "of_floor"),
        (",.1f", ("seconds", "run_seconds")),
    ),
    "opening": columns(
        ("", ("opening", "case")),
        (",.1f", ("seconds", "open_seconds"), ("of them until warm", "warm_up_seconds")),
        ("d", "graphs"),
        (",.1f", ("seconds to capture", "graph_seconds")),
        (",d", ("bytes of graphs", "graph_memory")),
        (",.1f", ("GiB free after", "free_gib")),
    ),
}
"""The columns for each kind of case, by the words behind the model's name."""
_TARGET_COLUMNS = columns(
    ("", "target", "wanted"), (".2f", "measured"), ("", "verdict", ("beside it", "remark"))
)


def to_markdown(results: Document) -> str:
    """Head, checks, kernels, engine and targets, as far as they were run, and the verdict."""
    parts: Mapping[str, Row] = results["parts"]
    blocks = list(_head(results))
    for part, tables in {
        "correctness": _correctness,
        "kernels": _kernels,
        "engine": _engine,
    }.items():
        if part in parts:
            blocks += tables(parts[part])
    heading = f"Targets, set for an {TARGET_DEVICE}"
    if TARGET_DEVICE not in results["device"].get("name", ""):
        heading += ", which this is not"
    targets = outcomes(results)
    for target in targets:
        if target["share"] is not None:
            target["verdict"] += f" ({target['share']:.0%} of it)"
    blocks += [heading, markdown_table(_TARGET_COLUMNS, targets), verdict(results)]
    return "\n\n".join(blocks) + "\n"


def verdict(results: Document) -> str:
    """How many checks are right, and how near the figures are to their targets."""
    rows = results["parts"].get("correctness", {}).get("rows", ())
    known = [row for row in rows if row.get("ok") is not None]
    words = []
    if known:
        words.append(f"{sum(bool(row['ok']) for row in known)} of {len(known)} checks are right")
    shares = [one["share"] for one in outcomes(results) if one["share"] is not None]
    if shares:
        met = f"{sum(share >= 1 for share in shares)} of {len(shares)} measured targets are met"
        words.append(f"{met}, at {spread_text(shares)} of what was wanted")
    else:
        words.append("no target was measured")
    return f"{'; '.join(words)}."


def _head(results: Document) -> Iterator[str]:
    if results["dry_run"]:
        yield "**Dry run on a CPU with tiny shapes: no figure below says anything about any GPU.**"
    device = results["device"]
    sizes = {"multiprocessors": "multiprocessors", "memory_gib": "GiB", "l2_mib": "MiB of L2"}
    size = "".join(f", {device[key]} {unit}" for key, unit in sizes.items() if key in device)
    software = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    yield (
        f"{device.get('name', 'unknown device')}{size}; {software}; commit {results['commit']}; "
        f"{results['date']}."
    )
    yield f"`{next(iter(results['parts'].values()))['command']}`"
    if unfinished := [name for name, part in results["parts"].items() if not part["complete"]]:
        yield f"Interrupted, and not complete: {', '.join(unfinished)}."


def _correctness(part: Row) -> Iterator[str]:
    kinds: dict[str, list[Row]] = {}
    # a failed row has no fields but its name, whose first words say what it was
    for row in part["rows"]:
        kinds.setdefault(row.get("check") or row["case"].partition(",")[0], []).append(row)
    table = [
        {
            "check": kind,
            "right": sum(row.get("ok") is True for row in some),
            "wrong": sum(row.get("ok") is False or "error" in row for row in some),
            "not_run": sum("skipped" in row for row in some),
            "share": max(
                (row["of_tolerance"] for row in some if row.get("of_tolerance") is not None),
                default=None,
            ),
        }
        for kind, some in kinds.items()
    ]
    yield "Correctness"
    yield markdown_table(_CHECKS, table)
    if told := [
        row for row in part["rows"] if not row.get("ok") and row.get("skipped") != BUDGET_SPENT
    ]:
        yield "\n".join(f"* {row['case']}: {_complaint(row)}" for row in told)


def _complaint(row: Row) -> str:
    found = [
        f"{name.replace('_', ' ')} {row[name]}"
        for name in _DIFFERENCES
        if row.get(name) not in (None, 0, [])
    ]
    found += [row[name] for name in ("problem", "error", "skipped") if row.get(name)]
    return ", ".join(found)


def _kernels(part: Row) -> Iterator[str]:
    rows = _with_failures(part["rows"])
    peers = dict.fromkeys(name for row in rows for name in row.get("slower", {}))
    for row in rows:
        if "us" in row:
            ours = row["routes"]["nanoserve"]
            row["spread"] = f"{row['us']:,.1f} ({ours['low']:,.1f}-{ours['high']:,.1f})"
    yield f"Kernels{_limits(part)}; times of others over ours"
    peer_columns = [Column(peer, f"slower.{peer}", ".2f") for peer in peers]
    yield markdown_table(_KERNEL_COLUMNS + peer_columns, rows)
    yield from _beyond_floor(part)
    if absent := {
        f"* {name}: {why}" for row in rows for name, why in row.get("absent", {}).items()
    }:
        yield "Not compared with:\n\n" + "\n".join(sorted(absent))


def _engine(part: Row) -> Iterator[str]:
    yield f"Engine{_limits(part)}"
    rows = _with_failures(part["rows"])
    for words, shown in _ENGINE_COLUMNS.items():
        if some := [row for row in rows if row["case"].partition(": ")[2].startswith(words)]:
            yield markdown_table(shown, some)
    yield from _beyond_floor(part)


def _beats_floor(row: Row) -> bool:
    """Whether it took less than the least time by the copy that was measured, which writes half of
    what it moves."""
    return (row.get("of_floor") or 0.0) > 1


def _beyond_floor(part: Row) -> Iterator[str]:
    if faster := [row["case"] for row in part["rows"] if _beats_floor(row)]:
        yield f"Faster than a copy of as many bytes, so that no floor is known: {'; '.join(faster)}"


def _with_failures(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows to show, with the reason of a failed one, and without a share of a floor that does not
    hold."""
    shown = []
    for row in rows:
        failed = next(
            (f"{word}: {row[word]}" for word in ("error", "skipped") if word in row), None
        )
        shown.append({**row, "failed": failed})
        if _beats_floor(row):
            shown[-1]["of_floor"] = None
    return shown


def _limits(part: Row) -> str:
    form = " (measured: copy {copy_gb_per_s:,.0f} GB/s, matmul {matmul_tflops:,.1f} TFLOP/s)"
    if not part.get("limits"):
        return ""
    return form.format(**part["limits"])
