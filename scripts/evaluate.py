"""Runs lm-evaluation-harness on transformers and on servers of the same checkpoint, and compares
them item by item.

    pip install "lm_eval[api,hf]"
    python -m scripts.evaluate --text stories.txt --model smollm2

The two tasks are made from any English text: which of two short sentences comes next (multiple
choice), and the perplexity of single sentences. Each run's results and samples stay in
``--output``.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from nanoserve.models.hub import LINK_NAME, resolve_model

TASKS = ("next_sentence", "short_sentences")
COMMON = ("--dtype", "float32", "--eager", "--max-model-len", "512", "--kv-cache-memory", "256MiB")
SERVERS = {
    "sarathi": (),
    "throttling, 2 stages": ("--policy", "throttling", "--pp", "2"),
    "hybrid": ("--policy", "hybrid", "--host-kv-memory", "256MiB"),
}
_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_READY = re.compile(r"listening on (\S+)")


class Item(NamedTuple):
    """Log-likelihoods of one item."""

    log_likelihoods: list[float]
    """One of each choice, or one of the whole text."""

    @property
    def picked(self) -> int:
        return max(range(len(self.log_likelihoods)), key=self.log_likelihoods.__getitem__)


def short_pairs(text: str, most_words: int) -> Iterator[tuple[str, str]]:
    """Neighbouring sentences of which each has 4 words at least, and ``most_words`` at most."""
    for paragraph in re.split(r"\n\s*\n|<\|endoftext\|>", text):
        sentences = [" ".join(sentence.split()) for sentence in _SENTENCE.split(paragraph)]
        for pair in pairwise(sentences):
            if all(
                4 <= len(sentence.split()) <= most_words and '"' not in sentence
                for sentence in pair
            ):
                yield pair


def write_tasks(text: str, count: int, directory: Path) -> None:
    """The two tasks of lm_eval, each of ``count`` items, as YAML (which JSON is) beside its
    data."""
    random.seed(0)
    unlike = {second: first for first, second in short_pairs(text, most_words=7)}
    pairs = sorted((first, second) for second, first in unlike.items())
    if len(pairs) < count:
        sys.exit(f"the text has {len(pairs)} pairs of short sentences, fewer than --items {count}")
    pairs = random.sample(pairs, count)
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in TASKS}
    for place, (first, second) in enumerate(pairs):
        answer, choices = random.randrange(2), [pairs[place - 1][1]]
        choices.insert(answer, second)
        rows[TASKS[0]].append({"context": first, "choices": choices, "answer": answer})
        rows[TASKS[1]].append({"text": f"{first} {second}"})
    perplexities = [{"metric": name} for name in ("word_perplexity", "byte_perplexity")]
    kinds: tuple[dict[str, Any], ...] = (
        {
            "output_type": "multiple_choice",
            "doc_to_text": "{{context}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "answer",
            "metric_list": [{"metric": "acc"}],
        },
        {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": perplexities,
        },
    )
    for name, kind in zip(TASKS, kinds, strict=True):
        data = directory / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
        source = {
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
        }
        (directory / f"{name}.yaml").write_text(
            json.dumps({"task": name, **source, **kind}, indent=1)
        )


def run_harness(model: str, settings: dict[str, object], tasks: Path, output: Path) -> None:
    words = [
        sys.executable,
        "-m",
        "lm_eval",
        "--model",
        model,
        "--include_path",
        str(tasks),
        "--tasks",
        ",".join(TASKS),
    ]
    words += ["--model_args", ",".join(f"{name}={value}" for name, value in settings.items())]
    # a server makes its batches itself, of concurrent requests
    batch = "16" if model == "hf" else "1"
    words += ["--batch_size", batch, "--log_samples", "--output_path", str(output)]
    caches = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tasks / "cache")}
    subprocess.run(words, check=True, env=os.environ | caches)


@contextmanager
def serving(model: str, options: Sequence[str]) -> Iterator[str]:
    """The address of a server that is loading or ready."""
    words = [
        sys.executable,
        "-m",
        "nanoserve",
        "serve",
        "--model",
        model,
        "--port",
        "0",
        *COMMON,
        *options,
    ]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            address = ""
            for line in process.stderr:
                print(line, end="", file=sys.stderr)
                if found := _READY.search(line):
                    address = found[1]
                if line.startswith("ready"):
                    break
            yield address
        finally:
            process.terminate()


def read_items(output: Path, task: str) -> list[Item]:
    """The items of a run, in the order of its data."""
    (file,) = output.rglob(f"samples_{task}_*.jsonl")
    samples = sorted(
        map(json.loads, file.read_text().splitlines()), key=lambda sample: sample["doc_id"]
    )
    replies = [[reply[0] for reply in sample["resps"]] for sample in samples]
    return [
        Item([float(one[0] if isinstance(one, list) else one) for one in each]) for each in replies
    ]


def read_results(output: Path) -> str:
    (file,) = output.rglob("results_*.json")
    results = json.loads(file.read_text())["results"]
    wanted = {"acc,none": "accuracy", "word_perplexity,none": "perplexity of a word"}
    found = [(text, results[task].get(name)) for task in TASKS for name, text in wanted.items()]
    return ", ".join(f"{text} {value:.6f}" for text, value in found if value is not None)


def compare(name: str, output: Path, reference: Path) -> None:
    """Print a run's results, and how far its items are from those of the reference."""
    print(f"{name}: {read_results(output)}")
    for task in TASKS:
        pairs = list(zip(read_items(output, task), read_items(reference, task), strict=True))
        differences = [
            abs(own - theirs)
            for one, other in pairs
            for own, theirs in zip(one.log_likelihoods, other.log_likelihoods, strict=True)
        ]
        picked = sum(one.picked != other.picked for one, other in pairs)
        largest = max(differences)
        print(
            f"  {task}: {len(pairs)} items, {picked} pick another choice; largest difference "
            f"{largest:.2g} nats"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--text", type=Path, required=True, help="English text from which the items are made"
    )
    parser.add_argument(
        "--model",
        default="smollm2",
        help="as for nanoserve serve; transformers reads the same files",
    )
    parser.add_argument("--items", type=int, default=500, help="items of each task")
    parser.add_argument(
        "--output", type=Path, default=Path("evaluation"), help="an empty or new directory"
    )
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    write_tasks(options.text.read_text(), options.items, options.output)
    model = resolve_model(options.model)
    # torch's softmax of a large vocabulary in float32 is off by 1e-5 in every token, always to one
    # side.
    files = {"pretrained": model.directory, "dtype": "float32", "softmax_dtype": "float64"}
    tokenizer = model.tokenizer_directory
    if model.directory is not None and (model.directory / LINK_NAME).exists():
        files["gguf_file"] = LINK_NAME
    reference = options.output / "transformers"
    run_harness("hf", files | {"tokenizer": tokenizer}, options.output, reference)
    compare("transformers", reference, reference)
    for name, flags in SERVERS.items():
        output = options.output / name.replace(", ", "-").replace(" ", "-")
        with serving(options.model, flags) as address:
            asked = {
                "base_url": f"{address}/v1/completions",
                "model": model.name,
                "tokenizer": tokenizer,
            }
            asked |= {"tokenizer_backend": "huggingface", "num_concurrent": 8, "max_length": 512}
            run_harness("local-completions", asked, options.output, output)
        compare(name, output, reference)


if __name__ == "__main__":
    main()
