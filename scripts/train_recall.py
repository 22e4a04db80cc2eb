"""Train all models of figure recall, and write the data file that ships with the package.

    python scripts/train_recall.py --output DIR

A model with a seed is a run, and has a file of its own in the output directory. Runs whose file is
there are not made again, so the script can be stopped at any time and goes on where it was. There
are two runs at a time, with one thread each. When all are there, their numbers are written to
nanoserve/lab/papers/recall.csv.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

# Large tensors are allocated in every step: the memory of one step is kept for the next. Read when
# a process starts, so this is for those that train.
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", "1000000000")
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "1000000000")

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))  # the project need not be installed

import torch

from nanoserve.lab.papers.associative_recall import MODELS, STEPS, VALUES, train
from nanoserve.lab.papers.running import Runner
from nanoserve.utils.files import replace_file

DATA = REPOSITORY / "nanoserve/lab/papers/recall.csv"
SEEDS = (0, 1, 2)
REPORT_STEPS = 100
COLUMNS = (
    *("model", "seed", "parameters", "tokens", "seconds", "chance"),
    *("pairs", "nearest", "farthest", "questions", "right"),
)


class TrainingRun(NamedTuple):
    """A job for a Runner. It trains one model, and keeps the result in a file of its own."""

    model: str
    seed: int
    directory: Path
    steps: int = STEPS

    def run(self) -> dict[str, Any]:
        """The fields of Trained, with the model and the seed; read if the file is there."""
        name = f"{self.model} {self.seed}".replace(" ", "-").replace(":", "-")
        path = self.directory / f"{name}.json"
        if not path.exists():
            torch.set_num_threads(1)
            trained = train(self.model, self.seed, self._report, self.steps)
            recalled = [one._asdict() for one in trained.recalled]
            fields = {**self._asdict(), **trained._asdict(), "recalled": recalled}
            del fields["directory"]
            replace_file(path, json.dumps(fields).encode())
        result: dict[str, Any] = json.loads(path.read_bytes())
        return result

    def _report(self, step: int, loss: float) -> None:
        if step % REPORT_STEPS == 0:
            seconds = time.process_time()
            print(
                f"{self.model}, seed {self.seed}: step {step} of {self.steps}, loss {loss:.3f}, "
                f"{seconds:.0f} s of this process",
                flush=True,
            )


def to_csv(results: Iterable[Mapping[str, Any]]) -> str:
    """Make a row for each run, number of pairs and range of distances."""
    text = io.StringIO()
    table = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    table.writeheader()
    for result in results:
        shared = {**result, "seconds": round(result["seconds"]), "chance": 1 / VALUES}
        for recalled in result["recalled"]:
            table.writerow(shared | recalled)
    return text.getvalue()


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the runs that are missing, then write the data."""
    parser = argparse.ArgumentParser(description="Train all models of figure recall.")
    parser.add_argument("--output", type=Path, required=True, help="Directory of the runs.")
    directory: Path = parser.parse_args(arguments).output
    directory.mkdir(parents=True, exist_ok=True)
    # all models of a seed before those of the next one
    runs = [TrainingRun(model, seed, directory) for seed, model in product(SEEDS, MODELS)]

    def report(done: int, total: int) -> None:
        print(f"{done} of {total} runs are there", flush=True)

    with Runner(workers=2, progress=report) as runner:
        outcomes = runner.run(runs)
    ordered = sorted(runs, key=lambda run: (list(MODELS).index(run.model), run.seed))
    replace_file(DATA, to_csv(outcomes[run] for run in ordered).encode())
    seconds = sum(outcomes[run]["seconds"] for run in runs)
    print(f"{DATA}: {len(runs)} runs, {seconds / 60:.0f} minutes of processor time")


if __name__ == "__main__":
    main()
