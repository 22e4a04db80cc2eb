"""CUDA graphs of the ranks of a tensor-parallel group: all ranks have a graph, or none has.

A replayed step is padded, and so are the tensors of its collectives. A rank that ran the step as it
is would send tensors of another size, and the ranks would wait for each other forever.
"""

from collections.abc import Callable

import torch

from nanoserve.errors import RuntimeFailure, first_line
from nanoserve.executor.start.memory import out_of_memory
from nanoserve.executor.step.decode_graphs import GraphRecorder, Recorded
from nanoserve.models.decoder import Decoder


def on_all_ranks(decoder: Decoder, *, holds: bool) -> bool:
    """Tell whether it holds on all ranks of the decoder's group, which all call this."""
    if decoder.shard.degree == 1:
        return holds
    refusals = torch.tensor([0 if holds else 1], dtype=torch.int32, device=decoder.device)
    return not decoder.group.all_reduce(refusals).item()


class RanksRecorder:
    """Has each graph recorded by all ranks of a group, in the same order.

    NCCL sends nothing while a graph is recorded. So a rank that cannot record it keeps no other
    rank waiting, and tells the others afterwards.
    """

    def __init__(self, recorder: GraphRecorder, decoder: Decoder) -> None:
        self._recorder, self._decoder = recorder, decoder

    def record(self, step: Callable[[], Recorded]) -> tuple[Callable[[], None], Recorded]:
        """Record as `GraphRecorder.record` does. Raises RuntimeError on all ranks if one of them
        cannot record the step; RuntimeFailure if the step itself fails, in whose sums the others
        wait for this rank."""
        has_run = False

        def followed() -> Recorded:
            nonlocal has_run
            result = step()
            has_run = True
            return result

        try:
            recorded = self._recorder.record(followed)
        except RuntimeError as error:
            first = error.__context__ or error
            if out_of_memory(first) or out_of_memory(error):
                raise  # it ends this worker, and the engine then ends the others
            if not has_run:
                raise RuntimeFailure(f"a decode step failed: {first_line(first)}") from error
            on_all_ranks(self._decoder, holds=False)
            raise
        if not on_all_ranks(self._decoder, holds=True):
            raise RuntimeError("another rank of the stage cannot record them")
        return recorded
