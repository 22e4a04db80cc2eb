"""``nanoserve quantize``: write a model with weights of few bits, and say what this does to its perplexity."""

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

from nanoserve.commands.options import Options, argument, file_option, option
from nanoserve.commands.progress import show_progress
from nanoserve.commands.terminal import remark
from nanoserve.config.model_config import ModelConfig
from nanoserve.config.quantization import CALIBRATING, WEIGHT_BITS
from nanoserve.errors import UsageError
from nanoserve.models.hub import resolve_model
from nanoserve.text.tokenizer import load_tokenizer
from nanoserve.utils.files import read_text
from nanoserve.utils.sizes import format_size

Tokens = tuple[int, ...]
_WINDOW, _CALIBRATING_WINDOWS, _HELD_OUT_WINDOWS = 512, 128, 16


class QuantizeOptions(Options):
    model: str | None = argument(None, "A directory or a hub id; default: the bundled storyteller.", metavar="MODEL")
    method: str = option("rtn", "What chooses the integers.", choices=tuple(WEIGHT_BITS))
    bits: int | None = option(None, "3, 4 or 8; default: 4, with llm-int8 8. vLLM does not read 3.")
    group: int | None = option(None, "Columns that share a scale; -1: the whole row. Default: 128.")
    act_order: bool = option(False, "GPTQ: take columns of large inputs first.")
    calibrate: Path | None = file_option("Text that awq and gptq run through the model.")
    held_out: Path | None = file_option("Text for the perplexity; default: the end of --calibrate.")
    output: Path = option(..., "Directory to write; an unfinished run in it is continued.", metavar="DIR")
    offline: bool = option(False, "Never download: take the hub's local cache.")


def run(options: QuantizeOptions) -> None:
    """Linear layers are quantized, symmetrically; embeddings, norms and routers stay as they are. rtn rounds to the
    nearest code; gptq also makes up for the error of each column in those after it; awq first scales up the columns
    whose inputs are large. llm-int8 stores 8 bits with a scale for each row; vLLM then rounds each token's activations
    as well, nanoserve does not. All is computed in float32 on the CPU, layer by layer. After an interruption, the same
    command continues.

    [bold]Examples[/bold]

      nanoserve quantize Qwen/Qwen3-0.6B --calibrate text.txt --output qwen3-w4
      nanoserve quantize --method rtn --bits 8 --held-out text.txt --output small
    """
    method, output = options.method, options.output
    possible = WEIGHT_BITS[method]
    bits = min(possible, key=lambda bits: abs(bits - 4)) if options.bits is None else options.bits
    if bits not in possible:
        raise UsageError(f"--method {method} has weights of {' or '.join(map(str, possible))} bits, not {bits}")
    if options.act_order and method != "gptq":
        raise UsageError(f"--act-order needs --method gptq, not {method}")
    if method == "llm-int8" and options.group not in (None, -1):
        raise UsageError("--method llm-int8 has a scale for each row: leave out --group")
    group = (-1 if method == "llm-int8" else 128) if options.group is None else options.group
    if group != -1 and (group < 32 or group % 32):
        raise UsageError(f"--group must be -1 or a multiple of 32, not {group}")
    if options.calibrate is None and method in CALIBRATING:
        raise UsageError(f"--method {method} needs a text to run through the model: give --calibrate FILE")
    resolved = resolve_model(options.model, offline=options.offline)
    if resolved.directory is None:
        raise UsageError(f"{resolved.name} has no files to quantize; give the directory or the hub id of a model")
    calibration, held_out = _texts(options, resolved.directory)
    calibration = calibration[:_CALIBRATING_WINDOWS] if method in CALIBRATING else []

    import torch

    from nanoserve.models.quantizing import Recipe, quantize_checkpoint

    recipe = Recipe(method, bits, group, options.act_order)
    inputs, measured = ([torch.tensor(piece) for piece in pieces] for pieces in (calibration, held_out))
    with show_progress() as progress:
        found = quantize_checkpoint(resolved.directory, output, recipe, inputs, measured, partial(progress, "layers"))
    sizes = [sum(file.stat().st_size for file in place.glob("*.safetensors")) for place in (resolved.directory, output)]
    print(f"{output}: {format_size(sizes[1])} of weights, from {format_size(sizes[0])}")
    if found is None:
        remark("give --held-out FILE to see what this does to the perplexity")
    else:
        (before, after), tokens = found, sum(len(piece) - 1 for piece in held_out)
        print(f"perplexity of {tokens:,} tokens: {before:.4f} before, {after:.4f} after ({after / before - 1:+.2%})")


def windows(tokens: Sequence[int], length: int, limit: int) -> list[Tokens]:
    """The first ``limit`` pieces of ``length`` tokens. Raises UsageError if the text has fewer than two tokens."""
    pieces = [tuple(tokens[start : start + length]) for start in range(0, len(tokens), length)][:limit]
    pieces = [piece for piece in pieces if len(piece) > 1]
    if not pieces:
        raise UsageError("the text is too short: perplexity needs at least two tokens")
    return pieces


def _texts(options: QuantizeOptions, directory: Path) -> tuple[list[Tokens], list[Tokens]]:
    """Pieces of text to calibrate on, and to measure perplexity on. Raises UsageError if a file is too short."""
    files = options.calibrate, options.held_out
    contents = ["" if path is None else read_text(path, UsageError) for path in files]
    with closing(load_tokenizer(directory)) as tokenizer:
        calibrating, measured = (tokenizer.encode(content) if content else [] for content in contents)
    vocab_size = ModelConfig.from_directory(directory).vocab_size
    for path, found in zip(files, (calibrating, measured), strict=True):
        if max(found, default=0) >= vocab_size:
            raise UsageError(f"{path}: token id {max(found)} is not in the vocabulary of {vocab_size}")
    whole = range(0, len(calibrating) - _WINDOW + 1, _WINDOW)
    pieces = [tuple(calibrating[start : start + _WINDOW]) for start in whole]
    least = _WINDOW if options.held_out else 2 * _WINDOW
    for path, found, needed in zip(files, (calibrating, measured), (least, 2), strict=True):
        if path is not None and len(found) < needed:
            raise UsageError(f"{path} has {len(found)} tokens, and at least {needed} are needed; give more text")
    if options.held_out is not None:
        return pieces, windows(measured, _WINDOW, _HELD_OUT_WINDOWS)
    count = min(_HELD_OUT_WINDOWS, -(-len(pieces) // 4))
    return pieces[: len(pieces) - count], pieces[len(pieces) - count :]
