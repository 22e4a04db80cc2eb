"""``nanoserve serve`` as a process that a benchmark starts, and that ends with it whatever
happens."""

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress

from nanoserve.errors import RuntimeFailure
from nanoserve.server.client.address import ServerAddress, parse_url
from nanoserve.server.client.connection import ApiClient, ServerLost, ServerRefused
from nanoserve.utils.watchdog import LoggedChild

_COMMAND = "nanoserve"
_LISTENING = "listening on "
_PREFIX = "nanoserve: "
_POLL_SECONDS = 0.1
_PATIENCE_SECONDS = 10.0
_FOR_OTHERS = ("NANOSERVE_API_KEY", "NANOSERVE_SERVED_MODEL_NAME")
"""Meant for servers that others reach; this one lives for one benchmark."""


class OwnServer:
    """A server on a free port of this machine, with these flags of ``nanoserve serve`` beside host
    and port. Raises RuntimeFailure in its own words, if it does not come up."""

    def __init__(self, flags: Sequence[str]) -> None:
        words = ("serve", "--host", "127.0.0.1", "--port", "0", *flags)
        environment = {name: value for name, value in os.environ.items() if name not in _FOR_OTHERS}
        program = (
            f"import runpy; sys.argv[1:] = sys.argv[3:]; runpy.run_module({_COMMAND!r}, None, "
            "'__main__', True)"
        )
        self._child = LoggedChild(program, *words, environment=environment)
        self.process_id = self._child.process.pid  # of its front end
        try:
            self.address = self._wait_until_ready()  # where it listens
        except BaseException:
            self.close()
            raise

    def _wait_until_ready(self) -> ServerAddress:
        while self._child.process.poll() is None:
            for line in self._child.lines:
                if _LISTENING in line:
                    client = ApiClient(parse_url(line.split()[-1]))
                    with suppress(ServerRefused, ServerLost):
                        client.ask(f"{client.address.root}/ready")
                        return client.address
            time.sleep(_POLL_SECONDS)
        raise RuntimeFailure(
            f"the server did not start: {self._child.last_words().removeprefix(_PREFIX)}"
        )

    def close(self) -> None:
        """End the server, whatever it is doing: its answers are not needed any more."""
        for _ in range(2):  # the second one says not to wait for running requests
            self._child.process.send_signal(signal.SIGTERM)
        self._child.end(_PATIENCE_SECONDS)  # if it is killed, its engine notices, and ends too
