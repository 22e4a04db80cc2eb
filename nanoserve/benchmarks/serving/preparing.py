"""What a server of our own will run on, built before it starts: a server builds it while it answers.

``python -m nanoserve.benchmarks.serving.preparing MODEL SETTINGS`` (both in JSON) opens the model once, waits until its
operators and compiled layers are there, and prints what runs; the benchmark itself holds no torch.
"""

import json
import sys
from dataclasses import fields
from typing import Any

import msgspec

from nanoserve.engine_config import EngineConfig
from nanoserve.processes.children import run_module


def prepare_elsewhere(model: str | None, settings: dict[str, Any], threads: int | None) -> dict[str, Any]:
    """Facts about the engine as it will run with these settings of LLM: model, dtype, operators, layers, threads.

    Raises:
        RuntimeFailure: in the process's own words, if the model cannot be opened.
    """
    words = json.dumps(model), msgspec.json.encode(settings).decode()  # a layout is a dataclass
    environment = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    return run_module("nanoserve.benchmarks.serving.preparing", *words, environment=environment)


def main(model: str | None, settings: dict[str, Any]) -> dict[str, Any]:
    """The child's work."""
    from nanoserve.benchmarks.settling import settle
    from nanoserve.llm import LLM

    with LLM(model, **settings) as llm:
        return settle(llm) | {"max_num_seqs": llm.engine_config.max_num_seqs}


if __name__ == "__main__":
    try:
        config = msgspec.json.decode(sys.argv[2], type=EngineConfig)
        settings = {field.name: getattr(config, field.name) for field in fields(config)}
        print("\n" + json.dumps(main(json.loads(sys.argv[1]), settings)))
    except Exception as error:
        sys.exit(str(error) or type(error).__name__)  # one line for the benchmark to show, whatever it was
