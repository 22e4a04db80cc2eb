"""``nanoserve serve`` that tries another engine sooner: ``python -m tests.server.hasty_serve
OPTIONS``."""

import sys

from nanoserve.commands.main import main
from nanoserve.server import engine_client

if __name__ == "__main__":
    engine_client.RETRY_SECONDS = 1.0
    sys.exit(main(["serve", *sys.argv[1:]]))
