"""Which compiler builds the CPU operators, how, and what the result depends on."""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import torch

from triton_ops.cpu.building import CannotBuild, Job

SOURCES = Path(__file__).parent
COMPILERS = ("g++", "c++", "clang++")
_VERSION_TIMEOUT = 10.0


def make_job(environment: Mapping[str, str]) -> Job:
    """Make the build job for the instruction set that torch uses here (ATEN_CPU_CAPABILITY changes
    it).

    `environment` gives CXX, PATH, XDG_CACHE_HOME and HOME. Raises CannotBuild.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    compiler = find_compiler(environment)
    version = compiler_version(compiler)
    flags = _compile_flags(capability)
    torch_root = Path(torch.__file__).parent
    includes = [f"-I{torch_root / 'include'}", f"-I{torch_root / 'include/torch/csrc/api/include'}"]
    link_last = [f"-L{torch_root / 'lib'}", "-ltorch_cpu", "-lc10"]
    if "clang" in version and platform.system() == "Linux":
        # its threads come from a library that torch did not bring along
        link_last.append("-fopenmp")
    parts = [version, torch.__version__, *compiler, *flags, *includes, *link_last, processor()]
    parts += [
        path.read_text(encoding="utf-8")
        for path in [*sorted(SOURCES.glob("*.h")), SOURCES / "operators.cpp"]
    ]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    return Job(
        key=f"{capability.lower()}-{digest}",
        directory=str(cache_directory(environment, "operators")),
        compile=(*compiler, *flags, *includes, "-c", str(SOURCES / "operators.cpp")),
        link=(*compiler, "-shared"),
        link_last=tuple(link_last),
    )


def find_compiler(environment: Mapping[str, str]) -> list[str]:
    """The command that starts it. Raises CannotBuild."""
    if environment.get("CXX"):
        command = shlex.split(environment["CXX"])
        if shutil.which(command[0], path=environment.get("PATH")) is None:
            raise CannotBuild(f"the compiler named by CXX, {command[0]}, is not there")
        return command
    for name in COMPILERS:
        if found := shutil.which(name, path=environment.get("PATH")):
            return [found]
    raise CannotBuild(
        f"no C++ compiler was found; install one of {', '.join(COMPILERS)} or set CXX"
    )


def compiler_version(compiler: list[str]) -> str:
    """Ask the compiler for its version. Raises CannotBuild if it does not run."""
    try:
        answer = subprocess.run(
            [*compiler, "--version"], capture_output=True, text=True, timeout=_VERSION_TIMEOUT
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise CannotBuild(f"the compiler {compiler[0]} does not run ({error})") from error
    return answer.stdout + answer.stderr


def _compile_flags(capability: str) -> list[str]:
    # Vectors are at::vec's generic, slow ones unless both macros name the instruction set.
    flags = [
        "-O3",
        "-std=c++20",
        "-fPIC",
        f"-DCPU_CAPABILITY={capability}",
        f"-DCPU_CAPABILITY_{capability}",
    ]
    flags.append("-march=x86-64-v3" if capability == "AVX2" else "-march=native")
    # The object is linked without OpenMP: its calls then reach the very library, and the threads,
    # that torch uses.
    return (
        [*flags, "-Xpreprocessor", "-fopenmp"]
        if platform.system() == "Darwin"
        else [*flags, "-fopenmp"]
    )


def processor() -> str:
    """Describe the processor as far as -march=native depends on it: architecture and instruction
    sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {flags}"


def cache_directory(environment: Mapping[str, str], name: str) -> Path:
    """The user's own folder for what can be built again. Raises CannotBuild if it cannot be made or
    trusted."""
    base = environment.get("XDG_CACHE_HOME") or os.path.join(
        environment.get("HOME") or os.path.expanduser("~"), ".cache"
    )
    directory = Path(base) / "nanoserve" / name
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
    except OSError as error:
        raise CannotBuild(
            f"the cache folder {directory} cannot be made ({error.strerror})"
        ) from error
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        # Whatever lies there is loaded as a program.
        raise CannotBuild(
            f"others can write to the cache folder {directory}; set XDG_CACHE_HOME to one of your "
            "own"
        )
    return directory
