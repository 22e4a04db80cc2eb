"""Multi-query associative recall (Zoology, arXiv 2312.04927), and small models that are trained on
it (the lecture, section 2.2.2).

A text has pairs of a key and a value. Each key comes a second time further on, and the model is
asked for its value. All other tokens are values without a key. So a model must see which values to
keep, keep several apart, and find one again. The models have about as many parameters each, and are
trained on the same texts.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from nanoserve.config.model_config import ModelConfig
from nanoserve.config.model_parts import LayerDifferences, RopeConfig
from nanoserve.lab.papers.s4d import S4D
from nanoserve.lab.papers.selective_scan import TrainableMamba
from nanoserve.models.attention import DenseCausalAttention
from nanoserve.models.decoder import DecoderLayer, FeedForward, RMSNorm, RotaryEmbedding

KEYS, VALUES = 16, 16
"""Keys are tokens 0 to 15, values the next 16."""
LENGTH, PAIRS = 48, (1, 4, 8)
DISTANCES = (2, 10, 18, 34, LENGTH)
"""Where the ranges of distances from a pair to its question begin; all distances are even."""
HEADS, WINDOW = 2, 4
_EPS = 1e-6

TEXTS = 8
"""Texts with each number of pairs in a step."""
STEPS = 1000
SHORT_LENGTH, SHORT_PAIRS, SHORT_SHARE = 16, (1, 2, 4), 0.5
"""Texts of the first share of the steps: shorter ones with fewer pairs, which are easier. More of
them are in a step, so that it has as many tokens."""
TESTED_QUESTIONS = 2048
"""Questions with each number of pairs, about as many; their texts are the same for all models."""
LEARNING_RATE, STATE_RATE = 5e-3, 1e-3
"""Learning rates at their highest; the lower one is for decays, frequencies and steps of states."""
WARM_UP, DECAY = 0.05, 0.5
"""The first share of the steps, in which the learning rates rise, and the last share, in which they
fall to zero."""
WEIGHT_DECAY = 0.01


# ---- the task ------------------------------------------------------------------------------------


class Texts(NamedTuple):
    """A batch of texts with as many pairs each."""

    tokens: Tensor
    """int64 [batch, LENGTH]."""
    pair_places: Tensor
    """Positions of the keys of pairs, int64 [batch, pairs]; the value is one further."""
    question_places: Tensor
    """Positions where the same keys come again; the value is one further, as in a pair."""

    @property
    def answers(self) -> Tensor:
        """The tokens that are right, int64 [batch, pairs]."""
        return self.tokens.gather(1, self.question_places + 1)

    @property
    def distances(self) -> Tensor:
        """Positions from a pair to its question, int64 [batch, pairs]."""
        return self.question_places - self.pair_places


def draw_texts(batch: int, pairs: int, generator: torch.Generator, length: int = LENGTH) -> Texts:
    """Draw texts. Pairs and questions take 2 positions each, which are drawn evenly; of the two
    places of a key the first one is the pair."""
    tokens = torch.randint(KEYS, KEYS + VALUES, (batch, length), generator=generator)
    keys = torch.rand(batch, KEYS, generator=generator).argsort(1)[:, :pairs]
    values = torch.randint(KEYS, KEYS + VALUES, (batch, pairs), generator=generator)
    shuffled = torch.rand(batch, length // 2, generator=generator).argsort(1)
    places = 2 * shuffled[:, : 2 * pairs].view(batch, pairs, 2)
    first, second = places.sort(-1).values.unbind(-1)
    for place in (first, second):
        tokens.scatter_(1, place, keys)
        tokens.scatter_(1, place + 1, values)
    return Texts(tokens, first, second)


# ---- the models ----------------------------------------------------------------------------------


class Residual(nn.Module):
    """Adds what a module makes of the normalized hidden states to them."""

    def __init__(self, width: int, module: nn.Module) -> None:
        super().__init__()
        self.norm = RMSNorm(width, _EPS)
        self.module = module

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [batch, length, width] -> same shape"""
        summed: Tensor = hidden + self.module(self.norm(hidden))
        return summed


class GatedS4D(nn.Module):
    """S4D as its paper uses it: its channels are mixed and gated after a GELU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.channels = S4D(width)
        self.outward = nn.Linear(width, 2 * width)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [batch, length, width] -> same shape"""
        convolved = self.channels.convolve(hidden.transpose(1, 2)).transpose(1, 2)
        return functional.glu(self.outward(functional.gelu(convolved)))


class AttentionLayer(nn.Module):
    """A layer of the engine's Decoder: attention and feed-forward part."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.config = config
        self.layer = DecoderLayer(config, index)
        self.rotary = RotaryEmbedding(config.rope)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [batch, length, width] -> same shape"""
        batch, length, _ = hidden.shape
        cos, sin = self.rotary(torch.arange(length).repeat(batch), torch.float32)
        attention = DenseCausalAttention(self.config, batch, length)
        output: Tensor = self.layer(hidden.flatten(0, 1), cos, sin, attention)
        return output.view_as(hidden)


class RecallModel(nn.Module):
    """Embedding, layers, and logits for all positions."""

    def __init__(self, width: int, layers: list[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(KEYS + VALUES, width)
        self.layers = nn.Sequential(*layers)
        self.norm = RMSNorm(width, _EPS)
        self.head = nn.Linear(width, KEYS + VALUES, bias=False)
        for layer in self.modules():
            if isinstance(layer, DecoderLayer | FeedForward):
                _initialize(layer)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [batch, length] -> logits [batch, length, KEYS + VALUES]"""
        logits: Tensor = self.head(self.norm(self.layers(self.embedding(tokens))))
        return logits


def _initialize(part: nn.Module) -> None:
    """Draw the weights of the engine's layers, which come without."""
    for module in part.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)


def _config(width: int, inner: int, windows: tuple[int, ...]) -> ModelConfig:
    """A decoder with feed-forward parts of this inner size, and a layer for each window."""
    head_dim = width // HEADS
    return ModelConfig(
        family="recall",
        vocab_size=KEYS + VALUES,
        hidden_size=width,
        intermediate_size=inner,
        num_layers=len(windows),
        num_heads=HEADS,
        num_kv_heads=HEADS,
        head_dim=head_dim,
        max_position_embeddings=LENGTH,
        rope=RopeConfig(rotary_dim=head_dim),
        layers=LayerDifferences(sliding_windows=windows),
    )


def _attention(width: int, inner: int, windows: tuple[int, ...]) -> list[nn.Module]:
    config = _config(width, inner, windows)
    return [AttentionLayer(config, index) for index in range(len(windows))]


def _mamba(width: int, layers: int, state_size: int) -> list[nn.Module]:
    """Heads of 32 channels, twice as many channels as the model is wide."""
    found: list[nn.Module] = []
    for _ in range(layers):
        mixer = TrainableMamba(width, channels=2 * width, heads=width // 16, state_size=state_size)
        found.append(Residual(width, mixer))
    return found


def _make_s4d() -> RecallModel:
    width, feed_forward = 64, _config(64, 84, (0,))
    layers: list[nn.Module] = []
    for _ in range(2):
        layers.append(Residual(width, GatedS4D(width)))
        layers.append(Residual(width, FeedForward(feed_forward)))
    return RecallModel(width, layers)


def _make_mamba() -> RecallModel:
    return RecallModel(64, _mamba(64, layers=2, state_size=28))


def _make_hybrid() -> RecallModel:
    """Layer 4 of 8 attends, as in Jamba."""
    layers = _mamba(32, layers=7, state_size=16)
    layers[4:4] = _attention(32, 36, (0,))
    return RecallModel(32, layers)


def _make_windows() -> RecallModel:
    """Layer 5 of 6 sees all positions, as in Gemma 3."""
    return RecallModel(40, _attention(40, 40, (WINDOW,) * 5 + (0,)))


def _make_full_attention() -> RecallModel:
    return RecallModel(64, _attention(64, 84, (0, 0)))


MODELS: Mapping[str, Callable[[], RecallModel]] = {
    "S4D": _make_s4d,
    "Mamba": _make_mamba,
    "hybrid 1:7": _make_hybrid,
    "windows 1:5": _make_windows,
    "full attention": _make_full_attention,
}
"""Models before training. Two layers are enough for one kind of layers, as in Zoology; a ratio of
two kinds takes more, which are narrower."""


# ---- training ------------------------------------------------------------------------------------


class Recalled(NamedTuple):
    """How many questions a model answered right, of one number of pairs and one range of
    distances."""

    pairs: int
    nearest: int
    farthest: int
    questions: int
    right: int


class Trained(NamedTuple):
    parameters: int
    tokens: int
    """Tokens that it was trained on."""
    seconds: float
    """Processor time of training."""
    recalled: list[Recalled]


Progress = Callable[[int, float], None]  # takes the steps that are done, and the loss


def train(
    name: str,
    seed: int,
    progress: Progress,
    steps: int = STEPS,
    questions: int = TESTED_QUESTIONS,
) -> Trained:
    """Train a model of MODELS, and ask it. The seed draws the weights, and the texts, which are the
    same for all models."""
    began = time.process_time()
    torch.manual_seed(seed)
    model = MODELS[name]()
    generator = torch.Generator().manual_seed(seed)
    optimizer = _make_optimizer(model)
    for step in range(steps):
        share = (step + 1) / steps
        factor = min(1.0, share / WARM_UP, (1 - share) / DECAY)
        for group in optimizer.param_groups:
            group["lr"] = factor * group["initial_lr"]
        loss = recall_loss(model, list(_draw_step(share, generator)))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        progress(step + 1, loss.item())
    seconds = time.process_time() - began
    parameters = sum(one.numel() for one in model.parameters())
    tokens = steps * TEXTS * len(PAIRS) * LENGTH
    return Trained(parameters, tokens, seconds, list(ask(model, questions)))


def _draw_step(share: float, generator: torch.Generator) -> Iterator[Texts]:
    """Draw the texts of a step, when this share of the steps is done with it."""
    length, numbers = LENGTH, PAIRS
    if share <= SHORT_SHARE:
        length, numbers = SHORT_LENGTH, SHORT_PAIRS
    for pairs in numbers:
        yield draw_texts(TEXTS * LENGTH // length, pairs, generator, length)


def recall_loss(model: nn.Module, drawn: list[Texts]) -> Tensor:
    """Mean cross entropy over all questions."""
    logits = model(torch.cat([texts.tokens for texts in drawn]))
    by_texts = logits.split([len(texts.tokens) for texts in drawn])
    asked = [
        _at_questions(own, texts).flatten(0, 1) for own, texts in zip(by_texts, drawn, strict=True)
    ]
    answers = torch.cat([texts.answers.flatten() for texts in drawn])
    return functional.cross_entropy(torch.cat(asked), answers)


@torch.inference_mode()
def ask(model: nn.Module, questions: int) -> Iterator[Recalled]:
    """Ask about texts that no seed of a training draws; the largest logit is the answer."""
    generator = torch.Generator().manual_seed(2**40)
    for pairs in PAIRS:
        right, distances = [], []
        for _ in range(math.ceil(questions / (TEXTS * pairs))):
            texts = draw_texts(TEXTS, pairs, generator)
            answered = _at_questions(model(texts.tokens), texts).argmax(-1)
            right.append(answered == texts.answers)
            distances.append(texts.distances)
        is_right, distance = torch.cat(right), torch.cat(distances)
        for nearest, beyond in pairwise(DISTANCES):
            inside = (distance >= nearest) & (distance < beyond)
            yield Recalled(
                pairs,
                nearest,
                beyond - 2,
                int(inside.sum()),
                int((inside & is_right).sum()),
            )


def _at_questions(logits: Tensor, texts: Texts) -> Tensor:
    """logits [batch, LENGTH, V] -> those after the keys that are asked for, [batch, pairs, V]."""
    rows = torch.arange(len(logits))[:, None]
    return logits[rows, texts.question_places]


def _make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    of_states: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[-1] in ("log_decay", "frequency", "log_step", "step_bias"):
            of_states.append(parameter)
        else:
            others.append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": others, "initial_lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY},
        {"params": of_states, "initial_lr": STATE_RATE, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98))
