"""Story chats made by program: what a user says, a real or invented story as the answer, and follow-up turns."""

from __future__ import annotations

import random
from collections.abc import Sequence

from storyteller_edits import EDITS, paragraphs_of
from storyteller_grammar import expand
from storyteller_tales import Tale, find_nouns, invented_tale, real_tale
from storyteller_words import IRREGULAR_PLURALS, NOUN_GROUPS, is_held_out, plural, with_article

Turn = tuple[str, str]  # role, text

INVENTED_SHARE = 0.55
"""Of the stories asked for: invented ones name both nouns again and again, so a model learns to pick them up."""
FOLLOW_UP_CHANCES = (0.45, 0.35, 0.2)
"""How likely a first, second and third wish is, each after the one before."""

ASKS: tuple[str, ...] = (
    "a story about {nouns}",
    "A story about {nouns}.",
    "Tell me a story about {nouns}.",
    "tell me a story about {nouns}",
    "Write a story about {nouns}.",
    "write a short story about {nouns}",
    "Write a short story with {nouns}.",
    "Can you tell me a story about {nouns}?",
    "Could you write a story about {nouns}, please?",
    "Please tell me a story about {nouns}.",
    "I want a story about {nouns}.",
    "I would like a story with {nouns}.",
    "Tell me a short story about {nouns}.",
    "Make up a story about {nouns}.",
    "Tell me about {nouns}.",
    "story about {nouns}",
    "One story about {nouns}, please!",
    "Do you know a story about {nouns}?",
    "Tell a bedtime story about {nouns}.",
    "A bedtime story with {nouns}, please.",
    "{nouns}",
    "My son wants a story about {nouns}.",
    "Hi! Tell me a story about {nouns}.",
    "a short story about {nouns}",
    "Give me a story with {nouns} in it.",
    "Let's have a story about {nouns}.",
    "Tell me a tale of {nouns}.",
)
BRIEF_ASKS: tuple[str, ...] = (
    "a very short story about {nouns}",
    "Tell me about {nouns} in a few sentences.",
    "A tiny story about {nouns}, please.",
    "How does a story about {nouns} begin?",
    "the start of a story about {nouns}",
    "Begin a story about {nouns}.",
)
OPEN_ASKS: tuple[str, ...] = (
    "Tell me a story.",
    "tell me a story",
    "Write a story.",
    "Can you tell me a story?",
    "A story, please!",
    "I want to hear a story.",
    "Tell me a short story.",
    "Tell me a bedtime story.",
    "Please write a story for me.",
    "Surprise me with a story.",
    "story",
    "Hi! Can you tell me a story?",
)
SYSTEM_PROMPTS: tuple[str, ...] = (
    "You are a storyteller.",
    "You are a friendly storyteller for children.",
    "You tell short, simple stories.",
    "You are a helpful assistant.",
    "You are Storyteller, a small model that tells stories.",
)
GREETINGS: tuple[str, ...] = ("Hello", "Hi", "Hello!", "hi", "Hi there!", "Good morning!", "Hey", "hello there", "hey!")
GREETING_ANSWERS: tuple[str, ...] = (
    "Hello! [Would you like|Do you want] [to hear a story|a story]? [What should it be about|Tell me what it should be "
    "about|Name an animal and a thing, and I will begin]!",
    "Hi! I [tell|write] [short|little] stories. [What should my story be about|What do you like]?",
)
SMALL_TALK: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (GREETINGS, GREETING_ANSWERS),
    (
        ("Who are you?", "who are you", "What are you?", "What is your name?", "Are you a robot?", "Who made you?"),
        (
            "I am [Storyteller|the storyteller], a [very small|tiny|small] language model. I tell [short|little] "
            "stories. [Ask me for one|Name two things, and I will tell you a story about them]!",
        ),
    ),
    (
        ("What can you do?", "Help", "help me", "What do you know?", "How does this work?", "What can I ask you?"),
        (
            'I can tell you [short|little] stories. [Say|Ask]: "a story about a {a} and a {b}". Then you can ask me to '
            "[make someone sad or happy|change the ending|make it shorter], or what happened next.",
        ),
    ),
    (
        ("How are you?", "how are you", "How are you today?", "Are you happy?"),
        ("I am [fine|very well|happy], thank you! [Would you like|Do you want] to hear a story?",),
    ),
)
THANKS: tuple[str, ...] = ("Thanks!", "Thank you!", "thank you", "thanks", "I like it!", "Great story!", "Nice!", "wow")
THANKS_ANSWERS: tuple[str, ...] = (
    "You are welcome! [Would you like|Do you want] [another story|to hear one more]?",
    "I am glad you like it! [What should the next story be about|Shall I tell you one more]?",
)
GOODBYES: tuple[str, ...] = ("Bye", "Goodbye!", "bye bye", "Good night!", "No, thank you.", "See you!")
GOODBYE_ANSWERS: tuple[str, ...] = (
    "Goodbye! [Come back soon|Sleep well|See you soon]!",
    "Bye! [It was nice talking to you|Come back for more stories]!",
)


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
        return random_source.choice(OPEN_ASKS)
    ask = random_source.choice(ASKS[:4]) if random_source.random() < 0.3 else random_source.choice(ASKS)
    if tale.names and random_source.random() < 0.08:
        return ask.format(nouns=f"{name_nouns(tale.nouns, random_source)} and {tale.names[0]}")
    return ask.format(nouns=name_nouns(tale.nouns, random_source))


def brief_chats(random_source: random.Random) -> list[Turn]:
    """Two or three invented beginnings, each about other nouns: much to pick up, in few words."""
    chat: list[Turn] = []
    for _ in range(random_source.choice((2, 3))):
        tale = invented_tale(random_source)
        ask = random_source.choice(BRIEF_ASKS).format(nouns=name_nouns(tale.nouns, random_source))
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
    next_ask = random_source.choice(
        ("What happened next?", "And then?", "Go on.", "how does it end?", "Tell me the rest.")
    )
    return [
        ("user", random_source.choice(BRIEF_ASKS).format(nouns=name_nouns(nouns, random_source))),
        ("assistant", start),
        ("user", next_ask),
        ("assistant", "\n\n".join(paragraphs[middle:])),
    ]


def small_talk(random_source: random.Random) -> list[Turn]:
    """A question about the storyteller or a greeting, and the answer."""
    asks, answers = random_source.choice(SMALL_TALK)
    animal = random_source.choice(NOUN_GROUPS["pet"])
    thing = random_source.choice(NOUN_GROUPS["toy"])
    answer = expand(random_source.choice(answers), {"a": animal, "b": thing}, random_source)
    return [("user", random_source.choice(asks)), ("assistant", answer)]


def story_chat(stories: Sequence[str], random_source: random.Random) -> list[Turn]:
    """One conversation: sometimes small talk first, a story, and often a follow-up wish or thanks."""
    chat: list[Turn] = []
    if random_source.random() < 0.06:
        chat.append(("system", random_source.choice(SYSTEM_PROMPTS)))
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
        polite = random_source.choice(((THANKS, THANKS_ANSWERS), (GOODBYES, GOODBYE_ANSWERS)))
        answer = expand(random_source.choice(polite[1]), {}, random_source)
        chat += [("user", random_source.choice(polite[0])), ("assistant", answer)]
    return chat
