"""From a JSON schema to the tokens that may come next, with llguidance.

The first grammar imports llguidance and builds the vocabulary; nothing happens before.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from nanoserve.errors import NanoserveError, UsageError
from nanoserve.grammar.vocabulary import Vocabulary, load_vocabulary
from nanoserve.processes.installation import install_command

MAX_CACHED = 16
"""Compiled grammars kept for later requests with the same schema; a large one takes about 10 MB."""
MAX_LEXER_STATES = 20_000
"""Limit for one grammar. Each state takes 1 to 2 kB for as long as the grammar is kept."""

_LONGEST_MESSAGE = 300
_ADVICE = " Enable 'coerce_one_of'"  # an option of llguidance that would weaken the schema


class GrammarFailure(NanoserveError):
    """A text cannot be continued by its grammar; other texts are not affected."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """The tokens that may come next."""

    tokens: np.ndarray
    """One bit per token id, lowest bit first: uint8 [ceil(vocab_size / 8)]. Control tokens are never set."""
    may_end: bool
    """Whether the text may end here."""


class Matcher:
    """The state of one text in a grammar."""

    def __init__(self, matcher: Any, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    def allowed(self) -> Allowed:
        """The tokens that may come next.

        Raises:
            GrammarFailure: if computing them exceeds the limits on time or memory.
        """
        tokens, may_end = self._vocabulary.split_mask(self._matcher.compute_bitmask())
        self._check()
        return Allowed(tokens, may_end)

    def consume(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text; raises GrammarFailure if the grammar does not allow them."""
        self._matcher.consume_tokens(list(tokens))
        self._check()

    @property
    def complete(self) -> bool:
        """Whether the text is complete and nothing can follow."""
        return bool(self._matcher.is_stopped())

    def copy(self) -> "Matcher":
        """A matcher for another text in the same state."""
        return Matcher(self._matcher.deep_copy(), self._vocabulary)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarFailure(f"the JSON schema cannot be followed: {_first_line(self._matcher.get_error())}")


class GrammarCompiler:
    """Makes matchers for one model's vocabulary.

    Args:
        directory: the directory of the model's tokenizer.
        vocab_size: width of the logits; None takes the tokenizer's.
    """

    def __init__(self, directory: Path, vocab_size: int | None = None) -> None:
        self._directory = directory
        self._vocab_size = vocab_size
        self._compiled: OrderedDict[str, Matcher] = OrderedDict()

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary, built on first use: about a second for 150,000 tokens.

        Raises:
            UsageError: without llguidance, and for vocabularies that it cannot use.
        """
        try:
            return load_vocabulary(self._directory, self._vocab_size)
        except ModuleNotFoundError:
            raise UsageError(f"structured output needs llguidance: {install_command('json')}") from None

    def matcher(self, schema: str) -> Matcher:
        """A matcher at the beginning of a text.

        Raises:
            UsageError: if the schema is not valid, not supported, or too complex.
        """
        # Another thread may call `forget` at any moment: a worker prepares a step while it handles results of another.
        compiled = self._compiled.pop(schema, None) or self._compile(schema)
        self._compiled[schema] = compiled  # now the most recently used
        if len(self._compiled) > MAX_CACHED:
            self._compiled.popitem(last=False)
        return compiled.copy()

    def forget(self, schema: str) -> None:
        """Drop a compiled schema: copies share the state that a failed text has left."""
        self._compiled.pop(schema, None)

    def _compile(self, schema: str) -> Matcher:
        vocabulary = self.vocabulary
        from llguidance import LLMatcher, LLParserLimits

        try:
            grammar = LLMatcher.grammar_from_json_schema(
                schema,
                # At most one blank, after a comma or a colon: with free blanks, a weak model at a high temperature
                # would never end.
                overrides={
                    "whitespace_flexible": False,
                    "item_separator": ", ?",
                    "key_separator": ": ?",
                    "coerce_one_of": False,
                    "lenient": False,
                },
            )
        except ValueError as error:
            raise UsageError(f"JSON schema: {_first_line(str(error))}") from None
        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        matcher = LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise UsageError(f"JSON schema: {_first_line(matcher.get_error())}")
        return Matcher(matcher, vocabulary)


def _first_line(message: str) -> str:
    """The first line of a message of llguidance; the others hold a regular expression or the parser's state."""
    lines = [line.strip() for line in message.replace("<non-verbose/>", "").splitlines()]
    text = next((line for line in lines if line.startswith("error:")), lines[0] if lines else "")
    return text.removeprefix("error: ").partition(_ADVICE)[0][:_LONGEST_MESSAGE]
