"""Block tables of sequences that write a canvas at a time: they reach to the end of the canvas."""

from nanoserve.request import Sequence
from nanoserve.scheduler.kv import BlockPool, CachedColumn, SequenceBlocks
from nanoserve.scheduler.windows import WindowedBlocks, computed_at_once, most_blocks


class AlignedCanvasBlocks(SequenceBlocks):
    """Block tables of canvases that begin at multiples of their length.

    Positions are divided into spans of a canvas's ``length``, and a query sees to the end of its
    span. So keys and values are final only where their span is: prompts are computed in whole
    spans, and cached prefixes end where a span does.
    """

    def __init__(self, pool: BlockPool, length: int) -> None:
        super().__init__(pool)
        self._length = length

    def start_of_span(self, position: int) -> int:
        return position // self._length * self._length

    def end_of_canvas(self, known: int) -> int:
        """The position behind the canvas of a sequence with so many tokens."""
        return self.start_of_span(known) + self._length

    def most_held(self, tokens: int, chunk: int | None = None) -> int:
        return super().most_held(self.end_of_canvas(tokens), chunk)

    def usable_prefix(self, sequence: Sequence) -> list[CachedColumn]:
        columns = super().usable_prefix(sequence)
        while len(columns) * self._block_size % self._length:
            columns.pop()
        return columns

    def cut(self, prompt: Sequence, count: int, budget: int) -> int:
        """Compute all that is left of the prompt if there is room for the canvas behind it, or else
        whole spans before the prompt's last one. Where the plan has room for any of its positions,
        a span may be a little more than that."""
        if count <= 0:
            return 0
        room = self.capacity(prompt)
        known = len(prompt.tokens)
        before_last = self.start_of_span(known - 1) - prompt.computed
        may_end = count == prompt.remaining or before_last == 0
        if may_end and self.end_of_canvas(known) - prompt.computed <= room:
            return prompt.remaining
        spans = max(self._length, self.start_of_span(count))
        return min(before_last, spans, self.start_of_span(room))

    def share_full(self, sequence: Sequence, computed: int) -> None:
        super().share_full(sequence, self.start_of_span(computed))

    def forked_at(self, parent: Sequence) -> int:
        return self.start_of_span(super().forked_at(parent))


class FreeCanvasBlocks(WindowedBlocks):
    """Block tables of canvases that begin directly behind the known tokens, of models with sliding
    windows or without.

    Known tokens are causal, so chunks and cached prefixes end anywhere. All positions of a canvas
    see what its first one sees through a window.
    """

    def __init__(self, pool: BlockPool, windows: tuple[int, ...], length: int) -> None:
        super().__init__(pool, windows)
        self._length = length

    def end_of_canvas(self, known: int) -> int:
        """The position behind the canvas of a sequence with so many tokens."""
        return known + self._length

    def most_held(self, tokens: int, chunk: int | None = None) -> int:
        at_once = max(chunk or 0, computed_at_once(self._length, self._block_size))
        return most_blocks(self.windows, self.end_of_canvas(tokens), self._block_size, at_once)

    def slide(self, sequence: Sequence, position: int) -> None:
        """Keep what the prompt's last token sees while other samples wait for the prompt: they
        compute that token when the first canvas is settled."""
        if sequence.fork is not None and sequence.fork.siblings:
            position = min(position, self.forked_at(sequence))
        super().slide(sequence, position)
