"""Compile JSON schemas to grammars that tell which tokens may come next, with llguidance.

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
from nanoserve.text.backends import SentencePieceBackend
from nanoserve.text.grammar import CANNOT_FOLLOW
from nanoserve.text.tokenizer import load_backend
from nanoserve.utils.installation import install_command

# compiled grammars kept for later requests with the same schema; a large one takes about 10 MB
MAX_CACHED = 16
# limit for one grammar. Each state takes 1 to 2 kB for as long as the grammar is kept
MAX_LEXER_STATES = 20_000

_LONGEST_MESSAGE = 300
_ADVICE = " Enable 'coerce_one_of'"  # an option of llguidance that would weaken the schema


@dataclass(frozen=True, slots=True)
class Allowed:
    """The tokens that may come next."""

    tokens: np.ndarray
    """One bit per token id, lowest bit first: uint8 [ceil(vocab_size / 8)]. Control tokens are
    never set."""
    may_end: bool  # whether the text may end here


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model, for its grammars."""

    tokenizer: Any  # the LLTokenizer of llguidance
    # one bit per token id of the logits, set if the token is text: uint8 [ceil(vocab_size / 8)]
    ordinary: np.ndarray
    # the token whose bit llguidance sets when a text may end; the model's end tokens may be others
    end_token: int

    def allowed(self, mask: bytes) -> Allowed:
        """Read a mask of llguidance: its bits for ordinary tokens, and the bit of the end token."""
        bits = np.frombuffer(mask, np.uint8)
        tokens = np.zeros_like(self.ordinary)
        count = min(len(bits), len(tokens))
        np.bitwise_and(bits[:count], self.ordinary[:count], out=tokens[:count])
        byte, bit = divmod(self.end_token, 8)
        return Allowed(tokens, bool(bits[byte] >> bit & 1))


def load_vocabulary(directory: Path, vocab_size: int | None) -> Vocabulary:
    """Read the tokenizer of a model directory; ``vocab_size`` is the width of the logits, None
    takes the tokenizer's. Raises ModuleNotFoundError without llguidance; ModelError if there is no
    usable tokenizer; UsageError if llguidance cannot use it."""
    from llguidance import LLTokenizer

    backend = load_backend(directory)
    controls = list(backend.control_ids.values())
    if not controls:
        raise UsageError(
            "structured output needs a tokenizer with control tokens; this model's has none"
        )
    end_token = min(controls)  # tokens that only tokenizer_config.json knows have the largest ids
    if isinstance(backend, SentencePieceBackend):
        source: Any = _PieceTable(backend, end_token)
    else:
        source = (directory / "tokenizer.json").read_text(encoding="utf-8").strip()
    try:
        tokenizer = LLTokenizer(source, eos_token=end_token)
    except ValueError as error:
        raise UsageError(
            f"structured output is not possible with this model's tokenizer: {error}"
        ) from None
    # neither control tokens nor rows of padding
    ordinary = np.zeros(vocab_size or backend.vocab_size, np.bool_)
    ordinary[: backend.vocab_size] = True
    ordinary[[token for token in controls if token < len(ordinary)]] = False
    return Vocabulary(tokenizer, np.packbits(ordinary, bitorder="little"), end_token)


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


class GrammarFailure(NanoserveError):
    """A text cannot be continued by its grammar; other texts are not affected."""


class Matcher:
    """The state of one text in a grammar."""

    def __init__(self, matcher: Any, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    def allowed(self) -> Allowed:
        """The tokens that may come next; raises GrammarFailure if computing them exceeds the
        limits."""
        allowed = self._vocabulary.allowed(self._matcher.compute_bitmask())
        self._check()
        return allowed

    def consume(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text; raises GrammarFailure if the grammar does not allow them."""
        self._matcher.consume_tokens(list(tokens))
        self._check()

    def allowed_ahead(self, tokens: Sequence[int]) -> int:
        """Count the leading tokens that the grammar would accept; the text stays as it is."""
        return int(self._matcher.validate_tokens(list(tokens)))

    @property
    def complete(self) -> bool:
        """Whether the text is complete and nothing can follow."""
        return bool(self._matcher.is_stopped())

    def copy(self) -> "Matcher":
        """A matcher for another text in the same state."""
        return Matcher(self._matcher.deep_copy(), self._vocabulary)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarFailure(f"{CANNOT_FOLLOW}: {_first_line(self._matcher.get_error())}")


class GrammarCompiler:
    """Makes matchers for one model's vocabulary; the arguments are as in `load_vocabulary`."""

    def __init__(self, directory: Path, vocab_size: int | None = None) -> None:
        self._directory = directory
        self._vocab_size = vocab_size
        self._compiled: OrderedDict[str, Matcher] = OrderedDict()

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Built on first use: about a second for 150,000 tokens. Raises UsageError without
        llguidance, and for vocabularies that it cannot use."""
        try:
            return load_vocabulary(self._directory, self._vocab_size)
        except ModuleNotFoundError:
            raise UsageError(
                f"structured output needs llguidance: {install_command('json')}"
            ) from None

    def matcher(self, schema: str) -> Matcher:
        """A matcher at the beginning of a text. Raises UsageError if the schema is not valid, not
        supported, or too complex."""
        # Another thread may call `forget` at any moment: a worker prepares a step while it handles
        # results of another.
        compiled = self._compiled.pop(schema, None)
        if compiled is None:
            compiled = self._compile(schema)
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
                # At most one blank, after a comma or a colon: with free blanks, a weak model at a
                # high temperature would never end.
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
    """The first line of a message of llguidance; the others hold a regular expression or the
    parser's state."""
    lines = [line.strip() for line in message.replace("<non-verbose/>", "").splitlines()]
    if not lines:
        return ""
    text = next((line for line in lines if line.startswith("error:")), lines[0])
    return text.removeprefix("error: ").partition(_ADVICE)[0][:_LONGEST_MESSAGE]
