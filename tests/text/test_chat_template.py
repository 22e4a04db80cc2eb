import errno
import json
import os
import resource
import signal
import subprocess
import threading
import time
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nanoserve.errors import ModelError, UsageError
from nanoserve.processes.children import LimitedProcess, ProcessUnavailable
from nanoserve.server.http_bodies import as_api_error
from nanoserve.text.chat_template import ChatTemplate, check_messages, load_chat_template
from nanoserve.text.tokenizer import load_tokenizer
from tests.text.building import make_byte_level
from tests.text.templates import STYLES

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Says <b>how</b> warm it is, in °C & words",
            "parameters": {"type": "object", "properties": {"place": {"type": "string", "enum": ["München", "Rome"]}}},
        },
    },
    {"type": "function", "function": {"name": "noop", "description": "", "parameters": {}}},
]
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "weather", "arguments": {"place": "Rome"}}}],
}
CONVERSATIONS = {
    "one": [{"role": "user", "content": "Hello  there \n"}],
    "system": [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "你好 🦊 <b>&amp;</b>"}],
    "turns": [
        {"role": "user", "content": "\n\nOne"},
        {"role": "assistant", "content": "<think>\nhm, \n\n</think>\n\n Two "},
        {"role": "user", "content": "Three"},
        {"role": "assistant", "content": "Four"},
        {"role": "user", "content": ""},
    ],
    "tools": [
        {"role": "user", "content": "How warm is Rome?"},
        CALL,
        {"role": "tool", "content": "31", "name": "weather"},
        {"role": "tool", "content": "32", "name": "weather"},
        {"role": "assistant", "content": "Warm.", "reasoning_content": "31 is warm"},
    ],
    "same role twice": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
}
ARGUMENTS = {
    "plain": {},
    "tools": {"tools": TOOLS},
    "thinking off": {"enable_thinking": False},
    "date": {"date_string": "4 May"},
}


class Refused(Exception):
    pass


@cache
def jinja2_template(template: str) -> Template:
    """What transformers does: the same environment, filters and functions."""

    def refuse(message):
        raise Refused(message)

    def to_json(value, *, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment.from_string(template)


def render_with_jinja2(template: str, messages, *, add_generation_prompt: bool, arguments) -> str:
    context = {"tools": None, "documents": None, **SPECIAL, **arguments}
    return jinja2_template(template).render(messages=messages, add_generation_prompt=add_generation_prompt, **context)


@pytest.fixture(scope="module")
def styles():
    templates = {name: ChatTemplate({"default": source}, SPECIAL, name) for name, source in STYLES.items()}
    yield templates
    for template in templates.values():
        template.close()


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_minijinja_renders_what_jinja2_renders(style, conversation, arguments, styles):
    messages, given = CONVERSATIONS[conversation], ARGUMENTS[arguments]
    for add_generation_prompt in (True, False):
        try:
            expected = render_with_jinja2(
                STYLES[style], messages, add_generation_prompt=add_generation_prompt, arguments=given
            )
        except Refused as refused:
            with pytest.raises(UsageError, match=str(refused)):
                styles[style].render(messages, add_generation_prompt=add_generation_prompt, arguments=given)
        else:
            rendered = styles[style].render(messages, add_generation_prompt=add_generation_prompt, arguments=given)
            assert rendered == expected


def test_all_styles_pass_the_check_at_load(styles):
    for template in styles.values():
        template.check()


BOMBS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "large range": "{% for a in range(10 ** 12) %}{% endfor %}",
    "long string": "{{ 'x' * 10 ** 12 }}",
    "fairly long string": "{{ 'x' * 90000000 }}",
    "doubling": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling lists": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling without loop": "{% set x = 'ab' %}" + "{% set x = x ~ x %}" * 60,
    "growing replacements": "{% set n = namespace(x='aaaa') %}{% for i in range(40) %}"
    "{% set n.x = n.x | replace('a', 'aaaa') %}{% endfor %}",
    "wide output": "{% set x = 'x' * 1000000 %}{% for i in range(5000) %}{{ x }}{% endfor %}",
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "slow filter": "{% set x = 'x' * 9000000 %}{% for i in range(9999) %}{% set y = x | upper | title %}{% endfor %}",
}


MUCH_ALIKE = {"fairly long string", "doubling lists", "doubling without loop", "growing replacements"}
"""They hit the same limits as the others do, each of which takes half a second to hit."""


@pytest.mark.parametrize(
    "bomb", [pytest.param(bomb, marks=pytest.mark.slow) if bomb in MUCH_ALIKE else bomb for bomb in BOMBS]
)
def test_a_template_bomb_is_a_load_error_within_a_second(bomb, tmp_path: Path):
    make_byte_level(tmp_path, chat_template=BOMBS[bomb])
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with pytest.raises(ModelError, match=r"tokenizer_config\.json") as caught:
        load_tokenizer(tmp_path)
    # Seconds of the processor: on a machine that does nothing else, those of the clock.
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1
    assert "\n" not in str(caught.value)


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__ }}",
    "{{ messages['__class__'] }}",
    "{{ messages | attr('__init__') }}",
    "{{ raise_exception.__globals__['os'].system('true') }}",
    "{% if false %}{{ cycler.__init__.__globals__.os }}{% endif %}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{{ self._TemplateReference__context }}",
    "{{ open('/etc/passwd') }}",
    "{{ lipsum() }}",
    "{% for x in %}",
    "{{ 1 / 0 }}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_an_escape_attempt_or_a_broken_template_is_a_load_error(template, tmp_path: Path):
    make_byte_level(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(ModelError, match=r"chat_template\.jinja") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_bomb_that_waits_for_its_moment_harms_only_that_conversation(tmp_path: Path):
    bomb = BOMBS["doubling"]
    template = "{% if messages[0].content == 'now' %}" + bomb + "{% endif %}{{ messages[0].content }}"
    tokenizer = load_tokenizer(make_byte_level(tmp_path, chat_template=template))
    with pytest.raises(ModelError, match=r"memory or time|out of fuel"):  # newer versions of the library count bytes
        tokenizer.encode_chat([{"role": "user", "content": "now"}])
    assert tokenizer.decode(tokenizer.encode_chat([{"role": "user", "content": "later"}])) == "later"
    tokenizer.close()


def test_long_conversations_are_no_bombs(styles):
    messages = [{"role": role, "content": "word " * 50} for _ in range(1000) for role in ("user", "assistant")]
    rendered = styles["qwen"].render([*messages, {"role": "user", "content": "x " * 500_000}])
    assert len(rendered) > 1_500_000


def test_an_interrupted_rendering_does_not_answer_the_next():
    class Interrupted:
        def readline(self):
            raise KeyboardInterrupt

        def close(self):
            pass

    template = ChatTemplate({"default": "{{ messages[0].content }}"}, {}, "here")
    sandbox = next(iter(template._sandboxes.values()))
    stdout, sandbox._process.stdout = sandbox._process.stdout, Interrupted()
    with pytest.raises(KeyboardInterrupt):
        template.render([{"role": "user", "content": "first"}])
    assert template.render([{"role": "user", "content": "second"}]) == "second"
    template.close()
    stdout.close()


def test_a_process_that_is_killed_from_outside_is_replaced():
    template = ChatTemplate({"default": "{{ messages | length }}"}, {}, "here")
    sandbox = next(iter(template._sandboxes.values()))
    for number in (signal.SIGKILL, signal.SIGTERM):
        sandbox._process.send_signal(number)
        sandbox._process.wait()
        assert template.render([{"role": "user", "content": "a"}]) == "1"
    template.close()


def test_one_that_is_killed_again_and_again_is_nobodys_fault(monkeypatch):
    template = ChatTemplate({"default": "{{ messages | length }}"}, {}, "here")
    sandbox = next(iter(template._sandboxes.values()))
    running = sandbox._running
    started = []

    def killed():
        process = running()
        started.append(process.pid)
        process.kill()
        return process

    monkeypatch.setattr(sandbox, "_running", killed)
    with pytest.raises(ProcessUnavailable, match="the process of the chat template was killed 2 times"):
        template.render([{"role": "user", "content": "a"}])
    assert len(set(started)) == 2
    assert as_api_error(ProcessUnavailable("killed")).status == 503
    template.close()


def test_closing_ends_the_process():
    template = ChatTemplate({"default": "{{ messages | length }}"}, {}, "here")
    process = next(iter(template._sandboxes.values()))._process
    template.close()
    assert process.returncode is not None


def test_closing_does_not_wait_for_a_question():
    template = ChatTemplate({"default": "{{ messages | length }}"}, {}, "here")
    sandbox = next(iter(template._sandboxes.values()))
    process = sandbox._process
    process.send_signal(signal.SIGSTOP)
    failures = []

    def ask():
        with pytest.raises(ProcessUnavailable, match="the process of the chat template was ended") as caught:
            template.render([{"role": "user", "content": "a"}])
        failures.append(caught.value)

    asking = threading.Thread(target=ask)
    asking.start()
    while not sandbox._lock.locked():
        time.sleep(0.001)
    template.close()
    asking.join()
    assert len(failures) == 1 and process.returncode == -signal.SIGKILL
    ask()
    assert sandbox._process is None, "none is started any more"


def test_a_process_that_cannot_be_started_is_not_the_clients_fault(monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(subprocess, "Popen", refuse)
    sandbox = LimitedProcess("nanoserve.text.template_process", "the process of the chat template", {})
    with pytest.raises(ProcessUnavailable, match="chat template cannot be started: Too many open files") as caught:
        sandbox.ask("{}")
    assert as_api_error(caught.value).status == 503


def test_a_refusal_is_the_users_error(tmp_path: Path):
    tokenizer = load_tokenizer(make_byte_level(tmp_path, chat_template=STYLES["gemma"]))
    with pytest.raises(UsageError, match="no system role here"):
        tokenizer.encode_chat(CONVERSATIONS["system"])
    tokenizer.close()


def test_the_jinja_file_beats_the_settings(tmp_path: Path):
    (tmp_path / "chat_template.jinja").write_text("file")
    assert rendered(load_chat_template(tmp_path, {"chat_template": "settings"}, {})) == "file"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("one", "one"),
        ([{"name": "rag", "template": "rag"}, {"name": "default", "template": "usual"}], "usual"),
        ([{"name": "only", "template": "only"}], "only"),
        ({"default": "usual", "tool_use": "tools"}, "usual"),
    ],
)
def test_named_templates(value, expected, tmp_path: Path):
    assert rendered(load_chat_template(tmp_path, {"chat_template": value}, {})) == expected


def test_a_template_for_tools_is_used_with_tools(tmp_path: Path):
    template = load_chat_template(tmp_path, {"chat_template": {"default": "usual", "tool_use": "tools"}}, {})
    assert template.render(CONVERSATIONS["one"], arguments={"tools": TOOLS}) == "tools"
    template.close()


def rendered(template) -> str:
    try:
        return template.render(CONVERSATIONS["one"])
    finally:
        template.close()


def test_generation_blocks_of_training_code_are_understood(tmp_path: Path):
    source = "{% for m in messages %}{%- generation -%} {{ m.content }} {%- endgeneration %}\n{% endfor %}"
    assert rendered(load_chat_template(tmp_path, {"chat_template": source}, {})) == "Hello  there \n"


def test_a_model_without_template_still_chats(tmp_path: Path):
    template = load_chat_template(tmp_path, {}, {})
    assert "no chat template" in template.notice
    assert template.render(CONVERSATIONS["system"]) == "System:  Be brief. \nUser: 你好 🦊 <b>&amp;</b>\nAssistant:"
    with pytest.raises(UsageError, match="enable_thinking"):
        template.render(CONVERSATIONS["one"], arguments={"enable_thinking": True})


def test_content_parts_are_joined():
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert check_messages([{"role": "developer", "content": content}]) == [{"role": "system", "content": "a\nb"}]


def nested(levels: int) -> list:
    return [nested(levels - 1)] if levels else []


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "empty"),
        ("hello", "must be a list"),
        (None, "must be a list"),
        ([3], r"messages\[0\] must be an object"),
        ([{"role": "user", "content": "a"}, {"content": "a"}], r"messages\[1\]\.role"),
        ([{"role": "root", "content": "a"}], "system, user, assistant, tool"),
        ([{"role": ["user"], "content": "a"}], r"messages\[0\]\.role"),
        ([{"role": "user"}], r"messages\[0\]\.content must be text"),
        ([{"role": "user", "content": 5}], "content must be text"),
        ([{"role": "user", "content": b"a"}], "content must be text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "image_url"),
        ([{"role": "user", "content": ["a"]}], r"content\[0\]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "must be text"),
        ([{"role": "user", "content": "a", "colour": 1}], "unknown fields: colour"),
        ([{"role": "user", "content": "a", "name": object()}], "plain JSON"),
        ([{"role": "user", "content": "a", "tool_calls": [{"a": nested(500)}]}], "more than 64 levels deep"),
        (
            [{"role": "assistant", "content": "a", "tool_calls": 5}],
            r"messages\[0\]\.tool_calls must be a list of objects",
        ),
        ([{"role": "assistant", "content": "a", "tool_calls": [{}, 5]}], "tool_calls must be a list of objects"),
    ],
)
def test_malformed_messages_are_named(messages, problem):
    with pytest.raises(UsageError, match=problem):
        check_messages(messages)


@pytest.mark.parametrize("name", ["messages", "bos_token", "add_generation_prompt"])
def test_template_arguments_cannot_replace_what_nanoserve_sets(name, tokenizers):
    with pytest.raises(UsageError, match=name):
        tokenizers["byte-level"].encode_chat(CONVERSATIONS["one"], template_arguments={name: "x"})


def test_the_oracle_is_transformers_own_environment(tmp_path: Path):
    from transformers import PreTrainedTokenizerFast

    oracle = PreTrainedTokenizerFast.from_pretrained(make_byte_level(tmp_path, **SPECIAL))
    for source in STYLES.values():
        rendered = oracle.apply_chat_template(
            CONVERSATIONS["one"], chat_template=source, add_generation_prompt=True, tokenize=False, tools=TOOLS
        )
        arguments = {"tools": TOOLS, "unk_token": None}
        assert rendered == render_with_jinja2(
            source, CONVERSATIONS["one"], add_generation_prompt=True, arguments=arguments
        )


def test_arguments_of_calls_come_as_text_and_reach_the_template_as_an_object():
    def given(arguments: Any) -> Any:
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
        (message,) = check_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
        return message["tool_calls"][0]["function"]["arguments"]

    assert given('{"a": [1, "x"]}') == given({"a": [1, "x"]}) == {"a": [1, "x"]}
    for text in ("", "[1]", '{"a":', "[" * 10_000):  # what a model may have written
        assert given(text) == text
    for text in ('{"a": "\\ud800"}', '{"a": "\\u0000"}', '{"a":' * 70 + "1" + "}" * 70):
        with pytest.raises(UsageError):
            given(text)
