"""``nanoserve serve`` with the fake engine: ``python -m tests.server.fake_serve OPTIONS``."""

import os
import resource

from nanoserve.commands.main import run
from nanoserve.server import engine_client
from nanoserve.utils import quarantine

PROGRAM = "from tests.server.fake_engine import main; main()"
"""The engine's process; this one imports nothing of it."""

if __name__ == "__main__":
    if "OPEN_FILES" in os.environ:
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(os.environ["OPEN_FILES"]),) * 2)
    engine_client.SILENCE_SECONDS = 2.0  # a stopped engine is given up sooner
    engine_client.RETRY_SECONDS = float(os.environ.get("RETRY_SECONDS", "0.5"))
    quarantine.DEATHS_SECONDS = 0.5
    engine_client.EngineClient.__init__.__kwdefaults__["program"] = PROGRAM  # type: ignore[attr-defined,index]
    run("serve")
