"""nanoserve itself, as one of the engines that are compared."""

import sys
from typing import Any

import torch

from nanoserve.benchmarks.driving import EngineDriver
from nanoserve.benchmarks.peers.protocol import Batch, BatchResult, Opening
from nanoserve.benchmarks.settling import settle_operators
from nanoserve.llm import LLM


class NanoservePeer:
    """The engine behind LLM, given token ids."""

    name = "nanoserve"

    def __init__(self, opening: Opening) -> None:
        self._llm = LLM(
            opening.model,
            dtype=opening.dtype,
            max_model_len=opening.max_length + 1,
            max_num_seqs=opening.max_batch,
            policy=opening.policy,
            eager=opening.eager,
        )
        operators = settle_operators(_announce)
        self._llm.prepare(lambda stage, done, _: None if done else _announce(f"{stage}, once on this machine ..."))
        self._driver = EngineDriver(self._llm.engine)
        self.description: dict[str, Any] = {
            "dtype": opening.dtype,
            "threads": torch.get_num_threads(),
            "operators": operators,
            "layers": "compiled" if self._llm.compiled else "eager",
        }

    def run(self, batch: Batch) -> BatchResult:
        run = self._driver.run(batch.prompts, [batch.output_tokens] * len(batch.prompts))
        return BatchResult(run.timings, run.tokens)

    def close(self) -> None:
        self._llm.close()


def _announce(line: str) -> None:
    print(line, file=sys.stderr)
