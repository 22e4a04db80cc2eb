"""Story chats made by program: what a user says, a real or invented story as the answer, and wishes
to change it.

The words and sentences are those of storyteller.toml. Real stories get other names and nouns:
exchanging nouns for others of their kind makes the same few thousand stories speak of hundreds of
nouns in tens of thousands of pairs, so that a model has to look at which ones it was asked for.
Invented stories come from a small grammar that can tell one about any two nouns. They are plain and
alike on purpose: from them a model learns to use the words it was asked for, to keep track of a
story's characters, and to change a told story when it is asked to. It learns English from real
stories.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

LANGUAGE: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("storyteller.toml").read_text(encoding="utf-8")
)
STORY, WISHES, CHAT = (LANGUAGE[part] for part in ("story", "wishes", "chat"))
NOUN_GROUPS: dict[str, list[str]] = {
    group: nouns.split() for group, nouns in LANGUAGE["nouns"].items()
}
GIRLS, BOYS, PETS = (LANGUAGE["names"][kind].split() for kind in ("girls", "boys", "pets"))
HELD_OUT_PAIRS = tuple(tuple(pair.split()) for pair in LANGUAGE["held_out"]["pairs"].split(", "))
IRREGULAR_PLURALS: dict[str, str] = LANGUAGE["irregular_plurals"]
GROUP_OF_NOUN: dict[str, str] = {
    noun: group for group, nouns in NOUN_GROUPS.items() for noun in nouns
}
HERO_GROUPS = frozenset({"pet", "beast", "bird", "crawler", "water animal", "creature", "person"})
THING_GROUPS = frozenset({"toy", "small thing", "clothing", "food", "vehicle"})
AMBIGUOUS_NAMES = frozenset(
    {"Ruby", "Spot", "Ivy", "Grace", "Daisy", "Kitty", "Sunny", "Ginger", "Teddy"}
)
NAMES = frozenset((*GIRLS, *BOYS, *PETS)) - AMBIGUOUS_NAMES
WORD = re.compile(r"[A-Za-z]+")
SENTENCE = re.compile(r"[^.!?]+[.!?]+[\"”]?\s*")
CHOICE = re.compile(r"\[([^\[\]]*)\]")
MAX_CHAT_STORY_BYTES = 1250
"""About 300 tokens: a chat's story ends well before the 350 tokens it may take."""
INVENTED_SHARE = 0.55
"""Share of invented stories. They name both nouns again and again, so that a model learns to pick
them up."""
FOLLOW_UP_CHANCES = (0.45, 0.35, 0.2)
"""Probabilities of a first, second and third wish, each after the one before."""

Turn = tuple[str, str]  # role, text


@dataclass(frozen=True)
class Tale:
    """A story, the nouns a user asks for it with, and the character that follow-up questions are
    about."""

    text: str
    nouns: tuple[str, ...]
    hero: str  # "Lily", or "the dog"
    pronoun: str  # "he", "she" or "it"
    names: tuple[str, ...]

    @property
    def paragraphs(self) -> list[str]:
        return self.text.split("\n\n")


def plural(noun: str) -> str:
    if noun in IRREGULAR_PLURALS:
        return IRREGULAR_PLURALS[noun]
    if noun.endswith(("s", "x", "ch", "sh")):
        return noun + "es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + "s"


NOUN_OF_WORD = {plural(noun): noun for noun in GROUP_OF_NOUN} | {
    noun: noun for noun in (*GROUP_OF_NOUN, "girl", "boy")
}


def with_article(noun: str) -> str:
    return ("an " if noun[0] in "aeio" or noun.startswith("umbrella") else "a ") + noun


def is_held_out(nouns: Sequence[str]) -> bool:
    """Whether a request for these nouns would contain a pair kept for the test."""
    return any(first in nouns and second in nouns for first, second in HELD_OUT_PAIRS)


def can_be_hero(noun: str) -> bool:
    """Whether a noun can carry a story: people, animals and creatures."""
    return noun in ("girl", "boy") or GROUP_OF_NOUN.get(noun) in HERO_GROUPS


def namesakes(name: str) -> list[str]:
    """The names that can stand for this one: girls, boys or pets."""
    return GIRLS if name in GIRLS else BOYS if name in BOYS else PETS


def replace_words(text: str, mapping: Mapping[str, str]) -> str:
    """Exchange whole words, keeping a capital first letter and putting "a" or "an" right before the
    new word."""
    pattern = re.compile(
        r"\b(?:([Aa])n? )?(" + "|".join(map(re.escape, mapping)) + r")\b", re.IGNORECASE
    )

    def exchanged(match: re.Match[str]) -> str:
        article, old = match.groups()
        new = mapping.get(old) or mapping.get(old.lower())
        if new is None:  # a name that was only matched without its capital
            return match[0]
        if old[0].isupper():
            new = new[0].upper() + new[1:]
        return new if article is None else article + with_article(new.lower())[1 : -len(new)] + new

    return pattern.sub(exchanged, text) if mapping else text


def replace_nouns(text: str, mapping: Mapping[str, str]) -> str:
    """Exchange nouns, in the singular and the plural."""
    plurals = {old: {old: new, plural(old): plural(new)} for old, new in mapping.items()}
    return replace_words(
        text, {old: new for forms in plurals.values() for old, new in forms.items()}
    )


def find_names(text: str) -> list[str]:
    """The known first names in a story, most frequent first."""
    counts = Counter(word for word in re.findall(r"\b[A-Z][a-z]+\b", text) if word in NAMES)
    return sorted(counts, key=lambda name: (-counts[name], name))


def find_nouns(text: str) -> Counter[str]:
    """The nouns of the word list in a story, and "girl" and "boy", with their frequencies."""
    return Counter(
        NOUN_OF_WORD[word] for word in WORD.findall(text.lower()) if word in NOUN_OF_WORD
    )


def rename_people(text: str, rng: Random) -> str:
    """Give every known girl, boy and pet of a story another name."""
    mapping: dict[str, str] = {}
    for name in find_names(text):
        taken = mapping.values()
        mapping[name] = rng.choice(
            [new for new in namesakes(name) if new not in text and new not in taken]
        )
    return replace_words(text, mapping)


def frequent_first(
    nouns: Iterable[str], counts: Counter[str], chance: float, most: int, rng: Random
) -> list[str]:
    """The repeated nouns, and others with this chance, by frequency; nouns that come `most` times
    or more are equal."""
    kept = [noun for noun in nouns if counts[noun] >= 2 or rng.random() < chance]
    rng.shuffle(kept)
    return sorted(kept, key=lambda noun: -min(counts[noun], most))


def exchange_nouns(text: str, rng: Random) -> tuple[str, list[str]]:
    """Exchange one to three of the story's nouns for others of their kind: the new text and the new
    nouns."""
    counts = find_nouns(text)
    candidates = frequent_first(counts, counts, 0.3, 4, rng)
    mapping: dict[str, str] = {}
    for old in candidates[: rng.choice((1, 2, 2, 3))]:
        group = GROUP_OF_NOUN.get(old, "person")
        groups = {group}
        if old in ("girl", "boy") or rng.random() < 0.35:
            groups.update(*(mix for mix in (HERO_GROUPS, THING_GROUPS) if group in mix))
        pool = [noun for name in sorted(groups) for noun in NOUN_GROUPS[name]]
        mapping[old] = rng.choice(
            [noun for noun in pool if noun not in counts and noun not in mapping.values()]
        )
    return replace_nouns(text, mapping), [*mapping.values()]


def describe(text: str, nouns: Sequence[str]) -> Tale:
    """The tale of this text: its hero is the most frequent name if there is one, else the first
    noun."""
    names = find_names(text)
    words = Counter(WORD.findall(text.lower()))
    he, she = words["he"] + words["his"], words["she"] + words["her"]
    hero = (
        names[0]
        if names
        else next((f"the {noun}" for noun in nouns if can_be_hero(noun)), "the little one")
    )
    pronoun = (
        "she"
        if hero in GIRLS or (hero not in BOYS and she > he)
        else "he"
        if hero in BOYS or he
        else "it"
    )
    return Tale(text, tuple(nouns), hero, pronoun, tuple(names))


def real_tale(text: str, rng: Random) -> Tale:
    """A real story, most often with other names and nouns, and one to three nouns that it can be
    asked for with."""
    if rng.random() < 0.5:
        text = rename_people(text, rng)
    text, chosen = exchange_nouns(text, rng) if rng.random() < 0.65 else (text, [])
    counts = find_nouns(text)
    others = frequent_first((noun for noun in counts if noun not in chosen), counts, 0.25, 3, rng)
    wanted = rng.choice((1, 2, 2, 2, 2, 3))
    nouns = [noun for noun in (*chosen, *others) if noun in counts][:wanted]
    rng.shuffle(nouns)
    while is_held_out(nouns):
        nouns.pop()
    return describe(text, nouns)


def person_slots(name: str, pronoun: str) -> dict[str, str]:
    """The slots that speak of one person or animal: the name and its pronouns ("he", "she" or
    "it")."""
    them, their = {"he": ("him", "his"), "she": ("her", "her"), "it": ("it", "its")}[pronoun]
    words = {"they": pronoun, "them": them, "their": their}
    return (
        {"Name": name}
        | words
        | {word.capitalize(): value.capitalize() for word, value in words.items()}
    )


def expand(template: str, slots: Mapping[str, str], rng: Random) -> str:
    """Fill a template: choose in every bracket, look up every slot, and tidy articles, blanks and
    capitals."""
    text = CHOICE.sub(lambda match: rng.choice(match[1].split("|")), template).format_map(slots)
    text = re.sub(r" +", " ", text).replace(" .", ".").replace(" ,", ",").replace('?".', '?"')
    text = re.sub(r"\b([Aa]) (?=[aeio])", r"\1n ", text)
    return re.sub(r"(^|[.!?] |\.\" |\n\n)([a-z])", lambda match: match[1] + match[2].upper(), text)


def some_animal(rng: Random) -> str:
    return rng.choice(NOUN_GROUPS["beast"] + NOUN_GROUPS["bird"] + NOUN_GROUPS["pet"])


def invented_tale(rng: Random) -> Tale:
    """A story out of the grammar about two nouns that may never have met before."""
    hero = rng.choice([*filter(can_be_hero, GROUP_OF_NOUN), "girl", "boy", "girl", "boy"])
    things = [noun for noun, group in GROUP_OF_NOUN.items() if group != "sky" and noun != hero]
    thing = rng.choice([noun for noun in things if not is_held_out([hero, noun])])
    pronoun = {"girl": "she", "boy": "he"}.get(hero) or rng.choice(("he", "she"))
    has_pet_name = hero not in ("girl", "boy") and rng.random() < 0.5
    person, animal, mom = (
        rng.choice(GIRLS + BOYS),
        some_animal(rng),
        "her mom" if pronoun == "she" else "his mom",
    )
    friend = rng.choice((person, "the " + animal, "the old " + animal, mom, "the wise owl"))
    place = rng.choice(NOUN_GROUPS["place"])
    name = rng.choice(PETS if has_pet_name else GIRLS if pronoun == "she" else BOYS)
    nouns = tuple(rng.sample((hero, thing), 2))
    meets = can_be_hero(thing)
    friend = "the " + thing if meets else friend
    plots = STORY[
        "meeting_plots"
        if meets
        else "place_plots"
        if GROUP_OF_NOUN[thing] == "place"
        else "thing_plots"
    ]
    template = rng.choice(STORY["openings"]) + rng.choice((" ", "\n\n", "\n\n"))
    ends = STORY["closings"]
    closings = sorted(rng.sample(ends, rng.choice((1, 1, 2))), key=ends.index)
    slots = person_slots(name, pronoun) | {
        "hero": hero,
        "place": place,
        "thing": thing,
        "a_thing": with_article(thing),
        "friend": friend,
        "Friend": friend[0].upper() + friend[1:],
        "friend_is_thing": f"{name} had found a new friend.",
    }
    text = expand(template + rng.choice(plots) + " ".join(closings), slots, rng)
    return Tale(text, nouns, name, pronoun, (name,))


def rename_hero(tale: Tale, rng: Random) -> tuple[str, Tale] | None:
    """Give the hero another name."""
    if not tale.names:
        return None
    old = tale.names[0]
    new = rng.choice([name for name in namesakes(old) if name not in tale.text])
    kind = "girl" if old in GIRLS else "boy" if old in BOYS else "animal"
    wish = rng.choice(WISHES["rename"]).format(kind=kind, new=new, old=old)
    return wish, describe(replace_words(tale.text, {old: new}), tale.nouns)


def exchange_noun(tale: Tale, rng: Random) -> tuple[str, Tale] | None:
    """Put another animal or thing in the place of one asked for."""
    nouns = [noun for noun in tale.nouns if noun in GROUP_OF_NOUN]
    if not nouns:
        return None
    old = rng.choice(nouns)
    pool = [noun for noun in NOUN_GROUPS[GROUP_OF_NOUN[old]] if noun not in tale.text]
    if not pool:
        return None
    new = rng.choice(pool)
    wish = rng.choice(WISHES["exchange"]).format(
        a_new=with_article(new), a_old=with_article(old), old=old
    )
    return wish, describe(
        replace_nouns(tale.text, {old: new}), [new if noun == old else noun for noun in tale.nouns]
    )


def change_feeling(tale: Tale, rng: Random) -> tuple[str, Tale] | None:
    """ "make the dog sad": a character is introduced in that mood."""
    feeling = rng.choice([*LANGUAGE["feelings"], "sad", "sad", "happy"])
    heroes = [noun for noun in tale.nouns if can_be_hero(noun)]
    character = f"the {rng.choice(heroes)}" if heroes else tale.hero
    if tale.names and rng.random() < 0.35:
        character = tale.hero
    key = character.removeprefix("the ")
    sentences = SENTENCE.findall(tale.text)
    place = next(
        (index for index, sentence in enumerate(sentences) if re.search(rf"\b{key}\b", sentence)),
        None,
    )
    if place is None or sentences[place].count('"') % 2:
        return None
    template = "{Name} was [very|so|] " + feeling + ". " + LANGUAGE["feelings"][feeling]
    mood = expand(template, person_slots(character, tale.pronoun), rng)
    start, rest = "".join(sentences[: place + 1]), "".join(sentences[place + 1 :])
    joint = "\n\n" if start.endswith("\n\n") else " "
    wish = rng.choice(WISHES["feeling"]).format(
        who=character, Who=character[0].upper() + character[1:], feeling=feeling
    )
    opposite = {"sad": "happy", "happy": "sad"}.get(feeling)
    if rng.random() < 0.5 and opposite:  # the mood lasts
        rest = re.sub(rf"\b{opposite}\b", feeling, rest)
    return wish, replace(tale, text=f"{start.rstrip()} {mood}{joint}{rest}")


def change_ending(tale: Tale, rng: Random) -> tuple[str, Tale] | None:
    """Put a sad, happy or funny ending in the place of the last paragraph."""
    if len(tale.paragraphs) < 2:
        return None
    kind, endings = rng.choice(list(LANGUAGE["endings"].items()))
    wish = rng.choice(WISHES["ending"]).format(kind=kind)
    ending = expand(rng.choice(endings), person_slots(tale.hero, tale.pronoun), rng)
    return wish, replace(tale, text="\n\n".join([*tale.paragraphs[:-1], ending]))


def shorten(tale: Tale, rng: Random) -> tuple[str, Tale] | None:
    """Leave the first three sentences and the last two."""
    sentences = SENTENCE.findall(tale.text)
    short = "".join(sentences[:3]).strip() + " " + "".join(sentences[-2:]).strip()
    if len(sentences) < 9 or short.count('"') % 2:
        return None
    return rng.choice(WISHES["shorten"]), replace(tale, text=short)


def continue_tale(tale: Tale, rng: Random) -> tuple[str, Tale]:
    """Tell what happened after the story's end."""
    wish = rng.choice(WISHES["continue"]).format(hero=tale.hero)
    other = some_animal(rng)
    slots = person_slots(tale.hero, tale.pronoun) | {
        "place": rng.choice(NOUN_GROUPS["place"]),
        "other": with_article(rng.choice(("little ", "big ", "small ", "")) + other),
        "other_the": "the " + other,
    }
    return wish, replace(tale, text=expand(rng.choice(STORY["continuations"]), slots, rng))


EDITS: tuple[Callable[[Tale, Random], tuple[str, Tale] | None], ...] = (
    *(rename_hero, exchange_noun, change_feeling, change_feeling, change_ending, change_ending),
    *(shorten, continue_tale, continue_tale),
)
"""Each makes the user's wish and the new tale of the tale told, or None where the tale does not
lend itself."""


def name_nouns(nouns: Sequence[str], rng: Random) -> str:
    """ "a dog and a ball", "a dog, a ball", "dogs and balls", "a dog and the ball" """
    style = rng.random()
    if style < 0.82:
        named = [with_article(noun) for noun in nouns]
    elif style < 0.88:
        named = [noun if noun in IRREGULAR_PLURALS else plural(noun) for noun in nouns]
    else:
        named = ["the " + noun for noun in nouns] if style < 0.94 else list(nouns)
    if len(named) == 1:
        return named[0]
    return (
        ", ".join(named[:-1])
        + rng.choice((" and ", " and ", " and ", " and ", " with ", ", "))
        + named[-1]
    )


def ask_for(tale: Tale, rng: Random) -> str:
    """A user's words that this tale answers."""
    if not tale.nouns:
        return rng.choice(CHAT["open_asks"])
    ask = rng.choice(CHAT["asks"][:4] if rng.random() < 0.3 else CHAT["asks"])
    hero = f" and {tale.names[0]}" if tale.names and rng.random() < 0.08 else ""
    return ask.format(nouns=name_nouns(tale.nouns, rng) + hero)


def brief_chats(rng: Random) -> list[Turn]:
    """Two or three invented beginnings, each about other nouns: much to pick up, in few words."""
    chat: list[Turn] = []
    for _ in range(rng.choice((2, 3))):
        tale = invented_tale(rng)
        ask = rng.choice(CHAT["brief_asks"]).format(nouns=name_nouns(tale.nouns, rng))
        chat += [("user", ask), ("assistant", " ".join(tale.paragraphs[:2]))]
    return chat


def two_part_chat(story: str, rng: Random) -> list[Turn]:
    """A real story told in two answers: what happened next is its second half. Empty where the
    story is too short."""
    paragraphs = story.split("\n\n")
    middle = len(paragraphs) // 2
    start, end = ("\n\n".join(part) for part in (paragraphs[:middle], paragraphs[middle:]))
    nouns = list(find_nouns(start))[:2]
    if len(paragraphs) < 3 or not nouns or is_held_out(nouns):
        return []
    next_ask = rng.choice(CHAT["next_asks"])
    ask = rng.choice(CHAT["brief_asks"]).format(nouns=name_nouns(nouns, rng))
    return [("user", ask), ("assistant", start), ("user", next_ask), ("assistant", end)]


def small_talk(talks: Sequence[Mapping[str, list[str]]], rng: Random) -> list[Turn]:
    """A question about the storyteller, a greeting or a farewell, and the answer."""
    talk = rng.choice(talks)
    slots = {"a": rng.choice(NOUN_GROUPS["pet"]), "b": rng.choice(NOUN_GROUPS["toy"])}
    answer = expand(rng.choice(talk["answers"]), slots, rng)
    return [("user", rng.choice(talk["asks"])), ("assistant", answer)]


def story_chat(stories: Sequence[str], rng: Random) -> list[Turn]:
    """One conversation: sometimes small talk first, a story, and often a follow-up wish or
    thanks."""
    chat: list[Turn] = []
    if rng.random() < 0.06:
        chat.append(("system", rng.choice(CHAT["system_prompts"])))
    if rng.random() < 0.06:
        chat += small_talk(LANGUAGE["small_talk"], rng)
        if rng.random() < 0.2:
            return chat
    if rng.random() < 0.15:
        return chat + brief_chats(rng)
    story = rng.choice(stories)
    if rng.random() < 0.04 and (parts := two_part_chat(story, rng)):
        return chat + parts
    tale = invented_tale(rng) if rng.random() < INVENTED_SHARE else real_tale(story, rng)
    chat += [("user", ask_for(tale, rng)), ("assistant", tale.text)]
    for chance in FOLLOW_UP_CHANCES:
        if rng.random() > chance:
            break
        if edited := rng.choice(EDITS)(tale, rng):
            wish, tale = edited
            chat += [("user", wish), ("assistant", tale.text)]
    return chat + small_talk(LANGUAGE["farewells"], rng) if rng.random() < 0.05 else chat
