"""The bundled storyteller keeps its promises: its size and shape, its tokenizer, and the stories it
tells."""

import json
import random
import re
from collections import Counter
from pathlib import Path

import jinja2
import msgspec
import pytest
from safetensors.torch import load_file
from tokenizers import Tokenizer

from nanoserve.config.model_config import ModelConfig
from scripts.storyteller_tales import HELD_OUT_PAIRS, plural, story_chat, with_article

REPOSITORY = Path(__file__).resolve().parent.parent
ASSETS = REPOSITORY / "nanoserve" / "assets"
STORYTELLER, DRAFT = ASSETS / "storyteller", ASSETS / "storyteller-draft"
DIFFUSION = ASSETS / "storyteller-diffusion"

MAX_STORY_TOKENS = 350
FEWEST_WITH_BOTH_WORDS = 0.75
FEWEST_ENDED = 0.90
FEWEST_WITHOUT_REPETITION = 0.90
MOST_REPEATS_OF_A_FOUR_GRAM = 3


def ask(first: str, second: str) -> str:
    """One of the fixed prompts."""
    return f"a story about {with_article(first)} and {with_article(second)}"


def has_word(text: str, word: str) -> bool:
    """Whether the word or its plural is in the text as a whole word."""
    return re.search(rf"\b({word}|{plural(word)})\b", text.lower()) is not None


def most_repeats(text: str) -> int:
    """How often the most frequent sequence of four words comes."""
    words = re.findall(r"[a-z']+", text.lower())
    return max(
        Counter(zip(words, words[1:], words[2:], words[3:], strict=False)).values(), default=0
    )


def test_checkers_can_fail() -> None:
    assert has_word("Two mice ran.", "mouse") and not has_word("The catalogue", "cat")
    assert most_repeats("he ran and ran " * 4) == 4
    assert most_repeats("once upon a time there was a cat") == 1


@pytest.mark.parametrize(
    ("directory", "largest"),
    [(STORYTELLER, 16 * 10**6), (DRAFT, 2 * 10**6), (DIFFUSION, 16 * 10**6)],
    ids=["storyteller", "draft", "diffusion"],
)
def test_size_and_shape(directory: Path, largest: int) -> None:
    config = ModelConfig.from_directory(directory)
    assert (directory / "model.safetensors").stat().st_size <= largest
    for count in (config.num_layers, config.num_heads, config.num_kv_heads):
        assert count % 4 == 0  # every parallel layout of up to four workers divides it
    tensors = load_file(directory / "model.safetensors")
    assert {str(tensor.dtype) for tensor in tensors.values()} == {"torch.bfloat16"}
    assert (directory / "MODEL_CARD.md").is_file()


@pytest.mark.parametrize("other", [DRAFT, DIFFUSION], ids=["draft", "diffusion"])
def test_the_others_speak_the_same_tokens(other: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (STORYTELLER / name).read_bytes() == (other / name).read_bytes()
    assert (
        ModelConfig.from_directory(STORYTELLER).vocab_size
        == ModelConfig.from_directory(other).vocab_size
    )


def test_tokenizer_round_trip() -> None:
    tokenizer = Tokenizer.from_file(str(STORYTELLER / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == ModelConfig.from_directory(STORYTELLER).vocab_size
    for text in ("Once upon a time, there was a dog.\n\nThe end.", "ünï¢ødé 🐶 \t\x00", " a  b "):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == text
    assert (
        len(
            tokenizer.encode(
                "Once upon a time there was a little dog", add_special_tokens=False
            ).ids
        )
        <= 9
    )


def test_ends_of_text_and_turn_are_both_ends() -> None:
    tokenizer = Tokenizer.from_file(str(STORYTELLER / "tokenizer.json"))
    ends = {tokenizer.token_to_id("<|endoftext|>"), tokenizer.token_to_id("<|end|>")}
    assert set(ModelConfig.from_directory(STORYTELLER).eos_token_ids) == ends
    generation = json.loads((STORYTELLER / "generation_config.json").read_text())
    assert set(generation["eos_token_id"]) == ends


def test_chat_template_writes_turns() -> None:
    template = json.loads((STORYTELLER / "tokenizer_config.json").read_text())["chat_template"]
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    rendered = jinja2.Template(template).render(
        messages=messages, bos_token="<|endoftext|>", add_generation_prompt=True
    )
    assert rendered == "<|endoftext|><|system|>Be kind.<|end|><|user|>Hi<|end|><|assistant|>"


@pytest.fixture(scope="module")
def stories() -> list[tuple[str, bool]]:
    """The answers to the forty fixed prompts, and whether each ended by itself."""
    from nanoserve.llm import LLM
    from nanoserve.request import SamplingParams

    conversations = [[{"role": "user", "content": ask(*pair)}] for pair in HELD_OUT_PAIRS]
    params = [
        SamplingParams(temperature=0.8, top_p=0.95, seed=seed, max_tokens=MAX_STORY_TOKENS)
        for seed in range(len(HELD_OUT_PAIRS))
    ]
    with LLM(STORYTELLER) as llm:
        answers = [request.outputs[0] for request in llm.chat(conversations, params)]
    return [(answer.text, answer.finish_reason == "stop") for answer in answers]


def test_invented_chats_ask_for_no_pair_of_the_test() -> None:
    random_source = random.Random(0)
    real = ["Lily had a dog and a kite.\n\nThe dog ran.\n\nLily was happy."]
    for _ in range(300):
        for role, text in story_chat(real, random_source):
            assert role != "user" or not any(
                has_word(text, one) and has_word(text, two) for one, two in HELD_OUT_PAIRS
            )


def test_asks_forty_different_prompts() -> None:
    assert len({ask(*pair) for pair in HELD_OUT_PAIRS}) == 40


def test_stories_use_both_words(stories: list[tuple[str, bool]]) -> None:
    found = [
        has_word(text, first) and has_word(text, second)
        for (text, _), (first, second) in zip(stories, HELD_OUT_PAIRS, strict=True)
    ]
    assert sum(found) / len(found) >= FEWEST_WITH_BOTH_WORDS


def test_stories_end_by_themselves(stories: list[tuple[str, bool]]) -> None:
    assert sum(ended for _, ended in stories) / len(stories) >= FEWEST_ENDED


def test_stories_do_not_repeat_themselves(stories: list[tuple[str, bool]]) -> None:
    calm = [most_repeats(text) <= MOST_REPEATS_OF_A_FOUR_GRAM for text, _ in stories]
    assert sum(calm) / len(calm) >= FEWEST_WITHOUT_REPETITION
    assert min(len(text.split()) for text, _ in stories) >= 25  # silence would repeat nothing


def test_stories_that_are_written_in_blocks_use_both_words_and_end() -> None:
    """A quarter of the requests; docs/diffusion.md has the figures of all of them."""
    from nanoserve.llm import LLM

    pairs = HELD_OUT_PAIRS[::4]
    with LLM("storyteller-diffusion") as llm:
        params = [
            msgspec.structs.replace(llm.default_sampling_params(), seed=seed, max_tokens=350)
            for seed in range(len(pairs))
        ]
        outputs = llm.chat([[{"role": "user", "content": ask(*pair)}] for pair in pairs], params)
    stories = [output.outputs[0] for output in outputs]
    with_both = [
        has_word(story.text, first) and has_word(story.text, second)
        for story, (first, second) in zip(stories, pairs, strict=True)
    ]
    assert sum(with_both) >= len(pairs) / 2
    assert sum(story.finish_reason == "stop" for story in stories) >= 0.8 * len(pairs)
    assert sum(most_repeats(story.text) > MOST_REPEATS_OF_A_FOUR_GRAM for story in stories) <= 1
