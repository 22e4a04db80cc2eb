"""Compiles the default forms of the GPU's programs ahead of time and prints what each needs of a
GPU.

``python -m scripts.compile_kernels`` needs neither a GPU nor torch, only triton (and numpy, which
triton asks for). It ends with 1, and a line for each fault, if a program does not compile, if its
registers do not suffice and values spill into memory, if it needs more shared memory than a program
may have on its target, or if it is launched before the grid before it has ended and uses memory
before it waits for that.

All forms take minutes. When all of them fit, the script records a digest of each program's sources
and forms in ``compiled_kernels.txt``, beside the version of Triton. While both are unchanged, one
form of that program is compiled for each target. Removing a version's lines makes the script
compile all forms again.
"""

import hashlib
import importlib
import importlib.metadata
import io
import os
import re
import sys
import tempfile
import types
from collections.abc import Container, Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scripts.kernel_variants import Variant

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "scripts" / "compiled_kernels.txt"


@dataclass(frozen=True)
class Target:
    """A GPU by its compute capability times ten, and the bytes of shared memory that one program
    may have there."""

    capability: int
    shared_memory: int


TARGETS = (
    # 163 KiB on sm_80 itself, but its configurations serve sm_86 and sm_89 too, which have less.
    Target(80, 99 << 10),
    Target(90, 227 << 10),
    Target(100, 227 << 10),
)

LOAD_WEIGHTS_EARLY = frozenset({"multiply_each_row"})
"""Programs that load weights, which do not change, before they wait for the grid before them. The
interpreter's tests see that they load nothing else there."""
Form = tuple[Target, "Variant"]


@dataclass(frozen=True)
class Build:
    """The assembler's figures of one program. `stack` and `spills` in bytes, `shared_memory` as a
    launch asks."""

    target: Target
    variant: "Variant"
    registers: int = 0
    stack: int = 0
    spills: int = 0
    shared_memory: int = 0
    products: str = ""
    early: str = ""
    """An instruction that uses global memory before a DEPENDENT program has waited."""
    failure: str = ""

    def breaches(self) -> list[str]:
        """The faults, a line for each; empty for a program that may be shipped."""
        found = []
        if self.failure:
            found.append(f"does not compile: {self.failure}")
        if self.spills or self.stack:
            found.append(
                f"spills: {self.spills} bytes of loads and stores, a stack of {self.stack} bytes"
            )
        if self.shared_memory > self.target.shared_memory:
            found.append(
                f"needs {self.shared_memory} bytes of shared memory, the limit is "
                f"{self.target.shared_memory}"
            )
        if self.early:
            found.append(f"has {self.early} before it waits for the grid before it")
        return [
            f"sm_{self.target.capability} {self.variant.program} {self.variant.label} {line}"
            for line in found
        ]


def prepare(cache_folder: str) -> None:
    """Make `triton_ops` importable without its operators, which need torch, and give Triton an
    empty cache."""
    package = types.ModuleType("triton_ops")
    package.__path__ = [str(ROOT / "triton_ops")]
    sys.modules["triton_ops"] = package
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_CACHE_DIR"] = cache_folder
    os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"


def build(target: Target, variant: "Variant") -> Build:
    """Compile one program, in a process that was prepared."""
    log = io.StringIO()
    try:
        with redirect_stdout(log):
            compiled = _compile(target, variant)
    except Exception as error:
        return Build(
            target, variant, failure=f"{type(error).__name__}: {str(error).splitlines()[0]}"
        )
    text = log.getvalue()
    return Build(
        target,
        variant,
        registers=_most(r"Used (\d+) registers", text),
        stack=_most(r"(\d+) bytes stack frame", text),
        spills=_most(r"(\d+) bytes spill stores", text) + _most(r"(\d+) bytes spill loads", text),
        shared_memory=compiled.metadata.shared,
        products=next(
            (name for name in ("tcgen05.mma", "wgmma", "mma.sync") if name in compiled.asm["ptx"]),
            "",
        ),
        early=_early_use(variant, compiled.asm["ptx"]),
    )


def _early_use(variant: "Variant", ptx: str) -> str:
    if not variant.constants.get("DEPENDENT"):
        return ""
    return early_use(ptx, may_load=variant.program in LOAD_WEIGHTS_EARLY)


def early_use(ptx: str, *, may_load: bool = False) -> str:
    """Find an instruction that uses global memory before the program waits for the grid before it.
    A program that `may_load` there may still not change anything."""
    before_wait, _, _ = ptx.partition("griddepcontrol.wait")
    kinds = ["st", "atom", "red"]
    if not may_load:
        kinds += ["ld", "ldu", "cp", "prefetch"]
    used = re.search(rf"\b(?:{'|'.join(kinds)})\b[\w.:]*\.(?:global|async)\S*", before_wait)
    return used.group() if used else ""


def _compile(target: Target, variant: "Variant"):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    program = getattr(
        importlib.import_module(f"triton_ops.gpu.kernels.{variant.module}"), variant.program
    )
    names = program.arg_names
    source = ASTSource(
        fn=program,
        signature={
            name: "constexpr" if name in variant.constants else variant.types[name]
            for name in names
        },
        constexprs={(names.index(name),): value for name, value in variant.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in variant.divisible},
    )
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", target.capability, 32), options=options)


def _most(pattern: str, log: str) -> int:
    """The greatest number that the assembler gave, one for each function of the program."""
    numbers = [int(number) for number in re.findall(pattern, log)]
    if not numbers:
        raise LookupError(f"the assembler's log has nothing like {pattern!r}")
    return max(numbers)


def program_digests(forms: Iterable[Form]) -> dict[str, str]:
    """Program -> a digest that changes with the file of the program and those that it imports, with
    its forms, and with their targets."""
    texts: dict[str, list[str]] = {}
    for target, variant in forms:
        texts.setdefault(variant.program, _sources(variant.module)).append(
            repr((target, replace(variant, divisible=frozenset()), sorted(variant.divisible)))
        )
    return {
        program: hashlib.sha256("\n".join(some).encode()).hexdigest()
        for program, some in texts.items()
    }


def _sources(module: str) -> list[str]:
    """The text of a file of programs, and of those that it imports."""
    text = (ROOT / "triton_ops" / "gpu" / "kernels" / f"{module}.py").read_text()
    imported = re.findall(r"^from triton_ops\.gpu\.kernels\.(\w+) import", text, re.MULTILINE)
    return [text, *(part for name in imported for part in _sources(name))]


def recorded_digests(record: Path) -> dict[str, dict[str, str]]:
    """Triton's version -> program -> the digest with which all its forms fit."""
    found: dict[str, dict[str, str]] = {}
    for line in record.read_text().splitlines() if record.exists() else ():
        version, program, digest = line.split()
        found.setdefault(version, {})[program] = digest
    return found


def all_forms() -> list[Form]:
    """Every default form for every target, in a process that was prepared."""
    from scripts.kernel_variants import (
        attention_variants,
        cache_variants,
        fused_linear_variants,
        packed_experts_variants,
        packed_variants,
        recurrent_variants,
        rotary_variants,
        sampling_variants,
        state_space_variants,
    )

    same = (
        *cache_variants(),
        *packed_variants(),
        *packed_experts_variants(),
        *sampling_variants(),
    )
    forms: list[Form] = []
    for target in TARGETS:
        generation = target.capability // 10
        variants = (
            *attention_variants(generation),
            *same,
            *fused_linear_variants(generation),
            *rotary_variants(generation),
            *recurrent_variants(generation),
            *state_space_variants(generation),
        )
        forms.extend((target, variant) for variant in variants)
    return forms


def one_form_per_program(forms: Iterable[Form]) -> list[Form]:
    """The first form of each program for each target."""
    chosen: dict[tuple[Target, str], Form] = {}
    for target, variant in forms:
        chosen.setdefault((target, variant.program), (target, variant))
    return [*chosen.values()]


def chosen_forms(forms: list[Form], changed: Container[str]) -> list[Form]:
    """All forms of the programs that have changed, and one of each other program for each
    target."""
    others = [form for form in forms if form[1].program not in changed]
    return [form for form in forms if form[1].program in changed] + one_form_per_program(others)


def build_forms(forms: list[Form], cache_folder: str) -> list[Build]:
    with ProcessPoolExecutor(initializer=prepare, initargs=(cache_folder,)) as pool:
        return list(pool.map(build, *zip(*forms, strict=True)))


def table(builds: list[Build]) -> str:
    rows = [
        (
            "target",
            "program",
            "form",
            "warps",
            "stages",
            "registers",
            "stack",
            "spills",
            "shared",
            "products",
        )
    ]
    for each in builds:
        form = each.variant
        numbers = (
            form.num_warps,
            form.num_stages,
            each.registers,
            each.stack,
            each.spills,
            each.shared_memory,
        )
        rows.append(
            (
                f"sm_{each.target.capability}",
                form.program,
                form.label,
                *map(str, numbers),
                each.products,
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def main() -> int:
    version = importlib.metadata.version("triton")
    with tempfile.TemporaryDirectory() as folder:
        prepare(folder)
        forms = all_forms()
        digests, recorded = program_digests(forms), recorded_digests(RECORD)
        known = recorded.get(version, {})
        changed = [program for program, digest in digests.items() if known.get(program) != digest]
        builds = build_forms(chosen_forms(forms, changed), folder)
    breaches = [line for each in builds for line in each.breaches()]
    print(f"triton {version}; stack, spills and shared memory in bytes")
    print(table(builds))
    if breaches:
        print(*breaches, sep="\n", file=sys.stderr)
        return 1
    recorded[version] = digests
    lines = [
        f"{each} {program} {digest}\n"
        for each, programs in sorted(recorded.items())
        for program, digest in sorted(programs.items())
    ]
    RECORD.write_text("".join(lines))
    print(f"all forms of {', '.join(changed) or 'no program'} were compiled, one of the others")
    print(f"{RECORD.relative_to(ROOT)} says that all forms of these sources fit")
    return 0


if __name__ == "__main__":
    sys.exit(main())
