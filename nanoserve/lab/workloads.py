"""Requests for engines: token ids of chosen lengths, from a grid, a preset or a trace."""

import csv
import math
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from nanoserve.errors import UsageError, shown
from nanoserve.request import RequestShape

LARGEST_SIZE = 2**20
# seconds; the year 9999 is at 2.5e11, and beyond some more the fractions of a second get lost
_LATEST = 1e12


@dataclass(frozen=True, slots=True)
class BatchCase:
    """A batch of equal requests that are issued together."""

    batch: int
    input_tokens: int
    output_tokens: int

    @property
    def name(self) -> str:
        return f"{self.batch} x {self.input_tokens}+{self.output_tokens}"


class LocalCase(NamedTuple):
    """Requests that are issued together."""

    name: str
    shapes: Sequence[RequestShape]
    warm_up: Sequence[RequestShape]  # run before them, unmeasured
    announced: str  # what is measured, in words


@dataclass(frozen=True, slots=True)
class Preset:
    """A fixed set of requests whose lengths are drawn uniformly, ends included."""

    requests: int
    input_range: tuple[int, int]
    output_range: tuple[int, int]

    def draw(self, seed: int) -> list[RequestShape]:
        generator = random.Random(seed)
        (shortest, longest), (least, most) = self.input_range, self.output_range
        return [
            RequestShape(generator.randint(shortest, longest), generator.randint(least, most))
            for _ in range(self.requests)
        ]


PRESETS: dict[str, Preset] = {
    "nano-vllm": Preset(256, (100, 1024), (100, 1024)),
    "cpu": Preset(32, (25, 256), (25, 256)),
    "cpu-small": Preset(16, (12, 128), (12, 128)),
}
"""nano-vllm is the setting of that project's benchmark; the others are a quarter and an eighth of
its lengths."""

# Azure's dates (ISO 8601); seconds, as vidur's
_TIME_COLUMNS = (("TIMESTAMP",), ("arrived_at",), ("arrival_time",))
_LENGTH_COLUMNS = (
    ("ContextTokens", "GeneratedTokens"),  # Azure LLM inference traces
    ("num_prefill_tokens", "num_decode_tokens"),  # vidur's processed traces
    ("input_tokens", "output_tokens"),
)


def parse_sizes(text: str, flag: str) -> tuple[int, ...]:
    """Whole numbers from 1, separated by commas: "1,4,16". Raises UsageError, naming the flag."""
    sizes = [_size(part.strip()) for part in text.split(",")]
    if not all(sizes):
        raise UsageError(
            f"{flag} takes whole numbers from 1 to {LARGEST_SIZE} such as 1,4,16, not {shown(text)}"
        )
    return tuple(dict.fromkeys(sizes))


def parse_lengths(text: str, flag: str) -> tuple[RequestShape, ...]:
    """Tokens in and out of requests, separated by commas: "128+32,512+64". Raises UsageError,
    naming the flag."""
    shapes = []
    for part in text.split(","):
        words = part.split("+")
        if len(words) != 2:
            raise UsageError(f"{flag} takes tokens in and out such as 512+128, not {shown(part)}")
        inputs, outputs = (parse_sizes(word, flag)[0] for word in words)
        shapes.append(RequestShape(inputs, outputs))
    return tuple(dict.fromkeys(shapes))


def random_prompts(lengths: Sequence[int], vocab_size: int, seed: int) -> list[tuple[int, ...]]:
    """Token ids drawn uniformly from the vocabulary; equal for equal seeds."""
    generator = random.Random(seed)
    return [tuple(generator.choices(range(vocab_size), k=length)) for length in lengths]


def read_trace(path: Path, limit: int | None = None) -> list[RequestShape]:
    """The lengths in at most `limit` rows of a CSV trace with a header; its arrival times are for
    ``read_arrivals``. Raises UsageError, naming the file, and the row (its line in the file) that
    makes no sense."""
    known = "; ".join(" and ".join(pair) for pair in _LENGTH_COLUMNS)
    rows = _rows(path, limit, _LENGTH_COLUMNS, f"has none of these pairs of columns: {known}")
    shapes = []
    for row in rows:
        inputs, outputs = (_length(text, place) for place, text in row)
        shapes.append(RequestShape(inputs, outputs))
    return shapes


def read_arrivals(path: Path, limit: int | None = None, *, in_order: bool = False) -> list[float]:
    """The arrival times in a CSV trace, in seconds from some moment on, in the order of its rows.
    Raises UsageError as ``read_trace`` does; with ``in_order`` also for a row that comes before the
    one in front of it."""
    known = ", ".join(name for (name,) in _TIME_COLUMNS)
    refusal, moments = f"tells no arrival times: it has none of {known}; give a rate", list[float]()
    for ((place, text),) in _rows(path, limit, _TIME_COLUMNS, refusal):
        moment = _moment(text, place)
        if in_order and moments and moment < moments[-1]:
            raise UsageError(
                f"{place}: {text} is before the row in front of it; sort the trace by time"
            )
        moments.append(moment)
    return moments


def _rows(
    path: Path, limit: int | None, known: Sequence[Sequence[str]], refusal: str
) -> list[list[tuple[str, str]]]:
    """Places and texts of the first known columns in the first rows of a trace; `refusal` is the
    error for none."""
    try:
        # a directory; or a pipe or device, reading which might never end
        if path.exists() and not path.is_file():
            raise UsageError(f"the trace {path} is not a regular file")
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            if not reader.fieldnames:
                raise UsageError(f"the trace {path} is empty")
            columns = next((names for names in known if set(names) <= set(reader.fieldnames)), None)
            if columns is None:
                raise UsageError(f"the trace {path} {refusal}")
            rows = [
                [
                    (f"{path}, row {reader.line_num}, {column}", row[column] or "")
                    for column in columns
                ]
                for row in islice(reader, limit)
            ]
    except OSError as error:
        raise UsageError(f"cannot read the trace {path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"the trace {path} is not a CSV file in UTF-8 ({error})") from error
    if not rows:
        raise UsageError(f"the trace {path} has no rows")
    return rows


def _moment(text: str, place: str) -> float:
    """Seconds; of a date, since 1970 as if it were in UTC: only differences are looked at."""
    seconds = math.nan
    with suppress(ValueError):
        seconds = datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
    with suppress(ValueError):
        seconds = float(text)
    if not -_LATEST <= seconds <= _LATEST:  # nor is a NaN
        raise UsageError(
            f"{place}: {shown(text)} is no time in seconds or as 2023-11-16 18:17:03.97"
        )
    return seconds


def _length(text: str, place: str) -> int:
    size = _size(text.strip().removesuffix(".0"))
    if not size:
        raise UsageError(
            f"{place}: {shown(text)} is not a number of tokens from 1 to {LARGEST_SIZE}"
        )
    return size


def _size(text: str) -> int:
    """A whole number from 1 to the largest size; 0 if it is none."""
    if not text.isascii() or not text.isdigit():
        return 0
    size = int(text[:12])
    if size > LARGEST_SIZE:
        return 0
    return size
