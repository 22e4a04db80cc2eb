"""The benchmarks from a checkout: ``python bench.py latency`` is ``nanoserve bench latency``."""

from nanoserve.commands.entry import run

if __name__ == "__main__":
    run("bench")
