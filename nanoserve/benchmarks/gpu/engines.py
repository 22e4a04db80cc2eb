"""Opening engines on the device, one at a time, for the cases that share them."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from nanoserve.benchmarks.driving import EngineDriver
from nanoserve.benchmarks.gpu.setting import GpuSetting
from nanoserve.llm import LLM
from nanoserve.models.hub import DUMMY_PREFIX
from nanoserve.processes.temporary import temporary_directory


class TimedEngine:
    """An LLM that is ready to be timed, and what drives it."""

    def __init__(self, setting: GpuSetting, shape: str, *, eager: bool = False, **settings: Any) -> None:
        self.llm = LLM(
            DUMMY_PREFIX + shape,
            device=str(setting.device),
            seed=0,
            enable_prefix_caching=False,
            eager=eager or setting.dry_run,  # compiling for a CPU takes a minute and proves nothing about a GPU
            **settings,
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
    """Holds at most one engine, so that each has the device's memory for itself; `closing` closes it."""

    def __init__(self, setting: GpuSetting, closing: ExitStack) -> None:
        self._setting = setting
        self._open: tuple[dict[str, Any], TimedEngine] | None = None
        self._configs = closing.enter_context(temporary_directory())
        closing.callback(self.clear)

    def get(self, **settings: Any) -> TimedEngine:
        """The engine of these settings of LLM; any other is closed first.

        `shape` names the model with random weights: a name in SHAPES, or the path of a config.json.
        """
        if self._open is None or self._open[0] != settings:
            self.clear()
            self._open = settings, TimedEngine(self._setting, **settings)
        return self._open[1]

    def config_file(self, name: str, config: Mapping[str, Any]) -> str:
        """A config.json of that name with this in it, as the `shape` of settings."""
        path = self._configs / f"{name}.json"
        path.write_text(json.dumps(dict(config)), encoding="utf-8")
        return str(path)

    def clear(self) -> None:
        """Give the engine's memory back, and what torch keeps for others that are gone: an engine asks what is free."""
        if self._open is not None:
            self._open[1].llm.close()
            self._open = None
        self._setting.give_back()
