"""The weight of the code: lines by room, class names that are used twice, and what a token of a
chat visits.

    python -m scripts.code_weight

A token is followed with `sys.setprofile` through an uncompiled chat with the bundled model; only
nanoserve's own functions are counted. The test of this script holds three of its figures below a
ceiling.
"""

import ast
import inspect
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from nanoserve.lab.papers.gllm.code_size import PACKAGES, ROOT, rooms, sources, together

OWN = tuple(f"{ROOT / package}/" for package in PACKAGES)


class Function(NamedTuple):
    """A function that was called."""

    file: str  # below the root
    name: str
    num_lines: int

    @property
    def is_engine(self) -> bool:
        """Whether it is neither the model's nor an operator's."""
        return not self.file.startswith(("nanoserve/models/", "triton_ops/"))


@dataclass(slots=True)
class Visit:
    """The functions of nanoserve that ran while something was done, each with the number of its
    calls."""

    calls: Counter[CodeType] = field(default_factory=Counter)

    @property
    def functions(self) -> list[Function]:
        """Named functions, by file: comprehensions are no functions to a reader."""
        functions = []
        for code in self.calls:
            if not code.co_name.startswith("<"):
                file = str(Path(code.co_filename).relative_to(ROOT))
                functions.append(Function(file, code.co_qualname, _num_lines(code)))
        return sorted(functions)

    @property
    def files(self) -> list[str]:
        """Paths below the root, sorted."""
        return sorted({str(Path(code.co_filename).relative_to(ROOT)) for code in self.calls})

    def observe(self, action: Callable[[], Any]) -> Any:
        """Do something and count its calls; its result."""
        sys.setprofile(self._count)
        try:
            return action()
        finally:
            sys.setprofile(None)

    def _count(self, frame: FrameType, event: str, argument: Any) -> None:
        if (
            event == "call"
            and frame.f_code.co_filename.startswith(OWN)
            and frame.f_code.co_name != "<module>"
        ):
            self.calls[frame.f_code] += 1


def _num_lines(code: CodeType) -> int:
    lines, _ = inspect.getsourcelines(code)
    return len(lines)


def repeated_class_names() -> dict[str, int]:
    """Public class names that more than one file defines, and the number of these files."""
    places = defaultdict[str, set[Path]](set)
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].add(path)
    return {name: len(found) for name, found in sorted(places.items()) if len(found) > 1}


def visits() -> tuple[Visit, Visit, Visit]:
    """Run a chat and record the functions visited for an answer's first token, from the question
    on; for a later token; and for all of plain serving, from loading the model to the end of an
    answer."""
    from nanoserve import LLM, SamplingParams

    question = [{"role": "user", "content": "Tell me a story about a cat."}]
    params = SamplingParams(max_tokens=8, seed=1)
    first, later, whole = Visit(), Visit(), Visit()
    with whole.observe(lambda: LLM(eager=True, kv_cache_memory=64 << 20)) as llm:
        # the visits of a token leave out what happens once
        whole.observe(lambda: llm.chat(question, params))
        llm.stream(question, params).close()
        answer = first.observe(lambda: _begun(llm.stream(question, params)))
        with closing(answer):
            next(answer)
            later.observe(lambda: next(answer))
    return first, later, whole


def _begun(answer: Any) -> Any:
    next(answer)
    return answer


def main() -> None:
    by_room = rooms()
    whole_product = together(size for room, size in by_room.items() if room.startswith("nanoserve"))
    for room, size in {**by_room, "nanoserve": whole_product}.items():
        print(f"{room:28} {size.files:4} files {size.lines:7,} lines {size.code:7,} of code")
    names = repeated_class_names()
    print(
        f"\n{len(names)} class names stand in more than one file: "
        f"{', '.join(f'{n} x{k}' for n, k in names.items())}"
    )
    *tokens, whole = visits()
    for name, visit in zip(("first", "later"), tokens, strict=True):
        print(
            f"\n{name} token: {len(visit.files)} files, {len(visit.calls)} functions, "
            f"{visit.calls.total()} calls"
        )
        engine = [function for function in visit.functions if function.is_engine]
        print(f"  {len(engine)} named functions outside models/ and triton_ops/")
        for file in visit.files:
            print(f"  {sum(function.file == file for function in visit.functions):4} {file}")
    lines = sum(len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in whole.files)
    print(f"\nplain serving on one device: {len(whole.files)} files of {lines:,} lines")
    print("  " + "\n  ".join(whole.files))


if __name__ == "__main__":
    main()
