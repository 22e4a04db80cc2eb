"""Faults of a machine: the answer is the same, there is one notice at most, and
nothing crashes.

Each fault is brought about for a process of its own, ``nanoserve generate`` with the bundled model.
`tests/triton_ops/test_cpu_build.py` brings the compiler's faults about without one.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from nanoserve import LLM
from nanoserve.request import SamplingParams
from triton_ops.cpu.toolchain import make_job

ROOT = Path(__file__).parents[2]
PROMPT = "Once upon a time"
TOKENS = 12
FAILING = '#!/bin/sh\ncase "$*" in *--version*) echo broken 1; exit 0;; esac\necho "x.cpp:1: error: no" >&2; exit 1\n'
PRETENDING = (
    '#!/bin/sh\ncase "$*" in *--version*) echo fake 1; exit 0;; esac\n'
    'for last; do [ "$previous" = "-o" ] && out=$last; previous=$last; done\necho library > "$out"\n'
)
PATIENCE = 600.0


@pytest.fixture(scope="module")
def story(storyteller: LLM) -> str:
    """The answer that every process must give."""
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS)
    return storyteller.generate(PROMPT, params)[0].outputs[0].text


def answer(*, core: int | None = None, **environment: str | None) -> tuple[str, list[str]]:
    """Return the output of ``nanoserve generate``, and its notices, with variables changed (None: not set at
    all)."""
    variables = {
        name: value for name, value in (os.environ | environment).items() if value is not None
    }
    words = ["cli.py", "generate", PROMPT, "-n", str(TOKENS), "-t", "0", "--dtype", "float32"]
    words += ["--kv-cache-memory", "16MiB"]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        preexec_fn=None if core is None else lambda: os.sched_setaffinity(0, {core}),
    )
    assert done.returncode == 0, done.stderr
    # said where loading takes long, which is no fault
    how_far = re.compile(r"^(loading|prompt) .*\d+ s$")
    return done.stdout.removesuffix("\n"), [
        line for line in done.stderr.splitlines() if not how_far.search(line)
    ]


def compiler(folder: Path, script: str) -> str:
    """A C++ compiler that does what the script says."""
    path = folder / "compiler"
    path.write_text(script)
    path.chmod(0o755)
    return str(path)


@pytest.mark.slow
def test_no_compiler(tmp_path: Path, story: str) -> None:
    (tmp_path / "empty").mkdir()
    text, notices = answer(PATH=str(tmp_path / "empty"), CXX=None, XDG_CACHE_HOME=str(tmp_path))
    assert text == story
    assert len(notices) == 1
    assert "no C++ compiler was found; install one of g++" in notices[0]


@pytest.mark.slow
def test_a_compiler_that_fails(tmp_path: Path, story: str) -> None:
    """The first process answers while it is tried, the next one tells."""
    broken = {"CXX": compiler(tmp_path, FAILING), "XDG_CACHE_HOME": str(tmp_path)}
    assert answer(**broken) == (story, [])
    deadline = time.monotonic() + PATIENCE
    while not list((tmp_path / "nanoserve" / "operators").glob("*.failed")):
        assert time.monotonic() < deadline, "the compiler was not called"
        time.sleep(0.05)
    text, notices = answer(**broken)
    assert text == story
    assert len(notices) == 1
    assert "x.cpp:1: error: no" in notices[0]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["file", "/proc"])
def test_a_cache_folder_that_cannot_be_written(tmp_path: Path, story: str, place: str) -> None:
    """A file where the folder should be, and a file system in which not even root makes folders."""
    (tmp_path / "file").write_text("")
    text, notices = answer(XDG_CACHE_HOME=str(tmp_path / place), CXX=compiler(tmp_path, PRETENDING))
    assert text == story
    assert len(notices) == 1
    assert "the cache folder" in notices[0] and "cannot be made" in notices[0]


@pytest.mark.slow
def test_a_cache_that_was_built_for_another_instruction_set(tmp_path: Path, story: str) -> None:
    """The file there is no library at all: a process that tried to load it would say so."""
    here = {"CXX": compiler(tmp_path, PRETENDING), "XDG_CACHE_HOME": str(tmp_path)}
    assert make_job(os.environ | here).run()
    text, notices = answer(**here)
    assert text == story
    assert len(notices) == 1 and "does not load" in notices[0]
    older = {"AVX512": "avx2", "AVX2": "default"}.get(torch.backends.cpu.get_cpu_capability())
    if older is None:
        pytest.skip("this processor has one instruction set only")
    assert answer(**here, ATEN_CPU_CAPABILITY=older) == (story, [])


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="processes cannot be bound to a core here"
)
@pytest.mark.parametrize("threads", [None, "4"])
def test_one_core_only(story: str, threads: str | None) -> None:
    text, notices = answer(core=min(os.sched_getaffinity(0)), OMP_NUM_THREADS=threads)
    assert text == story
    assert len(notices) <= 1  # where these tests run there may be no compiler


@contextmanager
def busy_neighbours() -> Iterator[None]:
    """Every core has a process that never rests."""
    neighbours = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(os.cpu_count() or 1)
    ]
    try:
        yield
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()


@pytest.mark.slow
def test_busy_neighbours(story: str) -> None:
    with busy_neighbours():
        text, notices = answer(OMP_NUM_THREADS=None)
    assert text == story
    assert len(notices) <= 1
