"""A step of one token through fused layers gives what the layers give that are not fused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nanoserve.config.model_config import ModelConfig
from nanoserve.executor.compile import fused_layer
from nanoserve.executor.compile.aot_build import layer_kind
from nanoserve.executor.compile.fused_layer import can_be_fused, most_fused_tokens
from nanoserve.executor.compile.layer_runner import LayerRunner
from nanoserve.executor.step.forward_pass import Caches, ForwardPass, StepInputs
from nanoserve.models.attention import AttentionBatch
from nanoserve.models.decoder import Decoder
from nanoserve.models.packed import PackedShape

BLOCK_SIZE, BLOCKS = 4, 8
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
FUSED: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},  # with biases
    "qwen3": {"head_dim": 16},  # with norms of queries and keys
    "mistral": {"sliding_window": 5},
    "smollm3": {"no_rope_layers": [1, 0]},
}
NOT_FUSED: dict[str, dict[str, Any]] = {
    "gemma2": SLIDING,
    "gemma3_text": SLIDING,
    "olmo3": SLIDING,
    "cohere2": {**SLIDING, "logit_scale": 1.0},
    "gpt_oss": {**SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def config_of(family: str, settings: dict[str, Any]) -> ModelConfig:
    return ModelConfig.from_hf({"model_type": family, **SHAPE, **settings})


class CountedCompiler:
    """A compiler that runs what it is given as it is, and counts how often."""

    def __init__(self) -> None:
        self.runs = 0
        torch._dynamo.reset()

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        def run(*tensors: Tensor) -> Any:
            self.runs += 1
            return graph(*tensors)

        return run


def random_decoder(config: ModelConfig) -> Decoder:
    torch.manual_seed(0)
    decoder = Decoder(config).requires_grad_(False)
    for parameter in decoder.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.2)  # norms and biases tell, too
    return decoder


def caches_of(config: ModelConfig) -> Caches:
    shape = (BLOCKS, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    generator = torch.Generator().manual_seed(1)
    keys, values = (
        [torch.randn(shape, generator=generator) for _ in range(config.num_layers)]
        for _ in range(2)
    )
    return Caches(keys, values)


def decode_step(position: int) -> StepInputs:
    """One token behind `position` others, in blocks that are not in order."""
    table = torch.tensor([[5, 2, 7, 0, 3]], dtype=torch.int32)
    slot = table[0, position // BLOCK_SIZE].long() * BLOCK_SIZE + position % BLOCK_SIZE
    batch = AttentionBatch(
        table,
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([position + 1], dtype=torch.int32),
        slot[None],
    )
    return StepInputs(torch.tensor([position * 3 % 64]), torch.tensor([position]), batch, 1)


@pytest.mark.parametrize("family", FUSED)
@torch.inference_mode()
def test_a_step_of_one_token_is_that_of_plain_layers(family: str) -> None:
    config = config_of(family, FUSED[family])
    decoder = random_decoder(config)
    fused_caches, plain_caches = caches_of(config), caches_of(config)
    compiler = CountedCompiler()
    runner = LayerRunner.torch_compile(decoder, backend=compiler)
    fused = ForwardPass(decoder, fused_caches, runner)
    plain = ForwardPass(decoder, plain_caches)
    for position in (0, 3, 4, 17):
        step = decode_step(position)
        torch.testing.assert_close(fused(step), plain(step))
    for name in ("keys", "values"):
        torch.testing.assert_close(getattr(fused_caches, name), getattr(plain_caches, name))
    assert compiler.runs == 0


@pytest.mark.parametrize(("most", "compiled"), [(2, 0), (1, 2)])
@torch.inference_mode()
def test_a_step_of_few_tokens_is_fused_and_one_of_more_compiled(
    most: int, compiled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_layer, "MOST_TOKENS", most)
    config = config_of("qwen3", FUSED["qwen3"])
    decoder = random_decoder(config)
    compiler = CountedCompiler()
    runner = LayerRunner.torch_compile(decoder, backend=compiler)
    two = AttentionBatch(
        torch.tensor([[5, 2], [7, 0]], dtype=torch.int32),
        torch.tensor([0, 1, 2], dtype=torch.int32),
        torch.tensor([6, 6], dtype=torch.int32),
        torch.tensor([9, 1]),
    )
    step = StepInputs(torch.tensor([1, 2]), torch.tensor([5, 5]), two, 1)
    found = ForwardPass(decoder, caches_of(config), runner)(step)
    torch.testing.assert_close(found, ForwardPass(decoder, caches_of(config))(step))
    assert compiler.runs == compiled


def test_the_more_weights_the_fewer_tokens_are_fused() -> None:
    """Where all tokens but the first read from the cache, and that takes as long as is saved."""
    tokens = [most_fused_tokens(size) for size in (1 << 10, 31_500_000, 122_000_000, 436_000_000)]
    assert tokens == [8, 4, 2, 1], "of a tiny model, Qwen3-0.6B, Llama-3.2-1B and Llama-3.1-8B"
    for size in (20_000_000, 31_500_000, 122_000_000):
        several = most_fused_tokens(size)
        reading = several * size / fused_layer.CACHE_BANDWIDTH
        assert reading <= size / fused_layer.MEMORY_BANDWIDTH + fused_layer.SAVED_SECONDS


@torch.inference_mode()
def test_a_layer_that_cannot_be_fused_after_all_is_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once it has run, a failure is the step's own."""
    config = config_of("llama", {})
    decoder = random_decoder(config)
    compiler, step = CountedCompiler(), decode_step(5)
    plain = ForwardPass(decoder, caches_of(config))(step)
    product = fused_layer.fused_linear

    def fail(*arguments: object, **options: object) -> Tensor:
        raise RuntimeError("no such instruction\nin line 7")

    monkeypatch.setattr(fused_layer, "fused_linear", fail)
    runner = LayerRunner.torch_compile(decoder, backend=compiler)
    forward = ForwardPass(decoder, caches_of(config), runner)
    torch.testing.assert_close(forward(step), plain)
    assert compiler.runs == config.num_layers
    notice = "nanoserve: steps of one token run compiled, which is slower: no such instruction"
    told = [record.getMessage() for record in caplog.records if record.name == "nanoserve"]
    assert told == [notice]
    monkeypatch.setattr(fused_layer, "fused_linear", product)
    runner = LayerRunner.torch_compile(decoder, backend=compiler)
    forward = ForwardPass(decoder, caches_of(config), runner)
    forward(step)
    monkeypatch.setattr(fused_layer, "fused_linear", fail)
    with pytest.raises(RuntimeError, match="no such instruction"):
        forward(step)


def test_kinds_of_layers_that_are_fused() -> None:
    for family, settings in FUSED.items():
        config = config_of(family, settings)
        assert can_be_fused(layer_kind("layer", config, 0)), family
        assert not can_be_fused(layer_kind("post_attention", config, 0))
        packed = (PackedShape("qkv", (), config.hidden_size),)
        assert not can_be_fused(layer_kind("layer", config, 0, packed))
    for family, settings in NOT_FUSED.items():
        assert not can_be_fused(layer_kind("layer", config_of(family, settings), 0)), family
