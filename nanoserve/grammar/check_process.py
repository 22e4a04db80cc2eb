"""The process in which schemas are tried: `python -c "from nanoserve.grammar.check_process import main; main()"`.

A schema is a small program from an untrusted client. llguidance limits most of what it may cost, but not everything:
one with a few thousand references in a row overflows the stack, and one with a large `multipleOf` computes for minutes.
Here, either ends this process and nothing else. A schema that passes here is cheap enough for the engine.

The process reads one JSON object per line: first {"directory": the tokenizer's}, then {"schema": text, "seconds": t}
for each check. It answers each check with {} or {"error": why not}.
"""

import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from nanoserve.errors import NanoserveError
from nanoserve.grammar.compiler import GrammarCompiler
from nanoserve.grammar.schema import check_schema
from nanoserve.processes.children import answer_requests, limit_resources, limit_time

MEMORY_LIMIT = 2 << 30
STACK_LIMIT = 2 << 20
"""A quarter of the engine's stack."""


def check(compiler: GrammarCompiler, request: dict[str, Any]) -> dict[str, str]:
    """Compile a schema and take the first step; {} if that works."""
    schema = request["schema"]
    try:
        limit_time(0)
        assert compiler.vocabulary  # the time to load it does not count
        limit_time(request["seconds"])
        matcher = compiler.matcher(schema)
        compiler.forget(schema)
        check_schema(msgspec.json.decode(schema))
        matcher.allowed()
    except (NanoserveError, msgspec.DecodeError) as error:
        return {"error": str(error)}
    return {}


def main() -> None:
    """Serve checks until stdin closes."""
    limit_resources(MEMORY_LIMIT, STACK_LIMIT)
    compiler = GrammarCompiler(Path(json.loads(sys.stdin.buffer.readline())["directory"]))
    answer_requests(lambda request: check(compiler, request))
