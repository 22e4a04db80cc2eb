"""The mechanisms of an engine's scheduler, as its configuration asks for them. Most engines never
load this module."""

from collections.abc import Sequence

from nanoserve.config.model_parts import CanvasConfig
from nanoserve.engine_config import EngineConfig
from nanoserve.errors import UsageError
from nanoserve.scheduler.assembly import make_extensions
from nanoserve.scheduler.canvas.aligned_canvases import AlignedCanvases
from nanoserve.scheduler.canvas.canvas_blocks import longest_sequence
from nanoserve.scheduler.canvas.canvases import Canvases
from nanoserve.scheduler.canvas.free_canvases import FreeCanvases
from nanoserve.scheduler.extension import Extensions
from nanoserve.scheduler.optional import LayoutCapacity
from nanoserve.scheduler.speculation.draft_proposer import DraftProposer
from nanoserve.scheduler.windows import most_tokens


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


def longest_with_canvas(
    canvas: CanvasConfig, windows: tuple[int, ...], num_blocks: int, block_size: int, most: int
) -> int:
    """Tokens of the longest sequence that fits these blocks of cache groups with these windows. Its
    last canvas ends within the ``most`` positions that there may be. Raises UsageError if none
    fits."""
    if canvas.is_free:
        longest = longest_sequence(windows, num_blocks, block_size, canvas.length, most)
    else:
        longest = most_tokens(windows, num_blocks, block_size, most)
        longest -= longest % canvas.length
    if longest < 2:  # a token of a prompt, and one of an answer
        raise UsageError(
            f"the KV cache of {num_blocks} blocks of {block_size} tokens does not hold a canvas of "
            f"{canvas.length}; raise --kv-cache-memory"
        )
    return longest
