"""Train drafters for the bundled storyteller, and measure how many of their tokens are right.

    python scripts/train_drafter.py --data DIR --kind eagle --minutes 5 --output DIR
    python scripts/train_drafter.py --data DIR --kind eagle --evaluate --output DIR

Kinds: `eagle` is a layer on the storyteller's hidden states, `medusa` further heads on them,
`draft` a storyteller of one layer. All learn the storyteller's own distributions, on answers that
it has given and on stories. `--evaluate` prints the probability that a draft token and those before
it are right, for requests with nouns that training never saw.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the project need not be installed

import msgspec
import storyteller_data as data
import storyteller_tales as tales
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from train_storyteller import (
    STORYTELLER,
    STORYTELLER_SHAPE,
    load_tokenizer,
    make_config,
    make_optimizers,
    write_model,
)

from nanoserve import LLM, SamplingParams
from nanoserve.config.model_config import ModelConfig
from nanoserve.executor.sampling.sampler import (
    Draw,
    SamplingRows,
    position_keys,
    sample,
    sequence_keys,
)
from nanoserve.models.decoder import INITIAL_STANDARD_DEVIATION, Decoder
from nanoserve.models.draft_heads import EagleHead, MedusaHeads, load_eagle, load_medusa
from nanoserve.models.loading import load_model
from scripts.saving import llama_config

ROW, ROWS = 256, 8
"""Tokens of a row and rows of a step: an answer with its request, or parts of two."""
STORY_SHARE = 0.3
"""Share of stories among the documents; the other documents are the storyteller's answers."""
STEP_WEIGHT = 0.8
"""A draft token that follows on n draft tokens counts for this to the n-th, as in EAGLE-3."""
TRAINED_STEPS = {"eagle": 3, "medusa": 4, "draft": 1}
FIRST_DRAFT = {"eagle": 2, "medusa": 2, "draft": 1}
"""How far the first draft token at a token is ahead of it."""
DRAFT_TOKENS = 4
GREEDY, SAMPLED = (
    SamplingParams(temperature=t, top_p=p, max_tokens=350) for t, p in ((0, 1), (0.8, 0.95))
)

Told = tuple[list[int], int]
"""The tokens of a chat, and how many of them are of the request."""
Following = Callable[[int], Tensor]
"""Number of draft tokens so far -> the tokens that follow the roots' chains, int64 [B * L]."""


class RootedAttention:
    """Attention of chains of draft tokens: one begins at each of `batch` x `length` tokens, its
    root. Dense, differentiable.

    The first call is causal attention over the tokens. In each later one, a root's next token sees
    the tokens up to the root and those of its own chain.
    """

    def __init__(self, config: ModelConfig, batch: int, length: int) -> None:
        self.config, self.shape = config, (batch, length)
        self.chains: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        self.hidden = torch.ones(length, length, dtype=torch.bool).triu(1)

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        assert sinks is None, "the storyteller has none"
        keys, values = self.chains.setdefault(layer, ([], []))
        group, scale = self.config.group_size, self.config.head_dim**-0.5
        query, key, value = (
            heads.unflatten(0, self.shape).transpose(1, 2) for heads in (query, key, value)
        )
        keys.append(key.repeat_interleave(group, 1))  # [B, H, L, D]
        values.append(value.repeat_interleave(group, 1))
        scores = [(query @ keys[0].transpose(2, 3) * scale).masked_fill(self.hidden, -torch.inf)]
        scores += [(query * own).sum(-1, keepdim=True) * scale for own in keys[1:]]
        weights = torch.cat(scores, -1).softmax(-1)
        length = self.shape[1]
        attended = weights[..., :length] @ values[0]
        for step, own in enumerate(values[1:]):
            attended = attended + weights[..., length + step, None] * own
        return attended.transpose(1, 2).flatten(2).flatten(0, 1)


def chains(
    module: nn.Module, tokens: Tensor, hidden: Tensor, steps: int, following: Following
) -> Iterator[Tensor]:
    """The logits of each draft token of the chains that begin at tokens [B, L], whose final hidden
    states in the storyteller are hidden [B * L, hidden_size]: float32 [B * L, V]."""
    if isinstance(module, MedusaHeads):
        yield from module(hidden, steps)
        return
    attention = RootedAttention(module.config, *tokens.shape)
    positions = torch.arange(tokens.shape[1]).repeat(len(tokens))
    for step in range(steps):
        inputs = following(step)
        if isinstance(module, EagleHead):
            inputs = module.pair(inputs, hidden)
        hidden = module(inputs, positions + step, attention)
        yield module.compute_logits(hidden)


def think(target: Decoder, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The storyteller's final hidden states and logits for tokens [B, L]: [B * L, ...]."""
    positions = torch.arange(tokens.shape[1]).repeat(len(tokens))
    hidden = target(tokens.flatten(), positions, RootedAttention(target.config, *tokens.shape))
    return hidden, target.compute_logits(hidden)


# ---- training ------------------------------------------------------------------------------------


def train(
    kind: str, module: nn.Module, target: Decoder, packer: data.Packer, minutes: float
) -> None:
    """Train in place for this number of minutes of processor time."""
    optimizers, began, share, step = make_optimizers(module), time.process_time(), 0.0, 0
    module.train()
    while share < 1.0:
        tokens = torch.tensor([[token for token, _ in packer.row(ROW)] for _ in range(ROWS)])
        loss = distillation_loss(kind, module, target, tokens)
        loss.backward()
        nn.utils.clip_grad_norm_((one for one in module.parameters() if one.requires_grad), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * min(1.0, 20 * share, 1.25 * (1 - share))
            optimizer.step()
            optimizer.zero_grad()
        step, share = step + 1, (time.process_time() - began) / (60 * minutes)
        if step % 25 == 0:
            print(f"{100 * share:3.0f} %, step {step}, loss {loss.item():.3f}", flush=True)
    module.eval()


def distillation_loss(kind: str, module: nn.Module, target: Decoder, tokens: Tensor) -> Tensor:
    """Cross entropy of the draft tokens with the storyteller's distributions, when all draft tokens
    before were right."""
    first, (batch, length) = FIRST_DRAFT[kind], tokens.shape
    with torch.no_grad():
        hidden, logits = think(target, tokens)
        wanted = logits.softmax(-1).view(batch, length, -1)

    def true_tokens(step: int) -> Tensor:
        return tokens.roll(-(first - 1 + step), 1).flatten()

    loss = torch.zeros(())
    for step, drafted in enumerate(
        chains(module, tokens, hidden, TRAINED_STEPS[kind], true_tokens)
    ):
        ahead = first - 1 + step
        likelihoods = drafted.log_softmax(-1).view(batch, length, -1)[:, : length - ahead]
        loss = loss - STEP_WEIGHT**step * (wanted[:, ahead:] * likelihoods).sum(-1).mean()
    return loss


def answers(requests: Sequence[str], params: SamplingParams) -> list[Told]:
    """Ask the storyteller. Returns all tokens of each chat, and how many of them are the request.
    Seeds are 0, 1, ..."""
    with LLM(max_num_seqs=128, dtype="float32") as llm:
        prompts = [
            llm.tokenizer.encode_chat([{"role": "user", "content": request}])
            for request in requests
        ]
        seeded = [msgspec.structs.replace(params, seed=seed) for seed in range(len(prompts))]
        outputs = llm.generate(prompts, seeded)
    return [
        (prompt + list(output.outputs[0].token_ids), len(prompt))
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def training_packer(corpus: data.Corpus, answered: Sequence[Told], rng: Random) -> data.Packer:
    """Rows of the storyteller's answers, and of stories."""
    tokenizer = load_tokenizer(STORYTELLER)

    def draw() -> data.Document:
        if rng.random() < STORY_SHARE:
            return data.draw_document(corpus, tokenizer, data.STORY_MIX, rng)
        return [(token, 1) for token in rng.choice(answered)[0]]

    return data.Packer(draw)


def new_drafter(kind: str, target: Decoder, intermediate: int) -> nn.Module:
    """An untrained drafter of the storyteller."""
    if kind == "draft":
        shape = STORYTELLER_SHAPE | {"num_hidden_layers": 1, "intermediate_size": intermediate}
        return Decoder(make_config(load_tokenizer(STORYTELLER), shape))
    if kind == "medusa":
        heads = MedusaHeads(target.config.hidden_size, target.config.vocab_size, DRAFT_TOKENS, 1)
        for head in heads.heads:
            nn.init.zeros_(head[0].linear.weight)
            nn.init.zeros_(head[0].linear.bias)
            head[1].weight.data.copy_(target.lm_head.weight)
        return heads
    config = replace(
        target.config, num_layers=1, intermediate_size=intermediate, tie_word_embeddings=False
    )
    head = EagleHead(config, target)
    for parameter in head.parameters():
        if parameter.requires_grad and parameter.dim() == 2:
            nn.init.normal_(parameter, std=INITIAL_STANDARD_DEVIATION)
    return head


def write(module: nn.Module, directory: Path) -> None:
    """Write a drafter as `nanoserve chat --speculate` reads it, with weights in bfloat16."""
    if not isinstance(module, EagleHead | MedusaHeads):
        write_model(module, module.config, load_tokenizer(STORYTELLER), directory)
        return
    directory.mkdir(parents=True, exist_ok=True)
    parameters = dict(module.named_parameters())
    tensors = {
        part.name: part.region(parameters[part.parameter]).bfloat16().contiguous()
        for part in module.parts()
    }
    name, config = "model.safetensors", {}
    if isinstance(module, MedusaHeads):
        name, config = (
            "medusa_lm_head.safetensors",
            {"medusa_num_heads": len(module.heads), "medusa_num_layers": 1},
        )
    else:
        config = llama_config(module.config, torch.bfloat16)
    save_file(tensors, directory / name, metadata={"format": "pt"})
    (directory / "config.json").write_text(
        json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )


def load(kind: str, directory: Path, target: Decoder) -> nn.Module:
    if kind == "draft":
        return load_model(directory, "float32")[0]
    return load_eagle(directory, target) if kind == "eagle" else load_medusa(directory, target)


# ---- measuring -----------------------------------------------------------------------------------


@torch.inference_mode()
def acceptance(
    kind: str, module: nn.Module, target: Decoder, told: Sequence[Told], params: SamplingParams
) -> list[float]:
    """The probability that the first draft token is what the storyteller says, that the first two
    are, and so on. It said `told` with these parameters, greedy or with the seeds 0, 1, ..., and
    the draft tokens are drawn with the same noise."""
    first, right, roots = FIRST_DRAFT[kind], torch.zeros(DRAFT_TOKENS), 0
    for seed, (said, prompt_length) in enumerate(told):
        tokens = torch.tensor([said])
        length = len(said)
        hidden, _ = think(target, tokens)
        draft_tokens = [tokens.roll(1 - first, 1).flatten()]
        for step, logits in enumerate(
            chains(module, tokens, hidden, DRAFT_TOKENS, draft_tokens.__getitem__)
        ):
            draft_tokens.append(draw(logits, torch.arange(length) + first + step, seed, params))
        begin, end = prompt_length + 1 - first, length - first - DRAFT_TOKENS + 1
        true = [
            tokens[0, first + step + begin : first + step + end] for step in range(DRAFT_TOKENS)
        ]
        matches = torch.stack(
            [
                draft_token[begin:end] == one
                for draft_token, one in zip(draft_tokens[1:], true, strict=True)
            ]
        )
        right += matches.float().cumprod(0).sum(1)
        roots += end - begin
    return (right / roots).tolist()


def draw(logits: Tensor, places: Tensor, seed: int, params: SamplingParams) -> Tensor:
    """The tokens [N] that the sampler draws from logits [N, V] for these places, int64 [N], of a
    sequence."""
    if params.temperature == 0:
        return logits.argmax(-1)
    rows, column = torch.arange(len(logits)), torch.ones(len(logits))
    key = sequence_keys(torch.full_like(rows, seed).numpy(), torch.zeros_like(rows).numpy())
    keys = position_keys(key, places.numpy())
    rule = Draw(
        rows=rows,
        keys=torch.from_numpy(keys),
        temperature=params.temperature * column,
        top_k=torch.zeros_like(rows),
        top_p=params.top_p * column.double(),
        min_p=0 * column.double(),
        largest_top_k=0,
        uses_top_p=params.top_p < 1,
        uses_min_p=False,
    )
    return sample(logits, SamplingRows((rule,), None, None)).tokens


def main() -> None:
    """Train or evaluate."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="directory with tinystories_train_subset.txt etc."
    )
    parser.add_argument("--kind", choices=[*FIRST_DRAFT], default="eagle", help="what to train")
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="processor time of the training loop"
    )
    parser.add_argument(
        "--answers", type=int, default=1500, help="answers of the storyteller to learn from"
    )
    parser.add_argument(
        "--intermediate", type=int, default=512, help="inner size of the layer's feed-forward part"
    )
    parser.add_argument("--output", type=Path, required=True, help="directory of the drafter")
    parser.add_argument(
        "--evaluate",
        action="store_true",
        help="only print how many draft tokens of the output are right",
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="of the documents drawn and the first weights"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    target, _ = load_model(STORYTELLER, "float32")
    if not options.evaluate:
        corpus, rng = data.read_corpus(options.data), Random(options.seed)
        requests = [
            tales.story_chat(corpus.short_stories, rng)[0][1] for _ in range(options.answers)
        ]
        packer = training_packer(corpus, answers(requests, SAMPLED), rng)
        drafter = new_drafter(options.kind, target, options.intermediate)
        count = sum(one.numel() for one in drafter.parameters() if one.requires_grad)
        print(f"{count:,} parameters", flush=True)
        train(options.kind, drafter, target, packer, options.minutes)
        write(drafter, options.output)
    drafter = load(options.kind, options.output, target)
    held_out = [
        f"a story about {' and '.join(map(tales.with_article, pair))}"
        for pair in tales.HELD_OUT_PAIRS
    ]
    for name, params in (("greedy", GREEDY), ("temperature 0.8, top_p 0.95", SAMPLED)):
        rates = acceptance(options.kind, drafter, target, answers(held_out, params), params)
        print(
            f"{name}: {' '.join(f'{rate:.3f}' for rate in rates)}: {1 + sum(rates):.2f} tokens a "
            "step"
        )


if __name__ == "__main__":
    main()
