"""A model's vocabulary as llguidance wants it: the bytes that each token stands for."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nanoserve.errors import UsageError
from nanoserve.text.backends import Backend, SentencePieceBackend
from nanoserve.text.tokenizer import load_backend


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens for grammars."""

    tokenizer: Any
    """Llguidance's."""
    ordinary: np.ndarray
    """One bit per token id of the logits, set where the token is text: uint8 [ceil(vocab_size / 8)]."""
    end_token: int
    """The one whose bit llguidance sets where a text may end, whatever the model's end tokens are."""

    def split_mask(self, mask: bytes) -> tuple[np.ndarray, bool]:
        """llguidance's bits as those of tokens that are text, and whether the text may end."""
        bits = np.frombuffer(mask, np.uint8)
        tokens = np.zeros_like(self.ordinary)
        count = min(len(bits), len(tokens))
        np.bitwise_and(bits[:count], self.ordinary[:count], out=tokens[:count])
        return tokens, bool(bits[self.end_token // 8] >> (self.end_token % 8) & 1)


def load_vocabulary(directory: Path, vocab_size: int | None) -> Vocabulary:
    """Read the tokenizer of a model directory.

    Args:
        vocab_size: width of the logits; None takes that of the tokenizer.

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
    end_token = min(controls)  # those that only tokenizer_config.json knows come last
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
    """Control tokens are left out of decoded text, so none may stand in it; nor may rows that only pad the logits."""
    ordinary = np.zeros(vocab_size, np.bool_)
    ordinary[: backend.vocab_size] = True
    ordinary[list(backend.control_ids.values())] = False
    return np.packbits(ordinary, bitorder="little")


class _PieceTable:
    """A sentencepiece vocabulary under the names that llguidance asks for."""

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
