"""``nanoserve prune``: write a model without its least important parts, and say what this does to
its perplexity."""

from functools import partial
from pathlib import Path

from nanoserve.commands.calibration import calibration_texts, weights_size
from nanoserve.commands.engine_options import locate_model
from nanoserve.commands.options import Options, file_option, option
from nanoserve.commands.progress import show_progress
from nanoserve.config.model_config import ModelConfig
from nanoserve.errors import UsageError
from nanoserve.utils.sizes import format_size

_SAMPLES = 1024


class PruneOptions(Options):
    model: str | None = option(
        None,
        "A model's name, a directory or a hub id; default: the bundled storyteller.",
        "-m",
        metavar="MODEL",
    )
    ffn_size: int | None = option(None, "Inner channels that each feed-forward part keeps.")
    hidden_size: int | None = option(None, "Channels that hidden states keep.")
    layers: int | None = option(None, "Layers to keep.")
    heads: int | None = option(None, "Query heads that each layer keeps, in whole KV groups.")
    calibrate: Path = option(..., "Text that is run through the model.", metavar="FILE")
    held_out: Path | None = file_option("Text for the perplexity; default: the end of --calibrate.")
    output: Path = option(..., "Directory to write, which is new or empty.", metavar="DIR")
    offline: bool = option(False, "Never download: use the hub's local cache.")


def run(options: PruneOptions) -> None:
    """The least important parts leave, and a smaller dense model stays, which loads like any other.
    Importance is that of Minitron: up to 1,024 pieces of the text run through the model, once, and
    parts that compute little are less important. All is computed in float32 on the CPU. Distil the
    model afterwards: scripts/distil.py does.

    [bold]Examples[/bold]

      nanoserve prune --ffn-size 384 --calibrate text.txt --output small
      nanoserve prune -m ./big --layers 20 --calibrate text.txt --output small
    """
    resolved = locate_model(options.model, offline=options.offline)
    source = resolved.directory
    if source is None:
        raise UsageError(
            f"{resolved.name} has no files to prune; give the directory or the hub id of a model"
        )
    calibration, held_out = calibration_texts(options.calibrate, options.held_out, source)

    import torch

    from nanoserve.models.pruning.trimming import Sizes, prune_checkpoint

    sizes = Sizes(
        hidden_size=options.hidden_size,
        intermediate_size=options.ffn_size,
        num_layers=options.layers,
        num_heads=options.heads,
    )
    samples = [torch.tensor(piece) for piece in calibration[:_SAMPLES]]
    measured = [torch.tensor(piece) for piece in held_out]
    with show_progress() as progress:
        found = prune_checkpoint(
            source, options.output, sizes, samples, measured, partial(progress, "samples")
        )
    written, read = weights_size(options.output), weights_size(source)
    print(f"{options.output}: {format_size(written)} of weights, from {format_size(read)}")
    print(_left(ModelConfig.from_directory(source).num_layers, found.layers))
    before, after = found.perplexity_before, found.perplexity_after
    tokens = sum(len(piece) - 1 for piece in held_out)
    print(
        f"perplexity of {tokens:,} tokens: {before:.4f} before, {after:.4f} after "
        f"({after / before - 1:+.2%})"
    )


def _left(count: int, kept: tuple[int, ...]) -> str:
    """Say which layers have left."""
    left = [str(layer) for layer in range(count) if layer not in kept]
    if not left:
        return f"all {count} layers stay"
    return f"layers that left, of 0 to {count - 1}: {', '.join(left)}"
