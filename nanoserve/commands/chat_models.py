"""The models of a chat: those of this machine, or of a server."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from nanoserve.commands.answers import LocalModel
from nanoserve.commands.terminal import is_terminal
from nanoserve.engine_config import EngineConfig
from nanoserve.models.hub import known_models
from nanoserve.utils.sizes import format_size

if TYPE_CHECKING:
    from nanoserve.commands.chat import ChatOptions
    from nanoserve.commands.remote_model import RemoteModel


class ModelSource(Protocol):
    def first(self) -> "LocalModel | RemoteModel":
        """The model that the command names, or the default one. Raises as `open`."""

    def open(self, name: str) -> "LocalModel | RemoteModel":
        """The model of that name, which may still have to load. Raises NanoserveError if there is
        none."""

    def listed(self) -> Iterable[tuple[str, str]]:
        """The name of each model that can be opened, and what else is known of it."""


class LocalModels:
    """Models that run in this process, each with the options of the command."""

    def __init__(self, options: "ChatOptions", notify: Callable[[str], None]) -> None:
        self._options, self._notify = options, notify

    def first(self) -> LocalModel:
        return self._open(self._options)

    def open(self, name: str) -> LocalModel:
        return self._open(replace(self._options, model=name))

    def _open(self, options: "ChatOptions") -> LocalModel:
        # wrong settings are refused before anything is downloaded
        EngineConfig(**options.settings())
        found = options.find_model()
        return LocalModel(
            found.name,
            partial(options.open_llm, found),
            self._notify,
            options.seed,
            drafts=is_terminal(sys.stdout) and not options.json,
        )

    def listed(self) -> Iterable[tuple[str, str]]:
        for name, size, place in known_models():
            yield name, f"{format_size(size)}, {place}"
