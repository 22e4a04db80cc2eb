"""The bytes and operations that attention and cache moves cannot do without. No torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """One sequence of a batch: how many of its tokens are queries, and how many it has in the cache, those included."""

    queries: int
    context: int

    @property
    def pairs(self) -> int:
        """Queries times the keys each of them sees: the last query sees `context`, the one before it one fewer."""
        first_sees = self.context - self.queries + 1
        return self.queries * (first_sees + self.context) // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Attention over a paged cache: its rows and its heads."""

    rows: tuple[AttentionRow, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def tokens(self) -> int:
        """Queries of all rows."""
        return sum(row.queries for row in self.rows)

    def num_bytes(self, bytes_per_number: int) -> int:
        """Keys and values of every row's context read once, queries read and results written once."""
        context = sum(row.context for row in self.rows)
        numbers = 2 * context * self.num_kv_heads + 2 * self.tokens * self.num_heads
        return numbers * self.head_dim * bytes_per_number

    @property
    def operations(self) -> int:
        """Two products of `head_dim` multiply-adds, of two operations each, for every head and pair."""
        return 4 * self.num_heads * self.head_dim * sum(row.pairs for row in self.rows)


def decode_rows(batch: int, context: int) -> tuple[AttentionRow, ...]:
    """One new token each of `batch` sequences."""
    return (AttentionRow(1, context),) * batch


def moved_bytes(tokens: int, num_kv_heads: int, head_dim: int, bytes_per_number: int) -> int:
    """Keys and values of so many tokens, each read once and written once."""
    return 2 * 2 * tokens * num_kv_heads * head_dim * bytes_per_number
