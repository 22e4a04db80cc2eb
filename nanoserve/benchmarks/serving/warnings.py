"""What a reader should know before believing a row: a benchmark says itself where its figures are weak."""

from collections.abc import Mapping
from typing import Any

_LATE_MS = 50.0


def warnings(row: Mapping[str, Any]) -> list[str]:
    """One line each, of a row of ``bench serve``."""
    lines = [f"{count} requests failed: {failure}" for failure, count in row["failures"].items()]
    if row["unfinished"]:
        lines.append(f"interrupted, {row['unfinished']} requests had no answer yet")
    if row["uncounted"]:
        lines.append(f"the server counted no tokens of {row['uncounted']} answers: their pieces stand for tokens")
    if row["of_other_length"]:
        lines.append(f"{row['of_other_length']} answers are not of the length that was asked for")
    if row["without_text"]:
        lines.append(
            f"{row['without_text']} answers showed no text before they ended: that is their first token's time"
        )
    if row["cached_tokens"]:
        share = row["cached_tokens"] / row["input_tokens"]
        lines.append(f"{share:.1%} of the prompt tokens came from the server's prefix cache")
    delay = row["send_delay_ms"]
    if delay is not None and delay["p99"] > _LATE_MS:
        lines.append(f"the client was late itself: by {delay['p99']:,.0f} ms in the 99th percentile")
    return lines
