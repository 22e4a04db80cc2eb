"""Two hosts on one machine: network namespaces with nothing in common but a cable, a pair of veth interfaces.

Needs Linux, root and the command ip. Runs what torchrun would run on two machines, one process on each::

    python -m scripts.two_hosts --rate 100mbit -- -m nanoserve generate "Once upon a time" --pp 2

``--rate`` shapes both directions of the cable by tc. What the first host writes comes out as it is, what the second one
has to say behind it if it failed.
"""

import argparse
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

ROOT = Path(__file__).parents[1]
MASTER_PORT = 29500
"""Free in a namespace that is new."""


class NoHosts(Exception):
    """Namespaces cannot be made here; the message says why."""


class Late(Exception):
    """A program did not end in time; the message is what all of them wrote."""


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

    def processes(self, word: str = "") -> list[int]:
        """The ids of those that run there with this word in their command line."""
        inside = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True)
        return [int(number) for number in inside.stdout.split() if word in _command_line(number)]

    def shape(self, rate: str) -> None:
        """Let no more than so much leave, as tc writes it: 100mbit."""
        _ip("netns", "exec", self.name, "tc", "qdisc", "add", "dev", self.interface, "root", *_bucket(rate))


def _written(file: IO[bytes]) -> str:
    """All of it; the place in the file is the program's, too, and stays where it is."""
    return os.pread(file.fileno(), 1 << 24, 0).decode()


def _command_line(process: str) -> str:
    try:
        return Path("/proc", process, "cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:  # gone meanwhile
        return ""


def _bucket(rate: str) -> list[str]:
    """A token bucket: `burst` is what 5 ms carry at 100 Mbit/s."""
    return ["tbf", "rate", rate, "burst", "64kb", "latency", "200ms"]


def torchrun(
    hosts: Sequence[Host],
    words: Sequence[str],
    environments: Sequence[Mapping[str, str]] = ({}, {}),
    *,
    port: int = MASTER_PORT,
) -> list[Program]:
    """Start the same command on all hosts, one process on each; the first host is torchrun's master, at this port."""
    return [
        host.start(
            [
                *(sys.executable, "-m", "torch.distributed.run"),
                *("--nnodes", str(len(hosts)), "--nproc-per-node", "1", "--node-rank", str(number)),
                *("--master-addr", hosts[0].address, "--master-port", str(port)),
                *words,
            ],
            environment,
        )
        for number, (host, environment) in enumerate(zip(hosts, environments, strict=True))
    ]


def wait(programs: Sequence[Program], seconds: float) -> None:
    """Wait for all of them; those that take longer are killed.

    Raises:
        Late: if some were.
    """
    until = time.monotonic() + seconds
    late = [program for program in programs if not program.ends_before(until)]
    for program in late:
        program.kill()
    if late:
        raise Late("\n".join(f"{program.output}\n{program.errors}" for program in programs))


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts, joined; gone afterwards with every process that still runs on them.

    Raises:
        NoHosts: where namespaces cannot be made.
    """
    if shutil.which("ip") is None or not hasattr(os, "geteuid") or os.geteuid() != 0:
        raise NoHosts("several hosts are network namespaces, which take Linux, root and the command ip")
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
            raise NoHosts(f"this machine makes no network namespaces: {error.stderr.strip()}") from None
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


def main() -> None:
    parser = argparse.ArgumentParser(description="Run a command by torchrun on two hosts of this one machine.")
    parser.add_argument("--rate", help="of the cable, as tc writes it: 100mbit; default: as fast as it goes")
    parser.add_argument("--seconds", type=float, default=3600.0, help="after which all is ended")
    parser.add_argument("words", nargs="+", help="what torchrun runs, behind --: -m nanoserve ...")
    options = parser.parse_args()
    with two_hosts() as hosts:
        for host in hosts:
            if options.rate is not None:
                host.shape(options.rate)
        first, second = programs = torchrun(hosts, options.words)
        wait(programs, options.seconds)
        print(first.output, end="")
        print(first.errors, end="", file=sys.stderr)
        if second.code != 0:
            print(second.errors, end="", file=sys.stderr)
    sys.exit(first.code or second.code)


if __name__ == "__main__":
    main()
