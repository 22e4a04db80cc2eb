"""Which names of this server a request may use.

By DNS rebinding, a web page can make a browser send requests to this server under the page's own name, and then read
the answers. The header Host holds that name, which is not a name of this server.
"""

import ipaddress
import re
from collections.abc import Sequence

_NAME_AND_PORT = re.compile(r"(?:\[([^\]]*)\]|([^:]*))(?::\d*)?")


def is_loopback(name: str) -> bool:
    """Whether a name means the machine itself."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


class AllowedHosts:
    """Names that a request's Host may hold, with any port: the given ones, and those of the machine itself."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(name.lower().strip("[]") for name in names)

    def __contains__(self, host: bytes) -> bool:
        found = _NAME_AND_PORT.fullmatch(host.decode("latin-1").lower())
        name = (found[1] or found[2]) if found else ""
        return name in self._names or is_loopback(name)
