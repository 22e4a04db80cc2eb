"""Compare nanoserve with a plain decoder of torch alone: `python -m scripts.gpu_peer MODEL...`.

The peer is what a user of torch would write: a static cache, scaled_dot_product_attention, and the
whole decode step compiled by torch.compile(mode="max-autotune"). It has the shapes and the random
weights of nanoserve's dummy model. Both decode greedily from the same prompts, in turns.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from nanoserve.config.model_config import ModelConfig
from nanoserve.errors import NanoserveError, UsageError
from nanoserve.lab.benchmarks.floors import ModelCost
from nanoserve.lab.benchmarks.gpu.device import GpuBench
from nanoserve.lab.benchmarks.gpu.models import EngineShelf, TimedEngine
from nanoserve.lab.benchmarks.rounds import rotated
from nanoserve.lab.benchmarks.verdicts import spread_text
from nanoserve.lab.workloads import random_prompts
from nanoserve.models.decoder import Decoder, DecoderLayer, FeedForward
from nanoserve.models.dtypes import format_name
from nanoserve.models.dummy import make_dummy_model
from nanoserve.record.metrics import BatchRates
from nanoserve.scheduler.work import StepWork

OURS, PEER = "nanoserve", "torch.compile"
_LEAST_KV_MEMORY = 16 << 20


class PlainLayer(nn.Module):
    """A layer with its own cache of keys and values, [batch, heads, length, head_dim]. It shares
    the matrices of a layer of nanoserve."""

    def __init__(self, layer: DecoderLayer, batch: int, length: int) -> None:
        super().__init__()
        config, feed_forward = layer.config, cast(FeedForward, layer.feed_forward)
        self.heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        self.head_dim, self.eps = config.head_dim, config.norms.eps
        self.attention_norm = layer.attention_norm.weight
        self.feed_forward_norm = layer.feed_forward_norm.weight
        self.query_norm, self.key_norm = None, None
        if config.attention.qk_norm:
            self.query_norm, self.key_norm = layer.query_norm.weight, layer.key_norm.weight
        self.qkv, self.output = layer.qkv.weight, layer.output.weight
        self.gate_up, self.down = feed_forward.gate_up.weight, feed_forward.down.weight
        cache = self.qkv.new_zeros(batch, config.num_kv_heads, length, config.head_dim)
        self.register_buffer("keys", cache, persistent=False)
        self.register_buffer("values", cache.clone(), persistent=False)

    def norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(hidden, weight.shape, weight, self.eps)

    def forward(
        self, hidden: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, mask: Tensor
    ) -> Tensor:
        """hidden [batch, tokens, hidden_size], at the same positions in every sequence."""
        batch, count, _ = hidden.shape
        projected = functional.linear(self.norm(hidden, self.attention_norm), self.qkv)
        by_head = projected.view(batch, count, -1, self.head_dim).transpose(1, 2)
        query, key, value = torch.split(by_head, self.heads, dim=1)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.norm(query, self.query_norm), self.norm(key, self.key_norm)
        keys, values = cast(Tensor, self.keys), cast(Tensor, self.values)
        keys.index_copy_(2, positions, rotate(key, cos, sin))
        values.index_copy_(2, positions, value)
        attended = functional.scaled_dot_product_attention(
            rotate(query, cos, sin), keys, values, attn_mask=mask, enable_gqa=True
        )
        hidden = hidden + functional.linear(attended.transpose(1, 2).flatten(2), self.output)
        normed = self.norm(hidden, self.feed_forward_norm)
        gate, up = functional.linear(normed, self.gate_up).chunk(2, dim=-1)
        return hidden + functional.linear(functional.silu(gate) * up, self.down)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads [batch, heads, tokens, head_dim] by angles [tokens, head_dim // 2]."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class PlainDecoder(nn.Module):
    """Llama or Qwen3 for a batch of equally long sequences. Raises UsageError for a decoder of
    another family."""

    def __init__(self, decoder: Decoder, batch: int, length: int) -> None:
        super().__init__()
        config = decoder.config
        if config.family not in ("llama", "qwen3") or config.layers.sliding_windows:
            raise UsageError(f"the peer knows Llama and Qwen3 without windows, not {config.family}")
        if any(name.endswith("bias") for name, _ in decoder.named_parameters()):
            raise UsageError("the peer knows no biases")
        layers = cast(Iterable[DecoderLayer], decoder.layers)
        self.layers = nn.ModuleList(PlainLayer(layer, batch, length) for layer in layers)
        self.embedding, self.lm_head = decoder.embedding.weight, decoder.lm_head.weight
        self.final_norm, self.eps = decoder.final_norm.weight, config.norms.eps
        self.register_buffer("frequencies", cast(Any, decoder.rotary[0]).inverse_frequencies)
        places = torch.arange(length, device=decoder.device)
        self.register_buffer("places", places, persistent=False)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Token ids [batch, tokens] at positions [tokens] -> logits of the last ones [batch,
        vocab_size]."""
        hidden = functional.embedding(tokens, self.embedding)
        angles = positions[:, None] * cast(Tensor, self.frequencies)
        cos, sin = angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)
        mask = cast(Tensor, self.places) <= positions[:, None]
        for layer in self.layers:
            hidden = layer(hidden, positions, cos, sin, mask)
        last = functional.rms_norm(hidden[:, -1], self.final_norm.shape, self.final_norm, self.eps)
        return functional.linear(last, self.lm_head)


class Decoded(NamedTuple):
    """Tokens of each sequence after its first, and tokens per second of all together."""

    tokens: list[list[int]]
    rate: float


class Peer:
    """The plain decoder with its step compiled. The prompts' keys and values are computed once, and
    every run decodes anew from there."""

    @torch.inference_mode()
    def __init__(
        self, bench: GpuBench, decoder: Decoder, prompts: Sequence[Sequence[int]], steps: int
    ) -> None:
        self._bench, self._steps = bench, steps
        prompt = torch.tensor(prompts, device=bench.device)
        self._context = prompt.shape[1]
        self.model = PlainDecoder(decoder, len(prompts), self._context + steps)
        positions = torch.arange(self._context, device=bench.device)
        self._first = self.model(prompt, positions).argmax(-1, keepdim=True)

    def compile(self, backend: str, mode: str) -> None:
        """Have the step compiled when it first runs: a token of each sequence, and their position,
        to the next tokens."""

        def step(token: Tensor, position: Tensor) -> Tensor:
            logits: Tensor = self.model(token, position)
            return logits.argmax(-1, keepdim=True)

        self._step: Callable[[Tensor, Tensor], Tensor] = torch.compile(
            step, backend=backend, mode=mode, fullgraph=True, dynamic=False
        )

    @torch.inference_mode()
    def run(self) -> Decoded:
        token, tokens = self._first, []
        position = torch.tensor([self._context], device=self._bench.device)
        self._bench.synchronize()
        began = time.perf_counter()
        for _ in range(self._steps):
            # a captured graph writes its next result into the same memory
            token = self._step(token, position).clone()
            tokens.append(token)
            position += 1
        self._bench.synchronize()
        seconds = time.perf_counter() - began
        return Decoded(torch.cat(tokens, dim=1).tolist(), len(token) * self._steps / seconds)


def open_engine(
    bench: GpuBench, shelf: EngineShelf, model: str, config: ModelConfig, batch: int, length: int
) -> TimedEngine:
    """nanoserve, with twice the memory for keys and values that these sequences need."""
    token_bytes = sum(config.layer_kv_numbers()) * bench.dtype.itemsize
    return shelf.get(
        model,
        dtype=format_name(bench.dtype),
        max_model_len=length + 16,
        max_num_seqs=batch,
        max_num_batched_tokens=batch * length,
        kv_cache_memory=max(_LEAST_KV_MEMORY, 2 * batch * length * token_bytes),
    )


def decode(engine: TimedEngine, prompts: Sequence[tuple[int, ...]], steps: int) -> Decoded:
    """Decode by nanoserve's engine as `Peer.run` does: the first tokens come with the prompts."""
    run = engine.driver.run(prompts, [1 + steps] * len(prompts))
    rate = BatchRates.of(run.timings).decode
    assert rate is not None, "there are tokens after the first"
    return Decoded([list(tokens[1:]) for tokens in run.tokens], rate)


def compare(bench: GpuBench, model: str, given: argparse.Namespace) -> None:
    """Print the rates of both for a model, and their ratio within each round."""
    limits = bench.limits
    decoder, config = make_dummy_model(model, format_name(bench.dtype), bench.device)
    prompts = random_prompts([given.context] * given.batch, config.vocab_size, seed=0)
    peer = Peer(bench, decoder, prompts, given.tokens)
    peer.compile(given.backend, given.mode)
    peer.run()  # which compiles
    runs: dict[str, list[Decoded]] = {OURS: [], PEER: []}
    with closing(EngineShelf(bench)) as shelf:
        length = given.context + given.tokens
        engine = open_engine(bench, shelf, model, config, given.batch, length)
        routes: dict[str, Callable[[], Decoded]] = {
            OURS: partial(decode, engine, prompts, given.tokens),
            PEER: peer.run,
        }
        routes[OURS]()
        for number in range(given.rounds):
            for name in rotated(routes, number):
                runs[name].append(routes[name]())
    middle = given.context + (given.tokens + 1) // 2
    step = StepWork.of([middle] * given.batch)
    floor = given.batch / ModelCost(config, bench.dtype.itemsize).floor_seconds(step, limits)
    for name, several in runs.items():
        rates = [run.rate for run in several]
        share = statistics.median(rates) / floor
        print(f"{model}, {name}: {spread_text(rates, ',.1f')} tokens/s, {share:.0%} of the floor")
    ratios = [ours.rate / other.rate for ours, other in zip(*runs.values(), strict=True)]
    ours, other = (torch.tensor(several[0].tokens) for several in runs.values())
    print(
        f"{model}: {OURS} over {PEER} {spread_text(ratios)}; {int((ours == other).sum())} of "
        f"{ours.numel()} tokens are the same",
        flush=True,
    )


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="a name or a config.json")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--mode", help="of torch.compile; on a GPU max-autotune by default")
    given = parser.parse_args(words)
    if min(given.batch, given.context, given.tokens, given.rounds) < 1:
        parser.error("--batch, --context, --tokens and --rounds take numbers from 1")
    is_dry = given.device == "cpu"
    if given.mode is None:
        given.mode = "default" if is_dry else "max-autotune"
    try:
        bench = GpuBench.open(dry_run=is_dry, asked="gpu_peer", instead="try it with --device cpu")
        for model in given.models:
            compare(bench, model, given)
            bench.give_back()
    except NanoserveError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
