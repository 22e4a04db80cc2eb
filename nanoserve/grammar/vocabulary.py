"""A model's vocabulary for llguidance: the bytes of each token."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nanoserve.errors import UsageError
from nanoserve.text.backends import Backend, SentencePieceBackend
from nanoserve.text.tokenizer import load_backend


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model, for its grammars."""

    tokenizer: Any
    """The LLTokenizer of llguidance."""
    ordinary: np.ndarray
    """One bit per token id of the logits, set if the token is text: uint8 [ceil(vocab_size / 8)]."""
    end_token: int
    """The token whose bit llguidance sets when a text may end; the model's end tokens may be others."""

    def split_mask(self, mask: bytes) -> tuple[np.ndarray, bool]:
        """The bits of llguidance that belong to text tokens, and whether the text may end."""
        bits = np.frombuffer(mask, np.uint8)
        tokens = np.zeros_like(self.ordinary)
        count = min(len(bits), len(tokens))
        np.bitwise_and(bits[:count], self.ordinary[:count], out=tokens[:count])
        return tokens, bool(bits[self.end_token // 8] >> (self.end_token % 8) & 1)


def load_vocabulary(directory: Path, vocab_size: int | None) -> Vocabulary:
    """Read the tokenizer of a model directory.

    Args:
        vocab_size: width of the logits; None takes the tokenizer's.

    Raises:
        ModuleNotFoundError: without llguidance.
        ModelError: if there is no usable tokenizer.
        UsageError: if llguidance cannot use it.
    """
    from llguidance import LLTokenizer

    backend = load_backend(directory)
    controls = list(backend.control_ids.values())
    if not controls:
        raise UsageError("structured output needs a tokenizer with control tokens; this model's has none")
    end_token = min(controls)  # tokens that only tokenizer_config.json knows have the largest ids
    if isinstance(backend, SentencePieceBackend):
        source: Any = _PieceTable(backend, end_token)
    else:
        source = (directory / "tokenizer.json").read_text(encoding="utf-8").strip()
    try:
        tokenizer = LLTokenizer(source, eos_token=end_token)
    except ValueError as error:
        raise UsageError(f"structured output is not possible with this model's tokenizer: {error}") from None
    return Vocabulary(tokenizer, _ordinary_bits(backend, vocab_size or backend.vocab_size), end_token)


def _ordinary_bits(backend: Backend, vocab_size: int) -> np.ndarray:
    """The bits of tokens that have a text: no control tokens, no rows that only pad the logits."""
    ordinary = np.zeros(vocab_size, np.bool_)
    ordinary[: backend.vocab_size] = True
    ordinary[list(backend.control_ids.values())] = False
    return np.packbits(ordinary, bitorder="little")


class _PieceTable:
    """A sentencepiece vocabulary with the attributes that llguidance reads."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, backend: SentencePieceBackend, end_token: int) -> None:
        self._backend = backend
        self.eos_token_id = end_token
        self.tokens = [backend.token_bytes(token) for token in range(backend.vocab_size)]
        self.special_token_ids = list(backend.control_ids.values())

    def __call__(self, text: str) -> list[int]:
        """Token ids of a text within another one."""
        return self._backend.encode_within(text)
