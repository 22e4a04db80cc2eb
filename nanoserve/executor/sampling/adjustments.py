"""Logits that requests change before sampling: what a JSON schema allows, and bias, penalties and
late end tokens."""

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanoserve.errors import NanoserveError
from nanoserve.executor.step.staging import Staging
from nanoserve.scheduler.plan import Begin
from nanoserve.text.grammar.compiler import GrammarCompiler
from triton_ops import allow_tokens


class SequenceGrammar:
    """How far one sequence's output has come in its grammar.

    The grammar alone decides when the text may end: end tokens are allowed when it is complete and
    not before. min_tokens keeps them away for longer while anything else may come, but never when
    nothing else may.
    """

    def __init__(
        self, begin: Begin, schema: str, vocab_size: int, compiler: GrammarCompiler
    ) -> None:
        # why the sequence cannot go on, if so; it ends with it, and the others go on
        self.error: str | None = None
        self.complete = False  # nothing can follow
        self._compiler, self._schema = compiler, schema
        self._min_tokens = begin.params.min_tokens
        self._end_tokens = frozenset(begin.end_tokens)
        self._ends = _bits(begin.end_tokens, vocab_size)
        self._late = _bits((*begin.end_tokens, *begin.params.stop_token_ids), vocab_size)
        try:
            self._matcher = compiler.matcher(schema)
            # after a preemption or a restart
            self._matcher.consume(begin.tokens[begin.prompt_length :])
        except NanoserveError as error:
            self._fail(error)

    def mask(self, output_length: int) -> np.ndarray | None:
        """The tokens that may come next, one bit each: uint8 [ceil(vocab_size / 8)]; None if it
        cannot go on."""
        if self.error is not None:
            return None
        try:
            allowed = self._matcher.allowed()
        except NanoserveError as error:
            self._fail(error)
            return None
        tokens: np.ndarray = (
            allowed.tokens | self._ends if allowed.may_end else allowed.tokens & ~self._ends
        )
        if output_length < self._min_tokens and (others := tokens & ~self._late).any():
            tokens = others
        return tokens

    def append(self, token: int) -> None:
        """Note a sampled token."""
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

    def after(self, draft_tokens: Sequence[int]) -> tuple["SequenceGrammar", int]:
        """The state behind those of the draft tokens that the grammar allows, and how many they
        are; this one stays."""
        if self.error is not None:
            return self, 0
        later = copy(self)
        later._matcher = self._matcher.copy()
        allowed = later._matcher.allowed_ahead(draft_tokens)
        later._matcher.consume(draft_tokens[:allowed])
        return later, allowed

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
        cls,
        grammars: Mapping[int, SequenceGrammar],
        output_lengths: Sequence[int],
        staging: Staging,
    ) -> "GrammarMask | None":
        """Have the masks of a batch, whose grammars are given by row, moved to the device together;
        None if no sequence can go on."""
        masks = dict[int, np.ndarray]()
        for row, grammar in grammars.items():
            mask = grammar.mask(output_lengths[row])
            if mask is not None:
                masks[row] = mask
        if not masks:
            return None
        return cls(staging.add(np.array(list(masks))), staging.add(np.stack(list(masks.values()))))

    def apply(self, logits: Tensor) -> Tensor:
        """A copy of logits [R, V] in which what may not come is -inf."""
        return allow_tokens(logits, self.rows, self.bits)


def _bits(tokens: Iterable[int], vocab_size: int) -> np.ndarray:
    flags = np.zeros(vocab_size, np.bool_)
    flags[[token for token in tokens if token < vocab_size]] = True
    return np.packbits(flags, bitorder="little")


_ENTRY = np.dtype([("token", "i8"), ("bias", "f4"), ("count", "f4"), ("seen", "?"), ("end", "?")])


class TokenAdjustments:
    """The tokens of one sequence whose logits are changed, and by what; grows by the tokens that
    are sampled.

    Token ids outside the vocabulary can never be sampled and are left out.
    """

    def __init__(self, begin: Begin, vocab_size: int) -> None:
        self.params = begin.params
        self.vocab_size = vocab_size
        self._counts_tokens = begin.params.penalizes_tokens
        bias, possible = begin.params.logit_bias, range(vocab_size).__contains__
        biased = list(filter(possible, bias))
        # else the grammar's mask sees to it
        waits = begin.params.min_tokens > 0 and begin.params.json_schema is None
        ends = (
            list(filter(possible, (*begin.end_tokens, *begin.params.stop_token_ids)))
            if waits
            else []
        )
        seen = begin.tokens if self._counts_tokens else ()
        # Without a loop of ours: many samples may begin in one step, each with thousands of tokens.
        distinct = dict.fromkeys((*biased, *ends, *seen))
        self._place = dict(zip(distinct, range(len(distinct)), strict=True))
        place_of = self._place.__getitem__
        self._entries = np.zeros(len(distinct) + 16, _ENTRY)
        self._entries["token"][: len(distinct)] = list(distinct)
        self._entries["bias"][: len(biased)] = list(map(bias.__getitem__, biased))
        self._entries["end"][list(map(place_of, ends))] = True
        self._entries["seen"][list(map(place_of, seen))] = True
        np.add.at(self._entries["count"], list(map(place_of, seen[begin.prompt_length :])), 1)

    def after(self, tokens: Iterable[int]) -> "TokenAdjustments":
        """A copy that has counted these tokens too."""
        if not self._counts_tokens:
            return self
        later = copy(self)
        later._place, later._entries = self._place.copy(), self._entries.copy()
        for token in tokens:
            later.append(token)
        return later

    @property
    def entries(self) -> np.ndarray:
        """The table, one entry per distinct token."""
        return self._entries[: len(self._place)]

    def append(self, token: int) -> None:
        """Count a token of the output."""
        if not self._counts_tokens:
            return
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._entries):
            self._entries = np.concatenate((self._entries, np.zeros_like(self._entries)))
        self._entries["token"][place] = token
        self._entries["seen"][place] = True
        self._entries["count"][place] += 1


@dataclass(frozen=True, slots=True)
class AdjustmentRows:
    """The tables of P of the batch's rows, one after the other: N entries in all. A long one makes
    no other longer."""

    rows: Tensor
    """int64 [P], places in the batch."""
    penalties: Tensor
    """float32 [P, 3]: for repetition, presence and frequency."""
    tables: Tensor
    """int64 [N], from 0 to P - 1: the table of each entry."""
    tokens: Tensor
    """int64 [N]."""
    bias: Tensor
    counts: Tensor
    seen: Tensor
    """The token is in the prompt or the output."""
    forbidden: Tensor
    """An end token before min_tokens."""

    @classmethod
    def stage(
        cls, tables: Mapping[int, TokenAdjustments], output_lengths: Sequence[int], staging: Staging
    ) -> "AdjustmentRows | None":
        """Have the tables of a batch, given by row, moved to the device together; None if there is
        nothing in any."""
        chosen = [(row, table) for row, table in tables.items() if len(table.entries)]
        if not chosen:
            return None
        params = [table.params for _, table in chosen]
        penalties = [
            (one.repetition_penalty, one.presence_penalty, one.frequency_penalty) for one in params
        ]
        waiting = [
            output_lengths[row] < one.min_tokens
            for (row, _), one in zip(chosen, params, strict=True)
        ]
        owners = np.repeat(np.arange(len(chosen)), [len(table.entries) for _, table in chosen])
        # As bytes: to put many together costs far less than to concatenate arrays of such a dtype.
        packed = np.frombuffer(b"".join([table.entries.data for _, table in chosen]), _ENTRY)
        tokens, bias, counts, seen = (
            staging.add(packed[name].copy()) for name in ("token", "bias", "count", "seen")
        )
        return cls(
            rows=staging.add(np.array([row for row, _ in chosen])),
            penalties=staging.add(np.array(penalties, np.float32)),
            tables=staging.add(owners),
            tokens=tokens,
            bias=bias,
            counts=counts,
            seen=seen,
            forbidden=staging.add(packed["end"] & np.array(waiting)[owners]),
        )

    def apply(self, logits: Tensor) -> Tensor:
        """A changed copy of logits [R, V]: bias, then penalties, then end tokens forbidden (vLLM's
        order).

        Repetition divides positive and multiplies negative logits (CTRL, arXiv 1909.05858, as
        Hugging Face has it); presence and frequency subtract for tokens of the output alone
        (OpenAI).
        """
        rows, tokens, counts = self.rows[self.tables], self.tokens, self.counts
        repetition, presence, frequency = self.penalties[self.tables].unbind(1)
        values = logits[rows, tokens] + self.bias
        punished = torch.where(values > 0, values / repetition, values * repetition)
        values = torch.where(self.seen, punished, values)
        values = values - frequency * counts - presence * (counts > 0)
        values = values.masked_fill(self.forbidden, -torch.inf)
        return logits.index_put((rows, tokens), values)
