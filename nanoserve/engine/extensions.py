"""The mechanisms of an engine's scheduler, as its configuration asks for them. Most engines never
load this module."""

from collections.abc import Sequence

from nanoserve.config.model_parts import CanvasConfig
from nanoserve.engine_config import EngineConfig
from nanoserve.scheduler.assembly import make_extensions
from nanoserve.scheduler.canvas.aligned_canvases import AlignedCanvases
from nanoserve.scheduler.canvas.canvases import Canvases
from nanoserve.scheduler.canvas.free_canvases import FreeCanvases
from nanoserve.scheduler.extension import Extensions
from nanoserve.scheduler.optional import LayoutCapacity
from nanoserve.scheduler.speculation.draft_proposer import DraftProposer


def engine_extensions(
    config: EngineConfig,
    *,
    host_blocks: int,
    other_layouts: Sequence[LayoutCapacity],
    state_slots: int,
    async_scheduling: bool,
    canvas: CanvasConfig | None = None,
) -> Extensions:
    """Make what the configuration asks for, with this many blocks in host memory, slots for
    recurrent states, and the canvas that the model writes, if it does."""
    proposer = None
    if config.speculate is not None:
        proposer = DraftProposer(
            looks_up=config.speculate == "ngram",
            token_budget=config.max_num_batched_tokens,
            async_scheduling=async_scheduling,
        )
    canvases = None
    if canvas is not None:
        canvases = _canvases(canvas, config.max_num_batched_tokens)
    return make_extensions(
        host_blocks=host_blocks,
        attends_on_host=config.attends_on_host,
        other_layouts=other_layouts,
        state_slots=state_slots,
        proposer=proposer,
        canvases=canvases,
    )


def _canvases(canvas: CanvasConfig, token_budget: int) -> Canvases:
    """Make the kind of canvases that the model writes."""
    if canvas.mask_token is None:
        return FreeCanvases(length=canvas.length, token_budget=token_budget)
    return AlignedCanvases(
        length=canvas.length, mask_token=canvas.mask_token, token_budget=token_budget
    )
