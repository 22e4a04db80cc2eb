"""The host pool: one file in memory that every worker sees its own part of."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoserve.config.model_parts import LayerDifferences
from nanoserve.config.published_shapes import load_shape
from nanoserve.engine_config import EngineConfig
from nanoserve.errors import RuntimeFailure, UsageError
from nanoserve.executor.kv_transfer import host_pool
from nanoserve.executor.kv_transfer.host_pool import HostPool, choose_host_blocks
from nanoserve.executor.workers.group import SharedFiles
from nanoserve.models.shards import make_shards, whole_model
from tests.executor.small_model import small_config

CONFIG = replace(
    small_config(), num_layers=4, num_heads=8, num_kv_heads=2, layers=LayerDifferences()
)
BLOCK_BYTES = 2 * 4 * 2 * 8 * 4 * 4
"""Keys and values, layers, heads, head_dim, tokens, bytes of a float32."""
in_memory = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="elsewhere they are files")
SIZES = {"num_blocks": 6, "block_size": 4, "dtype": torch.float32}


def chosen(**settings: Any) -> int:
    """Settings of an engine whose policy needs host memory."""
    reserved = settings.pop("reserved", 0)
    defaults = {"policy": "hybrid", "block_size": 4, "dtype": "fp32", "max_num_seqs": 3}
    return choose_host_blocks(CONFIG, EngineConfig(**(defaults | settings)), reserved)


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """Path of an empty file in memory."""
    files = SharedFiles()
    files.make(tmp_path / "pool")
    yield tmp_path / "pool"
    files.close()


def test_what_one_process_writes_another_reads_even_when_the_file_is_gone(tmp_path: Path) -> None:
    files = SharedFiles()
    files.make(path := tmp_path / "pool")
    created = HostPool.open(path, CONFIG, **SIZES, create=True)
    opened = HostPool.open(path, CONFIG, **SIZES)
    files.close()
    assert list(tmp_path.iterdir()) == []
    created.blocks[3, 1, 5, 1, 2, 7] = 42.0
    assert opened.blocks[3, 1, 5, 1, 2, 7] == 42.0
    assert opened.blocks.shape == (4, 2, 6, 2, 4, 8) and opened.num_blocks == 6


@in_memory
def test_the_file_is_in_no_file_system_and_another_process_opens_it(path: Path) -> None:
    """So that nothing of it is left, however all processes end, and at whatever moment."""
    created = HostPool.open(path, CONFIG, **SIZES, create=True)
    assert path.stat().st_nlink == 0 and path.is_symlink()
    write = "import sys; file = open(sys.argv[1], 'r+b'); file.write(bytes(4 * 100)); file.close()"
    created.blocks.fill_(1.0)
    subprocess.run([sys.executable, "-c", write, str(path)], check=True)
    assert created.blocks.flatten()[:100].eq(0).all() and created.blocks.flatten()[100] == 1


@pytest.mark.parametrize(
    ("settings", "option"),
    [({"policy": "hybrid"}, "--policy"), ({"host_kv_memory": 2**30}, "--host-kv-memory")],
    ids=["policy", "memory"],
)
def test_latents_are_not_kept_in_host_memory(settings: dict[str, Any], option: str) -> None:
    with pytest.raises(
        UsageError,
        match=f"{option}: the KV cache of deepseek_v3 is latents, which stay on the device",
    ):
        choose_host_blocks(load_shape("deepseek-v3"), EngineConfig(**settings))


def test_every_byte_of_the_file_is_there_from_the_start(path: Path) -> None:
    HostPool.open(path, CONFIG, **SIZES, create=True)
    facts = path.stat()
    assert facts.st_size == 6 * BLOCK_BYTES <= facts.st_blocks * 512


def test_a_pool_may_hold_bfloat16(path: Path) -> None:
    pool = HostPool.open(
        path, CONFIG, num_blocks=3, block_size=2, dtype=torch.bfloat16, create=True
    )
    pool.blocks.fill_(1.5)
    assert path.read_bytes() == b"\xc0\x3f" * (4 * 2 * 3 * 2 * 2 * 8)


@pytest.mark.parametrize(("pipeline", "tensor"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)])
def test_the_parts_of_a_layout_are_the_pool_and_do_not_meet(pipeline: int, tensor: int) -> None:
    pool = HostPool.of_one_process(CONFIG, **SIZES)
    pool.blocks.zero_()
    for shard in make_shards(CONFIG, pipeline_parallel=pipeline, tensor_parallel=tensor):
        part = pool.part(shard)
        assert part.writes
        part.blocks.add_(1)
    assert (pool.blocks == 1).all()


def test_of_replicated_heads_the_first_rank_writes() -> None:
    pool = HostPool.of_one_process(CONFIG, **SIZES)
    parts = [
        pool.part(shard) for shard in make_shards(CONFIG, pipeline_parallel=1, tensor_parallel=8)
    ]
    assert [part.writes for part in parts] == [True, False, False, False, True, False, False, False]
    parts[4].blocks.fill_(7.0)
    assert (parts[7].blocks == 7.0).all() and (pool.blocks[:, :, :, 1] == 7.0).all()


def test_on_another_machine_there_is_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(
        RuntimeFailure, match=r"cannot open the host pool .*: No such file.*must run on one machine"
    ):
        HostPool.open(tmp_path / "pool", CONFIG, **SIZES)


def test_a_file_of_another_size_is_not_taken_for_the_pool(tmp_path: Path) -> None:
    (tmp_path / "pool").write_bytes(b"something else")
    with pytest.raises(RuntimeFailure, match="another size"):
        HostPool.open(tmp_path / "pool", CONFIG, **SIZES)


def test_a_file_that_is_there_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pool").write_bytes(b"somebody else's")
    for _ in range(2):
        with pytest.raises(FileExistsError):
            SharedFiles().make(tmp_path / "pool")
        monkeypatch.delattr(os, "memfd_create", raising=False)  # elsewhere they are files
    assert (tmp_path / "pool").read_bytes() == b"somebody else's"


def test_memory_that_cannot_be_reserved_is_one_clear_line(path: Path) -> None:
    """This process may write no larger files for a moment. Python ignores the signal for it."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    expected = r"^a host pool of 12\.0 KiB does not fit \(File too large\); lower --host-kv-memory$"
    resource.setrlimit(resource.RLIMIT_FSIZE, (10000, most))
    try:
        with pytest.raises(RuntimeFailure, match=expected):
            HostPool.open(path, CONFIG, **SIZES, create=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))


def test_more_than_there_is_memory_is_one_clear_line(path: Path) -> None:
    with pytest.raises(
        RuntimeFailure, match=r"does not fit into the .* memory that is free; lower --host-kv"
    ):
        HostPool.open(
            path, CONFIG, num_blocks=2**40, block_size=4, dtype=torch.float32, create=True
        )
    with pytest.raises(
        RuntimeFailure, match=r"does not fit into the .* memory that is free; lower --host-kv"
    ):
        HostPool.of_one_process(CONFIG, num_blocks=2**40, block_size=4, dtype=torch.float32)


# --------------------------------------------------------------------------------------------------
# its size


def test_what_is_asked_for_is_shared_by_the_engines() -> None:
    assert chosen(host_kv_memory=10 * BLOCK_BYTES) == 10
    assert chosen(host_kv_memory=11 * BLOCK_BYTES - 1, data_parallel=2) == 5


def test_by_default_a_share_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pool, "available_memory", lambda device: 100 * BLOCK_BYTES)
    assert chosen() == 25
    assert chosen(reserved=60 * BLOCK_BYTES) == 10
    assert chosen(data_parallel=5) == 5


def test_by_default_no_more_than_all_sequences_can_use() -> None:
    assert chosen(max_model_len=10) == 3 * 3
    assert chosen() == 3 * 32, "the model's limit is 128 tokens"


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"host_kv_memory": 2**49},
            r"--host-kv-memory 524288\.0 GiB is more than the .* that is left for it",
        ),
        (
            {"host_kv_memory": 9 * BLOCK_BYTES, "max_model_len": 40},
            r"holds 36 tokens .* 40.* lower --max-model-len to 36",
        ),
        (
            {"host_kv_memory": 9 * BLOCK_BYTES, "max_model_len": 40},
            r"set --host-kv-memory to 20\.0 KiB at least",
        ),
        (
            {"host_kv_memory": 10 * BLOCK_BYTES, "data_parallel": 2, "max_model_len": 40},
            r"to 40\.0 KiB at least",
        ),
        (
            {"host_kv_memory": 1},
            r"holds 0 tokens of an engine, but blocks are of 4: set .* to 2\.0 KiB at least$",
        ),
    ],
)
def test_a_pool_of_no_use_is_refused(settings: dict, line: str) -> None:
    with pytest.raises(UsageError, match=line):
        chosen(**settings)


def test_a_whole_model_is_a_part_too() -> None:
    pool = HostPool.of_one_process(CONFIG, **SIZES)
    assert pool.part(whole_model(CONFIG)).blocks.shape == pool.blocks.shape
