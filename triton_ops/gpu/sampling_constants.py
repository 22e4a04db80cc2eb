"""Constants of the programs that sample, and how they divide a vocabulary."""

BLOCK = 1024  # logits that a program looks at together
NUM_WARPS = 4
NARROWING_WARPS = 8
"""Warps of the program that adds up a histogram: with fewer, each thread would hold more of it."""
DIGIT_BITS = 11
PASSES = ((22, False), (22, True), (11, False), (0, False))
"""SHIFT and LOW of each pass: three digits hold the 32 bits of a key."""
_PROGRAMS_PER_MULTIPROCESSOR = 32
"""Programs of a large batch: several times what run together, so that all multiprocessors end at
about the same time."""


def most_counted_rows(multiprocessors: int) -> int:
    """Return the most rows that have several programs each, whose arrivals are counted."""
    return _PROGRAMS_PER_MULTIPROCESSOR * multiprocessors // 2


def pieces_of_row(rows: int, vocab_size: int, multiprocessors: int) -> tuple[int, int]:
    """Return into how many pieces a row's vocabulary is cut, and the blocks of each piece."""
    blocks = -(-vocab_size // BLOCK)
    wanted = max(1, _PROGRAMS_PER_MULTIPROCESSOR * multiprocessors // rows)
    per_piece = -(-blocks // wanted)
    return -(-blocks // per_piece), per_piece
