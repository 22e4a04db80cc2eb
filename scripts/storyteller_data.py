"""The storyteller's training text: documents read from the data directory, its tokenizer, and
packed batches."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import storyteller_tales as tales
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCABULARY_SIZE = 4096
END_OF_TEXT, END_OF_TURN = "<|endoftext|>", "<|end|>"
SPECIAL_TOKENS = [END_OF_TEXT, END_OF_TURN, "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
BOOK_PIECE_CHARACTERS = 2000
PICKED_UP_WEIGHT = 12
"""Weight of a noun where a story first takes it from its request: few tokens, and all that the user
asked for."""

Token = tuple[int, int]
"""A token's id and its weight in the loss."""
Document = list[Token]
Mix = dict[str, float]
"""Weights of documents by kind: children's books, persona chats, plain stories, story chats,
echoes."""
BROAD_MIX: Mix = {"book": 0.35, "talk": 0.07, "story": 0.28, "chat": 0.30, "echo": 0.01}
STORY_MIX: Mix = {"book": 0.15, "talk": 0.02, "story": 0.33, "chat": 0.50, "echo": 0.01}
STORIES_IN_A_ROW = (1, 1, 1, 1, 2, 2, 3, 4)
"""The number of stories in a plain document is drawn from these. They are unmarked, as in the
validation file."""


def normalize(text: str) -> str:
    """One blank line between paragraphs, as in the validation file, and straight quotes."""
    return re.sub(r"\n\s*", "\n\n", text.strip().translate(str.maketrans("“”’‘", "\"\"''")))


@dataclass(frozen=True)
class Corpus:
    """The documents to train on, by kind."""

    stories: Sequence[str]
    books: Sequence[str]
    talks: Sequence[Sequence[tales.Turn]]

    @cached_property
    def short_stories(self) -> list[str]:
        """The stories that are short enough to be a chat's answer."""
        return [
            story for story in self.stories if len(story.encode()) <= tales.MAX_CHAT_STORY_BYTES
        ]


def read_corpus(data: Path) -> Corpus:
    """Read the training stories, children's books and persona chats; never the validation
    stories."""
    raw = (data / "tinystories_train_subset.txt").read_text(encoding="utf-8").split(END_OF_TEXT)
    dialogues = msgspec.json.Decoder().decode_lines((data / "dialogues.jsonl").read_bytes())
    return Corpus(
        stories=[normalize(story) for story in raw if story.strip()],
        books=[*split_book((data / "children_classics.txt").read_text(encoding="utf-8"))],
        talks=[
            [(turn["role"], normalize(turn["content"])) for turn in row["messages"]]
            for row in dialogues
            if row["source"].startswith("synthetic-persona-chat")
        ],
    )


def split_book(text: str) -> Iterator[str]:
    """Whole paragraphs, about BOOK_PIECE_CHARACTERS at a time, without headings."""
    piece: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        cleaned = normalize(re.sub(r"\s*\n\s*", " ", paragraph))
        if cleaned and not cleaned.startswith(("#", "---", "|", "[", "!")):
            piece.append(cleaned)
            if sum(map(len, piece)) > BOOK_PIECE_CHARACTERS:
                yield "\n\n".join(piece)
                piece = []


def split_validation_stories(text: str) -> list[str]:
    """Pieces of the validation file, whose stories are separated by blank lines as their paragraphs
    are.

    Only a paragraph that begins with "Once upon a time" starts a new piece, so some pieces hold
    several stories. Every byte of the file but the separators before such paragraphs is in one
    piece.
    """
    return [piece.strip() for piece in re.split(r"\n\n(?=Once upon a time)", text) if piece.strip()]


def train_tokenizer(corpus: Corpus, seed: int) -> Tokenizer:
    """A byte-level BPE of VOCABULARY_SIZE tokens; stories and story chats weigh most."""
    rng = Random(seed)
    chat_texts = [
        text for _ in range(2000) for _, text in tales.story_chat(corpus.short_stories, rng)
    ]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*corpus.stories, *chat_texts, *corpus.books[::8]], trainer)
    start = (END_OF_TEXT, tokenizer.token_to_id(END_OF_TEXT))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", pair=f"{END_OF_TEXT} $A $B", special_tokens=[start]
    )
    return tokenizer


def tokenizer_config(max_positions: int) -> dict[str, Any]:
    """tokenizer_config.json as Hugging Face reads it."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TURN,
        "pad_token": END_OF_TEXT,
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def encode_text(tokenizer: Tokenizer, text: str) -> Document:
    """A plain document: its start token, then its text."""
    return [(token, 1) for token in tokenizer.encode(text).ids]


def encode_chat(tokenizer: Tokenizer, chat: Sequence[tales.Turn]) -> Document:
    """A conversation as CHAT_TEMPLATE writes it."""
    document: Document = [(tokenizer.token_to_id(END_OF_TEXT), 1)]
    asked: dict[str, int] = {}
    for role, text in chat:
        encoded = tokenizer.encode(text, add_special_tokens=False)
        picked_up = picked_up_places(text, asked) if role == "assistant" else []
        document.append((tokenizer.token_to_id(f"<|{role}|>"), 1))
        for token, (begin, end) in zip(encoded.ids, encoded.offsets, strict=True):
            heavy = any(begin < last and first < end for first, last in picked_up)
            document.append((token, PICKED_UP_WEIGHT if heavy else 1))
        document.append((tokenizer.token_to_id(END_OF_TURN), 1))
        if role == "user":
            asked |= tales.find_nouns(text)
    return document


def picked_up_places(text: str, asked: Iterable[str]) -> list[tuple[int, int]]:
    """Where the text first names each noun that was asked for, as (first, behind the last)
    character.

    Later on the noun can be taken from the text itself.
    """
    found = (
        re.search(rf"\b(?:{noun}|{tales.plural(noun)})\b", text, re.IGNORECASE) for noun in asked
    )
    return [match.span() for match in found if match is not None]


def draw_document(corpus: Corpus, tokenizer: Tokenizer, mix: Mix, rng: Random) -> Document:
    """One document of the mix."""
    kind = rng.choices([*mix], [*mix.values()])[0]
    if kind == "talk":
        return encode_chat(tokenizer, rng.choice(corpus.talks))
    if kind == "chat":
        return encode_chat(tokenizer, tales.story_chat(corpus.short_stories, rng))
    if kind == "book":
        return encode_text(tokenizer, rng.choice(corpus.books))
    if kind == "echo":
        return encode_text(tokenizer, draw_echo(corpus, rng))
    stories = rng.sample(corpus.stories, rng.choice(STORIES_IN_A_ROW))
    return encode_text(tokenizer, "\n\n".join(vary_story(story, rng) for story in stories))


def draw_echo(corpus: Corpus, rng: Random) -> str:
    """Random nouns and names, or a story with its nouns exchanged, and then the same again.

    Only looking back helps, as a story must at its request and a changed story at the one before.
    """
    if rng.random() < 0.5:
        return "\n\n".join([tales.exchange_nouns(rng.choice(corpus.short_stories), rng)[0]] * 2)
    words = rng.choices([*tales.GROUP_OF_NOUN, *tales.GIRLS, *tales.BOYS], k=rng.randint(4, 40))
    return "\n\n".join([" ".join(words)] * 3)


def vary_story(story: str, rng: Random) -> str:
    """A plain story, most often with other names, often with other nouns too."""
    choice = rng.random()
    if choice < 0.25:
        return story
    story = tales.rename_people(story, rng)
    return tales.exchange_nouns(story, rng)[0] if choice > 0.5 else story


class Packer:
    """Fills rows of one length with whole documents, so that every row starts where a document
    does.

    The longest waiting document that fits comes next. The start of one more document fills the end
    of a row.
    """

    def __init__(self, draw: Callable[[], Document], waiting: int = 48) -> None:
        self.draw = draw
        self.waiting = [draw() for _ in range(waiting)]

    def row(self, length: int) -> Document:
        """The tokens of one row."""
        row = self.take(self.waiting[0])[:length]
        while room := length - len(row):
            fitting = [document for document in self.waiting if len(document) <= room]
            row += self.take(max(fitting, key=len, default=self.waiting[0]))[:room]
        return row

    def take(self, document: Document) -> Document:
        """Remove a waiting document and draw another in its place."""
        self.waiting.remove(document)
        self.waiting.append(self.draw())
        return document
