"""How large the KV cache becomes, and what is refused."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from nanoserve import LLM
from nanoserve.engine_config import EngineConfig
from nanoserve.errors import RuntimeFailure, UsageError
from nanoserve.executor.start.device_start import DeviceStart
from nanoserve.executor.start.gpu_start import GpuStart
from nanoserve.executor.start.memory import (
    CacheSize,
    available_memory,
    choose_cache_size,
    choose_num_blocks,
    kv_bytes_per_block,
    out_of_memory,
)
from nanoserve.models.hub import resolve_model
from nanoserve.utils.sizes import format_size, parse_size
from tests.executor.small_model import small_config, small_decoder

# 2 tensors x 2 layers x 2 heads x 8 numbers x 4 tokens x 4 bytes
BLOCK = 1024


def choose(*, free: int, **settings: object) -> int:
    config = EngineConfig(**{"block_size": 4, "max_num_seqs": 4, **settings})
    return choose_num_blocks(BLOCK, free, small_config().max_position_embeddings, config)


def test_bytes_of_a_block_are_those_of_the_caches() -> None:
    assert kv_bytes_per_block(small_config(), 4, torch.float32) == BLOCK
    assert kv_bytes_per_block(small_config(), 16, torch.bfloat16) == 2 * BLOCK


def test_by_default_a_share_of_the_free_memory() -> None:
    assert choose(free=400 * BLOCK) == 100
    assert choose(free=100 * BLOCK, device="cuda") == 95


@pytest.mark.parametrize(
    ("slot", "enough"), [(BLOCK, 16 * BLOCK + 16 * BLOCK), (100, 16 * BLOCK + 16 * 100)]
)
def test_advice_on_memory_counts_recurrent_states(slot: int, enough: int) -> None:
    """A request of 64 tokens takes 16 blocks. States take half of the memory, or 16 slots."""
    config = EngineConfig(block_size=4, max_num_seqs=4, max_model_len=64, kv_cache_memory=8 * BLOCK)

    def chosen(**settings: int) -> CacheSize:
        return choose_cache_size(BLOCK, slot, 400 * BLOCK, 128, replace(config, **settings))

    with pytest.raises(UsageError, match=r"--kv-cache-memory 8\.0 KiB holds") as refused:
        chosen()
    assert f"raise it to {format_size(enough)} or" in str(refused.value)
    assert chosen(kv_cache_memory=enough) == CacheSize(16, 16)


def test_without_attention_states_get_all_of_the_memory() -> None:
    """Blocks take none of it: there are 65,536, or enough for the longest sequence."""
    config = EngineConfig(block_size=16, max_num_seqs=4)

    def chosen(**settings: int) -> CacheSize:
        return choose_cache_size(0, 512, 400 * BLOCK, 2**20, replace(config, **settings))

    assert chosen() == CacheSize(2**16, 16)
    assert chosen(block_size=4) == CacheSize(2**18, 16)
    assert chosen(block_size=4, max_model_len=4096) == CacheSize(2**16, 16)
    assert chosen(kv_cache_memory=3 * 512) == CacheSize(2**16, 3)
    with pytest.raises(
        UsageError, match=r"^512 B of KV cache does not hold the .* 2 times 512 B; raise --kv-cache"
    ):
        chosen(kv_cache_memory=512)


def gpu_that_needs(reserved: int, *, graphs: int) -> GpuStart:
    """In the place of a GpuStart that has measured so much, of which its graphs take a part."""
    fake = SimpleNamespace(measure=lambda longest, progress: reserved, graph_bytes=graphs)
    return fake  # type: ignore[return-value]


def test_one_layouts_steps_and_the_graphs_of_both_are_kept_free() -> None:
    """One layout runs at a time; the graphs of the other keep their memory."""
    config, cpu = EngineConfig(block_size=4), torch.device("cpu")
    start = DeviceStart(resolve_model(None), config, [small_decoder()], cpu)
    for reserved, graphs in ((700, 300), (600, 50)):
        start.gpus.append(gpu_that_needs(reserved, graphs=graphs))
    assert start.reserved_bytes() == 600 - 50 + 300 + 50


def test_what_steps_were_seen_to_need_is_kept_free() -> None:
    def chosen(reserved: int, **settings: int) -> int:
        config = EngineConfig(device="cuda", block_size=4, max_num_seqs=4, **settings)
        start = DeviceStart(resolve_model(None), config, [small_decoder()], torch.device("cpu"))
        start.gpus.append(gpu_that_needs(reserved, graphs=0))
        free = max(0, 100 * BLOCK - start.reserved_bytes())
        return choose_num_blocks(start.block_bytes[0], free, 128, config)

    assert chosen(60 * BLOCK) == 38
    with pytest.raises(
        UsageError,
        match=r"--kv-cache-memory 41.0 KiB is more than the 40.0 KiB of memory that is free",
    ):
        chosen(60 * BLOCK, kv_cache_memory=41 * BLOCK)
    with pytest.raises(UsageError, match="only 0 B of memory is free"):
        chosen(101 * BLOCK)


def test_a_gpus_memory_that_torch_holds_without_use_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 5000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 700)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 500)
    assert available_memory("cuda") == 1200


def test_never_more_than_all_sequences_can_use() -> None:
    assert choose(free=10**6 * BLOCK) == 4 * 128 // 4
    assert choose(free=10**6 * BLOCK, max_model_len=13, max_num_seqs=3) == 3 * 4


def test_a_default_cache_may_be_smaller_than_the_models_own_limit() -> None:
    assert choose(free=40 * BLOCK) == 10


def test_a_length_asked_for_gets_more_than_the_usual_share() -> None:
    assert choose(free=40 * BLOCK, max_model_len=120) == 30


def test_an_explicit_size_is_taken_as_it_is() -> None:
    assert choose(free=100 * BLOCK, kv_cache_memory=90 * BLOCK + 7) == 90


@pytest.mark.parametrize(
    ("free", "settings", "complaint"),
    [
        (
            100 * BLOCK,
            {"kv_cache_memory": 101 * BLOCK},
            "--kv-cache-memory 101.0 KiB is more than the 100.0 KiB of memory that is free; ask "
            "for less",
        ),
        (
            100 * BLOCK,
            {"kv_cache_memory": 10 * BLOCK},
            "--kv-cache-memory 10.0 KiB holds 40 tokens, but one request may have 128; raise it to "
            "32.0 KiB"
            " or lower --max-model-len to 40",
        ),
        (
            100 * BLOCK,
            {"kv_cache_memory": 10, "max_model_len": 5},
            "--kv-cache-memory 10 B holds 0 tokens, but one request may have 5; raise it to 2.0 "
            "KiB",
        ),
        (
            20 * BLOCK,
            {"max_model_len": 100},
            "one request of 100 tokens needs 25.0 KiB of KV cache, but only 20.0 KiB of memory is "
            "free;"
            " lower --max-model-len or free some memory",
        ),
        (
            3 * BLOCK,
            {},
            "one request of 128 tokens needs 32.0 KiB of KV cache, but only 3.0 KiB of memory is "
            "free;"
            " lower --max-model-len or free some memory",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_numbers(
    free: int, settings: dict[str, int], complaint: str
) -> None:
    with pytest.raises(UsageError) as refusal:
        choose(free=free, **settings)
    assert str(refusal.value) == complaint


# ----------------------------------------------------------------------------------------------
# what is free


def test_this_machine_has_some_memory() -> None:
    assert 2**20 < available_memory("cpu") < 2**50


# ------------------------------------------------------------------------------------------ weights
# that do not fit


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (
            RuntimeError(
                "unable to mmap 9 bytes from file <a.safetensors>: Cannot allocate memory (12)"
            ),
            True,
        ),
        (RuntimeError("Triton Error [CUDA]: invalid argument"), False),
        (ValueError("out of range"), False),
    ],
)
def test_who_says_that_memory_is_out(error: Exception, *, told: bool) -> None:
    assert out_of_memory(error) == told


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (None, r"a checkpoint of [\d.]+ MiB does not fit"),
        ("dummy:smollm2-135m", "the weights do not fit"),
    ],
)
def test_a_model_beyond_all_memory_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, model: str | None, problem: str
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    # dummy first: were it imported while the other is replaced, it would keep the replacement
    monkeypatch.setattr("nanoserve.models.dummy.empty_decoder", fail)
    monkeypatch.setattr("nanoserve.models.loading.empty_decoder", fail)
    with pytest.raises(
        RuntimeFailure,
        match=f"^out of memory on cpu: {problem} into .* free; choose a smaller model",
    ):
        LLM(model)


# ----------------------------------------------------------------------------------------------
# sizes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MiB", 512 * 2**20),
        ("2GB", 2 * 10**9),
        ("1g", 2**30),
        ("1.5 GiB", 3 * 2**29),
        (" 300 kb ", 300_000),
        ("7", 7),
        (4096, 4096),
        ("12B", 12),
        ("0.5T", 2**39),
    ],
)
def test_sizes_as_people_write_them(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "GB", "-1g", "1 gig", "1e9", "nan", "1,5GB", "٣g", 0, "0.1B", "9" * 5000, "1x" * 99],
)
def test_what_is_not_a_size_is_refused_in_one_short_line(text: str | int) -> None:
    with pytest.raises(UsageError) as refusal:
        parse_size(text)
    assert len(str(refusal.value)) < 120


def test_sizes_are_shown_in_binary_units() -> None:
    shown = [format_size(size) for size in (12, 1536, 5 * 2**20, 3 * 2**29, 2**42)]
    assert shown == ["12 B", "1.5 KiB", "5.0 MiB", "1.5 GiB", "4096.0 GiB"]
    assert parse_size(format_size(2**30 + 1)) > 2**30
