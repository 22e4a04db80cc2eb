"""The process in which chat templates run: `python -c "from nanoserve.text.template_process import
main; main()"`.

A chat template is a small program that arrives with the weights. The sandbox of jinja2 offers it no
way to Python's objects, but thirty instructions that each double a string ask for a terabyte.
Memory and processor time can only be bounded for a process, so each template gets one. That process
can open neither files nor sockets: code that found a way out of the sandbox could read nothing and
send nothing.

It reads one JSON object per line: first {"template": source, "seconds": t}, then {"context": {...},
"max_characters": n, "seconds": t} for each rendering. It answers each rendering with {"text": ...},
{"refusal": the template's own words to the user} or {"error": ...}.
"""

import codecs
import importlib
import json
import re
import sys
import time
import traceback
from collections.abc import Callable
from datetime import datetime
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from nanoserve.utils.children import (
    answer_requests,
    forbid_files_and_processes,
    limit_resources,
    limit_time,
    take_questions,
)

MEMORY_LIMIT = 256 << 20

_LONGEST_MESSAGE = 300
_LATE_MODULES = ("html", "jinja2.debug", "pprint", "textwrap", "unicodedata")
_DUNDER = re.compile(r"__[a-zA-Z_]+__")
_FILE_NAME = "<template>"  # the name that jinja2 gives to a template without a file


class Refusal(Exception):
    """The template called `raise_exception`."""


class GenerationTag(Extension):
    """The statement `generation`, by which training code finds the assistant's text. It writes its
    body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse it to a call of the block, as in training code, so that variables set inside end
        with it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

    def _written(self, caller: Callable[[], str]) -> str:
        return caller()


class Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox of jinja2. A hidden attribute is an error at once; jinja2 would give an empty
    value."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        """Raise SecurityError for an attribute that is Python's own, or that would change a
        value."""
        raise SecurityError(f"{attribute!r} of {type(obj).__name__!r} is not for templates")


class PlainNamespace(Namespace):
    """The function `namespace` of templates. Names with an underscore in front are Python's own,
    and refused."""

    def __init__(self, /, *values: Any, **names: Any) -> None:
        attributes = dict(*values, **names)
        for name in attributes:
            check_name(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        check_name(name)
        super().__setitem__(name, value)


class DictMaker:
    """The function `dict` of templates: Python's class would have more to offer than new dicts."""

    def __call__(self, *values: Any, **names: Any) -> dict[Any, Any]:
        return dict(*values, **names)

    def fromkeys(self, *values: Any) -> dict[Any, Any]:
        """A dict with these keys."""
        return dict.fromkeys(*values)


def check_name(name: Any) -> None:
    """Raise SecurityError for a name that a namespace must not have."""
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no attribute {name!r}")


def build_environment() -> Sandbox:
    """The sandbox with the settings, filters and functions that HF transformers gives to chat
    templates."""
    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    environment.globals["dict"] = DictMaker()
    environment.globals["namespace"] = PlainNamespace
    del environment.globals["lipsum"]  # dummy text, which reads another file
    return environment


def to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - templates pass these by position
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002 - as above
) -> str:
    """Plain JSON. The filter of the template engine would escape the special characters of HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def refuse(message: Any) -> None:
    """The function `raise_exception`, which a template calls when it cannot render a
    conversation."""
    raise Refusal(one_line(message))


def one_line(message: Any) -> str:
    """The message on one line, cut where it is very long."""
    return " ".join(str(message).split())[:_LONGEST_MESSAGE]


def describe(error: Exception) -> str:
    """The message of an error and the line of the template, on one line."""
    if isinstance(error, MemoryError):
        return "it needs more memory than a template may have"
    lines = [
        line
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename == _FILE_NAME
    ]
    if isinstance(error, TemplateSyntaxError):
        lines = [error.lineno]
    message = one_line(error)
    if not isinstance(error, TemplateError):
        message = f"{type(error).__name__}: {message}"
    if lines:
        message += f" (line {lines[-1]})"
    return message


def check_names(tree: nodes.Template) -> None:
    """Raise SecurityError for a template that names Python's own attributes, even in code that
    would not run."""
    for node in tree.find_all((nodes.Name, nodes.Getattr, nodes.Const)):
        words = (
            getattr(node, "name", None),
            getattr(node, "attr", None),
            getattr(node, "value", None),
        )
        for word in words:
            if isinstance(word, str) and (found := _DUNDER.search(word)):
                raise SecurityError(f"it reaches for {found.group()} in line {node.lineno}")


def load_files() -> None:
    """Load modules and files that a running template would need; later no file can be opened."""
    for module in _LATE_MODULES:
        importlib.import_module(module)
    codecs.lookup("unicode_escape")  # decodes the strings of templates
    time.localtime()  # reads the time zone


def compile_template(source: str) -> Callable[[dict[str, Any]], dict[str, str]]:
    """The function that answers requests with this template. If it is malformed, each answer says
    so."""
    environment = build_environment()
    try:
        tree = environment.parse(source)
        check_names(tree)
        template = environment.from_string(tree)
    except Exception as error:  # also those of Python's own compiler
        failure = {"error": describe(error)}
        return lambda _: failure
    return lambda request: render(template, request)


def render(template: Template, request: dict[str, Any]) -> dict[str, str]:
    """Answer one request; see the module's docstring."""
    try:
        text = template.render(request["context"])
        text.encode()
    except Refusal as refusal:
        return {"refusal": str(refusal)}
    except UnicodeEncodeError:
        return {"error": "it wrote a lone surrogate, which is not valid Unicode"}
    # a template reaches the methods of all plain values, and their errors
    except Exception as error:
        return {"error": describe(error)}
    if len(text) > request["max_characters"]:
        return {"error": f"it wrote more than {request['max_characters']} characters"}
    return {"text": text}


def main() -> None:
    """Serve renderings until stdin closes."""
    limit_resources(MEMORY_LIMIT)
    load_files()
    forbid_files_and_processes()
    greeting = json.loads(sys.stdin.buffer.readline())
    take_questions()
    limit_time(greeting["seconds"])
    answer = compile_template(greeting["template"])
    limit_time(0)
    answer_requests(answer)
