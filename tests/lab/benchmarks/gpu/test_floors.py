"""Bytes, operations and shares against numbers worked out by hand."""

import pytest
import torch

from nanoserve.lab.benchmarks.floors import Limits
from nanoserve.lab.benchmarks.gpu.attention import AttentionRow, decode_rows, make_batch
from nanoserve.lab.benchmarks.gpu.device import GpuBench, TimeSpread
from nanoserve.lab.benchmarks.gpu.kernels import OURS, measured_fields, moved_fields


def test_decoding_reads_keys_and_values_once() -> None:
    batch = make_batch(
        decode_rows(4, 64), 32, 8, 128, block_size=16, dtype=torch.bfloat16, poisoned=True
    )
    keys_and_values = 2 * 4 * 64 * 8 * 128 * 2  # 1 MiB in 16 bits
    queries_and_results = 2 * 4 * 32 * 128 * 2
    assert batch.num_bytes == keys_and_values + queries_and_results == 2**20 + 2**16
    assert batch.operations == 4 * 4 * 64 * 32 * 128


@pytest.mark.parametrize(
    ("row", "pairs"),
    [
        (AttentionRow(1, 7), 7),
        (AttentionRow(4, 4), 1 + 2 + 3 + 4),
        (AttentionRow(3, 10), 8 + 9 + 10),
    ],
)
def test_a_query_meets_the_keys_up_to_its_own(row: AttentionRow, pairs: int) -> None:
    assert row.pairs == pairs
    batch = make_batch((row, row), 2, 1, 16, block_size=16, dtype=torch.float32)
    assert batch.operations == 4 * 2 * 16 * 2 * pairs
    assert len(batch.query) == 2 * row.queries


def test_a_move_reads_and_writes() -> None:
    bench = GpuBench(torch.device("cpu"), dry_run=True)
    fields = moved_fields(bench, 10, lambda: None, lambda: None)
    assert fields["bytes"] == 10 * 8 * 128 * 4 * 4  # of float32
    assert fields["slower"].keys() == {"torch indexing"}


def test_shares_are_of_the_measured_limits() -> None:
    limits = Limits(bytes_per_second=4e12, operations_per_second=800e12)
    times = {
        OURS: TimeSpread(us=500.0, low=450.0, high=600.0, n=9),
        "peer": TimeSpread(us=750.0, low=700.0, high=800.0, n=9),
    }
    fields = measured_fields(times, limits, num_bytes=10**9, operations=10**11)
    assert fields["of_copy_bandwidth"] == pytest.approx(0.5)  # 1 GB in 500 us is 2 TB/s
    assert fields["of_matmul_peak"] == pytest.approx(0.25)  # 10^11 in 500 us is 200 TFLOP/s
    assert fields["of_floor"] == pytest.approx(0.5)
    assert fields["slower"] == {"peer": 1.5}


def test_a_spread_is_in_microseconds() -> None:
    assert TimeSpread.of([3e-6, 1e-6, 2e-6, 9e-6]) == TimeSpread(
        us=pytest.approx(2.5), low=1.0, high=9.0, n=4
    )
