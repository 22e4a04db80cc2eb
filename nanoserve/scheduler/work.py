"""StepWork and StepFeatures: what the cost of a micro-batch and the time of a step depend on."""

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import msgspec

from nanoserve.errors import UsageError

if TYPE_CHECKING:
    from nanoserve.scheduler.plan import Row

# first position and number of tokens of a prefill chunk; (0, n) is a whole prompt
Chunk = tuple[int, int]


class StepWork(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A micro-batch of decode rows, of one token each, and prefill chunks, summed up."""

    decodes: int = 0
    decode_context: int = 0  # keys that they read, their own included, summed over rows
    chunks: tuple[Chunk, ...] = ()
    sampled: int = 0  # positions that get logits
    draft_tokens: int = 0  # tokens that decode rows have beside their first one
    windowed_decode_context: tuple[int, ...] = ()
    """``decode_context`` within each sliding window of the model, ascending: a row reads no more
    keys than the window."""

    @classmethod
    def of(
        cls,
        decode_contexts: Sequence[int] = (),
        chunks: Iterable[Chunk] = (),
        sampled: int | None = None,
        windows: Sequence[int] = (),
    ) -> "StepWork":
        """Sum up rows; O(rows). Decode rows read these keys, their own included; None samples all
        rows. ``windows`` are the model's, ascending. Raises UsageError for an empty context or
        chunk, or a negative position."""
        pieces = tuple(chunks)
        if decode_contexts and min(decode_contexts) < 1:
            raise UsageError(f"a decode row reads at least its own key, not {min(decode_contexts)}")
        for start, length in pieces:
            if start < 0 or length < 1:
                raise UsageError(
                    f"a chunk starts at 0 or later and holds a token or more, not {(start, length)}"
                )
        rows = len(decode_contexts) + len(pieces)
        return cls(
            decodes=len(decode_contexts),
            decode_context=sum(decode_contexts),
            chunks=pieces,
            sampled=rows if sampled is None else sampled,
            windowed_decode_context=tuple(
                sum(min(keys, window) for keys in decode_contexts) for window in windows
            ),
        )

    @cached_property
    def tokens(self) -> int:
        return self.decodes + self.draft_tokens + sum([length for _, length in self.chunks])

    @property
    def rows(self) -> int:
        return self.decodes + len(self.chunks)


def work_of(
    rows: "Iterable[Row]", sum_up: Callable[[list[int], list[Chunk], int], StepWork] = StepWork.of
) -> StepWork:
    """Sum the rows of a plan up; ``sum_up`` gets the decodes' contexts, the chunks and how many
    positions are sampled. A row with draft tokens is a decode."""
    contexts: list[int] = []
    chunks: list[Chunk] = []
    sampled = drafted = 0
    for row in rows:
        verified = 0 if row.draft is None else row.draft.verify
        sampled += row.sample + verified
        if len(row.tokens) == 1 or verified:
            contexts.append(row.start + len(row.tokens))
            drafted += verified
        else:
            chunks.append((row.start, len(row.tokens)))
    work = sum_up(contexts, chunks, sampled)
    if drafted:
        return msgspec.structs.replace(work, draft_tokens=drafted)
    return work


Strategy = Literal["device", "asymmetric", "overlap"]
"""How a step treats sequences whose KV is in host memory: "device", none begins a token in it;
"asymmetric", two sub-batches alternate between device and CPU within the step (NEO); "overlap",
their attention runs beside the steps, and they advance by one layer a step (APEX), as sequences
under way do in a step of the device's alone."""


class HostBatch(msgspec.Struct, frozen=True):
    """Host sequences that take part in a step and are equally far."""

    sequences: int
    context_tokens: int  # keys that their attention reads in each layer, summed over them
    # layers whose attention the CPU was given before the step; the last of them is not passed yet
    attended: int = 0

    @property
    def first_layer(self) -> int:
        """The layer whose linear part they reach next."""
        return max(0, self.attended - 1)


class StepFeatures(msgspec.Struct, frozen=True, kw_only=True):
    """A step, reduced to what its time depends on: from its plan before it runs, from its result
    afterwards."""

    strategy: Strategy
    device: StepWork  # the rows whose KV is on the device
    host: tuple[HostBatch, ...] = ()
    """In an overlapped step, the batches that begin a token or join the device's rows; before the
    step, all batches that may. In an asymmetric step, sub-batch 0, which runs with the device's
    rows."""
    host_second: tuple[HostBatch, ...] = ()  # sub-batch 1 of an asymmetric step

    @property
    def sampled(self) -> int:
        """Rows that get logits. An overlapped step counts the rows on the device: few host rows end
        beside them."""
        ending = (*self.host, *self.host_second) if self.strategy == "asymmetric" else ()
        return self.device.sampled + sum([batch.sequences for batch in ending])


MAX_DRAFT_TOKENS = 7
"""Draft tokens that a row may have."""


class DraftCounts(msgspec.Struct, array_like=True):
    """Counts of draft tokens, and of draft tokens that were right, since the engine started."""

    rows: int = 0  # rows that had draft tokens
    draft_tokens: int = 0
    accepted: list[int] = msgspec.field(default_factory=lambda: [0] * MAX_DRAFT_TOKENS)
    """Accepted draft tokens by their place in the row."""

    def __add__(self, other: "DraftCounts") -> "DraftCounts":
        """Add up both counts."""
        accepted = [
            one + another for one, another in zip(self.accepted, other.accepted, strict=True)
        ]
        return DraftCounts(self.rows + other.rows, self.draft_tokens + other.draft_tokens, accepted)
