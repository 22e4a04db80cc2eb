"""Prune the storyteller in many ways, heal some of the results, train the same shape from random
weights, and write the data of figure pruning, which ships with the package.

    python scripts/train_pruning.py --data DIR --output DIR

The directory of data is that of train_storyteller.py. A model and the way in which it is trained
is a run, and has a file of its own in the output directory. Runs whose file is there are not made
again, so the script can be stopped at any time and goes on where it was. There are two runs at a
time, with one thread each. Minutes are those of processor time. When all runs are there, their
numbers are written to nanoserve/lab/papers/pruning.csv.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

# as in train_recall.py
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", "1000000000")
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "1000000000")

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))  # the project need not be installed

import storyteller_data as data
import torch
from distil import Loss, Plan, Trainer, cut_rows, divergence, logits_of
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from nanoserve.config.model_config import ModelConfig
from nanoserve.lab.papers.running import Runner
from nanoserve.models import rounding
from nanoserve.models.decoder import Decoder, DecoderLayer, FeedForward
from nanoserve.models.loading import load_model
from nanoserve.models.pruning.importance import Importance, measure_importance
from nanoserve.models.pruning.trimming import Sizes, check_sizes, choose, trim_checkpoint
from nanoserve.utils.files import replace_file

STORYTELLER = REPOSITORY / "nanoserve/assets/storyteller"
DATA = REPOSITORY / "nanoserve/lab/papers/pruning.csv"
SEEDS = (0, 1, 2)
COLUMNS = (
    *("model", "importance", "training", "seed"),
    *("parameters", "tokens", "seconds", "perplexity"),
)
SIZES = {
    "feed-forward 576 of 768": Sizes(intermediate_size=576),
    "feed-forward 384 of 768": Sizes(intermediate_size=384),
    "4 of 8 heads": Sizes(num_heads=4),
    "hidden size 192 of 256": Sizes(hidden_size=192),
    "3 of 4 layers": Sizes(num_layers=3),
}
HEALED = "feed-forward 384 of 768"
"""The model that is healed, and whose shape is trained from random weights."""
IMPORTANCES = ("activation", "magnitude", "random")

ROW, ROWS = 256, 4
"""Tokens of a row and rows of a step."""
TOKENS = 40 * ROW * ROWS
HEALING_RATE, FRESH_RATE = 1e-3, 3e-3
"""The highest learning rates: of healing, and of training from random weights, where 8e-3 is
worse."""
CALIBRATING_ROWS = 64
ONE_PIECE_IN = 24
"""Share of the validation stories that are read."""
LONGEST = 1024


class Texts(NamedTuple):
    """The token ids of all texts."""

    training: Tensor
    """Rows, int64 [N, ROW]. The first of them are those of calibration."""
    validation: Sequence[Tensor]


def read_texts(directory: Path) -> Texts:
    """Stories, each after its start token; those of validation are never trained on."""
    tokenizer = Tokenizer.from_file(str(STORYTELLER / "tokenizer.json"))
    raw = (directory / "tinystories_train_subset.txt").read_text(encoding="utf-8")
    training = list[int]()
    for story in raw.split(data.END_OF_TEXT):
        if story.strip():
            training += tokenizer.encode(data.normalize(story)).ids
    raw = (directory / "tinystories_valid_subset.txt").read_text(encoding="utf-8")
    pieces = data.split_validation_stories(raw)[::ONE_PIECE_IN]
    validation = [torch.tensor(tokenizer.encode(piece).ids[:LONGEST]) for piece in pieces]
    return Texts(cut_rows(training, ROW), validation)


class PruningRun(NamedTuple):
    """A job for a Runner. It makes one model, and keeps its numbers in a file of its own."""

    model: str
    """One of SIZES, or "whole"."""
    importance: str
    """One of IMPORTANCES, or "none" for random weights and the whole model."""
    training: str
    """"none"; "distilled" for TOKENS; "next tokens" for TOKENS; or "next tokens, equal time"."""
    seed: int
    texts: Path
    directory: Path
    seconds: float | None = None
    """The processor time of equal time."""

    def run(self) -> dict[str, Any]:
        """The numbers of the model; read if the file is there."""
        name = f"{self.model} {self.importance} {self.training} {self.seed}".replace(" ", "-")
        path = self.directory / f"{name}.json"
        if not path.exists():
            torch.set_num_threads(1)
            replace_file(path, json.dumps(self._result()).encode())
        result: dict[str, Any] = json.loads(path.read_bytes())
        return result

    def _result(self) -> dict[str, Any]:
        texts = read_texts(self.texts)
        decoder = self._start(texts)
        tokens, seconds = 0, 0.0
        if self.training != "none":
            trainer = Trainer(decoder, texts.training, self._plan())
            for step in trainer.run(self._loss(decoder)):
                tokens, seconds = step.tokens, step.seconds
                if step.number % 20 == 0:
                    print(
                        f"{self.model}, {self.importance}, {self.training}, seed {self.seed}: "
                        f"{step.share:.0%}, loss {step.loss:.3f}",
                        flush=True,
                    )
        return {
            "model": self.model,
            "importance": self.importance,
            "training": self.training,
            "seed": self.seed,
            "parameters": sum(one.numel() for one in decoder.parameters()),
            "tokens": tokens,
            "seconds": seconds,
            "perplexity": perplexity(decoder, texts.validation),
        }

    def _start(self, texts: Texts) -> Decoder:
        """The decoder before it is trained."""
        whole, config = load_model(STORYTELLER, "float32")
        if self.model == "whole":
            return whole
        sizes = SIZES[self.model]
        check_sizes(sizes, config)
        with TemporaryDirectory() as directory:
            importance = self._importance(whole, texts)
            trim_checkpoint(STORYTELLER, Path(directory), choose(importance, sizes, config))
            pruned, own_config = load_model(directory, "float32")
        if self.importance != "none":
            return pruned
        torch.manual_seed(self.seed)
        return Decoder(own_config)

    def _importance(self, whole: Decoder, texts: Texts) -> Importance:
        if self.importance == "activation":
            rows = list(texts.training[:CALIBRATING_ROWS])
            return measure_importance(whole, rows, lambda done, total: None)
        if self.importance == "magnitude":
            return magnitudes(whole)
        return drawn(whole.config, self.seed)

    def _plan(self) -> Plan:
        rate = FRESH_RATE
        if self.importance != "none":
            rate = HEALING_RATE
        if self.seconds is not None:
            return Plan(ROWS, rate, self.seed, seconds=self.seconds)
        return Plan(ROWS, rate, self.seed, tokens=TOKENS)

    def _loss(self, decoder: Decoder) -> Loss:
        if self.training == "distilled":
            return divergence(decoder, load_model(STORYTELLER, "float32")[0])
        return next_tokens(decoder)


def next_tokens(decoder: Decoder) -> Loss:
    """Cross entropy of the tokens after the first of each row."""

    def loss(rows: Tensor) -> Tensor:
        logits = logits_of(decoder, rows).view(*rows.shape, -1)
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())

    return loss


@torch.inference_mode()
def perplexity(decoder: Decoder, texts: Sequence[Tensor]) -> float:
    """exp of the mean negative log probability of all tokens but the first of each text."""
    return rounding.perplexity(decoder, rounding.run_texts(decoder, texts), texts)


@torch.inference_mode()
def magnitudes(decoder: Decoder) -> Importance:
    """The importance of parts by the L2 norm of all weights that leave with them; nothing is
    computed with the model."""
    layers, groups, neurons = list[Tensor](), list[Tensor](), list[Tensor]()
    hidden = decoder.embedding.weight.square().sum(0)
    for layer in decoder.layers:
        assert isinstance(layer, DecoderLayer)
        feed_forward = layer.feed_forward
        assert isinstance(feed_forward, FeedForward)
        qkv, output = layer.qkv.weight.square(), layer.output.weight.square()
        gate_up, down = feed_forward.gate_up.weight.square(), feed_forward.down.weight.square()
        hidden += qkv.sum(0) + output.sum(1) + gate_up.sum(0) + down.sum(1)
        neurons.append((gate_up.sum(1).view(2, -1).sum(0) + down.sum(0)).sqrt())
        query, key, value = qkv.sum(1).split(layer.config.qkv_sizes)
        heads = layer.config.num_kv_heads
        by_group = [part.view(heads, -1).sum(1) for part in (query, key, value, output.sum(0))]
        groups.append(torch.stack(by_group).sum(0).sqrt())
        layers.append((qkv.sum() + output.sum() + gate_up.sum() + down.sum()).sqrt())
    return Importance(torch.stack(layers), hidden.sqrt(), torch.stack(groups), torch.stack(neurons))


def drawn(config: ModelConfig, seed: int) -> Importance:
    """The importance of parts at random."""
    generator = torch.Generator().manual_seed(seed)

    def scores(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    layers = config.num_layers
    return Importance(
        scores(layers),
        scores(config.hidden_size),
        scores(layers, config.num_kv_heads),
        scores(layers, config.intermediate_size),
    )


def first_runs(texts: Path, directory: Path) -> list[PruningRun]:
    """All runs but those whose length depends on others."""
    runs = [PruningRun("whole", "none", "none", 0, texts, directory)]
    for model, importance in product(SIZES, IMPORTANCES):
        seeds = SEEDS if importance == "random" else SEEDS[:1]
        runs += [PruningRun(model, importance, "none", seed, texts, directory) for seed in seeds]
    for seed in SEEDS:  # all of a seed before those of the next one
        for importance in ("activation", "none"):
            runs.append(PruningRun(HEALED, importance, "distilled", seed, texts, directory))
        runs.append(PruningRun(HEALED, "none", "next tokens", seed, texts, directory))
    return runs


def equally_long_runs(
    outcomes: Mapping[PruningRun, Mapping[str, Any]], texts: Path, directory: Path
) -> list[PruningRun]:
    """Training from random weights that takes as much processor time as healing took."""
    runs = []
    for seed in SEEDS:
        healed = outcomes[PruningRun(HEALED, "activation", "distilled", seed, texts, directory)]
        name = "next tokens, equal time"
        runs.append(PruningRun(HEALED, "none", name, seed, texts, directory, healed["seconds"]))
    return runs


def to_csv(results: Iterable[Mapping[str, Any]]) -> str:
    """Make a row for each run."""
    text = io.StringIO()
    table = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    table.writeheader()
    for result in results:
        rounded = {
            "seconds": round(result["seconds"]),
            "perplexity": round(result["perplexity"], 3),
        }
        table.writerow({**result, **rounded})
    return text.getvalue()


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the runs that are missing, then write the data."""
    parser = argparse.ArgumentParser(description="Make all models of figure pruning.")
    parser.add_argument("--data", type=Path, required=True, help="Directory of the stories.")
    parser.add_argument("--output", type=Path, required=True, help="Directory of the runs.")
    options = parser.parse_args(arguments)
    directory: Path = options.output
    directory.mkdir(parents=True, exist_ok=True)

    def report(done: int, total: int) -> None:
        print(f"{done} of {total} runs are there", flush=True)

    with Runner(workers=2, progress=report) as runner:
        runs = first_runs(options.data, directory)
        outcomes = runner.run(runs)
        runs += equally_long_runs(outcomes, options.data, directory)
        outcomes = runner.run(runs)
    replace_file(DATA, to_csv(outcomes[run] for run in runs).encode())
    seconds = sum(outcomes[run]["seconds"] for run in runs)
    print(f"{DATA}: {len(runs)} runs, {seconds / 60:.0f} minutes of processor time in training")


if __name__ == "__main__":
    main()
