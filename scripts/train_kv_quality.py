"""Train all models of figure kv-quality, and write the data file that ships with the package.

    python scripts/train_kv_quality.py --data DIR --output DIR

A kind of attention with a seed is a run: it reads the training stories of the data directory once,
and then the validation stories. The order of the stories and the first weights are those of the
seed. Every run writes a checkpoint into a directory of its own in the output directory, and its
result beside the weights. Runs whose result is there are not made again, so the script can be
stopped at any time and goes on where it was. There are two runs at a time, with one thread each.
When all are there, their numbers are written to nanoserve/lab/papers/kv_quality.csv.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

# Large tensors are allocated in every step: the memory of one step is kept for the next. Read when
# a process starts, so this is for those that train.
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", "1000000000")
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "1000000000")

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "scripts")]  # nothing need be installed

import storyteller_data as data
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from train_storyteller import STORYTELLER, load_tokenizer, nats_per_byte, sequence_loss

from nanoserve.config.model_config import ModelConfig
from nanoserve.lab.papers.attention_kinds import KINDS, bytes_of_token, checkpoint_config
from nanoserve.lab.papers.running import Runner
from nanoserve.models.decoder import Decoder
from nanoserve.utils.files import replace_file
from scripts.saving import save_checkpoint

DATA = REPOSITORY / "nanoserve/lab/papers/kv_quality.csv"
SEEDS = (0, 1, 2)
ROW, ROWS = 512, 8
"""Tokens of a row, and rows of a step."""
LEARNING_RATE = 3e-3
WARM_UP_STEPS = 10
"""Steps in which the learning rate rises; it then falls in a straight line to zero."""
ONE_PIECE_IN = 4
"""Share of the validation stories that are read."""
REPORT_STEPS = 25
COLUMNS = ("kind", "seed", "parameters", "bytes_of_token", "tokens", "seconds", "nats_per_byte")


class Trained(NamedTuple):
    """The result of a run."""

    parameters: int
    tokens: int
    """Tokens that were read in training."""
    seconds: float
    """Processor time of training."""
    nats_per_byte: float
    """Validation loss."""


class TrainingRun(NamedTuple):
    """A job for a Runner. It trains one model, and keeps the result beside its weights."""

    kind: str
    seed: int
    text: Path
    directory: Path

    def run(self) -> dict[str, Any]:
        """The columns of a row of the data file; read if the result is there."""
        target = self.directory / f"{self.kind.lower()}-{self.seed}"
        result_file = target / "result.json"
        if not result_file.exists():
            torch.set_num_threads(1)
            trained = self._train(target)
            fields = {
                "kind": self.kind,
                "seed": self.seed,
                "bytes_of_token": bytes_of_token(self.kind),
                **trained._asdict(),
            }
            replace_file(result_file, json.dumps(fields).encode())
        result: dict[str, Any] = json.loads(result_file.read_bytes())
        return result

    def _train(self, target: Path) -> Trained:
        tokenizer = load_tokenizer(STORYTELLER)
        decoder, config = new_decoder(self.kind, self.seed)
        batches = make_batches(data.read_corpus(self.text).stories, tokenizer, self.seed)
        began = time.process_time()
        for step, loss in train(decoder, batches):
            if step % REPORT_STEPS == 0:
                print(
                    f"{self.kind}, seed {self.seed}: step {step} of {len(batches)}, loss "
                    f"{loss:.3f}, {time.process_time() - began:.0f} s of this process",
                    flush=True,
                )
        seconds = time.process_time() - began
        save_checkpoint(decoder, config, checkpoint_config(self.kind), target)
        tokenizer.save(str(target / "tokenizer.json"))
        validation = (self.text / "tinystories_valid_subset.txt").read_text(encoding="utf-8")
        return Trained(
            parameters=sum(parameter.numel() for parameter in decoder.parameters()),
            tokens=len(batches) * ROWS * ROW,
            seconds=seconds,
            nats_per_byte=nats_per_byte(decoder, tokenizer, validation, ONE_PIECE_IN),
        )


def new_decoder(kind: str, seed: int) -> tuple[Decoder, ModelConfig]:
    """Make an untrained model of this kind of attention."""
    config = ModelConfig.from_hf(checkpoint_config(kind))
    torch.manual_seed(seed)
    return Decoder(config), config


def make_batches(stories: Sequence[str], tokenizer: Tokenizer, seed: int) -> list[Tensor]:
    """Put all stories in the order of the seed, each behind a start token, and cut them into steps:
    int64 [ROWS, ROW + 1, 2] of (id, weight)."""
    shuffled = list(stories)
    Random(seed).shuffle(shuffled)
    tokens = [token for story in shuffled for token in data.encode_text(tokenizer, story)]
    step_tokens = ROWS * (ROW + 1)
    whole = torch.tensor(tokens[: len(tokens) // step_tokens * step_tokens])
    return list(whole.view(-1, ROWS, ROW + 1, 2))


def train(decoder: Decoder, batches: Sequence[Tensor]) -> Iterator[tuple[int, float]]:
    """Train in place with AdamW, a step for each batch. Yields the number of the step, from 1 on,
    and its loss in nats per token."""
    decoder.train()
    optimizer = torch.optim.AdamW(
        decoder.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1
    )
    for step, batch in enumerate(batches, start=1):
        rising = step / WARM_UP_STEPS
        falling = (len(batches) + 1 - step) / len(batches)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(rising, falling)
        loss = sequence_loss(decoder, batch)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield step, loss.item()
    decoder.eval()


def to_csv(results: Iterable[Mapping[str, Any]]) -> str:
    """Make a row for each run."""
    text = io.StringIO()
    table = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    table.writeheader()
    for result in results:
        rounded = {
            "seconds": round(result["seconds"]),
            "nats_per_byte": round(result["nats_per_byte"], 4),
        }
        table.writerow({**result, **rounded})
    return text.getvalue()


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the runs that are missing, then write the data."""
    parser = argparse.ArgumentParser(description="Train all models of figure kv-quality.")
    parser.add_argument(
        "--data", type=Path, required=True, help="Directory with tinystories_train_subset.txt etc."
    )
    parser.add_argument("--output", type=Path, required=True, help="Directory of the runs.")
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    # all kinds of a seed before those of the next one
    runs = [
        TrainingRun(kind, seed, options.data, options.output)
        for seed, kind in product(SEEDS, KINDS)
    ]

    def report(done: int, total: int) -> None:
        print(f"{done} of {total} runs are there", flush=True)

    with Runner(workers=2, progress=report) as runner:
        outcomes = runner.run(runs)
    ordered = sorted(runs, key=lambda run: (KINDS.index(run.kind), run.seed))
    replace_file(DATA, to_csv(outcomes[run] for run in ordered).encode())
    seconds = sum(outcomes[run]["seconds"] for run in runs)
    print(f"{DATA}: {len(runs)} runs, {seconds / 60:.0f} minutes of processor time")


if __name__ == "__main__":
    main()
