"""The storyteller's training loop: the project's own Decoder, Muon and AdamW, and rates that follow a time budget."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from storyteller_data import (
    BROAD_MIX,
    END_OF_TEXT,
    END_OF_TURN,
    STORY_MIX,
    Corpus,
    Document,
    Packer,
    draw_document,
    encode_text,
    split_validation_stories,
    token_id,
)
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from nanoserve.config import ModelConfig
from nanoserve.models.attention import AttentionFunction, DenseCausalAttention
from nanoserve.models.decoder import Decoder, DecoderLayer, FeedForward

DRILL_SHARE = 0.4
"""The first share of the time, in which echoes are drilled: without them copying comes late, or not at all."""
ECHO_WEIGHT = 0.15
WARM_UP_SHARE = 0.015
DECAY_START = 0.25
"""From this share of the time on the learning rates fall in a straight line to zero."""
SHORT_ROW, LONG_ROW = 512, 1024
LONG_EVERY = 4
"""Every so many steps the rows are long, so that late positions are learned too."""
GRADIENT_NORM = 1.0


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal (Jordan et al., 2024): the matrices of the layers learn evenly.

    A fused parameter is updated as the matrices it is made of, given by their rows: made orthogonal in one piece,
    query and key would hardly move beside value, whose gradient is far larger, and the model would not learn to look
    back. (torch.optim.Muon cannot do this, and iterates in bfloat16, which is slow on most CPUs.)
    """

    def __init__(self, fused: Mapping[nn.Parameter, tuple[int, ...]], lr: float, momentum: float, weight_decay: float):
        super().__init__(list(fused), {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.fused = fused

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every parameter; all must have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                momentum: Tensor = state["momentum"]
                momentum.lerp_(parameter.grad, 1 - group["momentum"])
                direction = parameter.grad.lerp(momentum, group["momentum"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                for matrix, part in zip(
                    parameter.split(self.fused[parameter]), direction.split(self.fused[parameter]), strict=True
                ):
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


class DroppingAttention:
    """Dense causal attention whose output loses some values, against learning the stories by heart."""

    def __init__(self, attention: AttentionFunction, probability: float) -> None:
        self.attention = attention
        self.probability = probability

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return functional.dropout(self.attention(layer, query, key, value), self.probability)


@dataclass(frozen=True)
class Recipe:
    """What a training run may choose."""

    minutes: float
    broad_share: float = 0.22  # the first share of the time, in which books and talk are read beside the stories
    tokens_per_step: int = 4096
    matrix_rate: float = 0.01
    vector_rate: float = 2e-3
    weight_decay: float = 0.1
    dropout: float = 0.15  # of the outputs of attention and feed-forward; the stories are few and soon known by heart
    seed: int = 1

    def going_on(self) -> Recipe:
        """For a model that was trained before: no broad reading, and rates that do not undo what it has learnt."""
        return replace(self, broad_share=0.0, matrix_rate=0.3 * self.matrix_rate, vector_rate=0.3 * self.vector_rate)


@dataclass(frozen=True)
class Progress:
    """Handed to the caller now and then."""

    step: int
    tokens: int
    seconds: float
    share: float
    training_loss: float  # nats per token


def train(
    decoder: Decoder,
    corpus: Corpus,
    tokenizer: Tokenizer,
    recipe: Recipe,
    report: Callable[[Progress], None],
    report_seconds: float = 120.0,
) -> Progress:
    """Train in place until the recipe's time is over; `report` is called about every `report_seconds`."""
    random_source = random.Random(recipe.seed)
    device = decoder.device
    share = 0.0

    def draw() -> Document:
        mix = BROAD_MIX if share < recipe.broad_share else STORY_MIX
        if share < DRILL_SHARE:
            mix = replace(mix, echo=ECHO_WEIGHT)
        return draw_document(corpus, tokenizer, mix, random_source)

    packer = Packer(draw)
    optimizers = make_optimizers(decoder, recipe)
    for module in decoder.modules():
        if isinstance(module, FeedForward):
            module.register_forward_hook(
                lambda module, _, output: functional.dropout(output, recipe.dropout, module.training)
            )
    compute_loss = torch.compile(sequence_loss, dynamic=False)
    decoder.train()
    started = last_report = time.monotonic()
    step = tokens = 0
    mean_loss = 0.0
    while share < 1.0:
        length = LONG_ROW if step % LONG_EVERY == LONG_EVERY - 1 else SHORT_ROW
        rows = [packer.row(length + 1) for _ in range(recipe.tokens_per_step // length)]
        loss = compute_loss(decoder, torch.tensor(rows, device=device), recipe.dropout)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(decoder.parameters(), GRADIENT_NORM)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * rate_at(share)
            optimizer.step()
            optimizer.zero_grad()
        step, tokens = step + 1, tokens + recipe.tokens_per_step
        mean_loss = loss.item() if step == 1 else 0.98 * mean_loss + 0.02 * loss.item()
        now = time.monotonic()
        if step == LONG_EVERY:  # both lengths are compiled now: the clock starts
            started = now
        share = (now - started) / (60 * recipe.minutes)
        if now - last_report > report_seconds:
            last_report = now
            report(Progress(step, tokens, now - started, share, mean_loss))
    decoder.eval()
    return Progress(step, tokens, time.monotonic() - started, share, mean_loss)


def rate_at(share: float) -> float:
    """The factor of the learning rates when this share of the time is over."""
    return min(1.0, share / WARM_UP_SHARE, max(0.0, (1 - share) / (1 - DECAY_START)))


def make_optimizers(decoder: Decoder, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embedding and the norms."""
    fused: dict[nn.Parameter, tuple[int, ...]] = {}
    for module in decoder.layers.modules():
        if isinstance(module, DecoderLayer):
            fused[module.qkv.weight] = (module.query_size, module.kv_size, module.kv_size)
            fused[module.output.weight] = (module.output.out_features,)
        elif isinstance(module, FeedForward):
            fused[module.gate_up.weight] = (module.gate_up.out_features // 2,) * 2
            fused[module.down.weight] = (module.down.out_features,)
    others = [parameter for parameter in decoder.parameters() if parameter not in fused]
    optimizers = [
        Muon(fused, lr=recipe.matrix_rate, momentum=0.95, weight_decay=recipe.weight_decay),
        torch.optim.AdamW(others, lr=recipe.vector_rate, betas=(0.9, 0.95), weight_decay=0.01),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return optimizers


def sequence_loss(decoder: Decoder, rows: Tensor, dropout: float = 0.0) -> Tensor:
    """Mean cross entropy of the tokens after the first by their weights; rows [B, L + 1, 2] of (id, weight)."""
    batch, length = rows.shape[0], rows.shape[1] - 1
    ids, weights = rows[..., 0], rows[:, 1:, 1].reshape(-1).float()
    attention: AttentionFunction = DenseCausalAttention(decoder.config, batch, length)
    if dropout > 0:
        attention = DroppingAttention(attention, dropout)
    positions = torch.arange(length, device=rows.device).repeat(batch)
    hidden = decoder(ids[:, :-1].reshape(-1), positions, attention)
    losses = functional.cross_entropy(decoder.compute_logits(hidden), ids[:, 1:].reshape(-1), reduction="none")
    return (losses * weights).sum() / weights.sum()


@torch.inference_mode()
def nats_per_byte(decoder: Decoder, tokenizer: Tokenizer, text: str, every: int = 1) -> float:
    """Validation loss: the sum of all pieces' token losses over the sum of their UTF-8 bytes.

    The text is cut by `split_validation_stories`; each piece is read from a start token on, in windows of LONG_ROW
    tokens that begin anew (without their predecessor's context). `every` takes only one piece in so many,
    from all over the file: its beginning alone is easier than the rest.
    """
    total_nats: float = 0.0
    total_bytes: int = 0
    was_training = decoder.training
    decoder.eval()
    for piece in split_validation_stories(text)[::every]:
        document = encode_text(tokenizer, piece)
        total_bytes += len(piece.encode())
        for begin in range(0, len(document) - 1, LONG_ROW):
            window = torch.tensor([document[begin : begin + LONG_ROW + 1]], device=decoder.device)
            total_nats += sequence_loss(decoder, window).item() * (window.shape[1] - 1)
    decoder.train(was_training)
    return total_nats / total_bytes


def make_config(tokenizer: Tokenizer, shape: dict[str, int]) -> ModelConfig:
    """A Llama configuration of this shape with the tokenizer's vocabulary and end tokens."""
    end_of_text = token_id(tokenizer, END_OF_TEXT)
    return ModelConfig.from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": tokenizer.get_vocab_size(),
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "bos_token_id": end_of_text,
            "eos_token_id": [end_of_text, token_id(tokenizer, END_OF_TURN)],
            **shape,
        }
    )
