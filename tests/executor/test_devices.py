"""A problem of a device is one clear line with what to change, before anything is loaded."""

import logging
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nanoserve import LLM
from nanoserve.commands.main import describe
from nanoserve.errors import UsageError
from nanoserve.executor.start.model_loading import (
    check_model,
    usable_device,
    use_writable_triton_cache,
)
from tests.executor.small_model import small_config

GPU = torch.device("cuda", 0)


def pretend(
    monkeypatch: pytest.MonkeyPatch, *, gpus: int, capability: tuple[int, int] = (9, 0)
) -> None:
    """A CUDA build of torch on a machine with so many GPUs."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")


def refusal(name: str) -> str:
    with pytest.raises(UsageError) as refused:
        usable_device(name)
    message, exit_code = describe(refused.value)
    assert exit_code == 2 and "\n" not in message
    return message


def test_devices_that_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable_device("cpu") == torch.device("cpu")
    pretend(monkeypatch, gpus=2, capability=(8, 0))
    assert usable_device("cuda") == torch.device("cuda", 0)
    assert usable_device("cuda:1") == torch.device("cuda", 1)


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "", "cuda:-1", "mps", "meta"])
def test_unknown_names(name: str) -> None:
    assert (
        refusal(name)
        == f"unknown device {name!r}; choose cpu, cuda or cuda:N with N the number of a GPU"
    )


def test_a_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert (
        "was built without CUDA; install a CUDA build of torch, or choose --device cpu"
        in refusal("cuda")
    )


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, gpus=0)
    assert refusal("cuda:0").startswith(
        "--device cuda:0: no NVIDIA GPU can be used here; see that nvidia-smi lists one"
    )


def test_a_number_beyond_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, gpus=1)
    assert refusal("cuda:1") == "--device cuda:1: no such GPU; there is cuda:0 only"
    pretend(monkeypatch, gpus=4)
    assert refusal("cuda:4") == "--device cuda:4: no such GPU; there are cuda:0 to cuda:3"


def test_a_gpu_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, gpus=1, capability=(7, 5))
    assert "Tesla V100 is too old, its compute capability is 7.5 and 8.0 is needed" in refusal(
        "cuda"
    )


def test_an_engine_says_so_before_it_loads_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, gpus=0)
    with pytest.raises(UsageError, match="no NVIDIA GPU can be used"):
        LLM(device="cuda")


# ------------------------------------------------------------------------------------------ what
# the operators take


def model_refusal(
    monkeypatch: pytest.MonkeyPatch, *, head_dim: int = 64, block_size: int = 16, group: int = 2
) -> set[str]:
    pretend(monkeypatch, gpus=1)
    refusals = set()
    model = replace(small_config(), head_dim=head_dim, num_heads=2 * group)
    for dtype in ("auto", "bf16", "fp16", "fp32"):
        try:
            check_model(GPU, model, dtype, block_size)
        except UsageError as error:
            refusals.add(str(error))
    return refusals


def test_a_model_without_attention_runs_with_any_block(monkeypatch: pytest.MonkeyPatch) -> None:
    assert model_refusal(monkeypatch, block_size=48), "attention has no program for such blocks"
    assert not model_refusal(monkeypatch, head_dim=0, block_size=48)


@pytest.mark.parametrize("head_dim", [32, 64, 80, 128, 256])
@pytest.mark.parametrize("block_size", [16, 32])
def test_usual_models_run(monkeypatch: pytest.MonkeyPatch, head_dim: int, block_size: int) -> None:
    for group in (1, 7, 16):
        assert (
            model_refusal(monkeypatch, head_dim=head_dim, block_size=block_size, group=group)
            == set()
        )


def test_models_that_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    (heads,) = model_refusal(monkeypatch, head_dim=48)
    assert (
        heads.startswith("--device cuda:0: attention on a GPU knows no head_dim 48, only 32, 64,")
        and "CPU" in heads
    )
    (blocks,) = model_refusal(monkeypatch, block_size=24)
    assert blocks.startswith(
        "--device cuda:0: attention on a GPU knows no block_size 24, only 16, 32;"
    )
    (wide,) = model_refusal(monkeypatch, head_dim=512)  # in float32
    assert wide.startswith(
        "--device cuda:0: attention on a GPU takes heads of 512 in 16 bits only;"
    )
    assert model_refusal(monkeypatch, group=17) == set()


# -------------------------------------------------------------------------------------------------
# Triton's cache


def notices(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_cache_folder_that_can_be_written_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for environment in ({"HOME": str(tmp_path)}, {"TRITON_CACHE_DIR": str(tmp_path / "own")}):
        before = dict(environment)
        use_writable_triton_cache(environment)
        assert environment == before
    assert notices(caplog) == [] and (tmp_path / ".triton" / "cache").is_dir()


@pytest.mark.parametrize("place", ["file", "/proc"])
def test_a_cache_folder_that_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    """A file where the folder should be, and a file system in which not even root makes folders."""
    (tmp_path / "file").write_text("")
    environment = {"TRITON_CACHE_DIR": str(tmp_path / place)}
    use_writable_triton_cache(environment)
    instead = Path(environment["TRITON_CACHE_DIR"])
    (instead / "kernel").write_text("")
    assert stat.S_IMODE(instead.stat().st_mode) == 0o700, "what lies there is run as a program"
    (notice,) = notices(caplog)
    assert str(tmp_path / place) in notice and "TRITON_CACHE_DIR" in notice
