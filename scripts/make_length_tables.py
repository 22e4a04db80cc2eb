"""Make nanoserve/lab/simulator/length_tables.json from a directory of public traces.

    python scripts/make_length_tables.py TRACES

The directory holds the files named below, as their publishers call them.
"""

import sys
from pathlib import Path

import msgspec
import numpy as np

from nanoserve.lab.simulator.workload import FILE, NUM_QUANTILES, LengthTable
from nanoserve.lab.workloads import read_trace
from nanoserve.request import RequestShape

FILES = {
    "azure-conv": "AzureLLMInferenceTrace_conv.csv",
    "azure-code": "AzureLLMInferenceTrace_code.csv",
    "sharegpt-8k": "sharegpt_8k_filtered_stats_llama2_tokenizer.csv",
    "arxiv": "arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv",
    "osc": "neo_osc_lengths_llama2.json",
    "mooncake": "mooncake_conversation_trace.jsonl",
}
SOURCES = {
    "azure-conv": ("Azure/AzurePublicDataset, LLM inference trace 2023, conversation", "CC BY 4.0"),
    "azure-code": ("Azure/AzurePublicDataset, LLM inference trace 2023, code", "CC BY 4.0"),
    "sharegpt-8k": (
        "microsoft/sarathi-serve, ShareGPT conversations up to 8k tokens",
        "Apache-2.0",
    ),
    "arxiv": ("microsoft/vidur, arXiv summarization", "MIT"),
    "osc": ("NEO-MLSys25/NEO, summarization comparison", "Apache-2.0"),
    "mooncake": ("kvcache-ai/Mooncake, conversation trace", "Apache-2.0"),
}
"""The publisher's source of each, and its licence."""


def read_shapes(path: Path) -> list[RequestShape]:
    if path.suffix == ".csv":
        return read_trace(path)
    if path.suffix == ".json":
        return [
            RequestShape(row["prompt"], row["max_tokens"])
            for row in msgspec.json.decode(path.read_bytes())
        ]
    rows = msgspec.json.Decoder().decode_lines(path.read_bytes())
    return [RequestShape(row["input_length"], row["output_length"]) for row in rows]


def make_table(shapes: list[RequestShape], source: str, licence: str) -> LengthTable:
    """Quantiles, means and the rank correlation of some requests."""
    lengths = np.array([(shape.input_tokens, shape.output_tokens) for shape in shapes])
    inputs, outputs = np.quantile(
        lengths, np.linspace(0, 1, NUM_QUANTILES), axis=0, method="nearest"
    ).T
    correlation = np.corrcoef(*map(_ranks, lengths.T))[0, 1]
    return LengthTable(
        source=source,
        licence=licence,
        requests=len(shapes),
        mean_input=round(float(lengths[:, 0].mean()), 1),
        mean_output=round(float(lengths[:, 1].mean()), 1),
        rank_correlation=round(float(correlation), 4),
        input_quantiles=tuple(inputs.tolist()),
        output_quantiles=tuple(outputs.tolist()),
    )


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 0; equal values share the mean of theirs."""
    _, position, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return ((last - counts + last - 1) / 2)[position]


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    tables = {
        name: make_table(read_shapes(Path(sys.argv[1], file)), *SOURCES[name])
        for name, file in FILES.items()
    }
    lines = [f'"{name}": {msgspec.json.encode(table).decode()}' for name, table in tables.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
