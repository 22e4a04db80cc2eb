"""Turn the bundled storyteller into a block-diffusion model, in SDAR's format.

    python scripts/train_diffusion.py --data DIR --output DIR

The storyteller's weights are trained on, so that they write four tokens at a time (arXiv
2503.09573). They learn from its training text, and from what it predicted before the change. A run
can be stopped at any time. It goes on from its last checkpoint, which is in the output directory.

`scripts/compare_diffusion.py` compares the two as writers.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # idle threads leave the cores to others
# the memory of one step is kept for the next; read when a process starts
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", "1000000000")
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "1000000000")

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))  # the project need not be installed

import storyteller_data as data
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from train_storyteller import STORYTELLER, load_tokenizer, make_optimizers

from nanoserve.config.model_config import ModelConfig
from nanoserve.models.attention import DenseCausalAttention
from nanoserve.models.decoder import Decoder
from nanoserve.models.loading import load_model
from nanoserve.models.weights import tensor_parts
from nanoserve.utils.files import replace_file
from scripts.saving import llama_config
from triton_ops import dense_attention

BLOCK = 4
"""Tokens that are written together."""
MASK = "ÿ"
"""The token that is the mask, as the tokenizer writes it: the byte 0xFF, which is in no UTF-8
text."""
ROW, ROWS = 320, 8
"""Tokens of a row and rows of a step."""
STEPS = 1800
MIX: data.Mix = {"story": 0.3, "chat": 0.7}
RATE = 0.5
"""Factor of the learning rates with which the storyteller was trained."""
WARM_UP_STEPS = 30
DECAY_START = 0.4
"""From this share of the steps on the learning rates fall in a straight line to zero."""
CHECKPOINT_STEPS = 50
REPORT_STEPS = 25
SEED_STRIDE = 1_000_003
"""Between the seeds of the noise of two runs: more than a run has steps."""
GENERATION = {"temperature": 1.0, "top_p": 0.97}
"""Defaults of sampling. Tokens that are drawn several at once repeat what was said more often than
tokens drawn one by one. So they need more chance than the storyteller's 0.8 and 0.95."""
PADDING = 2.0**14
"""Value of the added dimensions of queries and keys, far larger than the others. See
`sdar_tensors`."""


# ---- the loss ------------------------------------------------------------------------------------


class TwoCopies:
    """Attention over `batch` pairs of copies of `length` tokens, the noised one and the clean one
    (arXiv 2503.09573, section 3 and appendix B). A noised token sees its own noised block and the
    clean blocks before it; a clean token the clean blocks to the end of its own. So one pass gives
    the predictions of all blocks."""

    def __init__(self, config: ModelConfig, batch: int, length: int) -> None:
        self.config, self.shape = config, (batch, 2, length)
        block = torch.arange(length) // BLOCK
        self.clean = block[None, :] <= block[:, None]
        own, before = block[None, :] == block[:, None], block[None, :] < block[:, None]
        self.noised = torch.cat((own, before), 1)

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        query, key, value = (
            heads.unflatten(0, self.shape).permute(1, 0, 3, 2, 4) for heads in (query, key, value)
        )
        scale = self.config.softmax_scale
        noised = dense_attention(
            query[0],
            torch.cat((key[0], key[1]), 2),
            torch.cat((value[0], value[1]), 2),
            self.noised,
            scale=scale,
        )
        clean = dense_attention(query[1], key[1], value[1], self.clean, scale=scale)
        return torch.stack((noised, clean), 1).transpose(2, 3).flatten(3).flatten(0, 2)


def draw_masks(batch: int, length: int, generator: torch.Generator) -> Tensor:
    """Draw which tokens are masked, bool [batch, length]: in each block 1 to BLOCK of them, each
    number as likely, at any places. The first token of a row is never masked: it starts a
    document."""
    blocks = (batch, length // BLOCK)
    count = torch.randint(1, BLOCK + 1, (*blocks, 1), generator=generator)
    order = torch.rand((*blocks, BLOCK), generator=generator).argsort(-1)
    masked = (order < count).flatten(1)
    masked[:, 0] = False
    return masked


def are_last(masked: Tensor) -> Tensor:
    """Whether all tokens from a token to the end of its block are masked, bool [B, L]."""
    by_block = masked.unflatten(1, (-1, BLOCK)).flip(-1)
    return by_block.long().cumprod(-1).flip(-1).flatten(1).bool()


def diffusion_loss(
    decoder: Decoder, teacher: Decoder, tokens: Tensor, masked: Tensor, mask_token: int
) -> Tensor:
    """Mean cross entropy at the masked tokens; tokens and masked are [B, L].

    Where no later token of a block is known, the target is the distribution of `teacher`, the
    storyteller, for the next token. It knows more tokens before, but on average over these it is
    what the block-diffusion model is to predict, and it teaches more than one token does. Elsewhere
    the target is the token.
    """
    batch, length = tokens.shape
    noised = tokens.masked_fill(masked, mask_token)
    positions = torch.arange(length).repeat(2 * batch)
    hidden = decoder(
        torch.stack((noised, tokens), 1).flatten(),
        positions,
        TwoCopies(decoder.config, batch, length),
    )
    hidden = hidden.unflatten(0, (batch, 2, length))[:, 0]
    is_last = are_last(masked)
    with torch.no_grad():
        positions = positions[: batch * length]
        before = teacher(
            tokens.flatten(), positions, DenseCausalAttention(teacher.config, batch, length)
        )
        before = before.unflatten(0, (batch, length)).roll(1, 1)
        targets = teacher.compute_logits(before[is_last]).softmax(-1)
    likelihoods = _likelihoods(decoder, hidden[is_last], mask_token)
    likelihoods = likelihoods.masked_fill(likelihoods.isneginf(), 0.0)
    of_last = -(targets * likelihoods).sum(-1)
    others = masked & ~is_last
    likelihoods = _likelihoods(decoder, hidden[others], mask_token)
    of_others = functional.nll_loss(likelihoods, tokens[others], reduction="none")
    return (of_last.sum() + of_others.sum()) / masked.sum()


def _likelihoods(decoder: Decoder, hidden: Tensor, mask_token: int) -> Tensor:
    """Log probabilities, float32 [N, V]; a mask is never predicted."""
    logits = decoder.compute_logits(hidden)
    excluded = torch.zeros(logits.shape[1])
    excluded[mask_token] = -torch.inf
    return (logits + excluded).log_softmax(-1)


# ---- training ------------------------------------------------------------------------------------


@dataclass
class Training:
    """A run and its state, which a checkpoint keeps."""

    decoder: Decoder
    teacher: Decoder
    tokenizer: Tokenizer
    corpus: data.Corpus
    steps: int
    seed: int
    rows: tuple[int, int] = (ROWS, ROW)
    step: int = 0
    seconds: float = 0.0
    """Time so far, without what an interruption lost."""
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.packer = data.Packer(self._draw)
        self.optimizers = make_optimizers(self.decoder)
        self.mask_token = mask_token(self.tokenizer)

    def _draw(self) -> data.Document:
        return data.draw_document(self.corpus, self.tokenizer, MIX, self.random)

    def run_step(self) -> None:
        """Train on one batch. Its noise depends on the seed and the step alone."""
        generator = torch.Generator().manual_seed(self.seed * SEED_STRIDE + self.step)
        count, length = self.rows
        # The weights of nouns are left out: where nothing is known for sure, they would have nouns
        # predicted again and again.
        tokens = torch.tensor(
            [[token for token, _ in self.packer.row(length)] for _ in range(count)]
        )
        masked = draw_masks(count, length, generator)
        with torch.autocast("cpu", torch.bfloat16):
            loss = diffusion_loss(self.decoder, self.teacher, tokens, masked, self.mask_token)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.decoder.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * RATE * rate_at(self.step, self.steps)
            optimizer.step()
            optimizer.zero_grad()
        self.losses.append(loss.item())
        self.step += 1

    def save(self, path: Path) -> None:
        """Write a checkpoint."""
        version, internal, gauss = self.random.getstate()
        state = {
            "seed": self.seed,
            "step": self.step,
            "seconds": self.seconds,
            "losses": self.losses,
            "random": [version, list(internal), gauss],
            "waiting": self.packer.waiting,
            "decoder": self.decoder.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        written = path.with_suffix(".new")
        torch.save(state, written)
        written.replace(path)

    def load(self, path: Path) -> None:
        """Go on from a checkpoint."""
        state = torch.load(path, weights_only=True)
        if state["seed"] != self.seed:
            sys.exit(f"{path} is of a run with --seed {state['seed']}; delete it first")
        self.step, self.seconds, self.losses = state["step"], state["seconds"], state["losses"]
        version, internal, gauss = state["random"]
        self.random.setstate((version, tuple(internal), gauss))
        self.packer.waiting = state["waiting"]
        self.decoder.load_state_dict(state["decoder"])
        for optimizer, its_state in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(its_state)

    def run(self, checkpoint: Path, last_step: int | None = None) -> None:
        """Train to the end, or to `last_step`, from the checkpoint if there is one."""
        if checkpoint.exists():
            self.load(checkpoint)
        end = self.steps if last_step is None else last_step
        while self.step < end:
            began = time.monotonic()
            self.run_step()
            self.seconds += time.monotonic() - began
            if self.step % REPORT_STEPS == 0:
                recent = self.losses[-REPORT_STEPS:]
                print(
                    f"{self.seconds / 60:5.1f} min, step {self.step} of {self.steps}, "
                    f"loss {sum(recent) / len(recent):.3f}",
                    flush=True,
                )
            if self.step % CHECKPOINT_STEPS == 0 or self.step == end:
                self.save(checkpoint)


def rate_at(step: int, steps: int) -> float:
    """The factor of the learning rates in a step, counted from 0."""
    left = (steps - step) / (steps * (1 - DECAY_START))
    return min(1.0, (step + 1) / WARM_UP_STEPS, left)


def mask_token(tokenizer: Tokenizer) -> int:
    """The id of MASK."""
    token = tokenizer.token_to_id(MASK)
    assert isinstance(token, int), "a byte-level vocabulary has all bytes"
    return token


def load_storyteller() -> tuple[Decoder, Decoder]:
    """The storyteller to train on, and once more as the teacher. The mask begins as the mean of all
    tokens."""
    decoder, _ = load_model(STORYTELLER, "float32")
    teacher, _ = load_model(STORYTELLER, "float32")
    embedding = decoder.embedding.weight
    embedding[mask_token(load_tokenizer(STORYTELLER))] = embedding.mean(0)
    decoder.requires_grad_(True)
    return decoder, teacher


# ---- the checkpoint ------------------------------------------------------------------------------


def sdar_tensors(decoder: Decoder) -> dict[str, Tensor]:
    """The weights as tensors of Qwen3's layers, which compute the same as the storyteller's.

    Qwen3 norms each query and key; the storyteller does not. So each head gets a pair of dimensions
    more, a constant PADDING by a bias. It is so large that the norm divides by nearly the same
    number everywhere; the weights of the norm multiply by that number, and leave the pair out. The
    added pair is the last, and `sdar_config` sets rope_theta so that the others turn as before.
    """
    config = decoder.config
    parameters = dict(decoder.named_parameters())
    tensors = {
        part.name: part.region(parameters[part.parameter]).detach() for part in tensor_parts(config)
    }
    size = config.head_dim + 2
    # PADDING twice in `size` dimensions, and the scale of scores: size ** -0.5
    undone = PADDING * (2 / size) ** 0.5 * (size / config.head_dim) ** 0.25
    norm = _with_pair(torch.full((1, config.head_dim), undone), 0.0).flatten()
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}.self_attn."
        for name, heads in (("q", config.num_heads), ("k", config.num_kv_heads)):
            weight = tensors[f"{prefix}{name}_proj.weight"].unflatten(0, (heads, -1))
            tensors[f"{prefix}{name}_proj.weight"] = _with_pair(weight, 0.0).flatten(0, 1)
            bias = _with_pair(torch.zeros(heads, config.head_dim), PADDING)
            tensors[f"{prefix}{name}_proj.bias"] = bias.flatten()
            tensors[f"{prefix}{name}_norm.weight"] = norm
        weight = tensors[f"{prefix}v_proj.weight"].unflatten(0, (config.num_kv_heads, -1))
        tensors[f"{prefix}v_proj.weight"] = _with_pair(weight, 0.0).flatten(0, 1)
        tensors[f"{prefix}v_proj.bias"] = torch.zeros(config.num_kv_heads * size)
        weight = tensors[f"{prefix}o_proj.weight"].unflatten(1, (config.num_heads, -1))
        widened = _with_pair(weight.movedim(0, -1), 0.0).movedim(-1, 0)
        tensors[f"{prefix}o_proj.weight"] = widened.flatten(1)
        tensors[f"{prefix}o_proj.bias"] = torch.zeros(config.hidden_size)
    return tensors


def _with_pair(heads: Tensor, value: float) -> Tensor:
    """heads [H, head_dim, ...] -> [H, head_dim + 2, ...], with a pair of dimensions that rotary
    embedding turns together: the last of each half."""
    first, second = heads.chunk(2, dim=1)
    added = torch.full_like(first[:, :1], value)
    return torch.cat((first, added, second, added), 1)


def sdar_config(config: ModelConfig, mask: int) -> dict[str, Any]:
    """config.json of `sdar_tensors`. The pairs of a head turn by powers of rope_theta with
    -2 i / head_dim, so it grows with the dimensions."""
    size = config.head_dim + 2
    return llama_config(config, torch.bfloat16) | {
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        "attention_bias": True,
        "head_dim": size,
        "rope_theta": config.rope.theta ** (size / config.head_dim),
        "block_size": BLOCK,
        "mask_token_id": mask,
    }


def write_sdar(decoder: Decoder, directory: Path) -> None:
    """Write a model directory in SDAR's format, with weights in bfloat16 and the storyteller's
    tokenizer."""
    tokenizer = load_tokenizer(STORYTELLER)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.bfloat16().contiguous().clone()
        for name, tensor in sdar_tensors(decoder).items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = sdar_config(decoder.config, mask_token(tokenizer))
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    replace_file(directory / "config.json", text.encode())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        replace_file(directory / name, (STORYTELLER / name).read_bytes())
    generation = json.loads((STORYTELLER / "generation_config.json").read_bytes()) | GENERATION
    text = json.dumps(generation, indent=2, sort_keys=True) + "\n"
    replace_file(directory / "generation_config.json", text.encode())


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and write the model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="directory with tinystories_train_subset.txt etc."
    )
    parser.add_argument("--output", type=Path, required=True, help="directory of the model")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of training")
    parser.add_argument("--seed", type=int, default=1, help="of the documents drawn and the noise")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    options.output.mkdir(parents=True, exist_ok=True)
    decoder, teacher = load_storyteller()
    training = Training(
        decoder,
        teacher,
        load_tokenizer(STORYTELLER),
        data.read_corpus(options.data),
        options.steps,
        options.seed,
    )
    training.run(options.output / "checkpoint.pt")
    write_sdar(decoder, options.output)
    print(f"{options.output}: {options.steps} steps in {training.seconds / 60:.1f} minutes")


if __name__ == "__main__":
    main()
