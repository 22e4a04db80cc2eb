"""Two hosts on one machine: network namespaces with nothing in common but a cable, a pair of veth interfaces."""

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

ROOT = Path(__file__).parents[2]
MASTER_PORT = 29500
"""Free in a namespace that is new."""

_NAME = re.compile(r"nanoserve-(\d+)-\d+-\w+")
_numbers = itertools.count()


class Program:
    """A running program in a session of its own. Its words go to files: pipes that nobody reads fill up."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        # Open as long as the program may write.
        self._output, self._errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            words,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._errors,
            start_new_session=True,
        )

    @property
    def code(self) -> int:
        """Its exit code; it must have ended."""
        assert self.process.returncode is not None
        return self.process.returncode

    @property
    def output(self) -> str:
        """What it has written so far."""
        return _written(self._output)

    @property
    def errors(self) -> str:
        """... to stderr."""
        return _written(self._errors)

    def ends_before(self, until: float) -> bool:
        """Wait for its end, no longer than to that monotonic time."""
        try:
            self.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """With all that it has started in its session."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@dataclass(frozen=True, slots=True)
class Host:
    """A namespace. ``address`` and ``interface`` are those of its end of the cable."""

    name: str
    address: str
    interface: str

    def start(self, words: Sequence[str], environment: Mapping[str, str] | None = None) -> "Program":
        """Start a program there."""
        return Program(["ip", "netns", "exec", self.name, *words], environment or {})

    def shape(self, rate: str) -> None:
        """Let no more than so much leave, as tc writes it: 100mbit."""
        _ip("netns", "exec", self.name, "tc", "qdisc", "add", "dev", self.interface, "root", *_bucket(rate))


def _written(file: IO[bytes]) -> str:
    """All of it; the place in the file is the program's, too, and stays where it is."""
    return os.pread(file.fileno(), 1 << 24, 0).decode()


def _bucket(rate: str) -> list[str]:
    """A token bucket: `burst` is what 5 ms carry at 100 Mbit/s."""
    return ["tbf", "rate", rate, "burst", "64kb", "latency", "200ms"]


def torchrun(
    hosts: Sequence[Host], words: Sequence[str], environment: Mapping[str, str] | None = None
) -> list[Program]:
    """Start the same command on all hosts, one process on each; the first host is torchrun's master."""
    return [
        host.start(
            [
                *(sys.executable, "-m", "torch.distributed.run"),
                *("--nnodes", str(len(hosts)), "--nproc-per-node", "1", "--node-rank", str(number)),
                *("--master-addr", hosts[0].address, "--master-port", str(MASTER_PORT)),
                *words,
            ],
            environment,
        )
        for number, host in enumerate(hosts)
    ]


def wait(programs: Sequence[Program], seconds: float) -> None:
    """Wait for all of them; those that take longer are killed, and the test fails with what they wrote."""
    until = time.monotonic() + seconds
    late = [program for program in programs if not program.ends_before(until)]
    for program in late:
        program.kill()
    if late:
        pytest.fail("not done in time:\n" + "\n".join(f"{program.output}\n{program.errors}" for program in programs))


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts, joined; gone afterwards with every process that still runs on them.

    Skips the test where namespaces cannot be made.
    """
    if shutil.which("ip") is None or not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip("several hosts are network namespaces, which take Linux, root and the command ip")
    _remove_left_overs()
    number = next(_numbers)
    first, second = (
        Host(f"nanoserve-{os.getpid()}-{number}-{end}", f"10.199.{number}.{place}", f"cable-{end}")
        for place, end in ((1, "a"), (2, "b"))
    )
    try:
        try:
            _join(first, second)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine makes no network namespaces: {error.stderr.strip()}")
        yield first, second
    finally:
        for host in (first, second):
            _remove(host.name)


def _join(first: Host, second: Host) -> None:
    for host in (first, second):
        _ip("netns", "add", host.name)
    ends = [("netns", host.name, "type", "veth") for host in (first, second)]
    _ip("link", "add", first.interface, *ends[0], "peer", "name", second.interface, *ends[1][:2])
    for host in (first, second):
        _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.interface)
        for interface in ("lo", host.interface):
            _ip("-n", host.name, "link", "set", interface, "up")


def _remove(name: str) -> None:
    """Interfaces go with the namespace, and that with its last process."""
    inside = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
    for process in inside.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _remove_left_overs() -> None:
    """What a test run has left that was killed itself."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    for name in (line.split()[0] for line in listed.splitlines() if line):
        made_by = _NAME.fullmatch(name)
        if made_by is not None and not Path("/proc", made_by[1]).exists():
            _remove(name)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], capture_output=True, text=True, check=True)
