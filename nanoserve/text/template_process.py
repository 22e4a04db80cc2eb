"""The process in which chat templates run: `python -c "from nanoserve.text.template_process import main; main()"`.

A chat template is a small program that arrives with the weights. minijinja offers it no way out, and fuel bounds its
instructions, but thirty that each double a string ask for a terabyte. Memory and processor time can only be bounded for
a process, so each template gets one. It reads one JSON object per line: first {"template": source}, then {"context":
{...}, "fuel": n, "max_characters": n, "seconds": t} for each rendering. It answers each rendering with {"text": ...},
{"refusal": the template's own words to the user} or {"error": ...}.
"""

import json
import sys
from datetime import datetime
from typing import Any

import minijinja

from nanoserve.processes.children import answer_requests, limit_resources

MEMORY_LIMIT = 256 << 20


class Refusal(Exception):
    """The template called `raise_exception`."""


def build_environment() -> minijinja.Environment:
    """minijinja with the settings, filters and functions that HF transformers gives to chat templates."""
    environment = minijinja.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.auto_escape_callback = lambda _name: False
    environment.add_filter("tojson", to_json)
    environment.add_global("raise_exception", refuse)
    environment.add_global("strftime_now", lambda layout: datetime.now().strftime(layout))
    return environment


def to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - templates pass these by position
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002 - as above
) -> str:
    """Plain JSON. The filter of the template engine would escape the special characters of HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def refuse(message: str) -> None:
    """The function `raise_exception`, which a template calls when it cannot render a conversation."""
    raise Refusal(message)


def describe(error: minijinja.TemplateError) -> str:
    """The message of an error and its line, without the excerpt of the source."""
    line = f" (line {error.line})" if error.line else ""
    return f"{error.message.split(' (in <string>')[0]}{line}"


def render(environment: minijinja.Environment, template: str, request: dict[str, Any]) -> dict[str, str]:
    """Answer one request; see the module's docstring."""
    environment.fuel = request["fuel"]
    try:
        text = environment.render_str(template, **request["context"])
    except Refusal as refusal:
        return {"refusal": str(refusal)}
    except minijinja.TemplateError as error:
        return {"error": describe(error)}
    except (TypeError, ValueError, RecursionError, MemoryError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    if len(text) > request["max_characters"]:
        return {"error": f"it wrote more than {request['max_characters']} characters"}
    return {"text": text}


def main() -> None:
    """Serve renderings until stdin closes."""
    limit_resources(MEMORY_LIMIT)
    environment = build_environment()
    template = json.loads(sys.stdin.buffer.readline())["template"]
    answer_requests(lambda request: render(environment, template, request))
