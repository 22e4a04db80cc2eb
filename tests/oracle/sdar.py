"""Small random SDAR checkpoints, and how SDAR generates, for tests.

SDAR's layers are those of Qwen3, so transformers' Qwen3 with an explicit mask is its reference.
"""

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

import nanoserve
from tests.oracle.checkpoints import VOCAB_SIZE, make_checkpoint, randomize

MASK_TOKEN = VOCAB_SIZE - 1
END_TOKEN = 2


def make_sdar(directory: Path, length: int = 4, *, vocab_size: int = VOCAB_SIZE) -> PreTrainedModel:
    """Write a checkpoint that writes `length` tokens at a time; returns the Qwen3 that it holds."""
    model = make_checkpoint("qwen3", directory)
    if vocab_size > VOCAB_SIZE:
        torch.manual_seed(1)
        model.resize_token_embeddings(vocab_size, mean_resizing=False)
        randomize(model)
        model.save_pretrained(directory)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config |= {"model_type": "sdar", "architectures": ["SDARForCausalLM"]}
    config |= {"block_size": length, "mask_token_id": MASK_TOKEN}
    path.write_text(json.dumps(config))
    return model


def make_sdar_for_text(directory: Path, length: int = 4) -> PreTrainedModel:
    """Write one with the tokenizer of the bundled model, and its vocabulary."""
    copy_tokenizer(directory)
    return make_sdar(directory, length, vocab_size=4096)


def copy_tokenizer(directory: Path) -> None:
    """Give a checkpoint of 4,096 tokens the tokenizer of the bundled model."""
    storyteller = Path(nanoserve.__file__).parent / "assets/storyteller"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(storyteller / name, directory)


@torch.inference_mode()
def block_causal_logits(model: PreTrainedModel, tokens: list[int], length: int) -> Tensor:
    """Logits at every position, where each sees to the end of its block, all computed anew."""
    block = torch.arange(len(tokens)) // length
    seen = block[None, :] <= block[:, None]
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    logits: Tensor = model(torch.tensor([tokens]), attention_mask=mask[None, None]).logits[0]
    return logits


@dataclass
class Generation:
    """What SDAR's generate.py does with a prompt, greedily. Confidences are probabilities of the
    likeliest tokens. Other than there, a mask is never generated, and a step settles masks alone,
    also where fewer than its share are left."""

    model: PreTrainedModel
    length: int
    threshold: float | None = 0.85
    """None: the strategy low_confidence_static, else low_confidence_dynamic."""
    steps: int | None = None
    bound: float | None = None
    """With it, the positions of lowest entropy are settled while the sum of their entropies less
    the largest is at most that, whatever the strategy (arXiv 2505.24857)."""
    passes: int = 0
    """Denoising steps so far."""
    logprobs: list[float] = field(default_factory=list)
    """Of the tokens of the last answer, in the step that settled each."""
    states: list[list[int]] = field(default_factory=list)
    """The last answer with its prompt after each step."""

    def answer(self, prompt: tuple[int, ...], most: int, end: int | None = END_TOKEN) -> list[int]:
        """Write block after block until there are `most` tokens, or an end token."""
        tokens = list(prompt)
        self.logprobs, self.states = [], []
        while len(tokens) < len(prompt) + most:
            fixed = len(tokens) % self.length
            tokens += [MASK_TOKEN] * (self.length - fixed)
            self._settle(tokens)
            new = tokens[len(prompt) :]
            if end in new:
                return new[: new.index(end) + 1][:most]
        return tokens[len(prompt) : len(prompt) + most]

    def _settle(self, tokens: list[int]) -> None:
        first = len(tokens) - self.length
        found = dict[int, float]()
        number = self.steps or self.length
        shares = [self.length // number] * number
        for step in range(self.length % number):
            shares[step] += 1
        for share in shares:
            masked = [at for at in range(first, len(tokens)) if tokens[at] == MASK_TOKEN]
            if not masked:
                break
            self.passes += 1
            logits = block_causal_logits(self.model, tokens, self.length).clone()
            logprobs = logits.log_softmax(-1)
            logits[:, MASK_TOKEN] = -torch.inf
            confidence, best = logits.softmax(-1).max(-1)
            chosen = sorted(masked, key=lambda at: -float(confidence[at]))[:share]
            if self.bound is not None:
                chosen = self._within_bound(logits, masked)
            elif self.threshold is not None:
                sure = [at for at in masked if confidence[at] > self.threshold]
                if len(sure) >= share:
                    chosen = sure
            for at in chosen:
                tokens[at] = int(best[at])
                found[at] = float(logprobs[at, best[at]])
            self.states.append(list(tokens))
        self.logprobs += [found[at] for at in sorted(found)]

    def _within_bound(self, logits: Tensor, masked: list[int]) -> list[int]:
        entropies = torch.distributions.Categorical(logits=logits[:, :MASK_TOKEN]).entropy()
        ascending = sorted(masked, key=lambda at: float(entropies[at]))
        sums = [float(entropies[ascending[:count]].sum()) for count in range(len(ascending))]
        assert self.bound is not None
        return [at for at, before in zip(ascending, sums, strict=True) if before <= self.bound]
