"""Facts of a device, and whether it can still be used after a failure."""

from types import SimpleNamespace

import pytest
import torch

from nanoserve.lab.benchmarks.gpu.device import GpuBench


def test_a_cpu_can_always_go_on() -> None:
    assert GpuBench.open(dry_run=True).give_back()


@pytest.mark.parametrize("failing", [None, "synchronize", "empty_cache"])
def test_a_gpu_can_go_on_while_it_waits_and_gives_memory_back(
    failing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = []

    def call(name: str) -> None:
        called.append(name)
        if name == failing:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("torch.cuda.synchronize", lambda device: call("synchronize"))
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: call("empty_cache"))
    bench = GpuBench(torch.device("cuda", 0), dry_run=False)
    assert bench.give_back() is (failing is None)
    assert called == ["synchronize", "empty_cache"][: 1 if failing == "synchronize" else 2]


def test_a_report_says_which_gpu_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(
        name="An invented GPU",
        major=9,
        minor=0,
        multi_processor_count=132,
        total_memory=80 * 2**30,
        L2_cache_size=50 * 2**20,
    )
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: properties)
    facts = GpuBench(torch.device("cuda", 0), dry_run=False).facts()
    assert (facts["name"], facts["capability"], facts["multiprocessors"]) == (
        "An invented GPU",
        "9.0",
        132,
    )
    assert (facts["memory_gib"], facts["l2_mib"]) == (80.0, 50.0)
