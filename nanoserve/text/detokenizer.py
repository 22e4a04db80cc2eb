"""Token ids to text while they arrive."""

from collections.abc import Sequence
from typing import Protocol

_REPLACEMENT = "\ufffd"
# Enough of the prompt to know how the first generated token joins it (a blank or none).
_PROMPT_WINDOW = 6


class Decoder(Protocol):
    """The part of a Tokenizer that detokenizing needs."""

    special_ids: frozenset[int]
    vocab_size: int

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the ids."""

    def is_byte(self, token_id: int) -> bool:
        """Whether the token is one raw byte of a byte-fallback vocabulary."""


class Detokenizer:
    """Turns a growing list of token ids into text that never ends in half a character.

    All pushes and the flush joined are what decoding all ids at once gives. How a token reads depends only on its
    neighbours, so a short window is decoded at each push: the ids of the last complete text, then the new ones. What
    the window says beyond its known part is new text. Time per token does not grow with the output.
    """

    def __init__(self, tokenizer: Decoder, prompt_ids: Sequence[int] = ()) -> None:
        """`prompt_ids`: what the output continues; without them it is decoded as the beginning of a text."""
        self._tokenizer = tokenizer
        self._window = self._readable(prompt_ids[-4 * _PROMPT_WINDOW :])[-_PROMPT_WINDOW:]
        self._known_ids = len(self._window)
        # Half a character at the end of the prompt is completed by the output.
        self._emitted = len(self._decode().rstrip(_REPLACEMENT))

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that became certain with these ids; empty while a character is incomplete."""
        new = self._readable(token_ids)
        if not new:
            return ""
        self._window += new
        # A run of byte tokens is decoded as one, and how it reads is known when it has ended.
        if self._tokenizer.is_byte(self._window[-1]):
            return ""
        text = self._decode()
        complete = text.removesuffix(_REPLACEMENT)
        fresh = complete[self._emitted :]
        self._emitted += len(fresh)
        if fresh and complete == text:
            self._window = self._window[self._known_ids :]
            self._known_ids = len(self._window)
            self._emitted = len(self._decode())
        return fresh

    def flush(self) -> str:
        """The rest, at the end of the output; bytes that never became a character read as U+FFFD."""
        text = self._decode()
        fresh = text[self._emitted :]
        self._emitted = len(text)
        return fresh

    def _readable(self, token_ids: Sequence[int]) -> list[int]:
        """The ids that have a text: no control tokens, no rows that only pad the embedding."""
        skipped, vocab_size = self._tokenizer.special_ids, self._tokenizer.vocab_size
        return [token for token in token_ids if token not in skipped and token < vocab_size]

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window)
