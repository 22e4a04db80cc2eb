"""The two libraries that tokenize, behind one small interface, and the control tokens of a
vocabulary.

In the string that a chat template makes, its own `<|im_end|>` looks exactly like one pasted by a
user. So before it runs, the spellings in the conversation get a *mark*, a private-use character
that occurs nowhere else. Every spelling that still matches afterwards was written by the template.
Then the marks are taken out again.
"""

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from nanoserve.errors import ModelError, UsageError, one_line
from nanoserve.text.tokenizer_checks import check_tokenizer
from nanoserve.utils.files import unusable_file

Piece = str | int  # a piece of a prompt: ordinary text, or the id of a control token

_PRIVATE_USE = range(0xE000, 0xF900)
# The form of control tokens, for tokenizers that do not flag them as special (the role tokens of
# some families).
_CONTROL_SHAPE = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)
_MARKUP_SHAPE = re.compile(r"<.*>|\[.*\]", re.DOTALL)
_LONGEST_REASON = 200  # characters of the library's own words in a message
_BYTE_PIECES = tuple(f"<0x{byte:02X}>" for byte in range(256))


def _byte_level_alphabet() -> dict[str, int]:
    """The character of each byte in byte-level vocabularies (GPT-2's `bytes_to_unicode`). Printable
    bytes keep their character; the other bytes get the characters from U+0100 on, in order."""
    printable = set(range(ord("!"), ord("~") + 1))
    printable |= set(range(ord("¡"), ord("¬") + 1))
    printable |= set(range(ord("®"), ord("ÿ") + 1))
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    for place, byte in enumerate(others):
        alphabet[chr(256 + place)] = byte
    return alphabet


_BYTE_LEVEL = _byte_level_alphabet()


class ControlTokens:
    """The control tokens of a tokenizer: their spellings and ids."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self.ids = {spelling: token_id for spelling, token_id in ids.items() if spelling}
        # Longest first: if one spelling begins another, the longer one matches.
        spellings = sorted(self.ids, key=len, reverse=True)
        self._pattern: re.Pattern[str] | None = None
        if spellings:
            self._pattern = re.compile("|".join(map(re.escape, spellings)))
        beginnings, endings = set(), set()
        for spelling in spellings:
            for cut in range(1, len(spelling)):
                beginnings.add(spelling[:cut])
                endings.add(spelling[cut:])
        self._beginnings, self._endings = tuple(beginnings), tuple(endings)

    def split(self, text: str) -> list[Piece]:
        """Cut `text` at its control tokens: ["hello", 2, "there"]; empty texts are left out."""
        if not text:
            return []
        if self._pattern is None:
            return [text]
        pieces: list[Piece] = []
        position = 0
        for match in self._pattern.finditer(text):
            pieces += [text[position : match.start()], self.ids[match.group()]]
            position = match.end()
        pieces.append(text[position:])
        return [piece for piece in pieces if piece != ""]

    def mark(self, text: str, mark: str) -> str:
        """Put `mark` into every spelling in `text`, and at an edge that could be one half of a
        spelling."""
        if self._pattern is None or not text:
            return text
        # After every character: a spelling may contain another, or overlap with the next.
        marked = self._pattern.sub(
            lambda match: "".join(character + mark for character in match.group()), text
        )
        if text.startswith(self._endings):
            marked = mark + marked
        if text.endswith(self._beginnings):
            marked = marked + mark
        return marked

    def mark_all(self, value: Any, mark: str) -> Any:
        """Apply `mark` to every string in a JSON value, names of fields included."""
        if isinstance(value, str):
            return self.mark(value, mark)
        if isinstance(value, Mapping):
            return {
                self._mark_name(name, mark): self.mark_all(item, mark)
                for name, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.mark_all(item, mark) for item in value]
        return value

    def _mark_name(self, name: str, mark: str) -> str:
        # Only whole spellings: a mark at the edge of an ordinary name would hide the field from the
        # template.
        if self._pattern is None or not self._pattern.search(name):
            return name
        return self.mark(name, mark)


def choose_mark(texts: Iterable[str]) -> str:
    """A private-use character that occurs in none of `texts`."""
    used = set("".join(texts))
    for code in _PRIVATE_USE:
        if chr(code) not in used:
            return chr(code)
    raise UsageError(
        "the conversation uses every private-use character of Unicode; remove some of them"
    )


class Backend(Protocol):
    """The operations of a tokenizing library."""

    # spelling -> id of every control token; decoded text leaves them out
    control_ids: Mapping[str, int]
    markup_ids: Mapping[str, int]
    """Spelling -> id of every token that structures a prompt: control tokens, tokens that look like
    them (`[INST]`, `<tool_call>`), flagged special or not, and added tokens that the chat template
    spells. Other added tokens are words."""
    vocab_size: int  # one more than the largest token id
    growth: float  # how many times its length a text may have before it is divided into tokens

    def encode(self, pieces: Sequence[Piece], *, add_special_tokens: bool) -> list[int]:
        """Ids of the pieces in a row. Text pieces never become tokens of `markup_ids`.
        `add_special_tokens` adds the tokens that the model expects around a text, such as BOS."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the ids; bytes that are no UTF-8 become U+FFFD, ids outside the vocabulary
        nothing."""

    def token_id(self, spelling: str) -> int | None:
        """The id of one token, or None."""

    def is_byte(self, token_id: int) -> bool:
        """Whether the token is one raw byte of a byte-fallback vocabulary."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token in the middle of a text; empty for control, unknown and unused
        tokens."""


def _byte_of(piece: str) -> bytes:
    """The byte of a byte piece, `<0x0A>`."""
    return bytes([int(piece[3:5], 16)])


def _is_markup(spelling: str, template: str) -> bool:
    core = spelling.strip()
    if len(core) < 2:  # runs of blanks and single characters are always words
        return False
    return core in template or _MARKUP_SHAPE.fullmatch(core) is not None


def _source(path: Path, settings: Mapping[str, Any]) -> Path:
    """The file to name in errors: the file from which the tokenizer's files were made, or else the
    tokenizer's own."""
    return Path(settings.get("made_from", path))


def _as_model_error(error: BaseException, what: str) -> BaseException:
    """Convert a failure of the `tokenizers` library to a ModelError of one line. Other exceptions,
    such as KeyboardInterrupt, are returned unchanged. The library raises plain `Exception`, and for
    a panic of its Rust code a BaseException of a class that it hides."""
    if isinstance(error, Exception) or type(error).__name__ == "PanicException":
        return ModelError(f"{what}: {one_line(str(error), _LONGEST_REASON)}")
    return error


class TokenizersBackend:
    """`tokenizer.json` through the `tokenizers` library. The file alone says which tokens surround
    a text: `add_bos_token` and `add_eos_token` of tokenizer_config.json are ignored beside it, as
    in HF transformers 5.

    The library can read special tokens as text, but then those of the template are text too. So the
    template's tokens are replaced by private separator tokens, which cut the text exactly where the
    control tokens would. Their ids are inserted afterwards. Ordinary text is tokenized as if the
    library had seen all tokens. All markup is special to the library; this class chooses the tokens
    that decoded text leaves out.
    """

    def __init__(
        self, path: Path, settings: Mapping[str, Any], named_special: Sequence[str], template: str
    ) -> None:
        from tokenizers import Tokenizer

        try:
            self._tokenizer = Tokenizer.from_file(str(path))
            self.growth = check_tokenizer(self._tokenizer)
        except BaseException as error:
            failure = _as_model_error(error, f"{_source(path, settings)} is not a usable tokenizer")
            if isinstance(failure, ModelError):
                failure = unusable_file(path, str(failure))
            raise failure from error
        added = self._add_missing_tokens(settings, named_special)
        control_ids: dict[str, int] = {}
        markup_ids: dict[str, int] = {}
        for token_id, token in added.items():
            text = token.content
            is_control = (
                token.special or text in named_special or _CONTROL_SHAPE.fullmatch(text) is not None
            )
            if is_control:
                control_ids[text] = token_id
            if is_control or _is_markup(text, template):
                markup_ids[text] = token_id
        self.control_ids: Mapping[str, int] = control_ids
        self.markup_ids: Mapping[str, int] = markup_ids
        self._skipped = frozenset(self.control_ids.values())
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocabulary.values(), default=-1)
        self._byte_ids = frozenset(
            vocabulary[piece] for piece in _BYTE_PIECES if piece in vocabulary
        )
        decoder = self._tokenizer.decoder
        self._is_byte_level = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()
        self._tokenizer.add_special_tokens(list(self.markup_ids))
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._separator = self._add_separators(added)
        self._separator_ids = set(map(self._tokenizer.token_to_id, self._separator.values()))

    def _add_missing_tokens(
        self, settings: Mapping[str, Any], named_special: Sequence[str]
    ) -> dict[int, Any]:
        """Add the tokens that only tokenizer_config.json knows, as HF does; returns all added
        tokens by id."""
        from tokenizers import AddedToken

        known = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        declared = settings.get("added_tokens_decoder") or {}
        flags = ("lstrip", "rstrip", "single_word", "normalized", "special")
        for number in sorted(declared, key=int):
            entry = declared[number]
            if entry["content"] in known:
                continue
            known.add(entry["content"])
            chosen = {flag: entry[flag] for flag in flags if flag in entry}
            token = AddedToken(entry["content"], **chosen)
            if token.special:
                self._tokenizer.add_special_tokens([token])
            else:
                self._tokenizer.add_tokens([token])
        unknown = [name for name in named_special if name not in known]
        in_vocabulary = [name for name in unknown if self._tokenizer.token_to_id(name) is not None]
        self._tokenizer.add_special_tokens(in_vocabulary)
        added: dict[int, Any] = self._tokenizer.get_added_tokens_decoder()
        return added

    def _add_separators(self, added: Mapping[int, Any]) -> dict[int, str]:
        """Add a separator token for each way in which control tokens swallow blanks beside them,
        with unguessable names. Returns the text of the separator that stands for each added token,
        by its id."""
        from tokenizers import AddedToken

        nonce = secrets.token_hex(16)
        texts: dict[tuple[bool, bool], str] = {}
        separators: dict[int, str] = {}
        for token_id, token in added.items():
            side = (token.lstrip, token.rstrip)
            if side not in texts:
                texts[side] = f"\ue000{nonce}{len(texts)}\ue001"
                separator = AddedToken(
                    texts[side], lstrip=token.lstrip, rstrip=token.rstrip, normalized=False
                )
                self._tokenizer.add_tokens([separator])
            separators[token_id] = texts[side]
        return separators

    def encode(self, pieces: Sequence[Piece], *, add_special_tokens: bool) -> list[int]:
        control: list[int] = []
        texts: list[str] = []
        for piece in pieces:
            if isinstance(piece, int):
                control.append(piece)
                texts.append(self._separator[piece])
            else:
                texts.append(piece)
        try:
            # A batch of one: the library releases the GIL only for batches.
            (encoding,) = self._tokenizer.encode_batch_fast(
                ["".join(texts)], add_special_tokens=add_special_tokens
            )
        except BaseException as error:
            raise _as_model_error(error, "the model's tokenizer fails with this text") from error
        ids: list[int] = encoding.ids
        if not control:
            return ids
        following = iter(control)
        restored: list[int] = []
        for token in ids:
            if token in self._separator_ids:
                token = next(following)
            restored.append(token)
        return restored

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        skipped = self._skipped
        if not skip_special_tokens:
            skipped = frozenset()
        readable = [
            token for token in token_ids if 0 <= token < self.vocab_size and token not in skipped
        ]
        try:
            text: str = self._tokenizer.decode(readable, skip_special_tokens=False)
        except BaseException as error:
            raise _as_model_error(error, "the model's tokenizer fails with these tokens") from error
        return text

    def token_id(self, spelling: str) -> int | None:
        token_id: int | None = self._tokenizer.token_to_id(spelling)
        return token_id

    def is_byte(self, token_id: int) -> bool:
        return token_id in self._byte_ids

    def token_bytes(self, token_id: int) -> bytes:
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None or token_id in self._skipped:
            return b""
        if self._is_byte_level:  # the library looks at the whole piece, too
            if not _BYTE_LEVEL.keys() >= set(piece):
                return piece.encode()
            return bytes(_BYTE_LEVEL[character] for character in piece)
        if self.is_byte(token_id):
            return _byte_of(piece)
        # Not decoded alone: at the beginning of a text, some tokenizers drop a token's blank.
        once = self.decode([token_id])
        twice = self.decode([token_id, token_id])
        return twice[len(once) :].encode()


class SentencePieceBackend:
    """`tokenizer.model` through `sentencepiece`, with the tokens that other files add. A text
    begins with BOS, if the model has one, and has no EOS; `add_bos_token` and `add_eos_token` of
    tokenizer_config.json, if given, decide."""

    growth = 1.0  # its one normalizer only replaces characters

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, Any],
        named_tokens: Mapping[str, str],
        added: Mapping[str, int],
        template: str,
    ) -> None:
        from sentencepiece import SentencePieceProcessor

        try:
            self._processor = SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError) as error:
            raise unusable_file(
                path, f"{_source(path, settings)} is not a usable sentencepiece model"
            ) from error
        self._size: int = self._processor.piece_size()
        pieces: list[str] = [self._processor.id_to_piece(number) for number in range(self._size)]
        self._sort_tokens(pieces, settings.get("added_tokens_decoder") or {}, added, template)
        # The legacy behaviour adds sentencepiece's leading blank to every text between control
        # tokens; the newer one only to the beginning of the prompt.
        self._blank_everywhere = bool(settings.get("legacy", True))
        self._has_leading_blank = self._processor.encode("a", out_type=str)[0].startswith("▁")
        characters = set("".join(pieces))
        # A character that is in no piece never merges: text after it is tokenized as in the middle
        # of a text.
        self._stopper = next(chr(code) for code in _PRIVATE_USE if chr(code) not in characters)
        self._stopper_length = len(self._processor.encode(self._stopper))
        self._halves: dict[int, list[int]] = {}
        self._halves = self._halves_of_markup()
        self._before: list[int] = []
        self._after: list[int] = []
        bos = self._named_id(named_tokens, "bos_token")
        adds_bos = settings.get("add_bos_token")
        if bos is not None and (adds_bos or adds_bos is None):
            self._before.append(bos)
        eos = self._named_id(named_tokens, "eos_token")
        if eos is not None and settings.get("add_eos_token"):
            self._after.append(eos)

    def _sort_tokens(
        self,
        pieces: Sequence[str],
        declared: Mapping[str, Any],
        added: Mapping[str, int],
        template: str,
    ) -> None:
        """Tell control tokens, markup and words apart, among the model's own control pieces and the
        added tokens."""
        added = dict(added)
        plain = set()  # added tokens that are declared as words
        for number, entry in declared.items():
            added[entry["content"]] = int(number)
            if not entry.get("special"):
                plain.add(entry["content"])
        controls = {
            piece: number
            for number, piece in enumerate(pieces)
            if self._processor.is_control(number)
        }
        control_ids: dict[str, int] = {}
        markup_ids: dict[str, int] = {}
        # Tokens that sentencepiece does not decode: its controls, and tokens beyond its vocabulary.
        self._spelling: dict[int, str] = {}
        for text, token_id in (added | controls).items():
            is_control = text in controls or text not in plain
            if is_control:
                control_ids[text] = token_id
            if is_control or _is_markup(text, template):
                markup_ids[text] = token_id
            if token_id >= self._size or text in controls:
                self._spelling[token_id] = text
        self.control_ids: Mapping[str, int] = control_ids
        self.markup_ids: Mapping[str, int] = markup_ids
        self._skipped = frozenset(control_ids.values())
        largest = max(added.values(), default=-1)
        self.vocab_size = max(self._size, largest + 1)
        self._words = ControlTokens(
            {text: number for text, number in added.items() if text not in markup_ids}
        )

    def _halves_of_markup(self) -> dict[int, list[int]]:
        """Ids of each markup token's first character and of its rest. sentencepiece finds such a
        token in any text; in ordinary text, these ids replace it."""
        halves = {}
        for text, number in self.markup_ids.items():
            if number in self._processor.encode(text):
                halves[number] = self.encode_within(text[0]) + self.encode_within(text[1:])
        return halves

    def _named_id(self, named_tokens: Mapping[str, str], name: str) -> int | None:
        """The id of BOS or EOS: the token that the settings name, else the model's own."""
        if name in named_tokens:
            return self.token_id(named_tokens[name])
        own: int = {"bos_token": self._processor.bos_id(), "eos_token": self._processor.eos_id()}[
            name
        ]
        if own < 0:
            return None
        return own

    def encode(self, pieces: Sequence[Piece], *, add_special_tokens: bool) -> list[int]:
        parts: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, int):
                parts.append(piece)
            else:
                parts += self._words.split(piece)
        ids: list[int] = []
        at_beginning = True
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
            elif at_beginning or self._blank_everywhere:
                ids += self._encode_text(part)
            else:
                ids += self.encode_within(part)
            at_beginning = False
        if add_special_tokens:
            return self._before + ids + self._after
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text = ""
        run: list[int] = []
        for token in token_ids:
            if skip_special_tokens and token in self._skipped:
                continue
            if token in self._spelling:
                text += self._decode_run(run, at_beginning=not text) + self._spelling[token]
                run = []
            elif 0 <= token < self._size:
                run.append(token)
        return text + self._decode_run(run, at_beginning=not text)

    def _decode_run(self, run: list[int], *, at_beginning: bool) -> str:
        if not run:
            return ""
        text: str = self._processor.decode(run)
        # sentencepiece drops a blank at the beginning of what it decodes; within a text the blank
        # must stay.
        inside = not at_beginning and self._has_leading_blank
        if inside and self._processor.id_to_piece(run[0]).startswith("▁"):
            return " " + text
        return text

    def token_id(self, spelling: str) -> int | None:
        number: int = self._processor.piece_to_id(spelling)
        if self._processor.id_to_piece(number) == spelling:
            return number
        return next((number for number, text in self._spelling.items() if text == spelling), None)

    def is_byte(self, token_id: int) -> bool:
        return 0 <= token_id < self._size and bool(self._processor.is_byte(token_id))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token in the middle of a text; empty for control, unknown and unused
        tokens."""
        if token_id in self._skipped:
            return b""
        if token_id in self._spelling:
            return self._spelling[token_id].encode()
        processor = self._processor
        if (
            token_id >= self._size
            or processor.is_unknown(token_id)
            or processor.is_unused(token_id)
        ):
            return b""
        piece: str = processor.id_to_piece(token_id)
        if processor.is_byte(token_id):
            return _byte_of(piece)
        return piece.replace("▁", " ").encode()

    def encode_within(self, text: str) -> list[int]:
        """Ids of a text in the middle of another."""
        ids = self._encode_text(self._stopper + text)
        return ids[self._stopper_length :]

    def _encode_text(self, text: str) -> list[int]:
        ids: list[int] = []
        for token in self._processor.encode(text):
            if token in self._halves:
                ids += self._halves[token]
            else:
                ids.append(token)
        return ids
