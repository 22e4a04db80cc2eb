"""``nanoserve serve`` with the fake engine, for benchmarks that start their own server."""

import runpy
import sys

if __name__ == "__main__":
    assert sys.argv.pop(1) == "serve"
    runpy.run_module("tests.server.fake_serve", run_name="__main__")
