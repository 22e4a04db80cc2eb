"""The profile of an engine that starts: made once, kept, read when one is given. No time is looked
at."""

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from nanoserve.costs.hardware import MachineSpeeds
from nanoserve.costs.profile import Profile, read_profile, write_profile
from nanoserve.engine_config import EngineConfig
from nanoserve.errors import RuntimeFailure, UsageError
from nanoserve.executor.cpu_attention.cpu_attention import CpuAttention
from nanoserve.executor.cpu_attention.host_attention import HostAttentionLost
from nanoserve.executor.cpu_attention.host_processor import HostProcessor
from nanoserve.executor.kv_transfer.host_pool import HostPool
from nanoserve.executor.profiling import start_profile
from nanoserve.executor.profiling.parts import Effort, ProfileSizes
from nanoserve.executor.profiling.start_profile import (
    StartingEngine,
    hybrid_profile,
    profile_at_start,
)
from nanoserve.executor.stage import Stage
from tests.costs.profiles import made_up_profile
from tests.executor.small_model import local_executor, small_config, small_decoder
from triton_ops.cpu import cpu_operators

BLOCK_SIZE = 4
SPEEDS = MachineSpeeds(memory_bandwidth=1e9, flops=1e10, host_link_bandwidth=1e9)
Stages = list[tuple[str, int, int]]


@pytest.fixture(autouse=True)
def briefly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Few sizes, one round, and a cache folder of the test's own."""
    # those of this process: looked for where the user keeps them, not in the folder of a test
    cpu_operators()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(start_profile, "EFFORT", Effort(0.0, 0, 1, longest_sample=1.0))
    sizes = replace(
        start_profile.SIZES,
        tokens=(1, 4, 80),
        batches=(1, 4),
        copies=(2**10, 2**12),
        kv_bytes=2**16,
    )
    monkeypatch.setattr(start_profile, "SIZES", sizes)
    monkeypatch.setattr(start_profile, "_MOSTLY", 0.0)  # tests run beside each other


@pytest.fixture(scope="module")
def engine() -> Iterator[StartingEngine]:
    """An executor as assembly hands it over: one that has run nothing yet."""
    processor = HostProcessor.set_apart(1, torch.device("cpu"))
    decoder, pool = (
        small_decoder(),
        HostPool.of_one_process(
            small_config(), num_blocks=8, block_size=BLOCK_SIZE, dtype=torch.float32
        ),
    )
    executor = local_executor(
        decoder,
        num_blocks=32,
        block_size=BLOCK_SIZE,
        host_pool=pool,
        processor=processor,
    )
    config = EngineConfig(policy="hybrid", block_size=BLOCK_SIZE)
    yield StartingEngine(
        stage=executor.stage,
        config=config,
        model=small_config(),
        speeds=SPEEDS,
        processor=processor,
    )
    executor.close()
    processor.close()


def fitting(engine: StartingEngine) -> Profile:
    """Made up, and of the engine's own setting."""
    setting, made_up = engine.setting, made_up_profile(small_config())
    machine = msgspec.structs.replace(made_up.device, name=setting.device)
    own = {
        "dtype": setting.dtype,
        "threads": setting.threads or 0,
        "host_threads": setting.host_threads,
    }
    about = {"undisturbed": 1.0}
    return msgspec.structs.replace(
        made_up, about=about, device=machine, host=machine, settings=made_up.settings | own
    )


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[StartingEngine]:
    """Whom a profile is made up for instead of measured."""
    engines: list[StartingEngine] = []

    def measure(engine: StartingEngine, sizes: ProfileSizes) -> Profile:
        engines.append(engine)
        return fitting(engine)

    monkeypatch.setattr(start_profile, "measure_shortly", measure)
    return engines


def cached(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "nanoserve" / "profiles").iterdir())


def test_a_profile_is_made_once_and_kept(engine: StartingEngine, tmp_path: Path) -> None:
    stages: Stages = []
    first = profile_at_start(engine, lambda *stage: stages.append(stage))
    assert stages == [(start_profile.STAGE, 0, 1), (start_profile.STAGE, 1, 1)]
    (path,) = cached(tmp_path)
    assert read_profile(path, Profile) == first
    again = profile_at_start(engine, lambda *stage: pytest.fail(f"measured again: {stage}"))
    assert again == first
    assert first.settings["host_threads"] == 1
    assert first.settings["layers"] == "eager"
    assert first.linear.sizes == (1, 4, 80)
    assert first.host_exchange.sizes == (1, 4)
    assert first.memory.kv_tokens == 32 * BLOCK_SIZE
    assert engine.runner.records == {}
    (attention,) = [each for each in engine.stage.mechanisms if isinstance(each, CpuAttention)]
    assert not attention.hybrid.pending


def compiled(stage: Stage) -> Any:
    return SimpleNamespace(runner=stage.runner, compiled=True)


@pytest.mark.parametrize(
    "change",
    [
        lambda engine: replace(engine, stage=compiled(engine.stage)),
        lambda engine: replace(engine, config=replace(engine.config, max_model_len=32)),
        lambda engine: replace(engine, config=replace(engine.config, max_num_seqs=2)),
    ],
)
def test_what_times_depend_on_is_measured_anew(
    engine: StartingEngine,
    measured: list[StartingEngine],
    change: Callable[[StartingEngine], StartingEngine],
) -> None:
    other = change(engine)
    for asked in (engine, other, engine, other):
        profile_at_start(asked)
    assert measured == [engine, other]


def test_what_others_disturbed_is_not_kept(
    engine: StartingEngine, measured: list[StartingEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_profile, "_MOSTLY", 1.1)
    profile_at_start(engine)
    profile_at_start(engine)
    assert measured == [engine, engine]


def test_a_damaged_one_is_measured_anew(
    engine: StartingEngine, measured: list[StartingEngine], tmp_path: Path
) -> None:
    profile_at_start(engine)
    (path,) = cached(tmp_path)
    for number, content in enumerate((b"", b"{", b'{"schema": "another"}', b"\xff\xfe"), start=2):
        path.write_bytes(content)
        profile = profile_at_start(engine)
        assert len(measured) == number
        assert cached(tmp_path) == [path]
        assert read_profile(path, Profile) == profile


def test_a_cache_that_cannot_be_written_is_done_without(
    engine: StartingEngine,
    measured: list[StartingEngine],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "cache").write_text("a file")
    assert hybrid_profile(engine) is not None
    assert measured == [engine]
    assert "this machine is measured at every start" in caplog.text


def test_a_given_profile_is_read_and_nothing_is_measured(
    engine: StartingEngine, tmp_path: Path
) -> None:
    path, profile = tmp_path / "given.json", fitting(engine)
    write_profile(profile, path)
    given = replace(engine, config=replace(engine.config, profile=str(path)))
    assert hybrid_profile(given, lambda *stage: pytest.fail(f"measured: {stage}")) == profile


def named(profile: Profile, name: str) -> Profile:
    found = msgspec.structs.replace(profile.device, name=name)
    return msgspec.structs.replace(profile, device=found, host=found)


def with_setting(profile: Profile, **settings: str | int) -> Profile:
    return msgspec.structs.replace(profile, settings=profile.settings | settings)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda profile: named(profile, "an abacus"),
            "is a profile of another machine (an abacus)",
        ),
        (
            lambda profile: msgspec.structs.replace(
                profile, device=msgspec.structs.replace(profile.device, name="a loom")
            ),
            "is a profile of another machine (a loom with ",
        ),
        (
            lambda profile: msgspec.structs.replace(
                with_setting(profile, model="large"), model=replace(profile.model, hidden_size=64)
            ),
            "is a profile of another model (large)",
        ),
        (
            lambda profile: msgspec.structs.replace(
                with_setting(profile, model="large"), model=profile.model.rounded("int8")
            ),
            "is a profile of large with weights in another form",
        ),
        (
            lambda profile: with_setting(profile, dtype="float16"),
            "is a profile of float16 numbers, not float32",
        ),
        (
            lambda profile: with_setting(profile, host_threads=7),
            "of 7 threads that attend in host memory, not 1",
        ),
        (lambda profile: with_setting(profile, threads=99), "of a device of 99 threads, not 1"),
    ],
)
def test_a_profile_of_something_else_is_refused_in_one_line(
    engine: StartingEngine, tmp_path: Path, change: Callable[[Profile], Profile], says: str
) -> None:
    path = tmp_path / "given.json"
    write_profile(change(fitting(engine)), path)
    given = replace(engine, config=replace(engine.config, profile=str(path)))
    with pytest.raises(UsageError) as refused:
        hybrid_profile(given)
    assert says in str(refused.value)
    assert "make one with nanoserve profile --host-threads 1" in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("content", ["", "[]", "{", json.dumps({"schema": "nanoserve-bench/1"})])
def test_a_file_that_is_no_profile_is_refused_in_one_line(
    engine: StartingEngine, tmp_path: Path, content: str
) -> None:
    path = tmp_path / "given.json"
    path.write_text(content)
    with pytest.raises(UsageError) as refused:
        hybrid_profile(replace(engine, config=replace(engine.config, profile=str(path))))
    assert f"{path} is not a profile" in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def failing(error: Exception) -> Callable[..., None]:
    def probes(*_: object, **__: object) -> None:
        raise error

    return probes


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (torch.OutOfMemoryError("out of memory"), "measuring this machine does not fit"),
        (RuntimeFailure("no room"), "no room"),
        (HostAttentionLost("the thread has ended"), "the thread has ended"),
    ],
)
def test_an_engine_that_cannot_be_measured_stays_on_its_device_and_says_so(
    engine: StartingEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    says: str,
) -> None:
    monkeypatch.setattr(start_profile, "open_probes", failing(error))
    with caplog.at_level(logging.WARNING, "nanoserve"):
        assert hybrid_profile(engine) is None
    (record,) = caplog.records
    assert "the device does everything alone" in record.message
    assert says in record.message
    assert len(record.message.splitlines()) == 1


def test_an_engine_of_single_tokens_stays_on_its_device(
    engine: StartingEngine, caplog: pytest.LogCaptureFixture
) -> None:
    assert (
        hybrid_profile(replace(engine, config=replace(engine.config, max_num_batched_tokens=1)))
        is None
    )
    assert "cannot be profiled" in caplog.text
