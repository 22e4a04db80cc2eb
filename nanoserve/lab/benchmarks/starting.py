"""The time from the start of a process to its first token, by stage. The parent has no torch.

A child runs this module with the monotonic time of its start, the model and LLM's settings, both in
JSON. Its last line tells when it reached each stage and what then ran.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoserve.utils.children import run_module

if TYPE_CHECKING:
    from nanoserve.request import RequestOutput

_TOKENS = ("first token", "second token", "third token")
STAGES = (
    "python",
    "import torch",
    "import nanoserve",
    "load",
    *_TOKENS,
    "build operators",
    "compile layers",
)
TO_FIRST_TOKEN = STAGES[: STAGES.index("first token") + 1]
_PROMPT = tuple(range(5, 21))
_PREPARATIONS = {"building operators": "build operators", "compiling layers": "compile layers"}


def start_once(
    model: str | None, settings: dict[str, object], threads: int | None, cache: Path
) -> dict[str, Any]:
    """Run one process that opens the model with these settings of LLM and generates; ``cache`` is
    where it builds. Returns seconds of each stage ("stages") and up to the first token
    ("to_first_token"), and what ran in the end ("operators", "layers"). Raises RuntimeFailure with
    the process's last line if it fails."""
    words = repr(time.monotonic()), json.dumps(model), json.dumps(settings)
    environment = {"XDG_CACHE_HOME": str(cache)}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    failing = "a process that was to start failed: "
    said = run_module(
        "nanoserve.lab.benchmarks.starting", *words, environment=environment, failing=failing
    )
    stages = stage_lengths(said.pop("marks"))
    return {
        "stages": stages,
        "to_first_token": sum(stages[name] for name in TO_FIRST_TOKEN),
        **said,
    }


def stage_lengths(marks: dict[str, float]) -> dict[str, float]:
    """Turn times since the start into the length of each stage, in order."""
    ends = [0.0] + [marks[name] for name in STAGES]
    return {name: end - before for name, (before, end) in zip(STAGES, pairwise(ends), strict=True)}


def drop_from_page_cache(paths: Iterable[Path]) -> int:
    """Ask the system to forget the contents of these files and of all files below these
    directories; pages that another process has mapped stay. Returns the number of files, 0 where it
    cannot be asked."""
    count = 0
    if not hasattr(os, "posix_fadvise"):
        return count
    for path in paths:
        files = [path]
        if path.is_dir():
            files = sorted(path.rglob("*"))
        for file in files:
            with suppress(OSError):
                if file.is_file():
                    with file.open("rb") as opened:
                        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                    count += 1
    return count


def library_directories() -> list[Path]:
    """Directories of torch and nanoserve."""
    found = [find_spec(name) for name in ("torch", "nanoserve")]
    return [
        Path(spec.origin).parent for spec in found if spec is not None and spec.origin is not None
    ]


def mark_tokens(outputs: "Iterable[RequestOutput]", mark: Callable[[str], None]) -> None:
    """Mark the stage of each token as it comes. A token that ends amid a character comes with a
    later one."""
    known = 0
    for output in outputs:
        new = sum(len(completion.token_ids) for completion in output.outputs)
        for name in _TOKENS[known : known + new]:
            mark(name)
        known += new


def _start_here(began: float, model: str | None, settings: dict[str, Any]) -> dict[str, Any]:
    """The child: import, load, answer, and wait for what was built meanwhile; ``marks`` are the
    ends of the stages."""
    marks: dict[str, float] = {}

    def mark(stage: str) -> None:
        marks[stage] = time.monotonic() - began

    mark("python")
    import torch  # noqa: F401  (importing it is what is timed)

    mark("import torch")
    from nanoserve.llm import LLM
    from nanoserve.request import SamplingParams

    mark("import nanoserve")
    with LLM(model, **settings) as llm:
        mark("load")
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=len(_TOKENS))
        mark_tokens(llm.stream(_PROMPT, params), mark)
        answered = time.monotonic() - began
        llm.built.prepare(lambda stage, *_: mark(_PREPARATIONS[stage]))
        for name in _PREPARATIONS.values():  # one that took no time was not spoken of
            answered = marks.setdefault(name, answered)
        from nanoserve.lab.benchmarks.settling import settle

        facts = settle(llm)
        return {"marks": marks, "operators": facts["operators"], "layers": facts["layers"]}


if __name__ == "__main__":
    print(
        "\n"
        + json.dumps(
            _start_here(float(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3]))
        )
    )
