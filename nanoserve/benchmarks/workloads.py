"""What the engines are given to do: token ids of chosen lengths, from a grid, a preset or a trace."""

import csv
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nanoserve.errors import UsageError

LARGEST_SIZE = 2**20


@dataclass(frozen=True, slots=True)
class RequestShape:
    """How long one request is, in tokens."""

    input_tokens: int
    output_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.input_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Case:
    """A batch of equal requests that are issued together."""

    batch: int
    input_tokens: int
    output_tokens: int

    @property
    def name(self) -> str:
        return f"{self.batch} x {self.input_tokens}+{self.output_tokens}"


@dataclass(frozen=True, slots=True)
class Preset:
    """A fixed set of requests whose lengths are drawn uniformly, ends included."""

    requests: int
    input_range: tuple[int, int]
    output_range: tuple[int, int]

    def draw(self, seed: int) -> list[RequestShape]:
        """The same lengths for the same seed."""
        generator = random.Random(seed)
        return [
            RequestShape(generator.randint(*self.input_range), generator.randint(*self.output_range))
            for _ in range(self.requests)
        ]


PRESETS: dict[str, Preset] = {
    "nano-vllm": Preset(256, (100, 1024), (100, 1024)),
    "cpu": Preset(32, (25, 256), (25, 256)),
    "cpu-small": Preset(16, (12, 128), (12, 128)),
}
"""nano-vllm is the setting of that project's benchmark; the others are a quarter and an eighth of its lengths."""

_TRACE_COLUMNS = (
    ("ContextTokens", "GeneratedTokens"),  # Azure LLM inference traces
    ("num_prefill_tokens", "num_decode_tokens"),  # vidur's processed traces
    ("input_tokens", "output_tokens"),
)


def parse_sizes(text: str, flag: str) -> tuple[int, ...]:
    """Whole numbers from 1, separated by commas: "1,4,16".

    Raises:
        UsageError: naming the flag.
    """
    sizes = []
    for part in text.split(","):
        digits = part.strip()
        if not (digits.isascii() and digits.isdigit()) or not 1 <= int(digits[:12]) <= LARGEST_SIZE:
            raise UsageError(f"{flag} takes whole numbers from 1 to {LARGEST_SIZE} such as 1,4,16, not {text!r}")
        sizes.append(int(digits))
    return tuple(dict.fromkeys(sizes))


def grid(batches: Sequence[int], inputs: Sequence[int], outputs: Sequence[int]) -> list[Case]:
    """Every combination, batch sizes varying slowest."""
    return [Case(batch, length, output) for batch in batches for length in inputs for output in outputs]


def random_prompts(lengths: Sequence[int], vocab_size: int, seed: int) -> list[tuple[int, ...]]:
    """Token ids drawn uniformly from the vocabulary; equal for equal seeds."""
    generator = random.Random(seed)
    return [tuple(generator.choices(range(vocab_size), k=length)) for length in lengths]


def read_trace(path: Path, limit: int | None = None) -> list[RequestShape]:
    """The lengths in a CSV trace with a header; arrival times are not looked at.

    Known columns: ContextTokens and GeneratedTokens, num_prefill_tokens and num_decode_tokens, input_tokens and
    output_tokens. At most ``limit`` rows are read.

    Raises:
        UsageError: naming the file, and the row (its line in the file) that makes no sense.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            shapes = list(_rows(path, file, limit))
    except OSError as error:
        raise UsageError(f"cannot read the trace {path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"the trace {path} is not a CSV file in UTF-8 ({error})") from error
    if not shapes:
        raise UsageError(f"the trace {path} has no rows")
    return shapes


def _rows(path: Path, file: Iterator[str], limit: int | None) -> Iterator[RequestShape]:
    reader = csv.DictReader(file)
    columns = next((pair for pair in _TRACE_COLUMNS if set(pair) <= set(reader.fieldnames or ())), None)
    if columns is None:
        known = "; ".join(" and ".join(pair) for pair in _TRACE_COLUMNS)
        raise UsageError(f"the trace {path} has none of these pairs of columns: {known}")
    for number, row in enumerate(reader):
        if number == limit:
            return
        lengths = [_length(row[column], f"{path}, row {reader.line_num}, {column}") for column in columns]
        yield RequestShape(*lengths)


def _length(text: str | None, place: str) -> int:
    digits = (text or "").strip().removesuffix(".0")
    if not (digits.isascii() and digits.isdigit()) or not 1 <= int(digits[:12]) <= LARGEST_SIZE:
        raise UsageError(f"{place}: {text!r} is not a number of tokens from 1 to {LARGEST_SIZE}")
    return int(digits)
