"""Faults on the way to the CPU's own operators end in one notice and plain torch, never
in a crash."""

import logging
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.processes import MARK, new_mark, wait_for_processes
from triton_ops.cpu import CpuOperators, background, building, cpu_operators, toolchain
from triton_ops.cpu.toolchain import make_job

LIBRARY_OF_NOTHING = """#!/bin/sh
case "$*" in *--version*) echo "fake compiler 1"; exit 0;; esac
echo called >> "$0.calls"
for last; do [ "$previous" = "-o" ] && out=$last; previous=$last; done
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An empty cache folder and no compiler."""
    return {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PATH": str(tmp_path), "HOME": str(tmp_path)}


def fake_compiler(environment: dict[str, str], tail: str) -> Path:
    """A compiler that does what the shell script says, $out being the file that it is to write."""
    script = Path(environment["PATH"]) / "g++"
    script.write_text(LIBRARY_OF_NOTHING + tail)
    script.chmod(0o755)
    return script


def notices(caplog: pytest.LogCaptureFixture) -> list[str]:
    """List the notices of problems, without the notice that it compiles."""
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return [message for message in said if not message.startswith("nanoserve: compiling ")]


def test_no_compiler_is_one_notice(
    environment: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    operators = CpuOperators(environment)
    assert not operators.expected and not operators.poll() and not operators.wait()
    assert len(notices(caplog)) == 1
    assert "no C++ compiler was found; install one of g++" in notices(caplog)[0]


def test_a_compiler_that_is_named_but_missing(
    environment: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    CpuOperators(environment | {"CXX": "/nowhere/c++ -v"})
    assert "named by CXX, /nowhere/c++, is not there" in notices(caplog)[0]


def test_a_failing_compiler_is_quoted_and_not_tried_again(
    environment: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    script = fake_compiler(environment, 'echo "x.cpp:1: error: no such thing" >&2; exit 1\n')
    assert not CpuOperators(environment).wait()
    assert not CpuOperators(environment).expected
    assert script.with_suffix(".calls").read_text() == "called\n"
    assert len(notices(caplog)) == 2
    assert all("x.cpp:1: error: no such thing" in notice for notice in notices(caplog))
    assert "again if you delete" in notices(caplog)[1]


def calls(script: Path) -> int:
    """How often the compiler was asked to compile or to link."""
    told = script.with_suffix(".calls")
    return told.read_text().count("called") if told.exists() else 0


def test_a_failure_is_remembered_until_the_compiler_is_another(environment: dict[str, str]) -> None:
    script = fake_compiler(environment, "exit 1\n")
    assert not CpuOperators(environment).wait() and calls(script) == 1
    failure = make_job(environment).failure
    os.utime(failure, (0, 0))  # however long ago
    assert not CpuOperators(environment).expected and calls(script) == 1
    script.write_text(script.read_text().replace("fake compiler 1", "fake compiler 2"))
    assert not CpuOperators(environment).wait() and calls(script) == 2


@pytest.mark.parametrize(
    "tail",
    [
        'echo "g++: fatal error: Killed signal terminated program cc1plus" >&2; exit 1\n',
        'echo "fatal error: error writing to x.o: No space left on device" >&2; exit 1\n',
        "kill -9 $$\n",
    ],
)
def test_a_machine_that_was_short_of_something_is_tried_again_at_the_next_start(
    environment: dict[str, str], caplog: pytest.LogCaptureFixture, tail: str
) -> None:
    script = fake_compiler(environment, tail)
    for attempt in (1, 2):
        assert not CpuOperators(environment).wait()
        assert calls(script) == attempt
    assert notices(caplog)[0].endswith("; the next start tries again)")
    script.write_text(LIBRARY_OF_NOTHING + "echo library > $out\n")
    assert make_job(environment).run()
    assert list(Path(make_job(environment).directory).glob("*.interrupted")) == []


def test_a_compiler_that_takes_too_long_is_tried_again_at_the_next_start(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = fake_compiler(environment, "exec sleep 600\n")
    monkeypatch.setattr(building, "TIMEOUT", 0.05)
    job = make_job(environment)
    assert (
        not job.run() and job.reason == "it was not done after 0.05 s; the next start tries again"
    )
    script.write_text(LIBRARY_OF_NOTHING + "exit 1\n")
    assert not CpuOperators(environment).wait()
    assert calls(script) == 2


def test_a_notice_is_short_whatever_the_compiler_says(
    environment: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    fake_compiler(environment, 'head -c 30000 /dev/zero | tr "\\0" "error " >&2; exit 1\n')
    for _ in "12":
        CpuOperators(environment).wait()
    first, again = notices(caplog)
    assert len(first) < 300 and len(again) < 400 + len(environment["HOME"])


def has_open(process: int, name: str) -> bool:
    with suppress(OSError):
        return any(path.readlink().name == name for path in Path(f"/proc/{process}/fd").iterdir())
    return False


def test_who_waits_for_a_build_that_fails_does_not_repeat_it(environment: dict[str, str]) -> None:
    script = fake_compiler(environment, 'while [ ! -e "$0.go" ]; do sleep 0.01; done; exit 1\n')
    job = make_job(environment)
    command = [sys.executable, "-I", building.__file__, job.to_json()]
    builders = [subprocess.Popen(command) for _ in range(2)]
    deadline = time.monotonic() + 240
    while not all(has_open(builder.pid, f"{job.key}.lock") for builder in builders):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    script.with_suffix(".go").touch()
    assert [builder.wait() for builder in builders] == [1, 1]
    assert calls(script) == 1


def test_a_failure_during_an_answer_does_not_interrupt_it(
    environment: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    fake_compiler(environment, "exit 1\n")
    operators = CpuOperators(environment)
    while operators.expected:
        operators.poll()
    assert operators.problem is not None and notices(caplog) == []


def test_what_is_no_library_does_not_load(
    environment: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    fake_compiler(environment, "echo nonsense > $out\n")
    assert not CpuOperators(environment).wait()
    assert "does not load" in notices(caplog)[0]


def test_a_damaged_library_is_built_again(environment: dict[str, str]) -> None:
    fake_compiler(environment, "echo library > $out\n")
    job = make_job(environment)
    assert job.run()
    (library,) = job.whole_libraries()
    library.write_text("damaged")
    assert job.whole_libraries() == []
    assert job.run()
    assert [path.read_text() for path in job.whole_libraries()] == ["library\n"]


def test_what_a_killed_builder_left_is_removed(environment: dict[str, str]) -> None:
    fake_compiler(environment, "echo library > $out\n")
    job = make_job(environment)
    (Path(job.directory) / f"{job.key}.99.o").touch()
    (Path(job.directory) / f"{job.key}.98.folder").mkdir()
    assert job.run()
    assert list(Path(job.directory).glob(f"{job.key}.[0-9]*")) == []


def test_two_processes_build_once_together(environment: dict[str, str]) -> None:
    script = fake_compiler(environment, "sleep 0.3; echo library > $out\n")
    command = [sys.executable, "-I", building.__file__, make_job(environment).to_json()]
    builders = [subprocess.Popen(command) for _ in range(2)]
    assert [builder.wait() for builder in builders] == [0, 0]
    # once to compile, once to link
    assert script.with_suffix(".calls").read_text() == "called\ncalled\n"
    assert len(make_job(environment).whole_libraries()) == 1


def test_another_instruction_set_is_another_library(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_compiler(environment, "")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    older = make_job(environment).key
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert make_job(environment).key != older


def test_a_cache_folder_that_cannot_be_made(
    environment: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    fake_compiler(environment, "")
    Path(environment["XDG_CACHE_HOME"]).write_text("a file")
    CpuOperators(environment)
    assert "cannot be made" in notices(caplog)[0]


def test_a_cache_folder_that_cannot_be_written_is_still_read(
    environment: dict[str, str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is as in an image whose file system is read-only. (To root, every folder looks as if it could be
    written.)"""
    script = fake_compiler(environment, "echo library > $out\n")
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    job = make_job(environment)
    CpuOperators(environment)
    assert "cannot be written" in notices(caplog)[0]
    assert not script.with_suffix(".calls").exists()
    assert job.run()
    CpuOperators(environment)
    # found, and no library at all
    assert f"{job.whole_libraries()[0]} does not load" in notices(caplog)[1]


def test_another_processor_is_another_library(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A home directory may be shared by machines of one vector width and different instructions."""
    fake_compiler(environment, "")
    here = make_job(environment).key
    monkeypatch.setattr(toolchain, "processor", lambda: "x86_64 flags: fma avx2")
    assert make_job(environment).key != here


def test_a_cache_folder_that_others_can_write_is_not_trusted(
    environment: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    fake_compiler(environment, "")
    folder = Path(make_job(environment).directory)
    folder.chmod(0o777)
    CpuOperators(environment)
    assert "others can write" in notices(caplog)[0]


@pytest.mark.slow
def test_the_older_instruction_set_gives_the_same_results() -> None:
    """The operators' own tests once more, built for AVX2."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("this processor has one instruction set only")
    if not cpu_operators().expected:
        pytest.skip(f"no CPU operators: {cpu_operators().problem}")
    here = Path(__file__).parent
    names = (
        "test_paged_attention.py",
        "test_linear.py",
        "test_recurrent.py",
        "test_state_space.py",
    )
    tests = [str(here / name) for name in names]
    outcome = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-k", "cpu", *tests],
        env=os.environ | {"ATEN_CPU_CAPABILITY": "avx2"},
        capture_output=True,
        text=True,
    )
    assert outcome.returncode == 0, outcome.stdout


# ------------------------------------------------------------------------------------------- who
# ends with whom


def sleeping_builder(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, *, at_terminal: bool
) -> str:
    """The mark of a builder, its compiler, and what that has started, which sleeps."""
    fake_compiler(environment, "sleep 600\n")
    monkeypatch.setattr(background, "_hears_the_terminal", lambda: at_terminal)
    monkeypatch.setenv(MARK, mark := new_mark())
    return mark


def test_a_builder_and_all_that_it_has_started_end_with_their_parent(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = sleeping_builder(environment, monkeypatch, at_terminal=False)
    builder = CpuOperators(environment)._builder
    wait_for_processes(mark, 3)
    assert builder is not None and builder.stdin is not None
    builder.stdin.close()  # as the system does when a process ends, however it ends
    wait_for_processes(mark, 0)
    builder.wait()
    (lock,) = Path(make_job(environment).directory).iterdir()
    assert lock.suffix == ".lock", "what it had begun is removed"


def test_a_builder_of_a_command_at_a_terminal_outlives_it(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = sleeping_builder(environment, monkeypatch, at_terminal=True)
    builder = CpuOperators(environment)._builder
    wait_for_processes(mark, 3)
    assert builder is not None and builder.stdin is None and os.getsid(builder.pid) == builder.pid
    builder.terminate()
    wait_for_processes(mark, 0)
    builder.wait()


# ------------------------------------------------------------------------------------------- who is
# waited for

SLOW = """trap 'exit 1' TERM
ps -o ni= -p $$ >> "$0.nice"
while [ ! -e "$0.go" ]; do sleep 0.01; done
echo nonsense > $out
"""


def niceness(script: Path, count: int) -> list[int]:
    """How far each of the compilers goes behind this process, once they have begun."""
    told = script.with_suffix(".nice")
    deadline = time.monotonic() + 240
    while not told.exists() or told.read_text().count("\n") < count:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    return [int(line) - mine for line in told.read_text().split()]


def test_a_compiler_that_somebody_waits_for_is_not_nice_and_replaces_one_that_is(
    environment: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    background._say_once.cache_clear()
    script = fake_compiler(environment, SLOW)
    operators = CpuOperators(environment)
    assert niceness(script, 1)[0] > 0
    operators.start(waited=True)
    assert niceness(script, 2)[1] == 0 and operators.pending
    (line,) = caplog.messages  # whether or not anybody watches a terminal
    assert line.startswith(
        "nanoserve: compiling for this model and machine, once; what takes more than 300 s is"
    )
    script.with_suffix(".go").touch()
    assert not operators.wait() and "does not load" in notices(caplog)[0]
    assert list(Path(make_job(environment).directory).glob("*.[0-9]*")) == [], (
        "what the first had begun is removed"
    )


def test_after_a_while_what_waits_goes_on_without(
    environment: dict[str, str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "PATIENCE", 0.0)
    script = fake_compiler(environment, SLOW)
    operators = CpuOperators(environment)
    builder = operators._builder
    assert builder is not None and operators.expected
    niceness(script, 1)
    assert not operators.wait() and not operators.expected
    assert notices(caplog)[-1] == (
        "nanoserve: plain torch is used, which is slower: the compiler is not done after 0 s; a "
        "later run finds what it"
        " makes"
    )
    script.with_suffix(".go").touch()  # it goes on by itself, behind everybody else
    assert operators._left is not None and operators._left.wait() == 0
