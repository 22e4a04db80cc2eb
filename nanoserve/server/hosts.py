"""Check the name by which a request addresses this server.

By DNS rebinding, a web page can make a browser send requests to this server under the page's own
name, and then read the answers. The header Host holds that name, which is not a name of this
server.
"""

import ipaddress
import re
from collections.abc import Collection

_NAME_AND_PORT = re.compile(r"(?:\[([^\]]*)\]|([^:]*))(?::\d*)?")


def is_loopback(name: str) -> bool:
    """Whether a name means the machine itself."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def is_allowed(host: bytes, names: Collection[str]) -> bool:
    """Whether a request's Host holds one of these lower-case names, or one of the machine itself,
    with any port."""
    found = _NAME_AND_PORT.fullmatch(host.decode("latin-1").lower())
    if found is None:
        return False
    name = found[1] or found[2]
    return name in names or is_loopback(name)
