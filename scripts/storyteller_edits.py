"""Follow-up turns: what a user asks to change in a story just told, and the story told anew."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from storyteller_grammar import (
    FEELINGS,
    FUNNY_ENDINGS,
    HAPPY_ENDINGS,
    SAD_ENDINGS,
    can_be_hero,
    expand,
    invent_continuation,
    person_slots,
)
from storyteller_tales import Tale, describe, noun_mapping, replace_words
from storyteller_words import BOYS, GIRLS, GROUP_OF_NOUN, NOUN_GROUPS, PETS, with_article

SENTENCE = re.compile(r"[^.!?]+[.!?]+[\"”]?\s*")

Edit = Callable[[Tale, random.Random], "tuple[str, Tale] | None"]
"""Takes the tale told; returns the user's wish and the new tale, or None where the tale does not lend itself."""


def paragraphs_of(text: str) -> list[str]:
    """A story's paragraphs, as `normalize` in storyteller_data leaves them."""
    return text.split("\n\n")


def changed(tale: Tale, text: str) -> Tale:
    """The same cast in another text."""
    return Tale(text, tale.nouns, tale.hero, tale.pronoun, tale.names)


def rename_hero(tale: Tale, random_source: random.Random) -> tuple[str, Tale] | None:
    """Another name for the one the story is about."""
    if not tale.names:
        return None
    old = tale.names[0]
    pool = GIRLS if old in GIRLS else BOYS if old in BOYS else PETS
    new = random_source.choice([name for name in pool if name not in tale.text])
    kind = "girl" if old in GIRLS else "boy" if old in BOYS else "animal"
    wish = random_source.choice(
        (
            f"Call the {kind} {new}.",
            f"change the name to {new}",
            f"Can the {kind} be called {new}?",
            f"Change {old} to {new}.",
            f"Use the name {new} instead of {old}.",
            f"the name should be {new}",
        )
    )
    return wish, describe(replace_words(tale.text, {old: new}), tale.nouns)


def exchange_noun(tale: Tale, random_source: random.Random) -> tuple[str, Tale] | None:
    """Another animal or thing in the place of one asked for."""
    nouns = [noun for noun in tale.nouns if noun in GROUP_OF_NOUN]
    if not nouns:
        return None
    old = random_source.choice(nouns)
    pool = [noun for noun in NOUN_GROUPS[GROUP_OF_NOUN[old]] if noun not in tale.text]
    if not pool:
        return None
    new = random_source.choice(pool)
    wish = random_source.choice(
        (
            f"Make it {with_article(new)} instead of {with_article(old)}.",
            f"Use {with_article(new)} instead of the {old}.",
            f"change the {old} to {with_article(new)}",
            f"Make the {old} {with_article(new)}.",
            f"Now with {with_article(new)} instead of the {old}.",
        )
    )
    text = replace_words(tale.text, noun_mapping(old, new))
    return wish, describe(text, [new if noun == old else noun for noun in tale.nouns])


def change_feeling(tale: Tale, random_source: random.Random) -> tuple[str, Tale] | None:
    """ "make the dog sad": the one named is introduced in that mood."""
    feeling = random_source.choice([*FEELINGS, "sad", "sad", "happy"])
    heroes = [noun for noun in tale.nouns if can_be_hero(noun)]
    who = f"the {random_source.choice(heroes)}" if heroes else tale.hero
    if tale.names and random_source.random() < 0.35:
        who = tale.hero
    key = who.removeprefix("the ")
    sentences = SENTENCE.findall(tale.text)
    place = next((index for index, sentence in enumerate(sentences) if re.search(rf"\b{key}\b", sentence)), None)
    if place is None or sentences[place].count('"') % 2:
        return None
    slots = person_slots(who, tale.pronoun)
    mood = "{Name} was [very|so|] " + feeling + ". " + random_source.choice(FEELINGS[feeling])
    rest = sentences[place + 1 :]
    opposite = {"sad": "happy", "happy": "sad"}.get(feeling)
    softened = [re.sub(rf"\b{opposite}\b", feeling, part) for part in rest] if opposite else rest
    parts = [*sentences[:place], sentences[place].rstrip() + " ", expand(mood, slots, random_source)]
    joint = "\n\n" if sentences[place].endswith("\n\n") else " "
    wish = random_source.choice(
        (
            "make {who} {feeling}",
            "Make {who} {feeling}.",
            "Can you make {who} {feeling}?",
            "{Who} should be {feeling}.",
            "Tell it again, but {who} is {feeling}.",
            "make {who} very {feeling}",
        )
    ).format(who=who, Who=who[0].upper() + who[1:], feeling=feeling)
    keeps_mood = random_source.random() < 0.5
    return wish, changed(tale, "".join(parts) + joint + "".join(softened if keeps_mood else rest))


def change_ending(tale: Tale, random_source: random.Random) -> tuple[str, Tale] | None:
    """A sad, happy or funny ending in the place of the last paragraph."""
    paragraphs = paragraphs_of(tale.text)
    if len(paragraphs) < 2:
        return None
    kind, endings = random_source.choice((("sad", SAD_ENDINGS), ("happy", HAPPY_ENDINGS), ("funny", FUNNY_ENDINGS)))
    wish = random_source.choice(
        (
            "give it a {kind} ending",
            "Give it a {kind} ending.",
            "Can it have a {kind} ending?",
            "Make the ending {kind}.",
            "Tell it with a {kind} ending, please.",
            "I want a {kind} end",
        )
    ).format(kind=kind)
    ending = expand(random_source.choice(endings), person_slots(tale.hero, tale.pronoun), random_source)
    return wish, changed(tale, "\n\n".join([*paragraphs[:-1], ending]))


def shorten(tale: Tale, random_source: random.Random) -> tuple[str, Tale] | None:
    """The first two sentences and the last paragraph's end."""
    sentences = SENTENCE.findall(tale.text)
    if len(sentences) < 9:
        return None
    short = "".join(sentences[:3]).strip() + " " + "".join(sentences[-2:]).strip()
    if short.count('"') % 2:
        return None
    wish = random_source.choice(
        (
            "make it shorter",
            "Make it shorter.",
            "Shorter, please.",
            "Can you make it short?",
            "Tell it in a few words.",
            "too long, make it shorter",
        )
    )
    return wish, changed(tale, short)


def continue_tale(tale: Tale, random_source: random.Random) -> tuple[str, Tale] | None:
    """What happened after the story's end."""
    wish = random_source.choice(
        (
            "What happened next?",
            "what happened next?",
            "And then?",
            "what happens next",
            "Go on.",
            "Tell me more.",
            "Continue the story.",
            "What did {hero} do then?",
            "continue",
            "more",
        )
    ).format(hero=tale.hero)
    return wish, changed(tale, invent_continuation(tale.hero, tale.pronoun, random_source))


EDITS: tuple[Edit, ...] = (
    rename_hero,
    exchange_noun,
    change_feeling,
    change_feeling,
    change_ending,
    change_ending,
    shorten,
    continue_tale,
    continue_tale,
)
