"""The results of a run as the tables of docs/benchmarks.md, held against what is aimed at on an H200.

Targets are ratios to what the same run measures. They are never asserted.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from nanoserve.benchmarks.gpu.results import Document

TARGET_DEVICE = "H200"
Rows = Mapping[str, Mapping[str, Any]]
"""The rows of all parts, by the name of their case."""
Verdict = Literal["met", "missed", "not measured"]


class TargetOutcome(msgspec.Struct, frozen=True):
    """One target and what came of it."""

    target: str
    wanted: str
    """In words."""
    measured: float | None
    """The ratio, or None."""
    share: float | None
    """Measured over wanted, or wanted over measured where less is better: 1 and more is met."""
    verdict: Verdict
    remark: str = ""
    """What belongs beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A bound of a ratio that some rows give."""

    name: str
    ratio: Callable[[Rows], float]
    """Out of the rows; KeyError or TypeError where they do not hold it."""
    least: float | None = None
    most: float | None = None
    """Exactly one of the two."""
    aim: float | None = None
    """What would be better still."""
    remark: Callable[[Rows], str] | None = None
    """Text about the same rows, shown beside the verdict."""

    def outcome(self, rows: Rows) -> TargetOutcome:
        measured = _found(self.ratio, rows)
        if measured is None:
            return TargetOutcome(self.name, self._wanted(), None, None, "not measured")
        share = measured / self.least if self.least is not None else (self.most or 0.0) / max(measured, 1e-9)
        remark = _found(self.remark, rows) if self.remark else None
        return TargetOutcome(
            self.name, self._wanted(), measured, share, "met" if share >= 1 else "missed", remark or ""
        )

    def _wanted(self) -> str:
        bound = f"at least {self.least:g}" if self.least is not None else f"at most {self.most:g}"
        return bound + (f" (aim {self.aim:g})" if self.aim is not None else "")


def _found(read: Callable[[Rows], Any], rows: Rows) -> Any:
    try:
        return read(rows)
    except (KeyError, TypeError):  # the row is missing, or its case failed
        return None


def _field(case: str, name: str) -> Callable[[Rows], float]:
    return lambda rows: float(rows[case][name])


def _kernels_beside(case: str) -> Callable[[Rows], str]:
    def read(rows: Rows) -> str:
        row = rows[case]
        return f"{row['kernels_per_step']:.0f} kernels per step, {row['kernel_us']:.1f} us each on average"

    return read


def _over_transformers(rows: Rows) -> float:
    ours, theirs = rows["qwen3-0.6b: preset"], rows["qwen3-0.6b: preset, transformers"]
    return float(ours["output_tokens_per_s"]) / float(theirs["output_tokens_per_s"])


def _beside_transformers(rows: Rows) -> str:
    theirs = rows["qwen3-0.6b: preset, transformers"]
    cut = f"; cut off after {theirs['requests_done']} requests, so the ratio is too high" if theirs["cut"] else ""
    return f"transformers attends by {theirs['attention']}{cut}"


_PREFILL = "prefill 8192, GQA 4, head_dim 128"

TARGETS = (
    *(
        Target(
            name=f"decode attention, {size}, GQA {group}, head_dim 128: share of copy bandwidth",
            ratio=_field(f"decode {size}, GQA {group}, head_dim 128", "of_copy_bandwidth"),
            least=least,
        )
        for size, group, least in (("64 x 4096", 4, 0.85), ("64 x 4096", 8, 0.85), ("1 x 32768", 4, 0.70))
    ),
    Target(
        name="prefill attention, 8192 tokens, head_dim 128: share of the matmul peak",
        ratio=_field(_PREFILL, "of_matmul_peak"),
        least=0.55,
    ),
    Target(
        name="prefill attention, 8192 tokens: time of SDPA's flash back end over ours",
        ratio=lambda rows: float(rows[_PREFILL]["slower"]["SDPA flash"]),
        least=1.0,
    ),
    Target(
        name="Llama-3.1-8B, decode at batch 1: share of the bandwidth floor",
        ratio=_field("llama-3.1-8b: decode, batch 1", "of_floor"),
        least=0.80,
        aim=0.90,
        remark=_kernels_beside("llama-3.1-8b: steps of batch 1"),
    ),
    Target(
        name="Qwen3-0.6B, decode at batch 1: share of the bandwidth floor",
        ratio=_field("qwen3-0.6b: decode, batch 1", "of_floor"),
        least=0.35,
        aim=0.50,
        remark=_kernels_beside("qwen3-0.6b: steps of batch 1"),
    ),
    Target(
        name="256-request preset, Qwen3-0.6B: output tokens/s over transformers' continuous batching",
        ratio=_over_transformers,
        least=4.0,
        remark=_beside_transformers,
    ),
    *(
        Target(
            name=f"host overhead, Qwen3-0.6B, {batch}: device idle between two steps, share of a step",
            ratio=_field(f"qwen3-0.6b: steps of {batch}", "idle_between_steps"),
            most=0.05,
        )
        for batch in ("batch 1", "a full batch")
    ),
)


def outcomes(results: Document) -> Sequence[TargetOutcome]:
    """Every target against the results of a run; a dry run measures none."""
    parts = {} if results["dry_run"] else results["parts"]
    rows = {row["case"]: row for part in parts.values() for row in part["rows"]}
    return [target.outcome(rows) for target in TARGETS]


_NOTHING = ""
_FAILED = ("error", "skipped")
_DIFFERENCES = (
    "unwanted_nans",
    "largest_difference",
    "median_difference",
    "tolerance",
    "different_requests",
    "different_rows",
)
"""What a row of a failed check may tell."""


def to_markdown(results: Document) -> str:
    """Head, checks, kernels, engine and targets, as far as they were run."""
    parts: Mapping[str, Mapping[str, Any]] = results["parts"]
    blocks = [*_head(results)]
    if "correctness" in parts:
        blocks += _correctness(parts["correctness"]["rows"])
    if "kernels" in parts:
        blocks += _kernels(parts["kernels"])
    if "engine" in parts:
        blocks += _engine(parts["engine"])
    blocks += _targets(results)
    return "\n\n".join(blocks) + "\n"


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


def _correctness(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        kinds.setdefault(_check_of(row), []).append(row)
    table = [
        [
            kind,
            str(sum(row.get("ok") is True for row in some)),
            str(sum(row.get("ok") is False or "error" in row for row in some)),
            str(sum("skipped" in row for row in some)),
            _worst(some),
        ]
        for kind, some in kinds.items()
    ]
    yield "Correctness"
    yield _table(["check", "right", "wrong", "not run", "largest share of the tolerance"], table)
    wrong = [f"* {row['case']}: {_complaint(row)}" for row in rows if row.get("ok") is False or "error" in row]
    if wrong:
        yield "\n".join(wrong)


def _check_of(row: Mapping[str, Any]) -> str:
    """A failed row has no fields but its name, whose first words say what it was."""
    return str(row.get("check") or row["case"].partition(",")[0])


def _worst(rows: Iterable[Mapping[str, Any]]) -> str:
    shares = [row["of_tolerance"] for row in rows if row.get("of_tolerance") is not None]
    return f"{max(shares):.2f}" if shares else _NOTHING


def _complaint(row: Mapping[str, Any]) -> str:
    if "error" in row:
        return str(row["error"])
    names = [name for name in _DIFFERENCES if row.get(name) not in (None, 0, [])]
    told = [f"{name.replace('_', ' ')} {row[name]}" for name in names]
    return ", ".join([*told, row["problem"]] if row.get("problem") else told)


def _limits(part: Mapping[str, Any]) -> str:
    limits = part.get("limits")
    if not limits:
        return ""
    return f" (measured: copy {limits['copy_gb_per_s']:,.0f} GB/s, matmul {limits['matmul_tflops']:,.1f} TFLOP/s)"


def _kernels(part: Mapping[str, Any]) -> Iterator[str]:
    rows = part["rows"]
    peers = list(dict.fromkeys(name for row in rows for name in row.get("slower", {})))
    table = []
    for row in rows:
        if "us" not in row:
            table.append([row["case"], *_failed(row, 4 + len(peers))])
            continue
        ours = row["routes"]["nanoserve"]
        spread = f"{row['us']:,.1f} ({ours['low']:,.1f}-{ours['high']:,.1f})"
        shares = [f"{row[name]:.0%}" for name in ("of_copy_bandwidth", "of_matmul_peak", "of_floor")]
        slower = [f"{row['slower'][name]:.2f}" if name in row["slower"] else _NOTHING for name in peers]
        table.append([row["case"], spread, *shares, *slower])
    yield f"Kernels{_limits(part)}; times of others over ours"
    yield _table(["kernel", "us (low-high)", "of copy bandwidth", "of matmul peak", "of floor", *peers], table)
    absent = {f"* {name}: {why}" for row in rows for name, why in row.get("absent", {}).items()}
    if absent:
        yield "Not compared with:\n\n" + "\n".join(sorted(absent))


def _failed(row: Mapping[str, Any], columns: int) -> list[str]:
    reason = next((f"{word}: {row[word]}" for word in _FAILED if word in row), "no figures")
    return [reason, *[_NOTHING] * (columns - 1)]


_ENGINE_TABLES = (
    ("decode, batch 1", "Decoding at batch 1", (("tokens/s", "tokens_per_s", ",.1f"), ("of floor", "of_floor", ".0%"))),
    ("prefill", "Prefill", (("tokens/s", "tokens_per_s", ",.0f"), ("of floor", "of_floor", ".0%"))),
    (
        "steps of",
        "Steps",
        (
            ("us per step, unprofiled", "unprofiled_step_us.us", ",.0f"),
            ("kernels per step", "kernels_per_step", ".0f"),
            ("us per kernel", "kernel_us", ".1f"),
            ("device idle between steps", "idle_between_steps", ".1%"),
            ("idle within steps", "idle_within_steps", ".1%"),
            ("idle, without the profiler", "idle_without_profiler", ".1%"),
        ),
    ),
    ("preset", "Preset", (("output tok/s", "output_tokens_per_s", ",.0f"), ("seconds", "run_seconds", ",.1f"))),
    (
        "opening",
        "Opening",
        (
            ("seconds", "open_seconds", ",.1f"),
            ("of them until warm", "warm_up_seconds", ",.1f"),
            ("graphs", "graphs", "d"),
            ("seconds to capture", "graph_seconds", ",.1f"),
            ("bytes of graphs", "graph_memory", ",d"),
            ("GiB free after", "free_gib", ",.1f"),
        ),
    ),
)
"""A table for each kind of case, by the words behind the model's name."""


def _engine(part: Mapping[str, Any]) -> Iterator[str]:
    yield f"Engine{_limits(part)}"
    for words, title, columns in _ENGINE_TABLES:
        rows = [row for row in part["rows"] if row["case"].partition(": ")[2].startswith(words)]
        if not rows:
            continue
        table = [
            [row["case"], *_failed(row, len(columns))]
            if any(word in row for word in _FAILED)
            else [row["case"], *(_text(row, path, form) for _, path, form in columns)]
            for row in rows
        ]
        yield _table([title.lower(), *(heading for heading, _, _ in columns)], table)


def _text(row: Mapping[str, Any], path: str, form: str) -> str:
    value: Any = row
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return _NOTHING if value is None else format(value, form)


def _targets(results: Document) -> Iterator[str]:
    here = TARGET_DEVICE in results["device"].get("name", "")
    yield f"Targets, set for an {TARGET_DEVICE}" + ("" if here else ", which this is not")
    table = [
        [
            one.target,
            one.wanted,
            _NOTHING if one.measured is None else f"{one.measured:.2f}",
            one.verdict + (f" ({one.share:.0%} of it)" if one.share is not None else ""),
            one.remark,
        ]
        for one in outcomes(results)
    ]
    yield _table(["target", "wanted", "measured", "verdict", "beside it"], table)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines)
