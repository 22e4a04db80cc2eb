"""Compiled layers that cannot be had leave the same tokens, computed eagerly, and one notice."""

import logging
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from nanoserve.config.model_config import ModelConfig
from nanoserve.config.model_parts import (
    AttentionConfig,
    LayerDifferences,
    MoeConfig,
    NormConfig,
    RopeConfig,
)
from nanoserve.executor.compile.aot_build import (
    LayerJob,
    compile_layer,
    layer_kind,
    layer_without_numbers,
)
from nanoserve.executor.compile.layer_runner import LayerRunner
from nanoserve.executor.local import LocalExecutor
from nanoserve.models.decoder import Decoder
from nanoserve.models.loading import empty_decoder
from nanoserve.request import SamplingParams
from nanoserve.scheduler.plan import Begin, Row, StepPlan
from tests.executor.small_model import (
    LayersRunBy,
    dense_greedy,
    local_executor,
    small_config,
    small_decoder,
    stateful_config,
)
from tests.oracle.checkpoints import FAMILIES
from triton_ops.cpu import cpu_operators
from triton_ops.cpu.building import content_hash

PROMPT = (3, 1, 4, 1, 5)


@pytest.fixture
def decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """A decoder, and an empty cache folder."""
    if not cpu_operators().wait():
        pytest.skip(f"nothing can be built: {cpu_operators().problem}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return small_decoder().requires_grad_(False)


def compiled_layers(decoder: Decoder, *, with_pieces: bool = False) -> LayerRunner:
    return LayerRunner.ahead_of_time(
        decoder, block_size=4, operators=cpu_operators(), with_pieces=with_pieces
    )


def greedy(decoder: Decoder, layers: LayerRunner) -> list[int]:
    """Three tokens behind PROMPT."""
    return greedy_of(local_executor(decoder, num_blocks=2, block_size=4, layers=layers))


def greedy_in_pieces(decoder: Decoder, layers: LayerRunner) -> list[int]:
    return greedy_of(
        local_executor(decoder, num_blocks=2, block_size=4, layers=LayersRunBy(layers.in_pieces))
    )


def greedy_of(executor: LocalExecutor) -> list[int]:
    begins = (Begin(1, PROMPT, len(PROMPT), 0, 0, SamplingParams(temperature=0.0)),)
    tokens = PROMPT
    for step in range(3):
        start = 0 if step == 0 else len(tokens) - 1
        blocks = (0, 1) if step == 0 else ()
        executor.submit(
            StepPlan(step, begin=begins[step:], rows=(Row(1, start, tokens[start:], True, blocks),))
        )
        (result,) = executor.collect(None)
        tokens += result.answers[0].tokens
    return list(tokens[len(PROMPT) :])


def keys_of(layers: LayerRunner) -> set[str]:
    return {library.shelf.key for library in layers.libraries}


def notices(caplog: pytest.LogCaptureFixture) -> list[str]:
    """List the notices of problems, without the notice that it compiles."""
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return [message for message in said if not message.startswith("nanoserve: compiling ")]


@pytest.mark.slow
def test_a_compiler_that_fails(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "false")
    layers = compiled_layers(decoder)
    layers.start()
    assert layers.pending
    layers.wait()
    assert not layers.loaded and not layers.pending
    assert len(notices(caplog)) == 1 and notices(caplog)[0].startswith(
        "nanoserve: layers run uncompiled"
    )
    assert greedy(decoder, layers) == dense_greedy(decoder, PROMPT, 3)
    compiled_layers(decoder).start()
    assert "again if you delete" in notices(caplog)[1]


def test_a_library_that_does_not_load(
    decoder: Decoder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layers = compiled_layers(decoder)
    (library,) = layers.libraries
    nonsense = tmp_path / "nonsense"
    nonsense.write_text("no library")
    nonsense.rename(
        Path(library.shelf.directory) / f"{library.shelf.key}-{content_hash(nonsense)}.so"
    )
    layers = compiled_layers(decoder)
    layers.start()
    assert not layers.loaded and not layers.pending
    assert len(notices(caplog)) == 1 and "does not load" in notices(caplog)[0]
    assert greedy(decoder, layers) == dense_greedy(decoder, PROMPT, 3)


def test_a_cache_folder_that_cannot_be_made(
    decoder: Decoder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    layers = compiled_layers(decoder)
    layers.start()
    assert len(notices(caplog)) == 1 and "cannot be made" in notices(caplog)[0]
    assert greedy(decoder, layers) == dense_greedy(decoder, PROMPT, 3)


def test_a_library_belongs_to_a_kind_of_layer_and_a_number_of_threads(decoder: Decoder) -> None:
    def keys(**changes: object) -> set[str]:
        return keys_of(compiled_layers(small_decoder(replace(decoder.config, **changes))))  # type: ignore[arg-type]  # any field

    usual = keys()
    assert len(usual) == 1
    assert keys(num_layers=5, vocab_size=99, layers=LayerDifferences()) == usual
    rope = RopeConfig(rotary_dim=8, theta=5.0, kind="linear", factor=2.0)
    assert keys(rope=rope) == usual
    assert keys(norms=NormConfig(eps=1e-5)).isdisjoint(usual)
    assert len(keys(layers=LayerDifferences(sliding_windows=(0, 7)))) == 2
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert keys().isdisjoint(usual)
    finally:
        torch.set_num_threads(threads)


def test_pieces_are_compiled_only_where_they_are_wanted(decoder: Decoder) -> None:
    layers = compiled_layers(decoder, with_pieces=True)
    assert [library.shelf.kind.part for library in layers.libraries] == [
        "layer",
        "pre_attention",
        "post_attention",
    ]
    assert len(keys_of(layers)) == 3
    assert keys_of(compiled_layers(decoder)) < keys_of(layers)
    assert [library.shelf.kind.part for library in compiled_layers(decoder).libraries] == ["layer"]


def test_a_layer_with_a_state_is_compiled_whole_or_between_sums(decoder: Decoder) -> None:
    config = stateful_config()
    layers = LayerRunner.ahead_of_time(
        small_decoder(config), block_size=4, operators=cpu_operators(), with_pieces=True
    )
    found = [
        (library.shelf.kind.part, library.shelf.kind.config.recurrent is not None)
        for library in layers.libraries
    ]
    assert found == [
        ("layer", True),
        ("layer", False),
        ("pre_attention", False),
        ("post_attention", False),
    ]


def test_pieces_know_of_neither_windows_nor_blocks(decoder: Decoder) -> None:
    def keys(block_size: int, *windows: int) -> set[str]:
        changed = small_decoder(
            replace(decoder.config, layers=LayerDifferences(sliding_windows=windows))
        )
        layers = LayerRunner.ahead_of_time(
            changed, block_size=block_size, operators=cpu_operators(), with_pieces=True
        )
        return {
            library.shelf.key for library in layers.libraries if library.shelf.kind.part != "layer"
        }

    assert len(keys(4, 0, 7)) == 2 and keys(4, 0, 7) == keys(16, 5, 0)


def test_pieces_run_eagerly_as_long_as_they_are_not_loaded(decoder: Decoder) -> None:
    for with_pieces in (False, True):
        layers = compiled_layers(decoder, with_pieces=with_pieces)
        assert not layers.loaded
        assert greedy_in_pieces(decoder, layers) == dense_greedy(decoder, PROMPT, 3)


def test_a_build_that_is_ended_while_a_class_is_made_is_no_failure_of_the_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM raises SystemExit wherever the build is, of which Python may make a RuntimeError."""

    class Ending:
        def __set_name__(self, owner: type, name: str) -> None:
            raise SystemExit(1)

    def import_torch(*program: object, **options: object) -> None:
        type("Imported", (), {"field": Ending()})

    monkeypatch.setattr(torch._inductor, "aot_compile", import_torch)
    kind = layer_kind("layer", small_config(), 0)
    job = LayerJob("key", str(tmp_path), kind, "float32", 16, torch.get_num_threads())
    with pytest.raises(SystemExit):
        job.fill(lambda temporary: compile_layer(job, temporary))
    assert not job.failure.exists() and not job.interruption.exists()


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_5_text", "granitemoehybrid"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_layer_that_is_compiled_has_the_dtypes_of_the_decoders(
    dtype: torch.dtype, family: str
) -> None:
    """Corrections of a router and decays of states stay float32; the compiled code would read them
    as the others."""
    config = ModelConfig.from_hf(FAMILIES[family]().to_dict())
    decoder = empty_decoder(config, dtype, torch.device("cpu"))
    layer = layer_without_numbers(layer_kind("layer", config, 1), dtype)
    found = {name: weight.dtype for name, weight in layer.named_parameters()}
    assert found == {name: weight.dtype for name, weight in decoder.layers[1].named_parameters()}
    assert set(found.values()) == {dtype, torch.float32}


def test_a_kind_of_layer_holds_all_that_the_layer_depends_on() -> None:
    moe = MoeConfig(4, 2, 16, normalize_weights=True, sparse_layers=frozenset({1}))
    attention = AttentionConfig(qkv_bias=True, qk_norm=True)
    norms = NormConfig(places="around")
    config = replace(small_config(sliding_window=5), moe=moe, attention=attention, norms=norms)
    dense, sparse = (layer_kind("layer", config, index).config for index in range(2))
    assert dense.moe is None and sparse.is_sparse(0) and sparse.sliding_window(0) == 5
    assert dense.attention.qk_norm and dense.norms.places == "around" and dense.attention.qkv_bias
    assert msgspec.json.decode(msgspec.json.encode(sparse), type=type(sparse)) == sparse
