"""A small decoder of every model family, and what each request of a zoo answers on one device with
room for all."""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from nanoserve.config.model_config import ModelConfig
from nanoserve.models.decoder import Decoder
from nanoserve.models.hub import resolve_model
from nanoserve.models.loading import load_model
from nanoserve.request import Request
from nanoserve.scheduler import make_policy
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.text.grammar.compiler import GrammarCompiler
from tests.executor.small_model import local_executor, small_decoder
from tests.executor.workers.loads import Expected, Seen, WatchedEngine, requests
from tests.models.test_shards import write_checkpoint
from tests.scheduler.lives import Arrival, live

BLOCK_SIZE = 4
MAX_MODEL_LEN = 64
ROOMY_BLOCKS = 100
VOCAB_SIZE = 61

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 4, "tie_word_embeddings": True, "attention_bias": True},
    "mistral": {"sliding_window": 12},
    "qwen2": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "qwen3": {
        "head_dim": 16,
        "use_sliding_window": True,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "glm4": {"head_dim": 8, "attention_bias": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 12},
    "qwen3_moe": {
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
}
ROUNDED = "qwen3 in int4"
FAMILIES = (*_VARIANTS, ROUNDED)


@dataclass(frozen=True)
class Model:
    """A decoder, and what each request of a zoo answers that has a device to itself, with room for
    all of its KV.

    Attributes:
        expected: by request and sample.
        grammars: for the requests that want JSON, if there are any.
    """

    config: ModelConfig
    decoder: Decoder
    requests: tuple[Request, ...]
    expected: dict[tuple[str, int], Expected]
    grammars: GrammarCompiler | None = None


def family_config(family: str) -> ModelConfig:
    """The model as the engine runs it with attention in host memory, which takes no cache groups."""
    return ModelConfig.from_hf({"model_type": family, **_SHAPE, **_VARIANTS[family]}).in_one_group()


@cache
def small_model(family: str) -> Model:
    """Random weights in float32, or rounded to integers."""
    if family != ROUNDED:
        config = family_config(family)
        return _answering(config, small_decoder(config), requests(VOCAB_SIZE, schemas=False))
    with TemporaryDirectory() as directory:
        write_checkpoint("qwen3", Path(directory), vocab_size=VOCAB_SIZE)
        decoder, config = load_model(directory, "float32", quantization="int4")
    return _answering(config, decoder, requests(VOCAB_SIZE, schemas=False))


@cache
def model_with_tokenizer(dtype: torch.dtype) -> Model:
    """With the vocabulary of the bundled tokenizer, so that there are requests for JSON too."""
    config = replace(family_config("qwen3"), vocab_size=4096)
    grammars = GrammarCompiler(resolve_model(None).tokenizer_directory, config.vocab_size)
    return _answering(
        config, small_decoder(config).to(dtype), requests(config.vocab_size, schemas=True), grammars
    )


def _answering(
    config: ModelConfig,
    decoder: Decoder,
    zoo: list[Request],
    grammars: GrammarCompiler | None = None,
) -> Model:
    executor = local_executor(
        decoder, num_blocks=ROOMY_BLOCKS, block_size=BLOCK_SIZE, grammars=grammars
    )
    seen = Seen()
    for request in zoo:
        scheduler = Scheduler(
            make_policy("sarathi", 2048),
            num_blocks=ROOMY_BLOCKS,
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            prefix_caching=False,
        )
        engine = WatchedEngine(scheduler, executor, vocab_size=config.vocab_size, seen=seen)
        live(engine, [Arrival(0, request, None, None)])
    executor.close()
    expected = {key: Expected.of(sequence) for key, sequence in seen.sequences.items()}
    return Model(config, decoder, tuple(zoo), expected, grammars)
