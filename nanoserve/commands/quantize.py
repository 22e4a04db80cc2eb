"""``nanoserve quantize``: write a model with weights of few bits, and say what this does to its
perplexity."""

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

from nanoserve.commands.engine_options import locate_model
from nanoserve.commands.options import Options, argument, file_option, option
from nanoserve.commands.progress import show_progress
from nanoserve.commands.terminal import remark
from nanoserve.config.model_config import ModelConfig
from nanoserve.config.quantization import CALIBRATING, WEIGHT_BITS
from nanoserve.errors import UsageError
from nanoserve.text.tokenizer import load_tokenizer
from nanoserve.utils.files import read_text
from nanoserve.utils.sizes import format_size

Tokens = tuple[int, ...]
_WINDOW, _CALIBRATING_WINDOWS, _HELD_OUT_WINDOWS = 512, 128, 16


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
    calibration, held_out = _texts(options, resolved.directory)
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
    written, read = _weights_size(output), _weights_size(resolved.directory)
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


def _weights_size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def windows(tokens: Sequence[int], length: int, limit: int) -> list[Tokens]:
    """The first ``limit`` pieces of ``length`` tokens. Raises UsageError if the text has fewer than
    two tokens."""
    pieces = [tuple(tokens[start : start + length]) for start in range(0, len(tokens), length)][
        :limit
    ]
    pieces = [piece for piece in pieces if len(piece) > 1]
    if not pieces:
        raise UsageError("the text is too short: perplexity needs at least two tokens")
    return pieces


def _texts(options: QuantizeOptions, directory: Path) -> tuple[list[Tokens], list[Tokens]]:
    """Pieces of text to calibrate on, and to measure perplexity on. Raises UsageError if a file is
    too short."""
    # the end of one text may have to serve as the other
    least = _WINDOW if options.held_out else 2 * _WINDOW
    contents = [_content(path) for path in (options.calibrate, options.held_out)]
    with closing(load_tokenizer(directory)) as tokenizer:
        calibrating, measured = [
            tokenizer.encode(content) if content else [] for content in contents
        ]
    vocab_size = ModelConfig.from_directory(directory).vocab_size
    _check_text(options.calibrate, calibrating, least, vocab_size)
    _check_text(options.held_out, measured, 2, vocab_size)
    whole = range(0, len(calibrating) - _WINDOW + 1, _WINDOW)
    pieces = [tuple(calibrating[start : start + _WINDOW]) for start in whole]
    if options.held_out is not None:
        return pieces, windows(measured, _WINDOW, _HELD_OUT_WINDOWS)
    count = min(_HELD_OUT_WINDOWS, -(-len(pieces) // 4))
    return pieces[: len(pieces) - count], pieces[len(pieces) - count :]


def _content(path: Path | None) -> str:
    if path is None:
        return ""
    return read_text(path, UsageError)


def _check_text(path: Path | None, tokens: Sequence[int], least: int, vocab_size: int) -> None:
    """Raise UsageError if the model does not know a token, or a file has less than the least number
    of tokens."""
    if max(tokens, default=0) >= vocab_size:
        raise UsageError(f"{path}: token id {max(tokens)} is not in the vocabulary of {vocab_size}")
    if path is not None and len(tokens) < least:
        raise UsageError(
            f"{path} has {len(tokens)} tokens, and at least {least} are needed; give more text"
        )
