import errno
import json
import os
import re
import resource
import signal
import struct
import subprocess
import threading
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from nanoserve.errors import ModelError, UsageError
from nanoserve.server.http_bodies import as_api_error
from nanoserve.text.chat_template import (
    LONG_CONVERSATION,
    ChatTemplate,
    check_messages,
    load_chat_template,
)
from nanoserve.text.template_process import compile_template
from nanoserve.text.tokenizer import load_tokenizer
from nanoserve.utils.children import SILENCE_SECONDS, LimitedProcess, ProcessUnavailable
from tests.text.building import make_byte_level
from tests.text.templates import STYLES

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Says <b>how</b> warm it is, in °C & words",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string", "enum": ["München", "Rome"]}},
            },
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
    "system": [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": "你好 🦊 <b>&amp;</b>"},
    ],
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


def render_with_transformers(
    template: str, messages, *, add_generation_prompt: bool, arguments
) -> str:
    (rendered,), _ = render_jinja_template(
        [messages],
        chat_template=template,
        add_generation_prompt=add_generation_prompt,
        **SPECIAL,
        **arguments,
    )
    return rendered


@pytest.fixture(scope="module")
def styles():
    templates = {
        name: ChatTemplate({"default": source}, SPECIAL, name) for name, source in STYLES.items()
    }
    yield templates
    for template in templates.values():
        template.close()


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_templates_render_as_in_transformers(style, conversation, arguments, styles):
    messages, given = CONVERSATIONS[conversation], ARGUMENTS[arguments]
    for add_generation_prompt in (True, False):
        try:
            expected = render_with_transformers(
                STYLES[style],
                messages,
                add_generation_prompt=add_generation_prompt,
                arguments=given,
            )
        except TemplateError as refused:
            with pytest.raises(UsageError, match=str(refused)):
                styles[style].render(
                    messages, add_generation_prompt=add_generation_prompt, arguments=given
                )
        else:
            rendered = styles[style].render(
                messages, add_generation_prompt=add_generation_prompt, arguments=given
            )
            assert rendered == expected


def test_all_styles_pass_the_check_at_load(styles):
    for template in styles.values():
        template.check()


BOMBS = {
    "nested loops": (
        "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"
    ),
    "large range": "{% for a in range(10 ** 12) %}{% endfor %}",
    "long string": "{{ 'x' * 10 ** 12 }}",
    "fairly long string": "{{ 'x' * 90000000 }}",
    "doubling": (
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor "
        "%}"
    ),
    "doubling lists": (
        "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor "
        "%}"
    ),
    "doubling without loop": "{% set x = 'ab' %}" + "{% set x = x ~ x %}" * 60,
    "growing replacements": "{% set n = namespace(x='aaaa') %}{% for i in range(40) %}"
    "{% set n.x = n.x | replace('a', 'aaaa') %}{% endfor %}",
    "wide output": "{% set x = 'x' * 1000000 %}{% for i in range(5000) %}{{ x }}{% endfor %}",
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "slow filter": (
        "{% set x = 'x' * 9000000 %}{% for i in range(9999) %}{% set y = x | upper | title %}{% "
        "endfor %}"
    ),
}


MUCH_ALIKE = {
    "fairly long string",
    "doubling lists",
    "doubling without loop",
    "growing replacements",
}
"""They hit the same limits as the others do, each of which takes half a second to hit."""


@pytest.mark.parametrize(
    "bomb",
    [pytest.param(bomb, marks=pytest.mark.slow) if bomb in MUCH_ALIKE else bomb for bomb in BOMBS],
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
    "{{ '\\ud800' }}",
    "{{ " + "(" * 10_000 + "1" + ")" * 10_000 + " }}",
    "{{" * 100_000,
    "{{ lipsum() }}",
    "{% for x in %}",
    "{{ 1 / 0 }}",
]


HIDDEN = [
    "{{ '' | attr('__cla' ~ 'ss__') }}",
    "{{ ''['__cla' ~ 'ss__'] }}",
    "{{ messages | map(attribute='_' ~ '_class__') | list }}",
    "{{ messages | map('attr', '_' ~ '_class__') | list }}",
    "{{ messages | groupby('_' ~ '_class__') | list }}",
    "{{ messages | sort(attribute='_' ~ '_class__') }}",
    "{{ ('{0._' ~ '_class__}').format('') }}",
    "{{ ('{x._' ~ '_class__}').format_map({'x': ''}) }}",
    "{{ (('{0._' ~ '_class__}') | attr('format'))('') }}",
    "{{ (['{0._' ~ '_class__}'] | map('attr', 'format') | first)('') }}",
    "{{ (('{0._' ~ '_class__}') | safe).format('') }}",
    "{{ ('{:{x._' ~ '_class__}}').format(1, x='') }}",
    "{% set f = ''.format %}{{ f['_' ~ '_self__'].upper() }}",
    "{{ cycler['_' ~ '_init__'] }}",
    "{{ joiner['_' ~ '_init__'] }}",
    "{{ namespace.mro() }}",
    "{{ namespace(**{'_' ~ '_class__': 1}) }}",
    "{{ namespace({'_' ~ '_class__': 1}) }}",
    "{% set n = namespace() %}{% set n._attrs = {} %}",
    "{% set namespace.kept = messages %}",
    "{{ namespace()._Namespace__attrs }}",
    "{{ dict['_' ~ '_class__'] }}",
    "{{ dict.fromkeys['_' ~ '_func__'] }}",
    "{{ range['_' ~ '_globals__'] }}",
    "{{ strftime_now['_' ~ '_code__'] }}",
    "{{ raise_exception['_' ~ '_globals__'] }}",
    "{% macro m() %}{% endmacro %}{{ m._func }}",
    "{% for i in [1] recursive %}{{ loop._recurse }}{% endfor %}",
    "{% set g = messages | select %}{{ g.gi_frame }}",
    "{% set g = messages | select %}{{ g['gi_code'] }}",
    "{% set g = messages | select %}{{ g | attr('gi_frame') }}",
    "{% set g = messages | select %}{{ '{0.gi_frame}'.format(g) }}",
    "{% set g = messages | select %}{{ g.throw(1) }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({}) }}",
    "{{ (messages | attr('pop'))() }}",
    "{{ missing._fail_with_undefined_error }}",
    "{{ messages | tojson(default=cycler) }}",
]
"""Ways to Python's objects that other sandboxes had, and ways to change what the next conversation
would see."""


@pytest.mark.parametrize("template", HIDDEN)
def test_no_template_sees_python_itself(template):
    context = {"messages": [{"role": "user", "content": "a"}]}
    answer = compile_template(template)({"context": context, "max_characters": 100})
    assert list(answer) == ["error"] and "\n" not in answer["error"]
    assert context["messages"] == [{"role": "user", "content": "a"}]


@pytest.mark.parametrize("template", ESCAPES)
def test_an_escape_attempt_or_a_broken_template_is_a_load_error(template, tmp_path: Path):
    make_byte_level(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(ModelError, match=r"chat_template\.jinja") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_the_process_of_a_template_can_reach_nothing():
    template = ChatTemplate({"default": "{{ messages | length }}"}, {}, "here")
    template.render([{"role": "user", "content": "a"}])
    process = template._sandboxes["default", False]._process
    limits = dict(
        re.findall(r"Max ([a-z ]+?)  +(\d+) ", Path(f"/proc/{process.pid}/limits").read_text())
    )
    assert int(limits["address space"]) == 256 << 20
    for none in ("open files", "file size", "processes", "core file size"):
        assert limits[none] == "0"
    template.close()


def test_the_time_of_a_template_is_the_local_time(tmp_path: Path, monkeypatch):
    # RFC 8536: a header, then one type of local time, 14 hours ahead of UTC, and its name
    zone = (
        b"TZif"
        + bytes(16)
        + struct.pack(">6I", 0, 0, 0, 0, 1, 4)
        + struct.pack(">ibB", 14 * 3600, 0, 0)
        + b"FAR\0"
    )
    (tmp_path / "zone").write_bytes(zone)
    monkeypatch.setenv("TZ", f":{tmp_path / 'zone'}")
    template = ChatTemplate({"default": "{{ strftime_now('%d %H:%M') }}"}, {}, "here")
    far = timezone(timedelta(hours=14))
    before = datetime.now(far)
    rendered = template.render([{"role": "user", "content": "a"}])
    template.close()
    assert rendered in (before.strftime("%d %H:%M"), datetime.now(far).strftime("%d %H:%M"))


PYTHONS = {
    "none is iterable": "False",
    "'a' is sequence": "True",
    "raise_exception is callable": "True",
    "'%s' % 3": "3",
    "'' | int": "0",
    "'abc'.removeprefix('a')": "bc",
    "'a-b'.partition('-') | join('/')": "a/-/b",
    "1.0 | tojson": "1.0",
    "1e3 | tojson": "1000.0",
    "'%.2f' % 0.125": "0.12",
    "'a b' | wordwrap(1) | tojson": '"a\\nb"',
    "'\\N{BULLET}'": "•",
    "{'a': none} | pprint": "{'a': None}",
    "'<b>x</b>' | striptags": "x",
}
"""Expressions whose values Python and the documentation of jinja2 define."""


def test_expressions_have_the_values_of_python_and_lines_end_in_one_character():
    source = "".join("{{ " + expression + " }}\r\n" for expression in PYTHONS)
    assert rendered(ChatTemplate({"default": source + "\r\n"}, {}, "here")) == "\n".join(
        [*PYTHONS.values(), ""]
    )


@pytest.mark.parametrize(
    "template", ["{{ messages.unknown() }}", "{{ messages[0].content.unknown('a') }}"]
)
def test_a_method_that_an_object_lacks_is_named_and_the_process_lives(template):
    template = ChatTemplate(
        {"default": "{% if messages | length > 1 %}\n" + template + "{% endif %}"}, {}, "here"
    )
    message = {"role": "user", "content": "a"}
    assert template.render([message]) == ""
    process = template._sandboxes["default", False]._process
    with pytest.raises(
        ModelError,
        match=r"^the chat template in here fails: .* has no attribute 'unknown' \(line 2\)$",
    ):
        template.render([message, message])
    assert (
        template.render([message]) == ""
        and template._sandboxes["default", False]._process is process
    )
    template.close()


def test_what_a_template_says_is_one_short_line():
    template = ChatTemplate({"default": "{{ raise_exception('no\n' * 5000) }}"}, {}, "here")
    with pytest.raises(UsageError, match="refuses these messages: no no no") as caught:
        template.render(CONVERSATIONS["one"])
    template.close()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


QUADRATIC = """{% for message in messages %}{% set found = namespace(last=true) %}
{% for later in messages[loop.index:] %}{% if later.role == 'assistant' %}
{% set found.last = false %}{% endif %}{% endfor %}{{ message.content if found.last }}{% endfor %}"""
"""Like gpt-oss's: for each message it looks at all later ones."""


@pytest.mark.parametrize("count", [1601, pytest.param(4096, marks=pytest.mark.slow)])
def test_a_template_may_look_at_all_messages_for_each(count):
    template = ChatTemplate({"default": QUADRATIC}, {}, "here")
    assert template.render([{"role": "user", "content": "a"}] * count) == "a" * count
    template.close()


def test_the_time_for_a_conversation_grows_with_it_and_is_bounded(monkeypatch):
    template = ChatTemplate({"default": ""}, {}, "here")
    asked = []
    for sandbox in template._sandboxes.values():
        monkeypatch.setattr(
            sandbox, "ask", lambda line: asked.append(json.loads(line)["seconds"]) or {"text": ""}
        )
    for count in (1, 4096, 20_000):
        template.render([{"role": "user", "content": "a"}] * count)
    template.close()
    short, long, longest = asked
    assert short < 0.6  # a hostile template costs no more, at first
    assert long > 3 * 3.0  # three seconds under gpt-oss's template, here, and a slower machine
    assert longest < SILENCE_SECONDS  # after which the process would be taken for dead


def test_a_long_conversation_does_not_delay_a_short_one():
    template = ChatTemplate({"default": "{{ messages | length }}"}, {}, "here")
    message = {"role": "user", "content": "a"}
    with template._sandboxes["default", True]._lock:  # as while it renders
        assert template.render([message] * LONG_CONVERSATION) == "256"
    assert template.render([message] * (LONG_CONVERSATION + 1)) == "257"
    template.close()


def test_a_bomb_that_waits_for_its_moment_harms_only_that_conversation(tmp_path: Path):
    bomb = BOMBS["doubling"]
    template = (
        "{% if messages[0].content == 'now' %}" + bomb + "{% endif %}{{ messages[0].content }}"
    )
    tokenizer = load_tokenizer(make_byte_level(tmp_path, chat_template=template))
    with pytest.raises(ModelError, match="needs more memory than"):
        tokenizer.encode_chat([{"role": "user", "content": "now"}])
    assert (
        tokenizer.decode(tokenizer.encode_chat([{"role": "user", "content": "later"}])) == "later"
    )
    tokenizer.close()


def test_long_conversations_are_no_bombs(styles):
    messages = [
        {"role": role, "content": "word " * 50}
        for _ in range(1000)
        for role in ("user", "assistant")
    ]
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
    with pytest.raises(
        ProcessUnavailable, match="the process of the chat template was killed 2 times"
    ):
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
        with pytest.raises(
            ProcessUnavailable, match="the process of the chat template was ended"
        ) as caught:
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
    sandbox = LimitedProcess(
        "nanoserve.text.template_process", "the process of the chat template", {}
    )
    with pytest.raises(
        ProcessUnavailable, match="chat template cannot be started: Too many open files"
    ) as caught:
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
    template = load_chat_template(
        tmp_path, {"chat_template": {"default": "usual", "tool_use": "tools"}}, {}
    )
    assert template.render(CONVERSATIONS["one"], arguments={"tools": TOOLS}) == "tools"
    template.close()


def rendered(template) -> str:
    try:
        return template.render(CONVERSATIONS["one"])
    finally:
        template.close()


def test_generation_blocks_of_training_code_are_understood(tmp_path: Path):
    source = (
        "{% for m in messages %}{%- generation -%} {{ m.content }} {%- endgeneration %}\n{% endfor "
        "%}"
    )
    assert (
        rendered(load_chat_template(tmp_path, {"chat_template": source}, {})) == "Hello  there \n"
    )


def test_a_model_without_template_still_chats(tmp_path: Path):
    template = load_chat_template(tmp_path, {}, {})
    assert "no chat template" in template.notice
    assert (
        template.render(CONVERSATIONS["system"])
        == "System:  Be brief. \nUser: 你好 🦊 <b>&amp;</b>\nAssistant:"
    )
    with pytest.raises(UsageError, match="enable_thinking"):
        template.render(CONVERSATIONS["one"], arguments={"enable_thinking": True})


def test_content_parts_are_joined():
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert check_messages([{"role": "developer", "content": content}]) == [
        {"role": "system", "content": "a\nb"}
    ]


@pytest.mark.parametrize(
    "extra", [{"reasoning_content": "hm"}, {"tool_calls": []}, {"tool_calls": None}, {}]
)
def test_an_answer_without_content_is_an_empty_one(extra):
    (message,) = check_messages([{"role": "assistant", "content": None, **extra}])
    assert message == {
        "role": "assistant",
        "content": "",
        **{key: value for key, value in extra.items() if value is not None},
    }


def test_reasoning_has_both_names_that_templates_know():
    source = "{% for m in messages %}{{ m | tojson }}{% endfor %}"
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "hm"},
    ]
    template = ChatTemplate({"default": source}, SPECIAL, "here")
    expected = render_with_transformers(source, messages, add_generation_prompt=True, arguments={})
    assert template.render(messages) == expected and '"thinking": "hm"' in expected
    template.close()


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
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "image_url",
        ),
        ([{"role": "user", "content": ["a"]}], r"content\[0\]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "must be text"),
        ([{"role": "user", "content": "a", "colour": 1}], "unknown fields: colour"),
        ([{"role": "user", "content": "a", "name": object()}], "plain JSON"),
        (
            [{"role": "user", "content": "a", "tool_calls": [{"a": nested(500)}]}],
            "more than 64 levels deep",
        ),
        (
            [{"role": "assistant", "content": "a", "tool_calls": 5}],
            r"messages\[0\]\.tool_calls must be a list of objects",
        ),
        (
            [{"role": "assistant", "content": "a", "tool_calls": [{}, 5]}],
            "tool_calls must be a list of objects",
        ),
    ],
)
def test_malformed_messages_are_named(messages, problem):
    with pytest.raises(UsageError, match=problem):
        check_messages(messages)


@pytest.mark.parametrize("name", ["messages", "bos_token", "add_generation_prompt"])
def test_template_arguments_cannot_replace_what_nanoserve_sets(name, tokenizers):
    with pytest.raises(UsageError, match=name):
        tokenizers["byte-level"].encode_chat(CONVERSATIONS["one"], template_arguments={name: "x"})


def test_arguments_of_calls_come_as_text_and_reach_the_template_as_an_object():
    def given(arguments: Any) -> Any:
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
        (message,) = check_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
        return message["tool_calls"][0]["function"]["arguments"]

    assert given('{"a": [1, "x"]}') == given({"a": [1, "x"]}) == {"a": [1, "x"]}
    # what a model may have written
    for other in ("null", "", "[1]", '{"a":', "[" * 10_000, None, [1]):
        assert given(other) == {}
    for text in ('{"a": "\\ud800"}', '{"a": "\\u0000"}', '{"a":' * 70 + "1" + "}" * 70):
        with pytest.raises(UsageError):
            given(text)


def test_only_errors_spell_out_where_a_value_is():
    spelled = []

    class Key(str):
        def __format__(self, layout: str) -> str:
            spelled.append(self)
            return super().__format__(layout)

    def chat(innermost: Any) -> list:
        for _ in range(58):
            innermost = {Key("k" * 1000): innermost}
        return [
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}],
                "tool_calls": [innermost, *[{}] * 100],
            }
        ]

    (message,) = check_messages(chat([1, "a", None, {Key("b"): 2.5}] * 1000))
    assert message["tool_calls"] == chat([1, "a", None, {"b": 2.5}] * 1000)[0]["tool_calls"]
    assert spelled == []
    with pytest.raises(
        UsageError, match=r"^messages\[0\]\.tool_calls\[0\]\.kkk.* contains a NUL character"
    ) as caught:
        check_messages(chat([1, "\0"]))
    assert len(spelled) == 58 and len(str(caught.value)) < 150
