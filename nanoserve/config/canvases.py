"""Read the canvas of each family that writes a block of tokens at a time. No torch here."""

from nanoserve.config.config_fields import ConfigFields
from nanoserve.config.model_parts import CanvasConfig, RenoisingConfig
from nanoserve.errors import ModelError

_LONGEST_CANVAS = 1024
_LEAST_BOUND = 1e-6


def sdar_canvas(fields: ConfigFields, _generation: ConfigFields) -> CanvasConfig:
    """Read the canvas of SDAR (arXiv 2510.06303)."""
    length = fields.positive("block_size", 4, most=_LONGEST_CANVAS)
    mask_token = fields.positive("mask_token_id", 151669)
    vocab_size = fields.positive("vocab_size")
    if mask_token >= vocab_size:
        raise ModelError(
            f"{fields.source}: mask_token_id {mask_token} is none of the {vocab_size} tokens"
        )
    if fields.flag("use_sliding_window", default=False):
        raise ModelError(
            f"{fields.source}: use_sliding_window is not supported for sdar: its blocks see all "
            "positions before them"
        )
    return CanvasConfig(length, mask_token)


def diffusion_gemma_canvas(fields: ConfigFields, generation: ConfigFields) -> CanvasConfig:
    """Read the free canvas of DiffusionGemma, and how it is denoised. Where generation_config.json
    says nothing, transformers' own defaults count."""
    length = fields.positive("canvas_length", 256, most=_LONGEST_CANVAS)
    if not fields.flag("tie_word_embeddings", default=True):
        raise ModelError(
            f"{fields.source}: tie_word_embeddings false is not supported: encoder and decoder "
            "must share their weights"
        )
    usual = RenoisingConfig()
    sampler = ConfigFields(generation.section("sampler_config") or {}, generation.source)
    stable_steps = generation.number("stability_threshold", usual.stability_threshold, least=0.0)
    renoising = RenoisingConfig(
        max_denoising_steps=generation.positive("max_denoising_steps", usual.max_denoising_steps),
        entropy_bound=sampler.number("entropy_bound", usual.entropy_bound, least=_LEAST_BOUND),
        t_min=generation.number("t_min", usual.t_min, least=0.0),
        t_max=generation.number("t_max", usual.t_max, least=0.0),
        stability_threshold=int(stable_steps),
        confidence_threshold=generation.number(
            "confidence_threshold", usual.confidence_threshold, least=_LEAST_BOUND
        ),
    )
    if renoising.t_max <= renoising.t_min:
        raise ModelError(
            f"{generation.source}: t_max {renoising.t_max:g} must be above t_min "
            f"{renoising.t_min:g}"
        )
    return CanvasConfig(length, mask_token=None, renoising=renoising)
