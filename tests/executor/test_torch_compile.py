"""Layers compiled by torch.compile: two graphs serve all layers of a kind: for one token, and for
any other number."""

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from nanoserve.config.model_config import ModelConfig
from nanoserve.config.model_parts import AttentionConfig, LayerDifferences, MoeConfig, NormConfig
from nanoserve.executor.compile.layer_runner import LayerRunner
from nanoserve.executor.step.forward_pass import Caches, ForwardPass, StepInputs
from nanoserve.executor.step.staging import HostBuffer
from nanoserve.models.attention import AttentionBatch
from nanoserve.models.decoder import Decoder, DecoderLayer, LayerFunction
from nanoserve.models.dummy import make_dummy_model
from nanoserve.models.shards import make_shards
from tests.executor.small_model import VOCAB_SIZE, small_config, small_decoder

BLOCK_SIZE = 4
SPARSE = MoeConfig(4, 2, 16, normalize_weights=True, sparse_layers=frozenset({1}))


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def step_of(rows: int, length: int, generator: torch.Generator) -> StepInputs:
    """Prompts of equal length, rows * length tokens, as they come from the host: parts of one
    buffer."""
    tokens, blocks = rows * length, -(-length // BLOCK_SIZE)
    places = torch.arange(length).repeat(rows)
    tensors = (
        torch.randint(0, VOCAB_SIZE, (tokens,), generator=generator),
        places,
        torch.arange(rows * blocks, dtype=torch.int32).view(rows, blocks),
        torch.arange(0, tokens + 1, length, dtype=torch.int32),
        torch.full((rows,), length, dtype=torch.int32),
        places + torch.arange(rows).repeat_interleave(length) * blocks * BLOCK_SIZE,
    )
    buffer = HostBuffer(torch.device("cpu"))
    buffer.begin()
    token_ids, positions, *batch = [buffer.add(tensor.numpy()) for tensor in tensors]
    buffer.transfer()
    return StepInputs(token_ids, positions, AttentionBatch(*batch), longest=len(token_ids))


def caches(config: ModelConfig, num_blocks: int) -> Caches:
    shape = (num_blocks, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    keys, values = (
        [torch.full(shape, torch.nan) for _ in range(config.num_layers)] for _ in range(2)
    )
    return Caches(keys, values)


def bent_config(windows: tuple[int, ...]) -> ModelConfig:
    return replace(
        small_config(),
        num_layers=3,
        attention=AttentionConfig(qkv_bias=True, qk_norm=True),
        norms=NormConfig(places="around"),
        moe=SPARSE,
        layers=LayerDifferences(sliding_windows=windows),
    ).in_one_group()


def test_two_graphs_per_kind_of_layer_equal_eager() -> None:
    """The first and the last of three layers are of one kind."""
    config = bent_config(windows=(0, 5, 0))
    decoder = small_decoder(config).requires_grad_(False)
    layers, generator = (
        LayerRunner.torch_compile(decoder, backend="aot_eager"),
        torch.Generator().manual_seed(1),
    )
    with torch.inference_mode():
        for rows, length, num_blocks in [
            (1, 5, 1),
            (1, 1, 40),
            (2, 1, 40),
            (1, 2, 40),
            (1, 7, 40),
            (16, 1, 40),
        ]:
            step = step_of(rows, length, generator)
            traced = ForwardPass(decoder, caches(config, max(num_blocks, rows * 2)), layers)(step)
            eager = ForwardPass(decoder, caches(config, max(num_blocks, rows * 2)))(step)
            torch.testing.assert_close(traced, eager)
    assert layers.loaded
    assert counters["stats"]["unique_graphs"] == 4
    assert not counters["graph_break"]


def test_two_graphs_per_piece_serve_batches_of_any_size() -> None:
    """Windows make three kinds of layers of these, and two kinds of pieces, for there are experts
    in one."""
    config = bent_config(windows=(0, 5, 5))
    decoder = small_decoder(config).requires_grad_(False)
    layers, generator = (
        LayerRunner.torch_compile(decoder, backend="aot_eager"),
        torch.Generator().manual_seed(1),
    )
    with torch.inference_mode():
        for rows, length in [(1, 5), (1, 1), (2, 1), (1, 7), (16, 1)]:
            step = step_of(rows, length, generator)
            traced = ForwardPass(decoder, caches(config, rows * 2), layers.in_pieces)(step)
            eager = ForwardPass(decoder, caches(config, rows * 2), LayerRunner().in_pieces)(step)
            torch.testing.assert_close(traced, eager)
            torch.testing.assert_close(traced, ForwardPass(decoder, caches(config, rows * 2))(step))
        assert counters["stats"]["unique_graphs"] == 8
        rows_of_a_batch = torch.randn(9, config.hidden_size, generator=generator)[4:]
        attended = torch.randn(9, config.num_heads * config.head_dim, generator=generator)[4:]
        for layer in decoder.layers:
            found = layers.post_attention(layer, attended, rows_of_a_batch)
            torch.testing.assert_close(found, layer.post_attention(attended, rows_of_a_batch))
    assert layers.loaded
    assert counters["stats"]["unique_graphs"] == 8
    assert not counters["graph_break"]


def test_sums_over_a_group_are_part_of_a_layer() -> None:
    class Twin:
        """The only rank that there is of two: the other is thought to compute the same."""

        def all_reduce(self, tensor: Tensor) -> Tensor:
            return 2 * tensor

        def gather(self, tensor: Tensor) -> Tensor:
            return torch.cat((tensor, tensor), dim=1)

    config = replace(small_config(), num_layers=1, layers=LayerDifferences(sliding_windows=(0,)))
    (shard, _) = make_shards(config, pipeline_parallel=1, tensor_parallel=2)
    decoder = Decoder(config, shard=shard, group=Twin()).requires_grad_(False).eval()
    layers, step = (
        LayerRunner.torch_compile(decoder, backend="eager"),
        step_of(2, 3, torch.Generator().manual_seed(1)),
    )
    with torch.inference_mode():
        traced = ForwardPass(decoder, caches(decoder.config, 4), layers)(step)
        torch.testing.assert_close(traced, ForwardPass(decoder, caches(decoder.config, 4))(step))
    assert layers.loaded


@pytest.mark.parametrize("run_layer", [lambda layers: layers, lambda layers: layers.in_pieces])
def test_a_compiler_that_fails_leaves_the_same_answers_and_one_notice(
    caplog: pytest.LogCaptureFixture, run_layer: Callable[[LayerRunner], LayerFunction]
) -> None:
    def broken(graph: object, inputs: object) -> None:
        raise ValueError("no compiler today\nand more of it")

    decoder = small_decoder().requires_grad_(False)
    layers = LayerRunner.torch_compile(decoder, backend=broken)
    step = step_of(2, 5, torch.Generator().manual_seed(1))  # more than are fused
    with torch.inference_mode():
        for _ in range(2):
            answer = ForwardPass(decoder, caches(decoder.config, 4), run_layer(layers))(step)
            assert torch.equal(answer, ForwardPass(decoder, caches(decoder.config, 4))(step))
    assert not layers.loaded
    (notice,) = [
        record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
    ]
    assert "layers run uncompiled" in notice and notice.endswith("ValueError: no compiler today")


def test_more_kinds_of_layers_than_dynamo_compiles_of_one_function_stay_compiled() -> None:
    """Dynamo stops at 8 for each code object, and here at 2."""
    config = replace(
        small_config(), num_layers=4, layers=LayerDifferences(sliding_windows=(1, 2, 3, 4))
    )
    decoder = small_decoder(config.in_one_group())
    decoder.requires_grad_(False)
    layers = LayerRunner.torch_compile(decoder, backend="eager")
    with torch.inference_mode(), torch._dynamo.config.patch(recompile_limit=2):
        for rows in (1, 3):
            step = step_of(rows, 15, torch.Generator().manual_seed(1))
            traced = ForwardPass(decoder, caches(decoder.config, 4 * rows), layers)(step)
            torch.testing.assert_close(
                traced, ForwardPass(decoder, caches(decoder.config, 4 * rows))(step)
            )
    assert layers.loaded
    assert counters["stats"]["unique_graphs"] == 4, "no step has one token"


def test_packed_layers_are_compiled(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "vocab_size": VOCAB_SIZE,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    path.write_text(json.dumps({"model_type": "llama", **sizes, **heads}))
    decoder, config = make_dummy_model(str(path), "float32", quantization="int4")
    layers, generator = (
        LayerRunner.torch_compile(decoder, backend="aot_eager"),
        torch.Generator().manual_seed(1),
    )
    with torch.inference_mode():
        for rows, length in [(2, 5), (1, 1)]:
            step = step_of(rows, length, generator)
            traced = ForwardPass(decoder, caches(config, 4), layers)(step)
            torch.testing.assert_close(traced, ForwardPass(decoder, caches(config, 4))(step))
    assert layers.loaded


def test_one_kind_that_cannot_be_compiled_leaves_the_others_compiled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    compiled = 0

    def second_fails(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        nonlocal compiled
        compiled += 1
        if compiled == 2:
            raise ValueError("not this one")
        return graph.forward

    config = replace(
        small_config(), num_layers=4, layers=LayerDifferences(sliding_windows=(3, 5, 7, 5))
    ).in_one_group()
    decoder = small_decoder(config).requires_grad_(False)
    layers, step = (
        LayerRunner.torch_compile(decoder, backend=second_fails),
        step_of(2, 9, torch.Generator()),
    )
    with torch.inference_mode():
        for _ in range(2):
            traced = ForwardPass(decoder, caches(config, 6), layers)(step)
            torch.testing.assert_close(traced, ForwardPass(decoder, caches(config, 6))(step))
    assert not layers.loaded and compiled == 3
    assert sum("layers run uncompiled" in record.getMessage() for record in caplog.records) == 1


def test_a_lack_of_memory_is_no_reason_to_run_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = small_decoder().requires_grad_(False)
    layers = LayerRunner.torch_compile(decoder, backend="eager")

    def fail(*arguments: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    for compiled in layers._compiled["layer"]:
        monkeypatch.setattr(compiled, "_function", fail)
    monkeypatch.setattr(DecoderLayer, "forward", fail)
    with pytest.raises(torch.OutOfMemoryError):
        ForwardPass(decoder, caches(decoder.config, 4), layers)(
            step_of(1, 9, torch.Generator().manual_seed(1))  # more than are fused
        )
    assert layers.loaded


def test_what_has_run_once_and_fails_is_no_matter_of_the_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = small_decoder().requires_grad_(False)
    layers = LayerRunner.torch_compile(decoder, backend="eager")
    forward = ForwardPass(decoder, caches(decoder.config, 4), layers)
    step = step_of(1, 9, torch.Generator().manual_seed(1))  # more than are fused
    with torch.inference_mode():
        forward(step)

        def fail(*arguments: object) -> torch.Tensor:
            raise RuntimeError("operation not permitted when stream is capturing")

        for compiled in layers._compiled["layer"]:
            monkeypatch.setattr(compiled, "_function", fail)
        with pytest.raises(RuntimeError, match="not permitted"):
            forward(step)
    assert layers.loaded
