"""The storyteller's training text: documents read from the data directory, its tokenizer, and packed batches."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from storyteller_tales import (
    BOYS,
    GIRLS,
    GROUP_OF_NOUN,
    MAX_CHAT_STORY_BYTES,
    Turn,
    exchange_nouns,
    find_nouns,
    plural,
    rename_people,
    story_chat,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCABULARY_SIZE = 4096
END_OF_TEXT, END_OF_TURN = "<|endoftext|>", "<|end|>"
SPECIAL_TOKENS = (END_OF_TEXT, END_OF_TURN, "<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
BOOK_PIECE_CHARACTERS = 2000
STORY_START = "Once upon a time"


def normalize(text: str) -> str:
    """One blank line between paragraphs, as in the validation file, and straight quotes."""
    text = text.replace("“", '"').replace("”", '"').replace("’", "'").replace("‘", "'")
    return re.sub(r"\n\s*", "\n\n", text.strip())


@dataclass(frozen=True)
class Corpus:
    """The documents to train on, by kind."""

    stories: tuple[str, ...]
    books: tuple[str, ...]
    talks: tuple[tuple[Turn, ...], ...]

    @cached_property
    def short_stories(self) -> list[str]:
        """The stories that are short enough to be a chat's answer."""
        return [story for story in self.stories if len(story.encode()) <= MAX_CHAT_STORY_BYTES]


def read_corpus(data: Path) -> Corpus:
    """Read the training stories, children's books and small talk; never the validation stories."""
    raw = (data / "tinystories_train_subset.txt").read_text(encoding="utf-8").split(END_OF_TEXT)
    stories = tuple(normalize(story) for story in raw if story.strip())
    books = tuple(split_book((data / "children_classics.txt").read_text(encoding="utf-8")))
    talks = tuple(read_talks(data / "dialogues.jsonl"))
    return Corpus(stories, books, talks)


def split_book(text: str) -> Iterator[str]:
    """Whole paragraphs, about BOOK_PIECE_CHARACTERS at a time, without headings."""
    piece: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        cleaned = normalize(re.sub(r"\s*\n\s*", " ", paragraph))
        if not cleaned or cleaned.startswith(("#", "---", "|", "[", "!")):
            continue
        piece.append(cleaned)
        if sum(map(len, piece)) > BOOK_PIECE_CHARACTERS:
            yield "\n\n".join(piece)
            piece = []


def read_talks(path: Path) -> Iterator[tuple[Turn, ...]]:
    """The persona chats of the dialogue file (simple modern English)."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            if row["source"].startswith("synthetic-persona-chat"):
                yield tuple((turn["role"], normalize(turn["content"])) for turn in row["messages"])


def split_validation_stories(text: str) -> list[str]:
    """Pieces of the validation file, whose stories are separated by blank lines as their paragraphs are.

    Only a paragraph that begins with "Once upon a time" is taken for a new story's first, so some pieces hold several
    stories. Every byte of the file but the separators before such paragraphs is in one piece.
    """
    return [piece.strip() for piece in re.split(rf"\n\n(?={STORY_START})", text) if piece.strip()]


# ------------------------------------------------------------------------------------------- tokenizer


def train_tokenizer(corpus: Corpus, seed: int) -> Tokenizer:
    """A byte-level BPE of VOCABULARY_SIZE tokens; stories and story chats weigh most."""
    random_source = random.Random(seed)
    chats = [story_chat(corpus.short_stories, random_source) for _ in range(2000)]
    chat_texts = [text for chat in chats for _, text in chat]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*corpus.stories, *chat_texts, *corpus.books[::8]], trainer)
    start = tokenizer.token_to_id(END_OF_TEXT)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", pair=f"{END_OF_TEXT} $A $B", special_tokens=[(END_OF_TEXT, start)]
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


Token = tuple[int, int]
"""A token's id, and how much learning it counts."""
Document = list[Token]
PICKED_UP_WEIGHT = 12
"""Weight of a noun where a story first takes it from its request: few tokens, and all that the user asked for."""


def encode_text(tokenizer: Tokenizer, text: str) -> Document:
    """A plain document: its start token, then its text."""
    return [(token, 1) for token in tokenizer.encode(text).ids]


def encode_chat(tokenizer: Tokenizer, chat: Sequence[Turn]) -> Document:
    """A conversation as CHAT_TEMPLATE writes it."""
    document: Document = [(token_id(tokenizer, END_OF_TEXT), 1)]
    asked: dict[str, int] = {}
    for role, text in chat:
        encoded = tokenizer.encode(text, add_special_tokens=False)
        picked_up = picked_up_places(text, asked) if role == "assistant" else []
        document.append((token_id(tokenizer, f"<|{role}|>"), 1))
        for token, (begin, end) in zip(encoded.ids, encoded.offsets, strict=True):
            heavy = any(begin < last and first < end for first, last in picked_up)
            document.append((token, PICKED_UP_WEIGHT if heavy else 1))
        document.append((token_id(tokenizer, END_OF_TURN), 1))
        if role == "user":
            asked |= find_nouns(text)
    return document


def picked_up_places(text: str, asked: Iterable[str]) -> list[tuple[int, int]]:
    """Where the text first names each noun that was asked for, as (first, behind the last) character.

    Later on the noun can be taken from the text itself.
    """
    found = (re.search(rf"\b(?:{noun}|{plural(noun)})\b", text, re.IGNORECASE) for noun in asked)
    return [match.span() for match in found if match is not None]


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a special token. Raises ValueError where the tokenizer is not the storyteller's."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the tokenizer has no {token}")
    return int(found)


# --------------------------------------------------------------------------------------------- batches


@dataclass(frozen=True)
class Mix:
    """Weights of documents by kind: children's books, persona chats, plain stories, story chats, echoes."""

    book: float
    talk: float
    story: float
    chat: float
    echo: float = 0.01


BROAD_MIX = Mix(book=0.35, talk=0.07, story=0.28, chat=0.30)
STORY_MIX = Mix(book=0.15, talk=0.02, story=0.33, chat=0.50)
STORIES_IN_A_ROW, OFTEN = (1, 2, 3, 4), (4, 2, 1, 1)
"""How many stories a plain document holds, unmarked as in the validation file, and how often that many."""


def draw_document(corpus: Corpus, tokenizer: Tokenizer, mix: Mix, random_source: random.Random) -> Document:
    """One document of the mix."""
    kinds = ("book", "talk", "story", "chat", "echo")
    kind = random_source.choices(kinds, (mix.book, mix.talk, mix.story, mix.chat, mix.echo))[0]
    if kind == "book":
        return encode_text(tokenizer, random_source.choice(corpus.books))
    if kind == "talk":
        return encode_chat(tokenizer, random_source.choice(corpus.talks))
    if kind == "chat":
        return encode_chat(tokenizer, story_chat(corpus.short_stories, random_source))
    if kind == "echo":
        return draw_echo(corpus, tokenizer, random_source)
    count = random_source.choices(STORIES_IN_A_ROW, OFTEN)[0]
    stories = [vary_story(story, random_source) for story in random_source.sample(corpus.stories, count)]
    return encode_text(tokenizer, "\n\n".join(stories))


def draw_echo(corpus: Corpus, tokenizer: Tokenizer, random_source: random.Random) -> Document:
    """Random nouns and names, or a story with its nouns exchanged, and then the same again.

    Nothing helps but to look back, as a story must at its request and a changed story at the one before.
    """
    if random_source.random() < 0.5:
        once = exchange_nouns(random_source.choice(corpus.short_stories), random_source)[0]
        return encode_text(tokenizer, "\n\n".join([once] * 2))
    choices = [*GROUP_OF_NOUN, *GIRLS, *BOYS]
    once = " ".join(random_source.choices(choices, k=random_source.randint(4, 40)))
    return encode_text(tokenizer, "\n\n".join([once] * 3))


def vary_story(story: str, random_source: random.Random) -> str:
    """A plain story, most often with other names, often with other nouns too."""
    choice = random_source.random()
    if choice < 0.25:
        return story
    story = rename_people(story, random_source)
    return exchange_nouns(story, random_source)[0] if choice > 0.5 else story


class Packer:
    """Fills rows of one length with whole documents, so that every row starts where a document does.

    Of the documents waiting, the longest that fits comes next; what is left at a row's end is filled with the start
    of one more document.
    """

    def __init__(self, draw: Callable[[], Document], waiting: int = 48) -> None:
        self.draw = draw
        self.waiting = [draw() for _ in range(waiting)]

    def row(self, length: int) -> Document:
        """The tokens of one row."""
        row = self.take(self.waiting[0] if self.waiting else self.draw())[:length]
        while len(row) < length:
            room = length - len(row)
            fitting = [document for document in self.waiting if len(document) <= room]
            row += self.take(max(fitting, key=len) if fitting else self.waiting[0])[:room]
        return row

    def take(self, document: Document) -> Document:
        """Remove a waiting document and draw another in its place."""
        self.waiting.remove(document)
        self.waiting.append(self.draw())
        return document
