"""Check whether a JSON schema may be sent to the engine, in a process that may fail over it.

A schema is a small program from an untrusted client. llguidance does not limit all that it may
cost: a few thousand references in a row overflow the stack, and a large `multipleOf` computes for
minutes. In a process of its own, either ends that process and nothing else. A schema that passes
there is cheap enough for the engine.

The process runs `main`. It reads one JSON object per line: first {"directory": the tokenizer's},
then {"schema": text, "seconds": t} for each check. It answers each check with {} or {"error": why
not}.
"""

import json
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import msgspec

from nanoserve.errors import NanoserveError, UsageError
from nanoserve.utils.children import (
    LimitedProcess,
    answer_requests,
    limit_resources,
    take_questions,
)

if TYPE_CHECKING:
    from nanoserve.text.grammar.compiler import GrammarCompiler

_BY_NAME = ("properties", "patternProperties")
_PARTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items", "additionalProperties")

SECONDS = 0.25
"""Processor time of one check. The engine spends as much once, while others wait. Most schemas take
milliseconds."""
MAX_REMEMBERED = 256  # number of passed schemas that are remembered; each has at most 64 KiB
MEMORY_LIMIT = 2 << 30
STACK_LIMIT = 2 << 20
"""A quarter of the engine's stack."""


class GrammarChecker:
    """Tries JSON schemas in a process with bounded memory and time. Safe to use from several
    threads.

    The process starts with the first schema. ``directory`` is that of the model's tokenizer.
    """

    def __init__(self, directory: Path) -> None:
        self._process = LimitedProcess(
            "nanoserve.text.grammar.checker",
            "the process that tries JSON schemas",
            {"directory": str(directory)},
        )
        self._passed: OrderedDict[str, None] = OrderedDict()
        self._lock = threading.Lock()

    def knows(self, schema: str) -> bool:
        """Whether the schema has passed recently; answers at once."""
        with self._lock:
            if schema in self._passed:
                self._passed.move_to_end(schema)
                return True
            return False

    def check(self, schema: str) -> None:
        """Check that text can follow a schema. Raises UsageError if it cannot; the message says
        why."""
        if self.knows(schema):
            return
        answer = self._process.ask(json.dumps({"schema": schema, "seconds": SECONDS}))
        if answer is None:
            raise UsageError(
                f"the JSON schema is too complex: trying it took more than {SECONDS} s or too much "
                "memory"
            )
        if "error" in answer:
            raise UsageError(answer["error"])
        with self._lock:
            self._passed[schema] = None
            if len(self._passed) > MAX_REMEMBERED:
                self._passed.popitem(last=False)

    def close(self) -> None:
        """End the process; a later check would start another."""
        self._process.close()


# ---- in the process


def check(compiler: "GrammarCompiler", request: dict[str, Any]) -> dict[str, str]:
    """Compile a schema and take the first step; {} if that works."""
    schema = request["schema"]
    try:
        matcher = compiler.matcher(schema)
        compiler.forget(schema)
        check_schema(msgspec.json.decode(schema))
        matcher.allowed()
    except (NanoserveError, msgspec.DecodeError) as error:
        return {"error": str(error)}
    return {}


def main() -> None:
    """Serve checks until stdin closes. Loading the vocabulary does not count as time of the first
    check."""
    # numpy and the tokenizer: for this process alone
    from nanoserve.text.grammar.compiler import GrammarCompiler

    limit_resources(MEMORY_LIMIT, STACK_LIMIT)
    compiler = GrammarCompiler(Path(json.loads(sys.stdin.buffer.readline())["directory"]))
    failure: dict[str, str] | None = None
    try:
        assert compiler.vocabulary
    except NanoserveError as error:
        failure = {"error": str(error)}

    def answer(request: dict[str, Any]) -> dict[str, str]:
        if failure is not None:
            return failure
        return check(compiler, request)

    take_questions()
    answer_requests(answer)


# ---- checks beyond llguidance's: it accepts schemas that no finite text meets, and some that it
# cannot enforce


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raise UsageError for a schema that no finite JSON text meets, or that a grammar cannot
    enforce. It has passed llguidance, so its keywords are well formed and it is not nested too
    deeply to recurse."""
    if "x-guidance" in schema:  # its settings could allow text that is not JSON
        raise UsageError("JSON schema: x-guidance is not supported")
    targets: dict[str, Any] = {}
    to_do: list[Any] = [schema]
    while to_do:
        for node in _subschemas(to_do.pop()):
            _check_property_count(node)
            ref = node.get("$ref")
            if isinstance(ref, str) and ref not in targets:
                targets[ref] = _resolve(schema, ref)
                to_do.append(targets[ref])
    # The least fixed point: a reference has a finite value only if its target has one by the
    # references known so far.
    endless = set(targets)
    while found := {ref for ref in endless if _is_finite(targets[ref], endless)}:
        endless -= found
    if not _is_finite(schema, endless):
        raise UsageError(
            "the JSON schema refers to itself without end: no text can ever be complete"
        )


def _check_property_count(node: Mapping[str, Any]) -> None:
    """Refuse a large minProperties: a grammar does not know the names so far, so it can enforce
    only one free name."""
    required = node.get("required")
    names = 0
    if isinstance(required, list):
        names = len(set(required))
    least = node.get("minProperties")
    if isinstance(least, int | float) and least > names + 1:
        raise UsageError(
            f"JSON schema: minProperties {least} is not supported: at most one more than are "
            "required"
        )


def _subschemas(schema: Any) -> Iterator[Mapping[str, Any]]:
    """The schema and all schemas within it; schemas that only a reference reaches are left out."""
    if not isinstance(schema, dict):
        return
    yield schema
    children: list[Any] = []
    for word in _BY_NAME:
        named = schema.get(word)
        if isinstance(named, dict):
            children += named.values()
    for word in _PARTS:
        part = schema.get(word)
        if isinstance(part, list):
            children += part
        else:
            children.append(part)
    for child in children:
        yield from _subschemas(child)


def _resolve(schema: Any, reference: str) -> Any:
    """The target of a JSON pointer into the schema (RFC 6901); None for other references."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    target = schema
    for part in unquote(reference[1:]).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        try:
            if isinstance(target, list):
                target = target[int(name)]
            else:
                target = target[name]
        except (KeyError, IndexError, ValueError, TypeError):
            return None
    return target


def _is_finite(schema: Any, endless: set[str]) -> bool:
    """Whether the schema has a finite value, if the references in `endless` have none."""
    if not isinstance(schema, dict):
        return True
    if schema.get("$ref") in endless:
        return False
    if not all(_is_finite(part, endless) for part in schema.get("allOf", ())):
        return False
    for word in ("anyOf", "oneOf"):
        if word in schema and not any(_is_finite(part, endless) for part in schema[word]):
            return False
    return _is_own_type_finite(schema, endless)


def _is_own_type_finite(schema: Mapping[str, Any], endless: set[str]) -> bool:
    if "const" in schema or "enum" in schema:
        return True
    types = schema.get("type", "string")
    if isinstance(types, str):
        types = [types]
    checks = {"object": _is_object_finite, "array": _is_array_finite}
    return any(kind not in checks or checks[kind](schema, endless) for kind in types)


def _is_object_finite(schema: Mapping[str, Any], endless: set[str]) -> bool:
    properties = schema.get("properties", {})
    others = schema.get("additionalProperties")
    return all(
        _is_finite(properties.get(name, others), endless) for name in schema.get("required", ())
    )


def _is_array_finite(schema: Mapping[str, Any], endless: set[str]) -> bool:
    least = schema.get("minItems", 0)
    first = schema.get("prefixItems", [])
    if not all(_is_finite(item, endless) for item in first[: int(least)]):
        return False
    return least <= len(first) or _is_finite(schema.get("items"), endless)
