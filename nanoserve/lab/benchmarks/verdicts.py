"""The sentence that ends the output of a benchmark: a ratio, its spread, and how many rounds
count."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def spread_text(values: Iterable[float], form: str = ".2f") -> str:
    """The median with the lowest and highest value behind it: "1.24 (1.08-1.38)"; a single value
    stands alone."""
    found = list(values)
    middle = format(statistics.median(found), form)
    if len(found) < 2:
        return middle
    return f"{middle} ({min(found):{form}}-{max(found):{form}})"


def extremes(ratios: Sequence[tuple[str, str, float]]) -> str:
    """The highest and the lowest of named ratios; each has its name, its text and its median."""
    ordered = sorted(ratios, key=lambda one: one[2])
    (low_name, low_text, _), (high_name, high_text, _) = ordered[0], ordered[-1]
    highest = f"{high_name} {high_text}"
    if len(ordered) == 1:
        return highest
    return f"from {low_name} {low_text} to {highest}"


def of_steps(rows: Sequence[Row]) -> str:
    """Say the share of the floor that was reached, or how far runs lie apart where no share is
    known."""
    kinds = [row["steps"].get("decode") or row["steps"].get("all") or {} for row in rows]
    shares = [kind["of_floor"] for kind in kinds if kind.get("of_floor") is not None]
    rates = [row["samples"]["output_tokens_per_s"] for row in rows]
    apart = max(max(several) / min(several) for several in rates)
    scatter = f"the fastest run of a case has {apart:.2f} times the output tok/s of its slowest"
    if not shares:
        return scatter[0].upper() + scatter[1:]
    return (
        f"Steps that decode reach {spread_text(shares, '.0%')} of the machine's floor, and "
        f"{scatter}"
    )


def of_layers(ratios: Sequence[Row]) -> str:
    """Say what compiling layers gains."""
    gains = [one for one in ratios if one["metric"] == "output_tokens_per_s"]
    named = [
        (
            f"at {one['case']}",
            f"{one['median']:.2f} ({one['low']:.2f}-{one['high']:.2f})",
            one["median"],
        )
        for one in gains
    ]
    return f"Compiled layers over eager ones in output tok/s: {extremes(named)}"


def of_variants(ratios: Sequence[Row]) -> str:
    """Ratios of output tok/s between variants, each perhaps with the case that it is of."""
    named = []
    for one in ratios:
        ratio = one.get("ratio", one)
        if ratio["metric"] == "output_tokens_per_s":
            name = ratio["variants"]
            if "case" in one:
                name = f"{name} in {one['case']}"
            text = f"{ratio['median']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})"
            named.append((name, text, ratio["median"]))
    if not named:
        return "A single variant has nothing to be compared with"
    return f"Output tok/s: {extremes(named)}"
