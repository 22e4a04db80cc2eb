"""The GPU's programs, compiled without a GPU: that all of them fit, and that what does not is reported."""

import os
import subprocess
import sys

import pytest

from scripts.compile_kernels import ROOT, TARGETS, Build, Target, table
from triton_ops.gpu.variants import cache_variants

VARIANT = next(cache_variants())


def test_what_fits_is_no_breach() -> None:
    for target in TARGETS:
        assert Build(target, VARIANT, registers=255, shared_memory=target.shared_memory).breaches() == []


@pytest.mark.parametrize(
    ("build", "problem"),
    [
        (Build(TARGETS[0], VARIANT, stack=16), "spills: 0 bytes of loads and stores, a stack of 16 bytes"),
        (Build(TARGETS[0], VARIANT, spills=8), "spills: 8 bytes of loads and stores, a stack of 0 bytes"),
        (Build(Target(80, 4096), VARIANT, shared_memory=4097), "needs 4097 bytes of shared memory, the limit is 4096"),
        (Build(TARGETS[0], VARIANT, failure="ValueError: no"), "does not compile: ValueError: no"),
    ],
    ids=["stack", "spills", "shared memory", "failure"],
)
def test_a_breach_is_one_line_that_names_the_program(build: Build, problem: str) -> None:
    assert build.breaches() == [f"sm_80 {VARIANT.program} {VARIANT.label} {problem}"]


def test_the_table_has_a_line_for_each_program() -> None:
    header, line = table([Build(TARGETS[1], VARIANT, registers=96, shared_memory=2048, products="wgmma")]).splitlines()
    assert header.split()[:2] == ["target", "program"]
    assert line.startswith("sm_90") and line.split()[-6:] == ["1", "96", "0", "0", "2048", "wgmma"]


PROGRAMS = ("write_slots", "move_blocks", "attend_single_tokens", "attend_longer_rows", "add_up_splits")

BAD_PROGRAMS = """
import dataclasses, sys, tempfile
from scripts.compile_kernels import TARGETS, Target, build, prepare

with tempfile.TemporaryDirectory() as folder:
    prepare(folder)
    from triton_ops.gpu.variants import attention_variants, cache_variants

    *_, widest = cache_variants()
    *_, reducing = attention_variants(9)
    fitting = build(TARGETS[1], widest)
    assert fitting.breaches() == [] and fitting.registers > 0, fitting
    for bad in (
        build(TARGETS[1], dataclasses.replace(widest, num_warps=1)),
        build(Target(90, 512), reducing),
        build(TARGETS[1], dataclasses.replace(widest, constants={**widest.constants, "DIMS": 3})),
    ):
        print(*bad.breaches(), sep="\\n")
assert "torch" not in sys.modules
"""


@pytest.mark.slow
def test_programs_that_spill_or_need_too_much_are_found() -> None:
    found = _run("-c", BAD_PROGRAMS)
    assert found.returncode == 0, found.stderr
    spilling, large, broken = found.stdout.splitlines()
    assert spilling.startswith("sm_90 move_blocks") and "spills: " in spilling
    assert large.startswith("sm_90 add_up_splits") and large.endswith("bytes of shared memory, the limit is 512")
    assert broken.startswith("sm_90 move_blocks") and "does not compile: " in broken


@pytest.mark.slow
def test_every_default_program_fits_every_target(capsys: pytest.CaptureFixture[str]) -> None:
    found = _run("scripts/compile_kernels.py")
    with capsys.disabled():  # whoever runs this wants to see the table, as the script itself shows it
        print(f"\n{found.stdout}")
    assert found.returncode == 0, found.stderr
    for target in TARGETS:
        for program in PROGRAMS:
            assert f"sm_{target.capability:<4} {program} " in found.stdout


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
