"""Grammars in a batch: what each sequence with a JSON schema may sample next, as one mask over its rows of logits."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanoserve.errors import NanoserveError
from nanoserve.grammar.compiler import GrammarCompiler
from nanoserve.runtime.step.staging import Staging
from nanoserve.scheduler.plan import Begin


class SequenceGrammar:
    """How far one sequence's output has come in its grammar.

    The grammar alone decides when the text may end: end tokens are allowed when it is complete and not before.
    min_tokens keeps them away for longer while anything else may come, but never when nothing else may.
    """

    def __init__(self, begin: Begin, schema: str, vocab_size: int, compiler: GrammarCompiler) -> None:
        self.error: str | None = None  # why the sequence cannot go on, if so; it ends with it, and the others go on
        self.complete = False  # nothing can follow
        self._compiler = compiler
        self._schema = schema
        self._min_tokens = begin.params.min_tokens
        self._end_tokens = frozenset(begin.end_tokens)
        self._ends = _bits(begin.end_tokens, vocab_size)
        self._late = _bits((*begin.end_tokens, *begin.params.stop_token_ids), vocab_size)
        try:
            self._matcher = compiler.matcher(schema)
            self._matcher.consume(begin.tokens[begin.prompt_length :])  # after a preemption or a restart
        except NanoserveError as error:
            self._fail(error)

    def mask(self, output_length: int) -> np.ndarray | None:
        """The tokens that may come next, one bit each: uint8 [ceil(vocab_size / 8)]; None if it cannot go on."""
        if self.error is not None:
            return None
        try:
            allowed = self._matcher.allowed()
        except NanoserveError as error:
            self._fail(error)
            return None
        tokens: np.ndarray = allowed.tokens | self._ends if allowed.may_end else allowed.tokens & ~self._ends
        if output_length < self._min_tokens and (others := tokens & ~self._late).any():
            tokens = others
        return tokens

    def append(self, token: int) -> None:
        """Take note of a sampled token."""
        if self.error is not None:
            return
        if token in self._end_tokens:
            self.complete = True
            return
        try:
            self._matcher.consume((token,))
        except NanoserveError as error:
            self._fail(error)
        else:
            self.complete = self._matcher.complete

    def _fail(self, error: NanoserveError) -> None:
        self.error = str(error)
        self._compiler.forget(self._schema)


@dataclass(frozen=True, slots=True)
class GrammarMask:
    """The masks of G of the batch's rows."""

    rows: Tensor
    """int64 [G], places in the batch."""
    bits: Tensor
    """uint8 [G, ceil(V / 8)]."""

    @classmethod
    def stage(
        cls, grammars: Mapping[int, SequenceGrammar], output_lengths: Sequence[int], staging: Staging
    ) -> "GrammarMask | None":
        """Have the masks of a batch moved to the device together; None if no sequence can go on.

        Args:
            grammars: by row of the batch.
            output_lengths: of all its rows.
        """
        masks = {
            row: mask for row, grammar in grammars.items() if (mask := grammar.mask(output_lengths[row])) is not None
        }
        if not masks:
            return None
        return cls(staging.add(np.array(list(masks))), staging.add(np.stack(list(masks.values()))))

    def apply(self, logits: Tensor) -> Tensor:
        """A copy of logits [R, V] in which what may not come is -inf."""
        rows = self.rows
        each = (self.bits[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=logits.device)) & 1
        forbidden = each.flatten(1)[:, : logits.shape[1]] == 0
        return logits.index_copy(0, rows, logits[rows].masked_fill(forbidden, -torch.inf))


def _bits(tokens: Iterable[int], vocab_size: int) -> np.ndarray:
    flags = np.zeros(vocab_size, np.bool_)
    flags[[token for token in tokens if token < vocab_size]] = True
    return np.packbits(flags, bitorder="little")
