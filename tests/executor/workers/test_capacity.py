"""How many KV blocks workers can have in common."""

import pytest

from nanoserve.engine_config import EngineConfig
from nanoserve.errors import UsageError
from nanoserve.executor.start.memory import CPU_SHARE, CUDA_SHARE
from nanoserve.executor.workers.executor import common_cache_size
from nanoserve.executor.workers.messages import Loaded
from nanoserve.utils.sizes import format_size


def config(**settings: object) -> EngineConfig:
    return EngineConfig(block_size=4, max_num_seqs=1000, **settings)


def test_workers_on_the_processors_of_one_machine_share_its_memory() -> None:
    """Each reports what is free before any of them takes its part; the least of these is the latest
    to be true."""
    workers = [Loaded(0, "host cpu", (100,), 90_000), Loaded(1, "host cpu", (300,), 80_000)]
    assert (
        common_cache_size(workers, config(), longest=4000).num_blocks
        == int(80_000 * CPU_SHARE) // 400
    )


def test_of_several_memories_the_one_with_the_least_room_counts() -> None:
    workers = [Loaded(0, "host cuda:0", (100,), 50_000), Loaded(1, "host cuda:1", (300,), 60_000)]
    assert (
        common_cache_size(workers, config(device="cuda"), longest=4000).num_blocks
        == int(60_000 * CUDA_SHARE) // 300
    )
    assert (
        common_cache_size(workers[:1], config(device="cuda"), longest=4000).num_blocks
        == int(50_000 * CUDA_SHARE) // 100
    )


def test_no_more_than_requests_can_use() -> None:
    workers = [Loaded(rank, "host cpu", (10,), 10**9) for rank in range(2)]
    settings = EngineConfig(block_size=4, max_num_seqs=3)
    assert common_cache_size(workers, settings, longest=18).num_blocks == 3 * 5


def test_without_attention_memory_is_for_states() -> None:
    """The second memory holds 200 states of 300 bytes, the first one more."""
    workers = [
        Loaded(0, "host cuda:0", (0,), 50_000, state_bytes=100),
        Loaded(1, "host cuda:1", (0,), 60_000, state_bytes=300),
    ]
    found = common_cache_size(workers, config(device="cuda"), longest=64)
    assert (found.num_blocks, found.state_slots) == (2**16, int(200 * CUDA_SHARE))


@pytest.mark.parametrize("machines", [1, 2])
def test_memory_that_is_asked_for_is_that_of_all_workers_together(machines: int) -> None:
    workers = [
        Loaded(rank, f"host{rank % machines} cpu", (size,), 10**6)
        for rank, size in enumerate((100, 300))
    ]
    assert (
        common_cache_size(workers, config(kv_cache_memory=8_000), longest=64).num_blocks
        == 8_000 // 400
    )


@pytest.mark.parametrize("machines", [1, 2])
def test_what_would_do_is_named_as_it_has_to_be_asked_for(machines: int) -> None:
    workers = [Loaded(rank, f"host{rank % machines} cpu", (1000,), 900_000) for rank in range(2)]
    with pytest.raises(
        UsageError, match=f"holds 16 tokens, .* raise it to {format_size(32_000)} or"
    ):
        common_cache_size(workers, config(kv_cache_memory=8_000), longest=64)
    assert common_cache_size(workers, config(kv_cache_memory=32_000), longest=64).num_blocks == 16


def test_a_request_of_full_length_that_does_not_fit_is_refused_in_one_line() -> None:
    workers = [Loaded(rank, "host cpu", (1000,), 900_000) for rank in range(2)]
    with pytest.raises(
        UsageError, match=r"--kv-cache-memory .* holds 16 tokens, but .* 64"
    ) as caught:
        common_cache_size(workers, config(kv_cache_memory=8_000), longest=64)
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match="lower --max-model-len"):
        common_cache_size(workers, config(max_model_len=4000), longest=8000)
    with pytest.raises(UsageError, match=r"more than the .* that is free"):
        common_cache_size(workers, config(kv_cache_memory=10**6), longest=64)
