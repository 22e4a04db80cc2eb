"""Whether a device can still be used after a failure."""

import pytest
import torch

from nanoserve.benchmarks.gpu.setting import Setting, find_setting


def test_a_cpu_can_always_go_on() -> None:
    assert find_setting(dry_run=True).give_back()


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
    setting = Setting(torch.device("cuda", 0), dry_run=False)
    assert setting.give_back() is (failing is None)
    assert called == ["synchronize", "empty_cache"][: 1 if failing == "synchronize" else 2]
