"""Stories as training material: real ones with exchanged names and nouns, invented ones, and whom each is about.

Exchanging nouns for others of their kind makes the same few thousand stories speak of hundreds of nouns in tens of
thousands of pairs, so that a model cannot but look at which ones it was asked for.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from storyteller_grammar import can_be_hero, invent_cast, invent_story
from storyteller_words import BOYS, GIRLS, GROUP_OF_NOUN, NOUN_GROUPS, PETS, is_held_out, plural, with_article

MAX_CHAT_STORY_BYTES = 1250  # about 300 tokens: a chat's story ends well before the 350 tokens it may take
GROUPS_THAT_MIX: tuple[frozenset[str], ...] = (
    frozenset({"pet", "beast", "bird", "crawler", "water animal", "creature", "person"}),
    frozenset({"toy", "small thing", "clothing", "food", "vehicle"}),
)
SINGULAR_OF_PLURAL = {plural(noun): noun for noun in GROUP_OF_NOUN}
WORD = re.compile(r"[A-Za-z]+")
UNSAFE_NAMES = frozenset({"Ruby", "Spot", "Ivy", "Grace", "Daisy", "Kitty", "Sunny", "Ginger", "Teddy"})


@dataclass(frozen=True)
class Tale:
    """A story, the nouns a user asks for it with, and whom follow-up questions are about."""

    text: str
    nouns: tuple[str, ...]
    hero: str  # "Lily", or "the dog"
    pronoun: str  # "he", "she" or "it"
    names: tuple[str, ...]


def replace_words(text: str, mapping: dict[str, str]) -> str:
    """Exchange whole words, keeping a capital first letter and putting "a" or "an" right before the new word."""
    pattern = re.compile(r"\b(?:([Aa])n? )?(" + "|".join(map(re.escape, mapping)) + r")\b", re.IGNORECASE)

    def exchanged(match: re.Match[str]) -> str:
        old = match[2]
        new = mapping.get(old) or mapping.get(old.lower())
        if new is None:  # a name that was only matched without its capital
            return match[0]
        if old[0].isupper():
            new = new[0].upper() + new[1:]
        if match[1] is None:
            return new
        return ("a" if match[1] == "a" else "A") + with_article(new.lower())[1:].replace(new.lower(), new)

    return pattern.sub(exchanged, text)


def noun_mapping(old: str, new: str) -> dict[str, str]:
    """Singular and plural of the old noun to those of the new one."""
    return {old: new, plural(old): plural(new)}


def find_names(text: str) -> list[str]:
    """The known first names in a story, most frequent first."""
    words = re.findall(r"\b[A-Z][a-z]+\b", text)
    names = {word for word in words if word in ALL_NAMES and word not in UNSAFE_NAMES}
    return sorted(names, key=lambda name: (-words.count(name), name))


ALL_NAMES = frozenset(GIRLS) | frozenset(BOYS) | frozenset(PETS)


def find_nouns(text: str) -> dict[str, int]:
    """The nouns of the word list in a story, and "girl" and "boy", with how often they come."""
    counts: dict[str, int] = {}
    for word in WORD.findall(text.lower()):
        noun = word if word in GROUP_OF_NOUN or word in ("girl", "boy") else SINGULAR_OF_PLURAL.get(word)
        if noun is not None:
            counts[noun] = counts.get(noun, 0) + 1
    return counts


def rename_people(text: str, random_source: random.Random) -> str:
    """Give every known girl and boy of a story another name."""
    names = find_names(text)
    mapping: dict[str, str] = {}
    for name in names:
        pool = GIRLS if name in GIRLS else BOYS if name in BOYS else PETS
        mapping[name] = random_source.choice([new for new in pool if new not in text and new not in mapping.values()])
    return replace_words(text, mapping) if mapping else text


def exchange_nouns(text: str, random_source: random.Random) -> tuple[str, list[str]]:
    """Exchange one to three of the story's nouns for others of their kind: the new text and the new nouns."""
    counts = find_nouns(text)
    candidates = [noun for noun in counts if counts[noun] >= 2 or random_source.random() < 0.3]
    random_source.shuffle(candidates)
    candidates.sort(key=lambda noun: -min(counts[noun], 4))
    mapping: dict[str, str] = {}
    chosen: list[str] = []
    for old in candidates[: random_source.choice((1, 2, 2, 3))]:
        group = GROUP_OF_NOUN.get(old, "person")
        groups = {group}
        if old in ("girl", "boy") or random_source.random() < 0.35:
            groups |= next((set(mix) for mix in GROUPS_THAT_MIX if group in mix), set())
        pool = [noun for name in sorted(groups) for noun in NOUN_GROUPS[name]]
        new = random_source.choice([noun for noun in pool if noun not in counts and noun not in chosen])
        mapping |= noun_mapping(old, new)
        chosen.append(new)
    return (replace_words(text, mapping), chosen) if mapping else (text, [])


def describe(text: str, nouns: Sequence[str]) -> Tale:
    """Who the story is about: the most frequent name if there is one, else the first noun."""
    names = find_names(text)
    lowered = WORD.findall(text.lower())
    he, she = lowered.count("he") + lowered.count("his"), lowered.count("she") + lowered.count("her")
    hero = names[0] if names else next((f"the {noun}" for noun in nouns if can_be_hero(noun)), "the little one")
    pronoun = "she" if hero in GIRLS or (hero not in BOYS and she > he) else "he" if hero in BOYS or he else "it"
    return Tale(text, tuple(nouns), hero, pronoun, tuple(names))


def real_tale(text: str, random_source: random.Random) -> Tale:
    """A real story, most often with other names and nouns, and one to three nouns that it can be asked for with."""
    if random_source.random() < 0.5:
        text = rename_people(text, random_source)
    chosen: list[str] = []
    if random_source.random() < 0.65:
        text, chosen = exchange_nouns(text, random_source)
    counts = find_nouns(text)
    others = [noun for noun in counts if noun not in chosen and (counts[noun] >= 2 or random_source.random() < 0.25)]
    random_source.shuffle(others)
    others.sort(key=lambda noun: -min(counts[noun], 3))
    wanted = random_source.choice((1, 2, 2, 2, 2, 3))
    nouns = [noun for noun in (*chosen, *others) if noun in counts][:wanted]
    random_source.shuffle(nouns)
    while is_held_out(nouns):
        nouns.pop()
    return describe(text, nouns)


def invented_tale(random_source: random.Random) -> Tale:
    """A story out of the grammar about two nouns that may never have met before."""
    heroes = [noun for group in NOUN_GROUPS for noun in NOUN_GROUPS[group] if can_be_hero(noun)]
    things = [noun for group in NOUN_GROUPS for noun in NOUN_GROUPS[group] if group != "sky"]
    hero = random_source.choice([*heroes, "girl", "boy", "girl", "boy"])
    thing = random_source.choice([noun for noun in things if noun != hero and not is_held_out([hero, noun])])
    cast = invent_cast(hero, thing, random_source)
    nouns = random_source.sample((hero, thing), 2)
    return Tale(invent_story(cast, random_source), tuple(nouns), cast.name, cast.pronoun, (cast.name,))
