"""Opening engines on the device, one at a time, for the cases that share them."""

import json
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import msgspec

from nanoserve.benchmarks.driving import EngineDriver
from nanoserve.benchmarks.gpu.setting import GpuSetting
from nanoserve.llm import LLM
from nanoserve.models.shapes import DUMMY_PREFIX
from nanoserve.processes.temporary import choose_directory, make_directory, remove_directory


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Which model with random weights, and how it runs."""

    shape: str
    """A name in SHAPES, or the path of a config.json."""
    dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_memory: int | None = None
    eager: bool = False


class TimedEngine:
    """An LLM that is ready to be timed, and what drives it."""

    def __init__(self, setting: GpuSetting, settings: EngineSettings) -> None:
        self.settings = settings
        fields = {name: getattr(settings, name) for name in settings.__struct_fields__ if name != "shape"}
        fields["eager"] |= setting.dry_run  # compiling for a CPU takes a minute and proves nothing about a GPU
        self.llm = LLM(
            DUMMY_PREFIX + settings.shape,
            device=str(setting.device),
            seed=0,
            enable_prefix_caching=False,
            **fields,
        )
        self.llm.prepare()
        self.driver = EngineDriver(self.llm.engine)
        self._in_flight = self.llm.engine.executor.max_in_flight

    def overlap(self, *, steps: bool) -> None:
        """Plan the next step while the device computes, as the executor would have it; or wait for each step first."""
        self.llm.engine.executor.max_in_flight = self._in_flight if steps else 1

    @property
    def overlaps(self) -> bool:
        """Whether more than one step may be in flight."""
        return self._in_flight > 1


class EngineShelf:
    """Holds at most one engine, so that each has the device's memory for itself."""

    def __init__(self, setting: GpuSetting) -> None:
        self._setting = setting
        self._open: TimedEngine | None = None
        make_directory(directory := choose_directory())
        self._configs = directory

    def get(self, settings: EngineSettings) -> TimedEngine:
        """The engine of these settings; any other is closed first."""
        if self._open is None or self._open.settings != settings:
            self.clear()
            self._open = TimedEngine(self._setting, settings)
        return self._open

    def config_file(self, name: str, config: Mapping[str, Any]) -> str:
        """A config.json of that name with this in it, as the `shape` of settings."""
        path = self._configs / f"{name}.json"
        path.write_text(json.dumps(dict(config)), encoding="utf-8")
        return str(path)

    def clear(self) -> None:
        """Give the engine's memory back, and what torch keeps for others that are gone: an engine asks what is free."""
        if self._open is not None:
            self._open.llm.close()
            self._open = None
        self._setting.give_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.clear()
        remove_directory(self._configs)
