"""Train the bundled storyteller, or its small sibling, from the text in a data directory.

    python scripts/train_storyteller.py --data DIR --minutes 50
    python scripts/train_storyteller.py --data DIR --minutes 10 --draft
    python scripts/train_storyteller.py --data DIR --evaluate

Trains the project's own Decoder with Muon and AdamW, at rates that follow a time budget. Uses a GPU
if one is at hand, otherwise the CPU. The sibling takes the tokenizer of the storyteller that is
already there, so train that one first. `--evaluate` prints the validation loss of the files in the
output directory.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import NamedTuple

# idle threads leave the cores to others; read when torch loads
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))  # the project need not be installed to train its model

import storyteller_data as data
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from nanoserve.config.model_config import ModelConfig
from nanoserve.models.attention import DenseCausalAttention
from nanoserve.models.decoder import Decoder, DecoderLayer, FeedForward
from nanoserve.models.loading import load_model
from scripts.saving import save_hf

Model = tuple[Decoder, ModelConfig, Tokenizer]
ASSETS = REPOSITORY / "nanoserve" / "assets"
STORYTELLER, DRAFT = ASSETS / "storyteller", ASSETS / "storyteller-draft"
MAX_POSITIONS = 1024
DRILL_SHARE = 0.4
"""The first share of the time, in which echoes are drilled. Without them the model learns to copy
late or never."""
ECHO_WEIGHT = 0.15
BROAD_SHARE = 0.22
"""The first share of the time, in which books and talk are read beside the stories."""
WARM_UP_SHARE = 0.015
DECAY_START = 0.25
"""From this share of the time on the learning rates fall in a straight line to zero."""
CONTINUED_RATE = 0.3
"""Factor of the learning rates for a model that was trained before, so that it keeps what it has
learned."""
TOKENS_PER_STEP = 4096
SHORT_ROW, LONG_ROW = 512, 1024
LONG_EVERY = 4
"""Every fourth step has long rows, so that late positions are learned too."""
DROPOUT = 0.15
"""Dropout of the outputs of attention and feed-forward; the stories are few and soon known by
heart."""
REPORT_SECONDS = 120.0
ONE_PIECE_IN = 12
"""Share of the validation stories that are read while training."""


STORYTELLER_SHAPE = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8}
DRAFT_SHAPE = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4}


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal (Jordan et al., 2024): the matrices of the layers
    learn evenly.

    A fused parameter is updated as the matrices it is made of, given by their rows: made orthogonal
    in one piece, query and key would hardly move beside value, whose gradient is far larger, and
    the model would not learn to look back. torch.optim.Muon cannot do this, and iterates in
    bfloat16, which is slow on most CPUs.
    """

    def __init__(
        self,
        fused: Mapping[nn.Parameter, tuple[int, ...]],
        lr: float,
        momentum: float,
        weight_decay: float,
    ):
        super().__init__(
            list(fused), {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        )
        self.fused = fused

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every parameter; all must have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                momentum.lerp_(parameter.grad, 1 - group["momentum"])
                direction = parameter.grad.lerp(momentum, group["momentum"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                rows = self.fused[parameter]
                for matrix, part in zip(parameter.split(rows), direction.split(rows), strict=True):
                    scale = max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
                    matrix.add_(orthogonalize(part), alpha=-group["lr"] * scale)


def orthogonalize(matrix: Tensor, steps: int = 5) -> Tensor:
    """Bring all singular values near 1 by Newton-Schulz iteration; matrix [M, N] -> [M, N]."""
    a, b, c = 3.4445, -4.7750, 2.0315  # Jordan's quintic: fast, ends between 0.7 and 1.2
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    orthogonal: Tensor = x.T if tall else x
    return orthogonal


class Progress(NamedTuple):
    """The state of a training run, now and then and at its end."""

    step: int
    seconds: float
    loss: float
    """Mean of the latest steps, in nats per token."""


def train(
    decoder: Decoder,
    corpus: data.Corpus,
    tokenizer: Tokenizer,
    minutes: float,
    seed: int,
    *,
    continued: bool,
) -> Iterator[Progress]:
    """Train in place until the time is over; yields about every REPORT_SECONDS, and at the end."""
    rng = Random(seed)
    share = 0.0

    def draw() -> data.Document:
        mix = data.BROAD_MIX if share < BROAD_SHARE and not continued else data.STORY_MIX
        return data.draw_document(
            corpus, tokenizer, mix | {"echo": ECHO_WEIGHT} if share < DRILL_SHARE else mix, rng
        )

    packer = data.Packer(draw)
    optimizers = make_optimizers(decoder)
    for module in decoder.modules():
        if isinstance(module, FeedForward):
            module.register_forward_hook(
                lambda module, _, output: functional.dropout(output, DROPOUT, module.training)
            )
    compute_loss = torch.compile(sequence_loss, dynamic=False)
    decoder.train()
    started = last_report = time.monotonic()
    step, mean_loss = 0, 0.0
    while share < 1.0:
        length = LONG_ROW if step % LONG_EVERY == LONG_EVERY - 1 else SHORT_ROW
        rows = [packer.row(length + 1) for _ in range(TOKENS_PER_STEP // length)]
        loss = compute_loss(decoder, torch.tensor(rows, device=decoder.device), DROPOUT)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = (
                    group["initial_lr"] * rate_at(share) * (CONTINUED_RATE if continued else 1.0)
                )
            optimizer.step()
            optimizer.zero_grad()
        step += 1
        mean_loss = loss.item() if step == 1 else 0.98 * mean_loss + 0.02 * loss.item()
        now = time.monotonic()
        if step == LONG_EVERY:  # both lengths are compiled now: the clock starts
            started = now
        share = (now - started) / (60 * minutes)
        if now - last_report > REPORT_SECONDS and share < 1.0:
            last_report = now
            yield Progress(step, now - started, mean_loss)
    decoder.eval()
    yield Progress(step, now - started, mean_loss)


def rate_at(share: float) -> float:
    """The factor of the learning rates when this share of the time is over."""
    return min(1.0, share / WARM_UP_SHARE, max(0.0, (1 - share) / (1 - DECAY_START)))


def make_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of decoder layers, AdamW for what else is trained."""
    fused: dict[nn.Parameter, tuple[int, ...]] = {}
    for module in model.modules():
        if isinstance(module, DecoderLayer):
            fused[module.qkv.weight] = (module.query_size, module.kv_size, module.kv_size)
            fused[module.output.weight] = (module.output.out_features,)
        elif isinstance(module, FeedForward):
            fused[module.gate_up.weight] = (module.gate_up.out_features // 2,) * 2
            fused[module.down.weight] = (module.down.out_features,)
    others = [
        parameter
        for parameter in model.parameters()
        if parameter.requires_grad and parameter not in fused
    ]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(others, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01)
    ]
    if fused:
        optimizers.append(Muon(fused, lr=0.01, momentum=0.95, weight_decay=0.1))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return optimizers


def sequence_loss(decoder: Decoder, rows: Tensor, dropout: float = 0.0) -> Tensor:
    """Mean cross entropy of the tokens after the first by their weights; rows [B, L + 1, 2] of (id,
    weight)."""
    batch, length = rows.shape[0], rows.shape[1] - 1
    ids, weights = rows[..., 0], rows[:, 1:, 1].reshape(-1).float()
    dense = DenseCausalAttention(decoder.config, batch, length)

    def attention(
        layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        return functional.dropout(dense(layer, query, key, value, sinks), dropout)

    positions = torch.arange(length, device=rows.device).repeat(batch)
    hidden = decoder(ids[:, :-1].reshape(-1), positions, attention)
    losses = functional.cross_entropy(
        decoder.compute_logits(hidden), ids[:, 1:].reshape(-1), reduction="none"
    )
    return (losses * weights).sum() / weights.sum()


@torch.inference_mode()
def nats_per_byte(decoder: Decoder, tokenizer: Tokenizer, text: str, every: int = 1) -> float:
    """Validation loss: the sum of all pieces' token losses over the sum of their UTF-8 bytes.

    The text is cut by `split_validation_stories`; each piece is read from a start token on, in
    windows of LONG_ROW tokens that start without their predecessor's context. With `every`, only
    each n-th piece is read, from all over the file: its beginning alone is easier than the rest.
    """
    pieces = data.split_validation_stories(text)[::every]
    nats: float = 0.0
    was_training = decoder.training
    decoder.eval()
    for piece in pieces:
        document = data.encode_text(tokenizer, piece)
        for begin in range(0, len(document) - 1, LONG_ROW):
            window = torch.tensor([document[begin : begin + LONG_ROW + 1]], device=decoder.device)
            nats += sequence_loss(decoder, window).item() * (window.shape[1] - 1)
    decoder.train(was_training)
    return nats / sum(len(piece.encode()) for piece in pieces)


def make_config(tokenizer: Tokenizer, sizes: Mapping[str, int]) -> ModelConfig:
    """A Llama configuration of this shape with the tokenizer's vocabulary and end tokens."""
    end_of_text, end_of_turn = map(tokenizer.token_to_id, (data.END_OF_TEXT, data.END_OF_TURN))
    return ModelConfig.from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": tokenizer.get_vocab_size(),
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": MAX_POSITIONS,
            "bos_token_id": end_of_text,
            "eos_token_id": [end_of_text, end_of_turn],
            **sizes,
        }
    )


def write_model(
    decoder: Decoder, config: ModelConfig, tokenizer: Tokenizer, directory: Path
) -> None:
    """Everything a Hugging Face model directory holds; weights in bfloat16."""
    save_hf(decoder, config, directory, dtype=torch.bfloat16)
    tokenizer.save(str(directory / "tokenizer.json"))
    ends = {"bos_token_id": config.bos_token_id, "eos_token_id": list(config.eos_token_ids)}
    generation = ends | {"do_sample": True, "temperature": 0.8, "top_p": 0.95}
    for name, content in (
        ("tokenizer", data.tokenizer_config(MAX_POSITIONS)),
        ("generation", generation),
    ):
        (directory / f"{name}_config.json").write_text(
            json.dumps(content, indent=2) + "\n", encoding="utf-8"
        )


def load_tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def new_model(corpus: data.Corpus, device: torch.device, seed: int, *, draft: bool) -> Model:
    """An untrained model and its tokenizer, which the sibling takes from the storyteller."""
    tokenizer = load_tokenizer(STORYTELLER) if draft else data.train_tokenizer(corpus, seed)
    config = make_config(tokenizer, DRAFT_SHAPE if draft else STORYTELLER_SHAPE)
    torch.manual_seed(seed)
    with device:
        return Decoder(config), config, tokenizer


def load(directory: Path, device: torch.device) -> Model:
    return *load_model(directory, "float32", device), load_tokenizer(directory)


def main() -> None:
    """Train or evaluate."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="directory with tinystories_train_subset.txt etc."
    )
    parser.add_argument(
        "--minutes", type=float, default=50.0, help="time budget of the training loop"
    )
    parser.add_argument("--output", type=Path, help="model directory (default: the bundled one)")
    parser.add_argument(
        "--draft", action="store_true", help="the small sibling instead of the storyteller"
    )
    parser.add_argument(
        "--start-from", type=Path, help="go on from this model directory, without the broad reading"
    )
    parser.add_argument(
        "--evaluate", action="store_true", help="print the validation loss of the output directory"
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="of the documents drawn and the first weights"
    )
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    output = options.output or (DRAFT if options.draft else STORYTELLER)
    validation = (options.data / "tinystories_valid_subset.txt").read_text(encoding="utf-8")
    if not options.evaluate:
        corpus = data.read_corpus(options.data)
        if options.start_from:
            decoder, config, tokenizer = load(options.start_from, device)
            decoder.requires_grad_(True)
        else:
            decoder, config, tokenizer = new_model(
                corpus, device, options.seed, draft=options.draft
            )
        print(
            f"{sum(parameter.numel() for parameter in decoder.parameters()):,} parameters on "
            f"{device}",
            flush=True,
        )
        continued = options.start_from is not None
        for progress in train(
            decoder, corpus, tokenizer, options.minutes, options.seed, continued=continued
        ):
            loss = nats_per_byte(decoder, tokenizer, validation, every=ONE_PIECE_IN)
            print(
                f"{progress.seconds / 60:5.1f} min, step {progress.step}, "
                f"{progress.step * TOKENS_PER_STEP:,} tokens, "
                f"training loss {progress.loss:.3f} nats/token, validation {loss:.4f} nats/byte",
                flush=True,
            )
            write_model(decoder, config, tokenizer, output)
    decoder, _, tokenizer = load(output, device)
    loss = nats_per_byte(decoder, tokenizer, validation)
    print(f"{output.name}: {loss:.4f} nats per byte on all validation stories")


if __name__ == "__main__":
    main()
