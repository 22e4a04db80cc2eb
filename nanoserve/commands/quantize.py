"""``nanoserve quantize``: write a model with weights of few bits, and say what this does to its
perplexity."""

from functools import partial
from pathlib import Path

from nanoserve.commands.calibration import calibration_texts, weights_size
from nanoserve.commands.engine_options import locate_model
from nanoserve.commands.options import Options, argument, file_option, option
from nanoserve.commands.progress import show_progress
from nanoserve.commands.terminal import remark
from nanoserve.config.quantization import CALIBRATING, WEIGHT_BITS
from nanoserve.errors import UsageError
from nanoserve.utils.sizes import format_size

_CALIBRATING_WINDOWS = 128


class QuantizeOptions(Options):
    model: str | None = argument(
        None, "A directory or a hub id; default: the bundled storyteller.", metavar="MODEL"
    )
    method: str = option("rtn", "Method that chooses the integers.", choices=tuple(WEIGHT_BITS))
    bits: int | None = option(None, "3, 4 or 8; default: 4, with llm-int8 8. vLLM does not read 3.")
    group: int | None = option(None, "Columns that share a scale; -1: the whole row. Default: 128.")
    act_order: bool = option(False, "GPTQ: take columns of large inputs first.")
    calibrate: Path | None = file_option("Text that awq and gptq run through the model.")
    held_out: Path | None = file_option("Text for the perplexity; default: the end of --calibrate.")
    output: Path = option(
        ..., "Directory to write; an unfinished run in it is continued.", metavar="DIR"
    )
    offline: bool = option(False, "Never download: use the hub's local cache.")


def run(options: QuantizeOptions) -> None:
    """Linear layers are quantized, symmetrically; embeddings, norms and routers stay as they are.
    rtn rounds to the nearest code; gptq also makes up for the error of each column in those after
    it; awq first scales up the columns whose inputs are large. llm-int8 stores 8 bits with a scale
    for each row; vLLM then rounds each token's activations as well, nanoserve does not. All is
    computed in float32 on the CPU, layer by layer. After an interruption, the same command
    continues.

    [bold]Examples[/bold]

      nanoserve quantize Qwen/Qwen3-0.6B --calibrate text.txt --output qwen3-w4
      nanoserve quantize --method rtn --bits 8 --held-out text.txt --output small
    """
    method, output = options.method, options.output
    bits, group = _bits_and_group(options)
    if options.calibrate is None and method in CALIBRATING:
        raise UsageError(
            f"--method {method} needs a text to run through the model: give --calibrate FILE"
        )
    resolved = locate_model(options.model, offline=options.offline)
    if resolved.directory is None:
        raise UsageError(
            f"{resolved.name} has no files to quantize; give the directory or the hub id of a model"
        )
    calibration, held_out = calibration_texts(
        options.calibrate, options.held_out, resolved.directory
    )
    if method not in CALIBRATING:
        calibration = []

    import torch

    from nanoserve.models.quantizing import Recipe, quantize_checkpoint

    recipe = Recipe(method, bits, group, options.act_order)
    inputs = [torch.tensor(piece) for piece in calibration[:_CALIBRATING_WINDOWS]]
    measured = [torch.tensor(piece) for piece in held_out]
    with show_progress() as progress:
        found = quantize_checkpoint(
            resolved.directory, output, recipe, inputs, measured, partial(progress, "layers")
        )
    written, read = weights_size(output), weights_size(resolved.directory)
    print(f"{output}: {format_size(written)} of weights, from {format_size(read)}")
    if found is None:
        remark("give --held-out FILE to see what this does to the perplexity")
        return
    before, after = found
    tokens = sum(len(piece) - 1 for piece in held_out)
    print(
        f"perplexity of {tokens:,} tokens: {before:.4f} before, {after:.4f} after "
        f"({after / before - 1:+.2%})"
    )


def _bits_and_group(options: QuantizeOptions) -> tuple[int, int]:
    """The bits of weights and the columns that share a scale. Raises UsageError if the method has
    other ones."""
    method, bits, group = options.method, options.bits, options.group
    possible = WEIGHT_BITS[method]
    if bits is None:
        bits = min(possible, key=lambda bits: abs(bits - 4))
    if bits not in possible:
        raise UsageError(
            f"--method {method} has weights of {' or '.join(map(str, possible))} bits, not {bits}"
        )
    if options.act_order and method != "gptq":
        raise UsageError(f"--act-order needs --method gptq, not {method}")
    if method == "llm-int8":
        if group not in (None, -1):
            raise UsageError("--method llm-int8 has a scale for each row: leave out --group")
        return bits, -1
    if group is None:
        group = 128
    if group != -1 and (group < 32 or group % 32):
        raise UsageError(f"--group must be -1 or a multiple of 32, not {group}")
    return bits, group
