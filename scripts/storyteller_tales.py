"""Story chats made by program: what a user says, a real or invented story as the answer, and wishes to change it.

The words and sentences are those of storyteller.toml. Real stories get other names and nouns: exchanging nouns for
others of their kind makes the same few thousand stories speak of hundreds of nouns in tens of thousands of pairs, so
that a model cannot but look at which ones it was asked for. Invented stories come from a small grammar that can tell
one about any two nouns. They are plain and alike on purpose: what a model learns from them is to use the words it was
asked for, to keep track of who did what, and to change a told story when it is asked to; its English comes from real
stories.
"""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

LANGUAGE: dict[str, Any] = tomllib.loads(Path(__file__).with_name("storyteller.toml").read_text(encoding="utf-8"))
NOUN_GROUPS: dict[str, tuple[str, ...]] = {group: tuple(nouns.split()) for group, nouns in LANGUAGE["nouns"].items()}
GIRLS, BOYS, PETS = (tuple(LANGUAGE["names"][kind].split()) for kind in ("girls", "boys", "pets"))
HELD_OUT_PAIRS = tuple(tuple(pair.split()) for pair in LANGUAGE["held_out"]["pairs"].split(", "))
IRREGULAR_PLURALS: dict[str, str] = LANGUAGE["irregular_plurals"]
FEELINGS: dict[str, str] = LANGUAGE["feelings"]
GROUP_OF_NOUN: dict[str, str] = {noun: group for group, nouns in NOUN_GROUPS.items() for noun in nouns}
ANIMAL_GROUPS: frozenset[str] = frozenset({"pet", "beast", "bird", "water animal", "crawler"})


def plural(noun: str) -> str:
    """The plural of a noun of storyteller.toml."""
    if noun in IRREGULAR_PLURALS:
        return IRREGULAR_PLURALS[noun]
    if noun.endswith(("s", "x", "ch", "sh")):
        return noun + "es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + "s"


def with_article(noun: str) -> str:
    """The noun after "a" or "an"."""
    return ("an " if noun[0] in "aeio" or noun.startswith("umbrella") else "a ") + noun


def is_held_out(nouns: list[str]) -> bool:
    """Whether a request for these nouns would contain a pair kept for the test."""
    return any(first in nouns and second in nouns for first, second in HELD_OUT_PAIRS)


# ------------------------------------------------------------------------------------------- real stories

MAX_CHAT_STORY_BYTES = 1250  # about 300 tokens: a chat's story ends well before the 350 tokens it may take
GROUPS_THAT_MIX: tuple[frozenset[str], ...] = (
    frozenset({"pet", "beast", "bird", "crawler", "water animal", "creature", "person"}),
    frozenset({"toy", "small thing", "clothing", "food", "vehicle"}),
)
ALL_NAMES = frozenset(GIRLS + BOYS + PETS)
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


# --------------------------------------------------------------------------------------- invented stories

CHOICE = re.compile(r"\[([^\[\]]*)\]")


@dataclass(frozen=True)
class Cast:
    """Who and what an invented story is about: the hero's kind and name, the second noun, a friend and a place."""

    hero: str
    name: str
    pronoun: str  # "he" or "she"
    thing: str
    friend: str
    place: str

    def slots(self) -> dict[str, str]:
        """The values of the templates' holes."""
        return {
            "hero": self.hero,
            "place": self.place,
            "thing": self.thing,
            "a_thing": with_article(self.thing),
            "friend": self.friend,
            "Friend": self.friend[0].upper() + self.friend[1:],
            "friend_is_thing": f"{self.name} had found a new friend.",
            **person_slots(self.name, self.pronoun),
        }


def person_slots(name: str, pronoun: str) -> dict[str, str]:
    """The holes that speak of one person or animal: the name and its pronouns ("he", "she" or "it")."""
    them, their = {"he": ("him", "his"), "she": ("her", "her"), "it": ("it", "its")}[pronoun]
    words = {"they": pronoun, "them": them, "their": their}
    return {"Name": name} | words | {word.capitalize(): value.capitalize() for word, value in words.items()}


def expand(template: str, slots: dict[str, str], random_source: random.Random) -> str:
    """Fill a template: choose in every bracket, look up every hole, tidy articles, blanks and capitals."""
    chosen = CHOICE.sub(lambda match: random_source.choice(match[1].split("|")), template)
    text = chosen.format_map(slots)
    text = re.sub(r" +", " ", text).replace(" .", ".").replace(" ,", ",").replace('?".', '?"')
    text = re.sub(r"\b([Aa]) (?=[aeio])", r"\1n ", text)
    return re.sub(r"(^|[.!?] |\.\" |\n\n)([a-z])", lambda match: match[1] + match[2].upper(), text)


def invent_cast(hero: str, thing: str, random_source: random.Random) -> Cast:
    """Choose everything that a request for these two nouns leaves open."""
    pronoun = {"girl": "she", "boy": "he"}.get(hero) or random_source.choice(("he", "she"))
    pool = GIRLS if pronoun == "she" else BOYS
    if hero not in ("girl", "boy") and random_source.random() < 0.5:
        pool = PETS
    friend_name = random_source.choice(GIRLS + BOYS)
    animal = random_source.choice(NOUN_GROUPS["beast"] + NOUN_GROUPS["bird"] + NOUN_GROUPS["pet"])
    friend = random_source.choice((friend_name, "the " + animal, "the old " + animal, "his mom", "the wise owl"))
    if friend == "his mom":
        friend = "her mom" if pronoun == "she" else "his mom"
    place = random_source.choice(NOUN_GROUPS["place"])
    return Cast(hero, random_source.choice(pool), pronoun, thing, friend, place)


def can_be_hero(noun: str) -> bool:
    """Whether a noun can carry a story: people, animals and creatures."""
    return noun in ("girl", "boy") or GROUP_OF_NOUN.get(noun) in ANIMAL_GROUPS | {"creature", "person"}


def invent_story(cast: Cast, random_source: random.Random) -> str:
    """A story about the cast."""
    story = LANGUAGE["story"]
    if can_be_hero(cast.thing):
        plots = story["meeting_plots"]
        cast = replace(cast, friend="the " + cast.thing)
    elif GROUP_OF_NOUN.get(cast.thing) == "place":
        plots = story["place_plots"]
    else:
        plots = story["thing_plots"]
    template = random_source.choice(story["openings"]) + random_source.choice((" ", "\n\n", "\n\n"))
    ends = story["closings"]
    closings = sorted(random_source.sample(ends, random_source.choice((1, 1, 2))), key=ends.index)
    template += random_source.choice(plots) + " ".join(closings)
    return expand(template, cast.slots(), random_source)


def invent_continuation(name: str, pronoun: str, random_source: random.Random) -> str:
    """What happened next to the one the story was about."""
    other = random_source.choice(NOUN_GROUPS["beast"] + NOUN_GROUPS["bird"] + NOUN_GROUPS["pet"])
    slots = person_slots(name, pronoun) | {
        "place": random_source.choice(NOUN_GROUPS["place"]),
        "other": with_article(random_source.choice(("little ", "big ", "small ", "")) + other),
        "other_the": "the " + other,
    }
    return expand(random_source.choice(LANGUAGE["story"]["continuations"]), slots, random_source)


# ------------------------------------------------------------------------------------------------ wishes

WISHES: dict[str, list[str]] = LANGUAGE["wishes"]
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
    wish = random_source.choice(WISHES["rename"]).format(kind=kind, new=new, old=old)
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
    wish = random_source.choice(WISHES["exchange"]).format(a_new=with_article(new), a_old=with_article(old), old=old)
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
    mood = "{Name} was [very|so|] " + feeling + ". " + FEELINGS[feeling]
    rest = sentences[place + 1 :]
    opposite = {"sad": "happy", "happy": "sad"}.get(feeling)
    softened = [re.sub(rf"\b{opposite}\b", feeling, part) for part in rest] if opposite else rest
    parts = [*sentences[:place], sentences[place].rstrip() + " ", expand(mood, slots, random_source)]
    joint = "\n\n" if sentences[place].endswith("\n\n") else " "
    wish = random_source.choice(WISHES["feeling"]).format(who=who, Who=who[0].upper() + who[1:], feeling=feeling)
    keeps_mood = random_source.random() < 0.5
    return wish, changed(tale, "".join(parts) + joint + "".join(softened if keeps_mood else rest))


def change_ending(tale: Tale, random_source: random.Random) -> tuple[str, Tale] | None:
    """A sad, happy or funny ending in the place of the last paragraph."""
    paragraphs = paragraphs_of(tale.text)
    if len(paragraphs) < 2:
        return None
    kind, endings = random_source.choice(list(LANGUAGE["endings"].items()))
    wish = random_source.choice(WISHES["ending"]).format(kind=kind)
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
    wish = random_source.choice(WISHES["shorten"])
    return wish, changed(tale, short)


def continue_tale(tale: Tale, random_source: random.Random) -> tuple[str, Tale] | None:
    """What happened after the story's end."""
    wish = random_source.choice(WISHES["continue"]).format(hero=tale.hero)
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


# ------------------------------------------------------------------------------------------------- chats

Turn = tuple[str, str]  # role, text

INVENTED_SHARE = 0.55
"""Share of invented stories. They name both nouns again and again, so that a model learns to pick them up."""
FOLLOW_UP_CHANCES = (0.45, 0.35, 0.2)
"""How likely a first, second and third wish is, each after the one before."""
_CHAT: dict[str, list[str]] = LANGUAGE["chat"]


def name_nouns(nouns: Sequence[str], random_source: random.Random) -> str:
    """ "a dog and a ball", "a dog, a ball", "dogs and balls", "a dog and the ball" """
    style = random_source.random()
    if style < 0.82:
        named = [with_article(noun) for noun in nouns]
    elif style < 0.88:
        named = [noun if noun in IRREGULAR_PLURALS else plural(noun) for noun in nouns]
    elif style < 0.94:
        named = ["the " + noun for noun in nouns]
    else:
        named = list(nouns)
    if len(named) == 1:
        return named[0]
    last_join = random_source.choice((" and ", " and ", " and ", " and ", " with ", ", "))
    return ", ".join(named[:-1]) + last_join + named[-1]


def ask_for(tale: Tale, random_source: random.Random) -> str:
    """A user's words that this tale answers."""
    if not tale.nouns:
        return random_source.choice(_CHAT["open_asks"])
    ask = (
        random_source.choice(_CHAT["asks"][:4]) if random_source.random() < 0.3 else random_source.choice(_CHAT["asks"])
    )
    if tale.names and random_source.random() < 0.08:
        return ask.format(nouns=f"{name_nouns(tale.nouns, random_source)} and {tale.names[0]}")
    return ask.format(nouns=name_nouns(tale.nouns, random_source))


def brief_chats(random_source: random.Random) -> list[Turn]:
    """Two or three invented beginnings, each about other nouns: much to pick up, in few words."""
    chat: list[Turn] = []
    for _ in range(random_source.choice((2, 3))):
        tale = invented_tale(random_source)
        ask = random_source.choice(_CHAT["brief_asks"]).format(nouns=name_nouns(tale.nouns, random_source))
        beginning = paragraphs_of(tale.text)[:2]
        chat += [("user", ask), ("assistant", " ".join(beginning))]
    return chat


def two_part_chat(story: str, random_source: random.Random) -> list[Turn] | None:
    """A real story told in two answers: what happened next is its second half."""
    paragraphs = paragraphs_of(story)
    if len(paragraphs) < 3:
        return None
    middle = len(paragraphs) // 2
    start = "\n\n".join(paragraphs[:middle])
    nouns = list(find_nouns(start))[:2]
    if not nouns or is_held_out(nouns):
        return None
    next_ask = random_source.choice(_CHAT["next_asks"])
    return [
        ("user", random_source.choice(_CHAT["brief_asks"]).format(nouns=name_nouns(nouns, random_source))),
        ("assistant", start),
        ("user", next_ask),
        ("assistant", "\n\n".join(paragraphs[middle:])),
    ]


def small_talk(random_source: random.Random) -> list[Turn]:
    """A question about the storyteller or a greeting, and the answer."""
    talk = random_source.choice(LANGUAGE["small_talk"])
    animal = random_source.choice(NOUN_GROUPS["pet"])
    thing = random_source.choice(NOUN_GROUPS["toy"])
    answer = expand(random_source.choice(talk["answers"]), {"a": animal, "b": thing}, random_source)
    return [("user", random_source.choice(talk["asks"])), ("assistant", answer)]


def story_chat(stories: Sequence[str], random_source: random.Random) -> list[Turn]:
    """One conversation: sometimes small talk first, a story, and often a follow-up wish or thanks."""
    chat: list[Turn] = []
    if random_source.random() < 0.06:
        chat.append(("system", random_source.choice(_CHAT["system_prompts"])))
    if random_source.random() < 0.06:
        chat += small_talk(random_source)
        if random_source.random() < 0.2:
            return chat
    if random_source.random() < 0.15:
        return chat + brief_chats(random_source)
    story = random_source.choice(stories)
    if random_source.random() < 0.04 and (parts := two_part_chat(story, random_source)):
        return chat + parts
    tale = invented_tale(random_source) if random_source.random() < INVENTED_SHARE else real_tale(story, random_source)
    chat += [("user", ask_for(tale, random_source)), ("assistant", tale.text)]
    for chance in FOLLOW_UP_CHANCES:
        if random_source.random() > chance:
            break
        edited = random_source.choice(EDITS)(tale, random_source)
        if edited is not None:
            wish, tale = edited
            chat += [("user", wish), ("assistant", tale.text)]
    if random_source.random() < 0.05:
        polite = random_source.choice(LANGUAGE["farewells"])
        answer = expand(random_source.choice(polite["answers"]), {}, random_source)
        chat += [("user", random_source.choice(polite["asks"])), ("assistant", answer)]
    return chat
