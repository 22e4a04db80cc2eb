"""Addresses of servers: from a URL that the user typed to hosts and paths."""

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from nanoserve.errors import UsageError, shown

_PORTS = {"http": 80, "https": 443}
_VERSION = "/v1"
_ORDINARY = re.compile(r"[!-~]+")
"""Printable ASCII without blanks: nothing else may enter the head of a request."""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    scheme: str
    host: str
    port: int
    root: str = ""
    """The path before /v1, usually empty. Paths outside of OpenAI's API, such as /ready, lie below
    it."""

    @property
    def api(self) -> str:
        """The path before /chat/completions and the like."""
        return self.root + _VERSION

    @property
    def host_header(self) -> str:
        """The Host header: with the port only if it is not the scheme's default."""
        host = self.host
        if ":" in host:
            host = f"[{host}]"
        if self.port != _PORTS[self.scheme]:
            host = f"{host}:{self.port}"
        return host

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host_header}{self.root}"


def parse_url(text: str) -> ServerAddress:
    """The address of ``http://host:port``, with or without /v1, or with a longer path that ends in
    /v1.

    Raises UsageError for any other text.
    """
    wanted = f"--url takes http://HOST:PORT or https://HOST/PATH/v1, not {shown(text)}"
    if not _ORDINARY.fullmatch(text):
        raise UsageError(wanted)
    try:
        parts = urlsplit(text)
        port = parts.port
        (parts.hostname or "").encode("idna")  # an empty or too long label would fail at connecting
    except ValueError:
        raise UsageError(wanted) from None
    if parts.scheme not in _PORTS or not parts.hostname or parts.query or parts.fragment:
        raise UsageError(wanted)
    if parts.username is not None:
        raise UsageError("--url holds a name or a password; give a key with --api-key instead")
    if port is None:
        port = _PORTS[parts.scheme]
    root = parts.path.rstrip("/").removesuffix(_VERSION).rstrip("/")
    return ServerAddress(parts.scheme, parts.hostname, port, root)


def key_headers(api_key: str | None) -> dict[str, str]:
    """The header that carries a key, empty without one. Raises UsageError for a key that a header
    cannot hold."""
    if not api_key:
        return {}
    if not _ORDINARY.fullmatch(api_key):
        raise UsageError("the API key holds blanks, line breaks or letters that no key has")
    return {"authorization": f"Bearer {api_key}"}
