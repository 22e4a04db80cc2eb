"""The GPU's programs, compiled without a GPU: that all of them fit, and that what does not is
reported."""

import os
import subprocess
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from scripts import compile_kernels
from scripts.compile_kernels import (
    LOAD_WEIGHTS_EARLY,
    ROOT,
    TARGETS,
    Build,
    Form,
    Target,
    all_forms,
    early_use,
    main,
    one_form_per_program,
    program_digests,
    recorded_digests,
    table,
)
from scripts.kernel_variants import cache_variants

VARIANT = next(cache_variants())


def test_what_fits_is_no_breach() -> None:
    for target in TARGETS:
        assert (
            Build(target, VARIANT, registers=255, shared_memory=target.shared_memory).breaches()
            == []
        )


@pytest.mark.parametrize(
    ("build", "problem"),
    [
        (
            Build(TARGETS[0], VARIANT, stack=16),
            "spills: 0 bytes of loads and stores, a stack of 16 bytes",
        ),
        (
            Build(TARGETS[0], VARIANT, spills=8),
            "spills: 8 bytes of loads and stores, a stack of 0 bytes",
        ),
        (
            Build(Target(80, 4096), VARIANT, shared_memory=4097),
            "needs 4097 bytes of shared memory, the limit is 4096",
        ),
        (
            Build(TARGETS[0], VARIANT, early="ld.global.b32"),
            "has ld.global.b32 before it waits for the grid before it",
        ),
        (Build(TARGETS[0], VARIANT, failure="ValueError: no"), "does not compile: ValueError: no"),
    ],
    ids=["stack", "spills", "shared memory", "early", "failure"],
)
def test_a_breach_is_one_line_that_names_the_program(build: Build, problem: str) -> None:
    assert build.breaches() == [f"sm_80 {VARIANT.program} {VARIANT.label} {problem}"]


WAIT = "griddepcontrol.wait; // dummy %r1"


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        pytest.param(
            ["ld.param.b64 %rd1, [p];", WAIT, "ld.global.b32 {%r2}, [%rd1];"], "", id="no"
        ),
        pytest.param(["ld.global.b32 {%r2}, [%rd1];", WAIT], "ld.global.b32", id="load"),
        pytest.param(["st.global.v4.b32 [%rd1], {%r2};", WAIT], "st.global.v4.b32", id="store"),
        pytest.param(
            ["@%p1 atom.global.gpu.acq_rel.add.s32 %r2, [%rd1], 1;", WAIT],
            "atom.global.gpu.acq_rel.add.s32",
            id="count",
        ),
        pytest.param(
            ["cp.async.cg.shared.global [ %r3 + 0 ], [ %rd1 + 0 ], 0x10;", WAIT],
            "cp.async.cg.shared.global",
            id="copy",
        ),
        pytest.param(["ld.global.b32 {%r2}, [%rd1];"], "ld.global.b32", id="never waits"),
    ],
)
def test_memory_that_is_used_before_the_wait_is_found(lines: list[str], found: str) -> None:
    assert early_use("\n".join(lines)) == found


def test_programs_that_load_weights_early_still_change_nothing() -> None:
    load, store = "ld.global.b32 {%r2}, [%rd1];", "st.global.b32 [%rd1], {%r2};"
    assert early_use(f"{load}\n{WAIT}", may_load=True) == ""
    assert early_use(f"{load}\n{store}\n{WAIT}", may_load=True) == "st.global.b32"


def test_programs_are_dependent_from_hopper_on() -> None:
    """Programmatic dependent launch came with compute capability 9.0 (CUDA C++ Programming
    Guide)."""
    found = {
        (target.capability, variant.constants["DEPENDENT"])
        for target, variant in all_forms()
        if "DEPENDENT" in variant.constants
    }
    assert found == {(80, False), (90, True), (100, True)}


def test_the_table_has_a_line_for_each_program() -> None:
    header, line = table(
        [Build(TARGETS[1], VARIANT, registers=96, shared_memory=2048, products="wgmma")]
    ).splitlines()
    assert header.split()[:2] == ["target", "program"]
    assert line.startswith("sm_90") and line.split()[-6:] == ["1", "96", "0", "0", "2048", "wgmma"]


PROGRAMS = (
    *("write_slots", "move_blocks", "decode_attention", "prefill_attention", "rotate_into_slots"),
    *("multiply_each_row", "multiply_row", "multiply_packed", "unpack_matrix", "add_up_parts"),
    *("multiply_pairs", "multiply_groups"),
    *("convolve", "step_delta_rule", "prepare_chunks", "scan_delta_rule"),
    *("step_dual", "attend_in_chunks", "scan_dual", "scan_selectively"),
    *("find_likeliest", "draw_likely", "narrow_top_p"),
)


def test_one_form_of_each_program_is_chosen_for_each_target() -> None:
    chosen = one_form_per_program(all_forms())
    assert len(chosen) == len(TARGETS) * len(PROGRAMS)
    assert {(target, form.program) for target, form in chosen} == {
        (t, p) for t in TARGETS for p in PROGRAMS
    }


def test_all_forms_are_compiled_of_programs_that_changed_or_if_triton_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    moving = [replace(VARIANT, module="cache", label=label) for label in ("narrow", "wide")]
    attending = [
        replace(VARIANT, module="attention", program="attend", label=label)
        for label in ("short", "long")
    ]
    variants = [*moving, *attending]
    calls, stack = list[list[str]](), 16

    def build_forms(forms: list[Form], cache_folder: str) -> list[Build]:
        calls.append([variant.label for _, variant in forms])
        return [Build(target, variant, stack=stack) for target, variant in forms]

    kernels = tmp_path / "triton_ops" / "gpu" / "kernels"
    kernels.mkdir(parents=True)
    (kernels / "shared.py").write_text("before")
    (kernels / "cache.py").write_text("before")
    (kernels / "attention.py").write_text("from triton_ops.gpu.kernels.shared import load")
    (tmp_path / "scripts").mkdir()
    record = tmp_path / "scripts" / "compiled_kernels.txt"
    monkeypatch.setattr(compile_kernels, "ROOT", tmp_path)
    monkeypatch.setattr(compile_kernels, "RECORD", record)
    monkeypatch.setattr(compile_kernels, "prepare", lambda folder: None)
    monkeypatch.setattr(
        compile_kernels, "all_forms", lambda: [(TARGETS[0], variant) for variant in variants]
    )
    monkeypatch.setattr(compile_kernels, "build_forms", build_forms)
    everything, one_each = ["narrow", "wide", "short", "long"], ["narrow", "short"]
    assert main() == 1 and not record.exists()
    stack = 0
    assert main() == 0 and main() == 0
    assert calls == [everything, everything, one_each]
    (kernels / "cache.py").write_text("after")
    assert main() == 0 and calls.pop() == ["narrow", "wide", "short"]
    (kernels / "shared.py").write_text("after")
    assert main() == 0 and calls.pop() == ["short", "long", "narrow"]
    variants[3] = replace(attending[1], num_warps=attending[1].num_warps * 2)
    stack = 16
    assert main() == 1 and calls.pop() == ["short", "long", "narrow"]
    stack = 0
    assert main() == 0 and calls.pop() == ["short", "long", "narrow"]
    assert main() == 0 and calls.pop() == one_each
    version = metadata.version("triton")
    digests = program_digests([(TARGETS[0], variant) for variant in variants])
    assert recorded_digests(record) == {version: digests}
    record.write_text(record.read_text().replace(version, "0.1"))
    assert main() == 0 and calls.pop() == everything
    assert recorded_digests(record) == {"0.1": digests, version: digests}
    assert "compiled_kernels.txt" in capsys.readouterr().out


BAD_PROGRAMS = """
import dataclasses, sys, tempfile
from scripts.compile_kernels import TARGETS, Target, build, prepare

with tempfile.TemporaryDirectory() as folder:
    prepare(folder)
    from scripts.kernel_variants import cache_variants, packed_variants

    *_, widest = cache_variants()
    forms = {(form.program, form.label): form for form in packed_variants()}
    product = forms["multiply_row", "int4, bf16"]
    fitting = build(TARGETS[1], widest)
    assert fitting.breaches() == [] and fitting.registers > 0, fitting
    for bad in (
        build(TARGETS[1], dataclasses.replace(widest, num_warps=1)),
        build(Target(90, 8), product),
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
    assert large.startswith("sm_90 multiply_row") and large.endswith(
        "bytes of shared memory, the limit is 8"
    )
    assert broken.startswith("sm_90 move_blocks") and "does not compile: " in broken


ORDER_OF_SPLITS = """
import re, tempfile
from scripts.compile_kernels import TARGETS, _compile, prepare

with tempfile.TemporaryDirectory() as folder:
    prepare(folder)
    from scripts.kernel_variants import attention_variants

    form = next(form for form in attention_variants(9) if form.program == "decode_attention")
    assembly = _compile(TARGETS[1], form).asm["ptx"]
print(*re.findall(r"(?:st|ld|atom)[.]global[.a-z_]*|bar[.]sync", assembly))
"""


@pytest.mark.slow
def test_a_split_is_counted_when_all_its_threads_have_stored_and_read_after_the_count() -> None:
    """PTX's memory model (PTX ISA, "Memory Consistency Model"): stores, a barrier of the program's
    threads, and a count of one thread that releases and acquires for the whole GPU; then a barrier,
    and loads that do not ask the multiprocessor's own cache."""
    found = _run("-c", ORDER_OF_SPLITS)
    assert found.returncode == 0, found.stderr
    words = found.stdout.splitlines()[-1].split()
    (count,) = (place for place, word in enumerate(words) if word.startswith("atom"))
    assert words[count].startswith("atom.global.gpu.acq_rel.add")
    stored = max(place for place in range(count) if words[place].startswith("st.global"))
    assert set(words[stored + 1 : count]) == {"bar.sync"}
    assert words[count + 1] == "bar.sync"
    loads = [word for word in words[count:] if word.startswith("ld")]
    assert loads and all(load.startswith("ld.global.cg") for load in loads)


FIRST_WORDS = """
import re, tempfile
from scripts.compile_kernels import TARGETS, _compile, all_forms, one_form_per_program, prepare

with tempfile.TemporaryDirectory() as folder:
    prepare(folder)
    for target, form in one_form_per_program(all_forms()):
        if "DEPENDENT" in form.constants:
            assembly = _compile(target, form).asm["ptx"]
            words = re.findall(r"griddepcontrol[.]\\w+|ld[.]global|cp[.]async", assembly)
            print("form:", target.capability, form.program, *words)
"""


@pytest.mark.slow
def test_dependent_programs_wait_before_their_first_load() -> None:
    """And let the grid behind them begin at once; older GPUs know neither word."""
    found = _run("-c", FIRST_WORDS)
    assert found.returncode == 0, found.stderr
    forms = [line.split()[1:] for line in found.stdout.splitlines() if line.startswith("form:")]
    assert {"decode_attention"} <= {program for _, program, *_ in forms}
    for capability, program, *words in forms:
        if capability == "80":
            assert not any(word.startswith("griddepcontrol") for word in words)
            continue
        if program in LOAD_WEIGHTS_EARLY:
            words = [word for word in words if word.startswith("griddepcontrol")]
        assert words[:2] == ["griddepcontrol.wait", "griddepcontrol.launch_dependents"]


@pytest.mark.slow
def test_every_program_fits_every_target(capsys: pytest.CaptureFixture[str]) -> None:
    """In all its forms if they have changed, which the script then records."""
    found = _run("-m", "scripts.compile_kernels")
    # whoever runs this wants to see the table, as the script itself shows it
    with capsys.disabled():
        print(f"\n{found.stdout}")
    assert found.returncode == 0, found.stderr
    for target in TARGETS:
        for program in PROGRAMS:
            assert f"sm_{target.capability:<4} {program} " in found.stdout


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
