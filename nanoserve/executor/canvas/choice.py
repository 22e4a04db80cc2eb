"""The Mechanism that denoises the canvases of a model."""

from nanoserve.config.model_parts import CanvasConfig
from nanoserve.engine_config import RENOISE, Denoising
from nanoserve.executor.canvas.denoising import CanvasDenoising
from nanoserve.executor.canvas.free_denoising import FreeCanvasDenoising
from nanoserve.executor.mechanism import Mechanism


def make_denoising(canvas: CanvasConfig, asked: str | None) -> Mechanism:
    """Make that of the model's kind of canvases, with what ``--denoising`` asks for."""
    if canvas.renoising is not None:
        chosen = Denoising.parse(asked or RENOISE)
        return FreeCanvasDenoising(canvas.length, canvas.renoising.changed(chosen.settings))
    return CanvasDenoising(canvas, Denoising.parse(asked or "confidence"))
