"""Which peers there are, and how one that is missing is installed. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from nanoserve.processes.installation import install_command


@dataclass(frozen=True, slots=True)
class PeerKind:
    """A peer that may be compared with."""

    modules: tuple[str, ...]
    """What must be importable."""
    install: str
    """The command that makes it so."""

    @property
    def missing(self) -> list[str]:
        """Modules that are not installed."""
        return [module for module in self.modules if find_spec(module) is None]


PEERS: Mapping[str, PeerKind] = {
    "transformers": PeerKind(("transformers",), "pip install 'transformers>=5.0'"),
    "llama.cpp": PeerKind(("llama_cpp", "gguf"), "pip install llama-cpp-python gguf"),
    "server": PeerKind(("starlette", "uvicorn", "h11", "zmq", "prometheus_client"), install_command("server")),
}
"""Choices of ``bench compare --peers``; the server is our own, asked over HTTP."""
