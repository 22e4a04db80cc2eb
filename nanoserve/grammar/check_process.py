"""The process in which schemas are tried: `python -c "from nanoserve.grammar.check_process import main; main()"`.

A schema is a small program from a stranger. llguidance limits much of what it may cost, but not everything: one with
a few thousand references in a row overflows the stack, one with a large `multipleOf` computes for minutes. Here either
ends this process and nothing else; what passes here is cheap enough for the engine.

It reads one JSON object per line: first {"directory": the tokenizer's}, then {"schema": text, "seconds": t} for each
check. It answers each check with {} or {"error": why not}.
"""

import json
import sys
from pathlib import Path

import msgspec

from nanoserve.errors import NanoserveError
from nanoserve.grammar.compiler import GrammarCompiler
from nanoserve.grammar.schema import check_schema
from nanoserve.text.process_limits import limit_resources, limit_time

MEMORY_LIMIT = 2 << 30
STACK_LIMIT = 2 << 20
"""A quarter of what the engine has."""


def check(compiler: GrammarCompiler, schema: str) -> None:
    """Compile a schema and take the first step.

    Raises:
        NanoserveError: saying what is wrong with it.
    """
    matcher = compiler.matcher(schema)
    compiler.forget(schema)
    check_schema(msgspec.json.decode(schema))
    matcher.allowed()


def main() -> None:
    """Serve checks until stdin closes."""
    limit_resources(MEMORY_LIMIT, STACK_LIMIT)
    compiler = GrammarCompiler(Path(json.loads(sys.stdin.buffer.readline())["directory"]))
    for line in sys.stdin.buffer:
        request = json.loads(line)
        answer = {}
        try:
            assert compiler.vocabulary  # loading it is not the schema's fault
            limit_time(request["seconds"])
            check(compiler, request["schema"])
        except (NanoserveError, msgspec.DecodeError) as error:
            answer = {"error": str(error)}
        limit_time(0)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()
