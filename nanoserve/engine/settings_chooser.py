"""The protocol of the module that chooses the layout and the policy that a user left open, and
advises on those named.

Choosing simulates, and the simulator belongs to the laboratory. So the engine knows a protocol, and
imports the module when there is something to choose.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

from nanoserve.config.model_config import ModelConfig
from nanoserve.engine_config import EngineConfig
from nanoserve.layout import ParallelLayout
from nanoserve.models.hub import ProgressCallback, ResolvedModel
from nanoserve.record.counters import EngineStatus
from nanoserve.request import ExpectedLengths, RequestShape

if TYPE_CHECKING:
    from nanoserve.costs.hardware import MachineSpeeds

_MODULE = "nanoserve.lab.auto_parallel"


class SettingsChooser(Protocol):
    """A module with these functions."""

    def choose_settings(
        self,
        resolved: ResolvedModel,
        config: EngineConfig,
        model: ModelConfig,
        progress: ProgressCallback | None = None,
        expected: ExpectedLengths | None = None,
    ) -> tuple[EngineConfig, str]:
        """Choose what the config leaves open; return the whole config, and the choice in one line.

        Expected requests count as a closed batch; without any, the usual ones come at a rate.
        Raises UsageError if the number of workers is not known or nothing fits, and what starting
        workers raises.
        """

    def advise_on_batch(
        self,
        model: ModelConfig,
        config: EngineConfig,
        speeds: "MachineSpeeds",
        status: EngineStatus,
        layouts: Sequence[ParallelLayout],
        shapes: Sequence[RequestShape],
    ) -> str:
        """Predict a batch of these shapes on a running engine, and name a faster way, in one
        line."""


def settings_chooser() -> SettingsChooser:
    """Import the laboratory's module."""
    return cast(SettingsChooser, import_module(_MODULE))
