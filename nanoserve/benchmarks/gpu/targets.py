"""What is aimed at on an H200, as ratios to what the same run measures, held against its results. Never asserted."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from nanoserve.benchmarks.gpu.results import Document

TARGET_DEVICE = "H200"
Rows = Mapping[str, Mapping[str, Any]]
"""The rows of all parts, by the name of their case."""
Verdict = Literal["met", "missed", "not measured"]


class Outcome(msgspec.Struct, frozen=True):
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
    """Of the same rows."""

    def outcome(self, rows: Rows) -> Outcome:
        measured = _found(self.ratio, rows)
        if measured is None:
            return Outcome(self.name, self._wanted(), None, None, "not measured")
        share = measured / self.least if self.least is not None else (self.most or 0.0) / max(measured, 1e-9)
        remark = _found(self.remark, rows) if self.remark else None
        return Outcome(self.name, self._wanted(), measured, share, "met" if share >= 1 else "missed", remark or "")

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


def outcomes(results: Document) -> Sequence[Outcome]:
    """Every target against the results of a run; a dry run measures none."""
    parts = {} if results["dry_run"] else results["parts"]
    rows = {row["case"]: row for part in parts.values() for row in part["rows"]}
    return [target.outcome(rows) for target in TARGETS]
