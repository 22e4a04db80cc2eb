"""The words that the storyteller's invented chats are made of, and the word pairs that its test asks for.

Nouns stand in groups whose members can take each other's place in a story without making nonsense of it (a fox can
do what a dog did, but a boat cannot). The groups are wide on purpose: a model that has seen hundreds of nouns asked
for and then used learns to copy the word it is asked for, whatever the word is.
"""

from __future__ import annotations


def words(text: str) -> tuple[str, ...]:
    """The words of a text."""
    return tuple(text.split())


NOUN_GROUPS: dict[str, tuple[str, ...]] = {
    "pet": words("dog cat puppy kitten bunny rabbit hamster pony mouse kitty"),
    "beast": words(
        "bear fox wolf lion tiger elephant monkey giraffe zebra horse cow pig sheep goat deer squirrel hedgehog "
        "badger camel kangaroo koala panda raccoon donkey lamb rhinoceros hippo leopard mole otter beaver skunk "
        "llama moose"
    ),
    "bird": words("bird duck owl chicken parrot crow swan goose penguin robin eagle rooster hen peacock pigeon"),
    "water animal": words("fish whale shark dolphin crab octopus seal turtle frog starfish toad lobster walrus"),
    "crawler": words("ant bee butterfly spider bug worm snail ladybug caterpillar beetle lizard snake moth"),
    "creature": words("dragon monster fairy unicorn ghost robot giant dinosaur elf witch mermaid wizard"),
    "person": words(
        "king queen prince princess farmer doctor teacher baker pirate knight clown policeman fireman sailor "
        "soldier chef nurse painter hunter singer dancer captain"
    ),
    "toy": words(
        "ball doll kite balloon puzzle block drum whistle bell trumpet guitar piano violin marble puppet teddy"
    ),
    "vehicle": words("car truck train boat bike bus plane ship wagon rocket tractor tricycle scooter van"),
    "food": words(
        "cake apple cookie banana sandwich pie carrot pizza muffin candy lollipop cupcake pancake "
        "peach pear lemon tomato potato pumpkin melon egg strawberry cherry sausage"
    ),
    "small thing": words(
        "box key book pencil stone rock shell coin ring spoon cup bottle button feather flag lamp candle "
        "mirror basket bag map letter brush bucket rope clock crown necklace jar pillow blanket hammer "
        "needle umbrella camera phone bowl plate fork pen ribbon gem jewel diamond ladder shovel broom"
    ),
    "clothing": words("hat coat dress shirt shoe boot sock scarf glove jacket sweater cap belt mitten costume"),
    "plant": words("tree flower bush leaf seed mushroom cactus sunflower daisy acorn vine"),
    "place": words(
        "park garden forest farm beach house castle cave river lake hill mountain school shop market zoo "
        "playground pond village island library field kitchen barn bridge tower yard town city desert "
        "jungle museum tent"
    ),
    "sky": words("sun moon star cloud rainbow storm wind"),
}

IRREGULAR_PLURALS: dict[str, str] = {
    "mouse": "mice", "sheep": "sheep", "fish": "fish", "deer": "deer", "wolf": "wolves", "goose": "geese",
    "leaf": "leaves", "octopus": "octopuses", "scarf": "scarves", "policeman": "policemen", "fireman": "firemen",
    "tomato": "tomatoes", "potato": "potatoes", "cactus": "cactuses", "moose": "moose", "rhinoceros": "rhinoceroses",
    "knife": "knives",
}  # fmt: skip

GIRLS: tuple[str, ...] = words(
    "Lily Lucy Mia Anna Sue Sara Sarah Emma Amy Jane Molly Ella Kitty Daisy Mary Lila Nina Zoe Bella Lola Jill Ruby "
    "Grace Kate Tina Eva Clara Maya Nora Ivy Hannah Julia Alice Betty Susie Jenny Sally Polly Laura Lisa Leah"
)
BOYS: tuple[str, ...] = words(
    "Tim Timmy Tom Tommy Max Ben Sam Jack Billy Bob Bobby Joe Mike Leo Fred Spot Charlie Peter Jimmy John "
    "Dan Danny Oliver Henry Lucas Alex Adam Paul Jim Andy Nick Johnny David Harry George Noah Oscar Felix Theo Toby"
)
PETS: tuple[str, ...] = words(
    "Fluffy Buddy Benny Bubbles Whiskers Sparkle Pip Coco Rex Lucky Sunny Buzzy Teddy Snowy Ginger Pepper Biscuit "
    "Patch Nibbles Hoppy Muffin Waggy Pebble Dot Bruno Honey"
)

# The forty requests of the test. No invented chat may ask for both words of a pair.
HELD_OUT_PAIRS: tuple[tuple[str, str], ...] = (
    ("dog", "kite"), ("cat", "boat"), ("bear", "cake"), ("frog", "crown"), ("fox", "balloon"),
    ("mouse", "drum"), ("bird", "hat"), ("rabbit", "train"), ("lion", "flower"), ("duck", "umbrella"),
    ("monkey", "banana"), ("elephant", "ball"), ("owl", "lamp"), ("fish", "ring"), ("princess", "truck"),
    ("pirate", "cookie"), ("dragon", "bell"), ("robot", "apple"), ("horse", "scarf"), ("pig", "mirror"),
    ("bee", "book"), ("turtle", "key"), ("squirrel", "car"), ("king", "puppy"), ("farmer", "star"),
    ("girl", "spider"), ("boy", "whale"), ("butterfly", "box"), ("cow", "moon"), ("tiger", "doll"),
    ("penguin", "sandwich"), ("goat", "bike"), ("fairy", "shoe"), ("wolf", "candle"), ("snail", "tree"),
    ("kitten", "river"), ("hen", "castle"), ("crab", "coin"), ("ant", "pie"), ("unicorn", "rainbow"),
)  # fmt: skip

GROUP_OF_NOUN: dict[str, str] = {noun: group for group, nouns in NOUN_GROUPS.items() for noun in nouns}
ANIMAL_GROUPS: frozenset[str] = frozenset({"pet", "beast", "bird", "water animal", "crawler"})


def plural(noun: str) -> str:
    """The plural of a noun of this file."""
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
