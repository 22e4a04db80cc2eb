"""How heavy the code is: lines by room, class names that are used twice, and what a token of a chat visits.

    python -m scripts.code_weight

A token is followed with `sys.setprofile` through an uncompiled chat with the bundled model; only nanoserve's own
functions are counted. The test of this script holds three of its figures below a ceiling.
"""

import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from nanoserve.papers.gllm.code_size import PACKAGES, ROOT, Room, rooms, sources, together


@dataclass(slots=True)
class Visit:
    """The functions of nanoserve that ran while something was done, each with the number of its calls."""

    calls: Counter[CodeType] = field(default_factory=Counter)

    @property
    def files(self) -> list[str]:
        """Paths below the root, sorted."""
        return sorted({str(Path(code.co_filename).relative_to(ROOT)) for code in self.calls})

    def observe(self, frame: FrameType, event: str, argument: Any) -> None:
        """A profile function for `sys.setprofile`."""
        if event == "call" and frame.f_code.co_filename.startswith(OWN) and frame.f_code.co_name != "<module>":
            self.calls[frame.f_code] += 1


OWN = tuple(f"{ROOT / package}/" for package in PACKAGES)


def repeated_class_names() -> dict[str, int]:
    """Public class names that more than one file defines, and how many do."""
    places = defaultdict[str, set[Path]](set)
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].add(path)
    return {name: len(found) for name, found in sorted(places.items()) if len(found) > 1}


def visits() -> tuple[Visit, Visit, Visit]:
    """What the first token of a chat's answer visits, from the question on; what a later one visits; and what all of
    plain serving does, from loading the model to the end of an answer."""
    from nanoserve import LLM, SamplingParams

    question = [{"role": "user", "content": "Tell me a story about a cat."}]
    first, later, whole = Visit(), Visit(), Visit()
    models: list[LLM] = []
    observed(lambda: models.append(LLM(eager=True, kv_cache_memory=64 << 20)), whole)
    with models[0] as llm:
        params = SamplingParams(max_tokens=8, seed=1)
        observed(lambda: llm.chat(question, params), whole)  # the visits of a token leave out what happens once
        stream = llm.stream(question, params)
        stream.close()

        def ask() -> None:
            nonlocal stream
            stream = llm.stream(question, params)
            next(stream)

        observed(ask, first)
        next(stream)
        observed(lambda: next(stream), later)
        stream.close()
    return first, later, whole


def observed(action: Callable[[], Any], visit: Visit) -> None:
    """Do something while a visit takes note."""
    sys.setprofile(visit.observe)
    try:
        action()
    finally:
        sys.setprofile(None)


def _print_rooms(by_room: Mapping[str, Room]) -> None:
    for room, size in by_room.items():
        print(f"{room:28} {size.files:4} files {size.lines:7,} lines {size.code:7,} of code")
    product = together(size for room, size in by_room.items() if room.startswith("nanoserve"))
    print(f"{'nanoserve':28} {product.files:4} files {product.lines:7,} lines {product.code:7,} of code")


def main() -> None:
    """Print all of it."""
    _print_rooms(rooms())
    names = repeated_class_names()
    print(f"\n{len(names)} class names stand in more than one file: {', '.join(f'{n} x{k}' for n, k in names.items())}")
    *tokens, whole = visits()
    for name, visit in zip(("first", "later"), tokens, strict=True):
        print(f"\n{name} token: {len(visit.files)} files, {len(visit.calls)} functions, {visit.calls.total()} calls")
        print("  " + "\n  ".join(visit.files))
    lines = sum(len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in whole.files)
    print(f"\nplain serving on one device: {len(whole.files)} files of {lines:,} lines")
    print("  " + "\n  ".join(whole.files))


if __name__ == "__main__":
    main()
