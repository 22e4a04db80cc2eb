"""Texts for the commands that write smaller checkpoints: some to calibrate on, others to measure
perplexity on."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from nanoserve.config.model_config import ModelConfig
from nanoserve.errors import UsageError
from nanoserve.text.tokenizer import load_tokenizer
from nanoserve.utils.files import read_text

Tokens = tuple[int, ...]
WINDOW = 512
"""Tokens of a piece of text."""
_HELD_OUT_WINDOWS = 16


def calibration_texts(
    calibrate: Path | None, held_out: Path | None, directory: Path
) -> tuple[list[Tokens], list[Tokens]]:
    """Pieces of text to calibrate on, and to measure perplexity on, for the model of a directory.
    Without a held-out text, the end of the other one is measured. Raises UsageError if a file is
    too short."""
    # the end of one text may have to serve as the other
    least = WINDOW if held_out else 2 * WINDOW
    contents = [_content(path) for path in (calibrate, held_out)]
    with closing(load_tokenizer(directory)) as tokenizer:
        calibrating, measured = [
            tokenizer.encode(content) if content else [] for content in contents
        ]
    vocab_size = ModelConfig.from_directory(directory).vocab_size
    _check_text(calibrate, calibrating, least, vocab_size)
    _check_text(held_out, measured, 2, vocab_size)
    whole = range(0, len(calibrating) - WINDOW + 1, WINDOW)
    pieces = [tuple(calibrating[start : start + WINDOW]) for start in whole]
    if held_out is not None:
        return pieces, windows(measured, WINDOW, _HELD_OUT_WINDOWS)
    count = min(_HELD_OUT_WINDOWS, -(-len(pieces) // 4))
    return pieces[: len(pieces) - count], pieces[len(pieces) - count :]


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


def weights_size(directory: Path) -> int:
    """Bytes of the safetensors files of a directory."""
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


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
