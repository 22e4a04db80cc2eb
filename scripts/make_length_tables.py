"""Make nanoserve/simulator/length_tables.json from a directory of public traces.

    python scripts/make_length_tables.py TRACES

The directory holds the files named below, as their publishers call them.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from nanoserve.measures.workloads import RequestShape, read_trace
from nanoserve.simulator.workload import FILE, NUM_QUANTILES, LengthTable


def _json_lengths(path: Path) -> list[RequestShape]:
    return [RequestShape(row["prompt"], row["max_tokens"]) for row in json.loads(path.read_text())]


def _json_lines(path: Path) -> list[RequestShape]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [RequestShape(row["input_length"], row["output_length"]) for row in rows]


Reader = Callable[[Path], list[RequestShape]]
TRACES: dict[str, tuple[str, Reader, str, str]] = {
    "azure-conv": (
        "AzureLLMInferenceTrace_conv.csv",
        read_trace,
        "Azure/AzurePublicDataset, LLM inference trace 2023, conversation",
        "CC BY 4.0",
    ),
    "azure-code": (
        "AzureLLMInferenceTrace_code.csv",
        read_trace,
        "Azure/AzurePublicDataset, LLM inference trace 2023, code",
        "CC BY 4.0",
    ),
    "sharegpt-8k": (
        "sharegpt_8k_filtered_stats_llama2_tokenizer.csv",
        read_trace,
        "microsoft/sarathi-serve, ShareGPT conversations up to 8k tokens",
        "Apache-2.0",
    ),
    "arxiv": (
        "arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv",
        read_trace,
        "microsoft/vidur, arXiv summarization",
        "MIT",
    ),
    "osc": ("neo_osc_lengths_llama2.json", _json_lengths, "NEO-MLSys25/NEO, summarization comparison", "Apache-2.0"),
    "mooncake": (
        "mooncake_conversation_trace.jsonl",
        _json_lines,
        "kvcache-ai/Mooncake, conversation trace",
        "Apache-2.0",
    ),
}


def make_table(shapes: list[RequestShape], source: str, licence: str) -> LengthTable:
    """Quantiles, means and the rank correlation of some requests."""
    lengths = np.array([(shape.input_tokens, shape.output_tokens) for shape in shapes])
    shares = np.linspace(0, 1, NUM_QUANTILES)
    inputs, outputs = (np.quantile(lengths[:, column], shares, method="nearest") for column in (0, 1))
    correlation = np.corrcoef(_ranks(lengths[:, 0]), _ranks(lengths[:, 1]))[0, 1]
    return LengthTable(
        source=source,
        licence=licence,
        requests=len(shapes),
        mean_input=round(float(lengths[:, 0].mean()), 1),
        mean_output=round(float(lengths[:, 1].mean()), 1),
        rank_correlation=round(float(correlation), 4),
        input_quantiles=tuple(int(value) for value in inputs),
        output_quantiles=tuple(int(value) for value in outputs),
    )


def _ranks(values: "np.ndarray") -> "np.ndarray":
    """Ranks from 0; equal values share the mean of theirs."""
    _, position, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return ((last - counts + last - 1) / 2)[position]


def main() -> None:
    """Write the file."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    directory = Path(sys.argv[1])
    tables = {
        name: make_table(read(directory / file), source, licence)
        for name, (file, read, source, licence) in TRACES.items()
    }
    lines = [f'"{name}": {msgspec.json.encode(table).decode()}' for name, table in tables.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
