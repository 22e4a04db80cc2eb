"""Heal a pruned model: distil it from its teacher, the model that it was cut from.

    nanoserve prune --ffn-size 384 --calibrate text.txt --output small
    python scripts/distil.py --teacher MODEL --student small --text text.txt --output healed

The student learns the teacher's own distributions: the loss is the Kullback-Leibler divergence
KL(teacher || student) of the next token, mean over all tokens of the text. A text that ends in
.jsonl has conversations, {"messages": [...]} a line, which are written in the student's chat
format. All is computed in float32 on the CPU. The state is kept in the output directory, so the
script can be stopped at any time and goes on where it was; a run that was stopped ends with the
very weights of one that was not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the project need not be installed

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional

from nanoserve.commands.batch_files import read_rows
from nanoserve.errors import NanoserveError
from nanoserve.models.attention import DenseCausalAttention
from nanoserve.models.decoder import Decoder
from nanoserve.models.hub import resolve_model
from nanoserve.models.loading import load_model
from nanoserve.text.tokenizer import Tokenizer, load_tokenizer
from nanoserve.utils.files import read_text, replace_file
from nanoserve.utils.interrupts import deferred_interrupts
from nanoserve.utils.sizes import format_size
from scripts.saving import save_like

STATE_NAME = "distil.safetensors"
WARM_UP = 0.05
"""The first share of a run, in which the learning rate rises; after it, it falls to zero."""
SAVE_SECONDS = 60.0
REPORT_SECONDS = 10.0

Loss = Callable[[Tensor], Tensor]
"""Rows of tokens, int64 [B, L] -> the mean loss of their tokens."""


class Step(NamedTuple):
    """The progress of a run after a step."""

    number: int
    share: float
    """Share of the run that is done."""
    tokens: int
    seconds: float
    """Seconds of processor time."""
    loss: float


@dataclass(frozen=True)
class Plan:
    """The length of a run and how it learns."""

    batch: int
    """Rows of a step."""
    rate: float
    """The highest learning rate."""
    seed: int
    tokens: int | None = None
    """Tokens after which it ends."""
    seconds: float | None = None
    """Processor time after which it ends."""

    def share(self, tokens: int, seconds: float) -> float:
        """The share of the run that is done."""
        shares = []
        if self.tokens is not None:
            shares.append(tokens / self.tokens)
        if self.seconds is not None:
            shares.append(seconds / self.seconds)
        return max(shares)


class Trainer:
    """Trains a decoder on rows of tokens by AdamW. Each epoch has all rows once, in an order of its
    own."""

    def __init__(self, decoder: Decoder, rows: Tensor, plan: Plan) -> None:
        """rows: int64 [N, L]"""
        self.decoder, self.rows, self.plan = decoder, rows, plan
        decoder.requires_grad_(True)
        self.optimizer = torch.optim.AdamW(
            decoder.parameters(), lr=plan.rate, betas=(0.9, 0.95), weight_decay=0.01
        )
        self.steps, self.seconds = 0, 0.0

    @property
    def tokens(self) -> int:
        return self.steps * self.plan.batch * self.rows.shape[1]

    def run(self, loss_of: Loss) -> Iterator[Step]:
        """Train in place until the plan is over; yields after each step."""
        while (share := self.plan.share(self.tokens, self.seconds)) < 1.0:
            with deferred_interrupts():  # so that Ctrl-C leaves whole steps
                loss = self._step(loss_of, share)
            done = self.plan.share(self.tokens, self.seconds)
            yield Step(self.steps, done, self.tokens, self.seconds, loss)
        self.decoder.requires_grad_(False)

    def _step(self, loss_of: Loss, share: float) -> float:
        """Do a step when this share of the run is done. Returns its loss."""
        began = time.process_time()
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.rate * min(1.0, (share + 1e-3) / WARM_UP, 1 - share)
        loss = loss_of(self.batch())
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.decoder.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        self.seconds += time.process_time() - began
        return loss.item()

    def batch(self) -> Tensor:
        """The rows of the next step. They depend on the seed and the step alone."""
        count, first = len(self.rows), self.steps * self.plan.batch
        places = [
            self._order(place // count)[place % count]
            for place in range(first, first + self.plan.batch)
        ]
        return self.rows[torch.stack(places)]

    def _order(self, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.plan.seed * 1_000_003 + epoch)
        return torch.randperm(len(self.rows), generator=generator)

    def save(self, path: Path, settings: str) -> None:
        """Keep weights and optimizer in a file. A file that is there is replaced as a whole."""
        tensors = {}
        for name, parameter in self.decoder.named_parameters():
            tensors[f"weight {name}"] = parameter.detach()
            for key, value in self.optimizer.state[parameter].items():
                tensors[f"{key} {name}"] = value
        state = {"settings": settings, "steps": str(self.steps), "seconds": str(self.seconds)}
        replace_file(path, save(tensors, metadata=state))

    def load(self, path: Path, settings: str) -> None:
        """Go on from a file. Ends the script if it is of a run with other settings."""
        with safe_open(path, "pt") as file:
            state = file.metadata()
            if state["settings"] != settings:
                sys.exit(
                    f"{path} is of a run with other settings: give the same to go on, or choose "
                    "another --output"
                )
            for name, parameter in self.decoder.named_parameters():
                parameter.data.copy_(file.get_tensor(f"weight {name}"))
                self.optimizer.state[parameter] = {
                    key: file.get_tensor(f"{key} {name}")
                    for key in ("step", "exp_avg", "exp_avg_sq")
                }
        self.steps, self.seconds = int(state["steps"]), float(state["seconds"])


def logits_of(decoder: Decoder, rows: Tensor) -> Tensor:
    """rows [B, L] -> float32 [B * L, V]"""
    batch, length = rows.shape
    attention = DenseCausalAttention(decoder.config, batch, length)
    hidden = decoder(rows.flatten(), torch.arange(length).repeat(batch), attention)
    return decoder.compute_logits(hidden)


def divergence(student: Decoder, teacher: Decoder) -> Loss:
    """KL(teacher || student) of the next token."""

    def loss(rows: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = logits_of(teacher, rows).log_softmax(-1)
        found = logits_of(student, rows).log_softmax(-1)
        return functional.kl_div(found, wanted, reduction="batchmean", log_target=True)

    return loss


def read_tokens(path: Path, tokenizer: Tokenizer) -> list[int]:
    """The tokens of a text; a .jsonl file has conversations, one after another in the chat format.
    Ends the script if one of them is unusable."""
    if path.suffix != ".jsonl":
        return tokenizer.encode(read_text(path))
    tokens: list[int] = []
    for row in read_rows(path):
        wrong = row.error
        if isinstance(row.prompt, str):
            wrong = "no messages"
        if wrong is not None:
            sys.exit(f"{path}, line {row.index + 1}: {wrong}")
        tokens += tokenizer.encode_chat(row.prompt, add_generation_prompt=False)
    return tokens


def cut_rows(tokens: Sequence[int], length: int) -> Tensor:
    """Whole rows of a text, int64 [N, L]; the rest at its end is left out."""
    count = len(tokens) // length
    return torch.tensor(tokens[: count * length]).view(count, length)


def distil(options: argparse.Namespace) -> None:
    """Train the student, and write it."""
    teacher, config = load_model(directory_of(options.teacher), "float32")
    student, own_config = load_model(options.student, "float32")
    if own_config.vocab_size != config.vocab_size:
        sys.exit(f"{options.student} has another vocabulary than its teacher")
    with closing(load_tokenizer(options.student)) as tokenizer:
        tokens = read_tokens(options.text, tokenizer)
    rows = cut_rows(tokens, options.length)
    if not len(rows):
        sys.exit(f"{options.text} has {len(tokens)} tokens, and a row has {options.length}")
    plan = Plan(options.rows, options.rate, options.seed, tokens=options.tokens or len(tokens))
    trainer = Trainer(student, rows, plan)
    digest = hashlib.blake2s(rows.numpy().tobytes()).hexdigest()
    settings = json.dumps([str(plan), options.teacher, str(options.student), digest])
    output: Path = options.output
    output.mkdir(parents=True, exist_ok=True)
    state = output / STATE_NAME
    if state.exists():
        trainer.load(state, settings)
        print(f"goes on after step {trainer.steps}", flush=True)
    elif any(output.iterdir()):
        sys.exit(f"{output} exists and is not empty; choose another --output")
    follow(trainer, divergence(student, teacher), state, settings)
    save_like(student, options.student, output)
    state.unlink(missing_ok=True)
    size = format_size((output / "model.safetensors").stat().st_size)
    print(f"{output}: {size} of weights, distilled on {trainer.tokens:,} tokens")


def follow(trainer: Trainer, loss: Loss, state: Path, settings: str) -> None:
    """Train to the end. Prints how far it is, and keeps the state now and then and on Ctrl-C."""
    saved = reported = time.monotonic()
    try:
        for step in trainer.run(loss):
            now = time.monotonic()
            if now - reported > REPORT_SECONDS or step.share >= 1.0:
                reported = now
                left = step.seconds * (1 - step.share) / step.share
                print(
                    f"{step.share:4.0%}, step {step.number}, {step.tokens:,} tokens, divergence "
                    f"{step.loss:.3f}, about {max(0.0, left):.0f} s of processor time left",
                    flush=True,
                )
            if now - saved > SAVE_SECONDS:
                saved = now
                trainer.save(state, settings)
    except KeyboardInterrupt:
        if trainer.steps:
            trainer.save(state, settings)
        sys.exit(f"interrupted after step {trainer.steps}; the same command goes on")


def directory_of(name: str) -> Path:
    """The directory of a model by its name. Ends the script if it has no files."""
    found = resolve_model(name).directory
    if found is None:
        sys.exit(f"{name} has no files; give the directory or the hub id of a model")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the options, and distil."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option: Any = parser.add_argument
    option("--teacher", required=True, help="the model before pruning: a directory or a name")
    option("--student", type=Path, required=True, help="directory of the pruned model")
    option("--text", type=Path, required=True, help="text, or .jsonl of conversations")
    option("--output", type=Path, required=True, help="directory to write; a run in it goes on")
    option("--tokens", type=int, help="tokens to learn from; default: the text once")
    option("--length", type=int, default=256, help="tokens of a row")
    option("--rows", type=int, default=4, help="rows of a step")
    option("--rate", type=float, default=1e-3, help="highest learning rate")
    option("--seed", type=int, default=0, help="of the order of the rows")
    try:
        distil(parser.parse_args(arguments))
    except NanoserveError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("interrupted")


if __name__ == "__main__":
    main()
