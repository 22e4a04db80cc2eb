"""Invented stories: a small grammar that can tell a story about any one or two nouns.

A template is English with two kinds of holes: `{slot}` is looked up, `[one|other]` is a free choice. Nested choices are
not needed. The stories are plain and alike on purpose: what a model learns from them is to use the words it was asked
for, to keep track of who did what, and to change a told story when it is asked to; its English comes from real stories.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, replace

from storyteller_words import ANIMAL_GROUPS, BOYS, GIRLS, GROUP_OF_NOUN, NOUN_GROUPS, PETS, with_article

CHOICE = re.compile(r"\[([^\[\]]*)\]")

FEELINGS: dict[str, tuple[str, ...]] = {
    "sad": ("{They} [cried and cried|had big tears in {their} eyes|looked down at the ground]. {They} [missed {their} "
            "best friend|felt all alone|had lost something {they} loved|had no one to play with].",),
    "happy": ("{They} [smiled all day|sang a little song|laughed and danced around]. {They} had [a good dream|many "
              "good friends|a new game to play].",),
    "angry": ("{They} [stamped {their} feet|frowned and would not talk|shouted, \"Go away!\"]. Someone had [taken "
              "{their} lunch|laughed at {them}|broken {their} favorite toy].",),
    "scared": ("{They} [hid behind a tree|shook from head to toe|wanted to run away]. {They} had heard [a loud "
               "noise|a big boom|a strange sound in the dark].",),
    "sleepy": ("{They} [yawned a big yawn|could not keep {their} eyes open|wanted to take a nap]. {They} had [played "
               "all night|been awake too long|not slept well].",),
    "hungry": ("{Their} tummy made a funny sound. {They} had [not eaten all day|no breakfast|lost {their} lunch].",),
    "brave": ("{They} [stood tall|took a deep breath|was not afraid of anything]. {They} always helped [{their} "
              "friends|the small ones|anyone who was scared].",),
    "silly": ("{They} [made funny faces|walked backwards|wore a sock on {their} head]. Everyone laughed [at the funny "
              "sight|and laughed|very hard].",),
    "lonely": ("{They} [had no friends|sat alone every day|looked out at the empty road]. {They} wished for [a "
               "friend|someone to play with|someone to talk to].",),
    "kind": ("{They} [shared everything|helped everyone|gave big hugs]. {They} always said [nice words|\"please\" and "
             "\"thank you\"|\"Can I help you?\"].",),
}  # fmt: skip

SAD_ENDINGS: tuple[str, ...] = (
    "But then [it started to rain|the sky got dark|a strong wind came]. {Name} [lost {their} way|got lost|fell down] "
    "and could not find {their} friends. {They} called and called, but no one came. {Name} sat down and cried. It "
    "was a very sad day.",
    "But in the end, {their} friend had to go far away. {Name} waved goodbye and cried. {They} waited every day, but "
    "{their} friend did not come back. {Name} was very sad.",
    "But the next day, everything was gone. {Name} looked [here and there|everywhere|all day], but {they} could not "
    "find it. {Name} went home alone. {They} was very sad and went to bed with tears in {their} eyes.",
)  # fmt: skip
HAPPY_ENDINGS: tuple[str, ...] = (
    "In the end, everything was [good|fine|all right] again. {Name} [hugged {their} friends|laughed and jumped up and "
    "down|gave everyone a big hug]. They all [danced and sang|ate cake together|played until the sun went down]. "
    "{Name} was [very|so] happy, and they lived happily ever after.",
    "Then {Name} had [a good idea|a wonderful surprise]. All {their} friends came to help. They worked together, and "
    "soon everything was [better|fixed|good] again. {Name} smiled a big smile. \"Thank you, my friends!\" {they} "
    "said. From that day on, {Name} was always happy.",
    "Just then, {their} mom came. \"Do not worry,\" she said. \"I am here.\" She gave {Name} a big hug, and they went "
    "home together. {Name} felt warm and happy. {They} went to sleep with a smile.",
)  # fmt: skip
FUNNY_ENDINGS: tuple[str, ...] = (
    "Then {Name} sneezed, \"Achoo!\" The sneeze was so big that [all the leaves fell off the tree|everyone's hats "
    "flew away|{they} rolled down the hill]. Everyone looked at {Name}. Then they all laughed and laughed until their "
    "tummies hurt.",
    "Then {Name} slipped and sat down in a big [cake|puddle|bowl of soup]. Splash! {They} looked so funny that "
    "everyone laughed. {Name} laughed too. \"I am a [mud monster|silly soup]!\" {they} said.",
)  # fmt: skip
CONTINUATIONS: tuple[str, ...] = (
    "The next [day|morning], {Name} woke up early. {They} wanted to [see {their} friends|play] again. {Name} went to "
    "the {place} and saw {other} there. \"Hello!\" said {other_the}. \"Do you want to play with me?\" {Name} was "
    "happy. They [played tag|played hide and seek|ran and jumped] all day. When it was time to go home, {Name} said, "
    "\"See you tomorrow!\"",
    "After that, {Name} went home and told {their} [mom|dad|grandma] everything. {Their} family listened and "
    "[smiled|laughed]. \"You had a big day,\" they said. Then {Name} [ate a warm dinner|had some soup|ate a cookie] "
    "and went to bed. {They} dreamed about [the {place}|a new adventure|{their} friends].",
    "A few days later, {Name} found {other} near the {place}. It looked [lost|sad|cold]. \"Do not be afraid,\" said "
    "{Name}. \"I will help you.\" {They} took {other_the} home and gave it [some food|a warm bed|a big hug]. From "
    "that day on, they were best friends.",
)  # fmt: skip

OPENINGS = (
    "Once upon a time, there was a [little|big|small|young|kind|] {hero} named {Name}. {Name} lived [in|near] a "
    "[big|small|nice|] {place}.",
    "One [sunny|cold|rainy|warm|nice|] day, a [little|big|small|funny|] {hero} named {Name} was [walking|playing] "
    "[near|by] the {place}.",
    "Once there was a {hero}. [{Their} name was {Name}|Everyone called {them} {Name}]. {They} loved [to sing|to "
    "run|to play|{their} home] more than anything.",
    "{Name} was a [little|big|happy|funny|very kind] {hero} who lived near the {place}.",
)  # fmt: skip
CLOSINGS = (
    "{Name} was [very|so] happy. {They} [hugged {friend}|said, \"Thank you!\"|smiled all the way home].",
    "From that day on, {Name} and {friend} were best friends.",
    "They [laughed and played|played together] until the sun went down. Then they went home [for dinner|to sleep|].",
    "And {Name} and {friend} lived happily ever after.",
    "{Name} learned that it is good to [share|help others|be kind|be brave|ask for help]. The end.",
)  # fmt: skip

THING_PLOTS = (
    "One [day|morning], {Name} found {a_thing} [under a tree|by the road|near the {place}|in the grass|behind a big "
    "rock]. \"What a [nice|pretty|big|funny] {thing}!\" {they} said. {Name} [looked at the {thing}|took the {thing} "
    "home|wanted to keep the {thing}].\n\nThen {friend} came. {Friend} was [sad|crying|looking for something]. \"I "
    "lost my {thing},\" said {friend}. {Name} [thought for a moment|wanted to keep it, but it was not right to do "
    "so]. \"Here is your {thing},\" {they} said. {Friend} [was so happy|jumped with joy|smiled a big smile].\n\n",
    "{Name} had {a_thing}. It was [red|blue|yellow|green|old|shiny|{their} favorite thing]. {Name} [took the {thing} "
    "everywhere|loved the {thing} very much|played with it every day].\n\nBut one day, the {thing} was gone! {Name} "
    "looked [under the bed|in the {place}|behind the door] and [in the garden|under the table|up in a tree]. No "
    "{thing}! {Name} [began to cry|was very sad]. Then {friend} [asked, \"What is wrong?\"|came to help]. \"I can not "
    "find my {thing},\" said {Name}. They looked together. At last, they saw the {thing} [in a bush|behind a "
    "box|under a pile of leaves].\n\n",
    "{Name} wanted {a_thing} more than anything. {They} asked {their} [mom|dad|grandma], \"Can I have {a_thing}, "
    "please?\" \"[You must work for it|You have to wait|Maybe one day],\" was the answer. So {Name} [helped in the "
    "{place}|cleaned the house|carried water] every day.\n\nOn {their} birthday, {friend} came with a [big|small] "
    "gift. {Name} opened it. It was {a_thing}! \"[Wow|Oh]! This is the best {thing} in the world!\" {Name} said.\n\n",
    "One day, {Name} saw {friend} with {a_thing}. \"Can I [try|see|hold] your {thing}?\" asked {Name}. \"No! The "
    "{thing} is mine!\" said {friend}. {Name} was sad and [walked away|sat down alone].\n\nAfter a while, {friend} "
    "[felt bad|felt sorry|was lonely]. It was not fun to be alone with the {thing}. \"I am sorry,\" said {friend}. "
    "\"We can share the {thing}.\" \"[Thank you|Yay|That is kind]!\" said {Name}. They [took turns|had fun] with the "
    "{thing} all day.\n\n",
    "{Name} [was walking home|went for a walk] when {they} saw {a_thing} high up in a tree. \"How did the {thing} get "
    "up there?\" {they} said. {They} [jumped and jumped|tried to climb|pulled a branch], but {they} could not reach "
    "the {thing}.\n\n\"Can I help you?\" asked {friend}. \"Yes, please!\" said {Name}. {Friend} [climbed up the "
    "tree|shook the tree|found a long stick], and down came the {thing}! \"We did it!\" they [shouted|said].\n\n",
)  # fmt: skip
MEETING_PLOTS = (
    "One day, {Name} met {a_thing}. The {thing} was [sad|lost|shy|hungry|scared]. \"Hello, {thing},\" said {Name}. "
    "\"Why are you [sad|here all alone]?\" \"I [have no friends|can not find my home|am cold and hungry],\" said the "
    "{thing}.\n\n\"Do not worry,\" said {Name}. \"I will [help you|be your friend|stay with you].\" {They} [gave the "
    "{thing} some food|took the {thing} to the {place}|showed the {thing} the way]. The {thing} [smiled|felt much "
    "better|was not sad any more].\n\n",
    "{Name} wanted to [play|run a race|climb a hill], but no one was there. Then {a_thing} came along. \"Do you want "
    "to [race|play] with me?\" asked {Name}. \"Yes!\" said the {thing}. They ran [to the {place}|around the "
    "tree|very fast]. The {thing} [fell down|got tired|hurt its foot]. {Name} stopped to help. \"[Are you all "
    "right|Are you hurt]?\" {they} asked.\n\n\"I am fine,\" said the {thing}. \"[Thank you|You are kind].\" They did "
    "not care who won the race. {friend_is_thing}\n\n",
    "Near the {place} lived {a_thing}. Everyone was afraid of the {thing}. But {Name} was [not afraid|very "
    "brave|curious]. {They} [went|walked] up to the {thing} and said, \"Hi! My name is {Name}.\"\n\nThe {thing} "
    "looked [surprised|happy]. \"No one ever talks to me,\" said the {thing}. \"[Do you want|Would you like] to "
    "play?\" {Name} [nodded|said yes]. They played [hide and seek|with a ball|in the sand], and {Name} saw that the "
    "{thing} was very [nice|kind|funny].\n\n",
)  # fmt: skip
PLACE_PLOTS = (
    "{Name} had never seen the {thing} before. \"I want to go to the {thing}!\" {they} said. So {they} packed [some "
    "food|a little bag|some bread] and went with {friend}.\n\nThe {thing} was [big|beautiful|far away|quiet]. They "
    "[looked around|ran and jumped|saw many new things] and [found a pretty stone|met a new friend|had a picnic]. "
    "\"I love the {thing},\" said {Name}.\n\n",
    "One day, {Name} went to the {thing} alone. {They} [looked at everything|played there] for a long time. Then it "
    "got dark, and {Name} was [lost|scared]. \"Help!\" {they} [called|cried].\n\n{Friend} heard {them} and came to "
    "the {thing}. \"[I am here|Take my hand],\" said {friend}. \"I will take you home.\" {Name} was not "
    "[scared|afraid] any more.\n\n",
)  # fmt: skip


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
    plots: tuple[str, ...]
    if can_be_hero(cast.thing):
        plots = MEETING_PLOTS
        cast = replace(cast, friend="the " + cast.thing)
    elif GROUP_OF_NOUN.get(cast.thing) == "place":
        plots = PLACE_PLOTS
    else:
        plots = THING_PLOTS
    template = random_source.choice(OPENINGS) + random_source.choice((" ", "\n\n", "\n\n"))
    closings = sorted(random_source.sample(CLOSINGS, random_source.choice((1, 1, 2))), key=CLOSINGS.index)
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
    return expand(random_source.choice(CONTINUATIONS), slots, random_source)
