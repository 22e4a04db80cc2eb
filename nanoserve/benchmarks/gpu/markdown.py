"""The results of a run as the tables of docs/benchmarks.md, held against what is aimed at on an H200.

Targets are ratios to what the same run measures. They are never asserted.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanoserve.benchmarks.gpu.results import Document
from nanoserve.benchmarks.tables import Column, markdown_table

TARGET_DEVICE = "H200"
Rows = Mapping[str, Mapping[str, Any]]
"""The rows of all parts, by the name of their case."""


@dataclass(frozen=True, slots=True)
class Target:
    """A bound of a figure that a row gives: exactly one of `least` and `most`; `aim` would be better still."""

    name: str
    case: str
    field: str
    """Path of the figure within the row."""
    over: str | None = None
    """Case whose figure of that name this one is divided by."""
    least: float | None = None
    most: float | None = None
    aim: float | None = None
    remark: Callable[[Rows], str] | None = None
    """Text about the same rows, shown beside the verdict."""

    def outcome(self, rows: Rows) -> dict[str, Any]:
        """The row of the target: `share` is measured over wanted, or wanted over measured where less is better."""
        bound = f"at least {self.least:g}" if self.least is not None else f"at most {self.most:g}"
        wanted = bound + (f" (aim {self.aim:g})" if self.aim is not None else "")
        found: dict[str, Any] = {
            "target": self.name,
            "wanted": wanted,
            "measured": None,
            "share": None,
            "verdict": "not measured",
        }
        try:
            measured = self._figure(rows[self.case]) / (1.0 if self.over is None else self._figure(rows[self.over]))
        except (KeyError, TypeError):  # the row is missing, or its case failed
            return found | {"verdict": "not measured"}
        share = measured / self.least if self.least is not None else (self.most or 0.0) / max(measured, 1e-9)
        found |= {"measured": measured, "share": share, "verdict": "met" if share >= 1 else "missed"}
        try:
            return found | {"remark": self.remark(rows) if self.remark else None}
        except (KeyError, TypeError):
            return found

    def _figure(self, row: Mapping[str, Any]) -> float:
        return float(Column("", self.field).value(row))


def _kernels_beside(case: str) -> Callable[[Rows], str]:
    def read(rows: Rows) -> str:
        row = rows[case]
        return f"{row['kernels_per_step']:.0f} kernels per step, {row['kernel_us']:.1f} us each on average"

    return read


def _beside_transformers(rows: Rows) -> str:
    theirs = rows["qwen3-0.6b: preset, transformers"]
    cut = f"; cut off after {theirs['requests_done']} requests, so the ratio is too high" if theirs["cut"] else ""
    return f"transformers attends by {theirs['attention']}{cut}"


_PREFILL = "prefill 8192, GQA 4, head_dim 128"

_PROMPT = "prefill attention, 8192 tokens"
_HOST = "host overhead, Qwen3-0.6B"
_FLOOR = "decode at batch 1: share of the bandwidth floor"
_IDLE = "device idle between two steps, share of a step"

TARGETS = (
    *(
        Target(
            f"decode attention, {size}, GQA {group}, head_dim 128: share of copy bandwidth",
            f"decode {size}, GQA {group}, head_dim 128",
            "of_copy_bandwidth",
            least=least,
        )
        for size, group, least in (("64 x 4096", 4, 0.85), ("64 x 4096", 8, 0.85), ("1 x 32768", 4, 0.70))
    ),
    Target(f"{_PROMPT}, head_dim 128: share of the matmul peak", _PREFILL, "of_matmul_peak", least=0.55),
    Target(f"{_PROMPT}: time of SDPA's flash back end over ours", _PREFILL, "slower.SDPA flash", least=1.0),
    *(
        Target(
            f"{name}, {_FLOOR}",
            f"{model}: decode, batch 1",
            "of_floor",
            least=least,
            aim=aim,
            remark=_kernels_beside(f"{model}: steps of batch 1"),
        )
        for name, model, least, aim in (
            ("Llama-3.1-8B", "llama-3.1-8b", 0.80, 0.90),
            ("Qwen3-0.6B", "qwen3-0.6b", 0.35, 0.50),
        )
    ),
    Target(
        "256-request preset, Qwen3-0.6B: output tokens/s over transformers' continuous batching",
        "qwen3-0.6b: preset",
        "output_tokens_per_s",
        over="qwen3-0.6b: preset, transformers",
        least=4.0,
        remark=_beside_transformers,
    ),
    *(
        Target(f"{_HOST}, {batch}: {_IDLE}", f"qwen3-0.6b: steps of {batch}", "idle_between_steps", most=0.05)
        for batch in ("batch 1", "a full batch")
    ),
)


def outcomes(results: Document) -> Sequence[dict[str, Any]]:
    """Every target against the results of a run; a dry run measures none."""
    parts = {} if results["dry_run"] else results["parts"]
    rows = {row["case"]: row for part in parts.values() for row in part["rows"]}
    return [target.outcome(rows) for target in TARGETS]


_DIFFERENCES = (
    "unwanted_nans",
    "largest_difference",
    "median_difference",
    "tolerance",
    "different_requests",
    "different_rows",
)
"""What a row of a failed check may tell."""
_CHECKS = [
    Column("check", "check"),
    Column("right", "right"),
    Column("wrong", "wrong"),
    Column("not run", "not_run"),
    Column("largest share of the tolerance", "share", ".2f"),
]
_KERNELS = [
    Column("kernel", "case"),
    Column("us (low-high)", "spread"),
    Column("of copy bandwidth", "of_copy_bandwidth", ".0%"),
    Column("of matmul peak", "of_matmul_peak", ".0%"),
    Column("of floor", "of_floor", ".0%"),
]
_ENGINE = {
    "decode, batch 1": [
        Column("decoding at batch 1", "case"),
        Column("tokens/s", "tokens_per_s", ",.1f"),
        Column("of floor", "of_floor", ".0%"),
    ],
    "prefill": [
        Column("prefill", "case"),
        Column("tokens/s", "tokens_per_s", ",.0f"),
        Column("of floor", "of_floor", ".0%"),
    ],
    "steps of": [
        Column("steps", "case"),
        Column("us per step, unprofiled", "unprofiled_step_us.us", ",.0f"),
        Column("kernels per step", "kernels_per_step", ".0f"),
        Column("us per kernel", "kernel_us", ".1f"),
        Column("device idle between steps", "idle_between_steps", ".1%"),
        Column("idle within steps", "idle_within_steps", ".1%"),
        Column("idle, without the profiler", "idle_without_profiler", ".1%"),
    ],
    "preset": [
        Column("preset", "case"),
        Column("output tok/s", "output_tokens_per_s", ",.0f"),
        Column("seconds", "run_seconds", ",.1f"),
    ],
    "opening": [
        Column("opening", "case"),
        Column("seconds", "open_seconds", ",.1f"),
        Column("of them until warm", "warm_up_seconds", ",.1f"),
        Column("graphs", "graphs", "d"),
        Column("seconds to capture", "graph_seconds", ",.1f"),
        Column("bytes of graphs", "graph_memory", ",d"),
        Column("GiB free after", "free_gib", ",.1f"),
    ],
}
"""The columns for each kind of case, by the words behind the model's name."""
_TARGETS = [
    Column("target", "target"),
    Column("wanted", "wanted"),
    Column("measured", "measured", ".2f"),
    Column("verdict", "verdict"),
    Column("beside it", "remark"),
]


def to_markdown(results: Document) -> str:
    """Head, checks, kernels, engine and targets, as far as they were run."""
    parts: Mapping[str, Mapping[str, Any]] = results["parts"]
    blocks = [*_head(results)]
    for part, tables in {"correctness": _correctness, "kernels": _kernels, "engine": _engine}.items():
        if part in parts:
            blocks += tables(parts[part])
    here = TARGET_DEVICE in results["device"].get("name", "")
    blocks.append(f"Targets, set for an {TARGET_DEVICE}" + ("" if here else ", which this is not"))
    targets = [
        one | {"verdict": one["verdict"] + (f" ({one['share']:.0%} of it)" if one["share"] is not None else "")}
        for one in outcomes(results)
    ]
    return "\n\n".join([*blocks, markdown_table(_TARGETS, targets)]) + "\n"


def _head(results: Document) -> Iterator[str]:
    if results["dry_run"]:
        yield "**Dry run on a CPU with tiny shapes: no figure below says anything about any GPU.**"
    device, versions = results["device"], results["versions"]
    size = "".join(
        f", {device[key]} {unit}"
        for key, unit in (("multiprocessors", "multiprocessors"), ("memory_gib", "GiB"), ("l2_mib", "MiB of L2"))
        if key in device
    )
    software = ", ".join(f"{name} {version}" for name, version in versions.items())
    command = next(iter(results["parts"].values()))["command"]
    yield f"{device.get('name', 'unknown device')}{size}; {software}; commit {results['commit']}; {results['date']}."
    yield f"`{command}`"
    unfinished = [name for name, part in results["parts"].items() if not part["complete"]]
    if unfinished:
        yield f"Interrupted, and not complete: {', '.join(unfinished)}."
    notes = [f"* {note}" for part in results["parts"].values() for note in part.get("notes", ())]
    if notes:
        yield "\n".join(notes)


def _correctness(part: Mapping[str, Any]) -> Iterator[str]:
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for row in part["rows"]:  # a failed row has no fields but its name, whose first words say what it was
        kinds.setdefault(row.get("check") or row["case"].partition(",")[0], []).append(row)
    table = [
        {
            "check": kind,
            "right": sum(row.get("ok") is True for row in some),
            "wrong": sum(map(_is_wrong, some)),
            "not_run": sum("skipped" in row for row in some),
            "share": max((row["of_tolerance"] for row in some if row.get("of_tolerance") is not None), default=None),
        }
        for kind, some in kinds.items()
    ]
    yield "Correctness"
    yield markdown_table(_CHECKS, table)
    if wrong := [f"* {row['case']}: {_complaint(row)}" for row in part["rows"] if _is_wrong(row)]:
        yield "\n".join(wrong)


def _is_wrong(row: Mapping[str, Any]) -> bool:
    return row.get("ok") is False or "error" in row


def _complaint(row: Mapping[str, Any]) -> str:
    if "error" in row:
        return str(row["error"])
    told = [f"{name.replace('_', ' ')} {row[name]}" for name in _DIFFERENCES if row.get(name) not in (None, 0, [])]
    return ", ".join([*told, row["problem"]] if row.get("problem") else told)


def _kernels(part: Mapping[str, Any]) -> Iterator[str]:
    rows = [_with_failure(row) for row in part["rows"]]
    peers = dict.fromkeys(name for row in rows for name in row.get("slower", {}))
    for row in rows:
        if "us" in row:
            ours = row["routes"]["nanoserve"]
            row["spread"] = f"{row['us']:,.1f} ({ours['low']:,.1f}-{ours['high']:,.1f})"
    yield f"Kernels{_limits(part)}; times of others over ours"
    yield markdown_table([*_KERNELS, *(Column(peer, f"slower.{peer}", ".2f") for peer in peers)], rows)
    absent = {f"* {name}: {why}" for row in rows for name, why in row.get("absent", {}).items()}
    if absent:
        yield "Not compared with:\n\n" + "\n".join(sorted(absent))


def _engine(part: Mapping[str, Any]) -> Iterator[str]:
    yield f"Engine{_limits(part)}"
    for words, columns in _ENGINE.items():
        rows = [_with_failure(row) for row in part["rows"] if row["case"].partition(": ")[2].startswith(words)]
        if rows:
            yield markdown_table(columns, rows)


def _with_failure(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**row, "failed": next((f"{word}: {row[word]}" for word in ("error", "skipped") if word in row), None)}


def _limits(part: Mapping[str, Any]) -> str:
    limits = part.get("limits")
    if not limits:
        return ""
    return f" (measured: copy {limits['copy_gb_per_s']:,.0f} GB/s, matmul {limits['matmul_tflops']:,.1f} TFLOP/s)"
