"""Timings begin when it is settled what runs: the C++ operators and compiled layers, or plain torch
in their stead.

``python -m nanoserve.lab.benchmarks.settling MODEL SETTINGS`` (both in JSON) opens a model and
prints these facts.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import msgspec
import torch

from nanoserve.engine_config import EngineConfig
from nanoserve.llm import LLM
from nanoserve.models.dtypes import format_name, resolve_dtype
from triton_ops.cpu import cpu_operators


def settle_operators(announce: Callable[[str], None] = lambda _: None) -> str:
    """Wait for the operators, after saying so. Returns what the CPU runs: "C++", or "plain torch
    (REASON)"."""
    operators = cpu_operators()
    if operators.expected and not operators.loaded:
        announce("building the C++ operators, once on this machine ...")
    if operators.wait():
        return "C++"
    return f"plain torch ({operators.problem})"


def settle(llm: LLM, announce: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Wait for the operators and for compiled layers; facts about what runs from here on."""
    operators, config = settle_operators(announce), llm.built.config

    def tell(stage: str, done: int, total: int) -> None:
        if not done:
            announce(f"{stage}, once on this machine ...")

    llm.built.prepare(tell)
    layers = "eager"
    if llm.built.compiled:
        layers = "compiled"
    return {
        "model": llm.model_name,
        "dtype": format_name(
            resolve_dtype(config.dtype, torch.device(config.device), llm.built.model.dtype)
        ),
        "quantization": config.quantization or "none",
        "operators": operators,
        "layers": layers,
        "threads": torch.get_num_threads(),
        "policy": config.policy_name,
    }


if __name__ == "__main__":
    try:
        asked = msgspec.json.decode(sys.argv[2], type=EngineConfig)
        with LLM(
            json.loads(sys.argv[1]),
            **{field.name: getattr(asked, field.name) for field in fields(asked)},
        ) as llm:
            print("\n" + json.dumps(settle(llm) | {"max_num_seqs": llm.built.config.max_num_seqs}))
    except Exception as error:
        # one line for the benchmark to show, whatever it was
        sys.exit(str(error) or type(error).__name__)
