"""Two hosts on one machine: network namespaces whose only connection is a cable, a pair of veth
interfaces.

Needs Linux, root and the command ip. Runs what torchrun would run on two machines, one process on
each::

    python -m scripts.two_hosts --rate 100mbit -- -m nanoserve generate "Once upon a time" --pp 2

``--rate`` shapes both directions of the cable by tc. The output of the first host is printed as it
is, the errors of the second one behind it if it failed.
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
_NAME = re.compile(r"nanoserve-(\d+)-\d+-\w+")
_numbers = itertools.count()


class NoHosts(Exception):
    """Namespaces cannot be made here; the message says why."""


class Program(subprocess.Popen[bytes]):
    """A running program in a session of its own. It writes to files, because a pipe that nobody
    reads fills up."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        # Open as long as the program may write.
        self._output, self._errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        super().__init__(
            words,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._errors,
            start_new_session=True,
        )

    @property
    def output(self) -> str:
        return _written(self._output)

    @property
    def messages(self) -> str:
        return _written(self._errors)


@dataclass(frozen=True, slots=True)
class Host:
    """A namespace. ``address`` and ``interface`` are those of its end of the cable."""

    name: str
    address: str
    interface: str

    def start(self, words: Sequence[str], environment: Mapping[str, str] | None = None) -> Program:
        return Program(["ip", "netns", "exec", self.name, *words], environment or {})

    def processes(self, word: str = "") -> list[int]:
        """The ids of the processes that run there with this word in their command line."""
        return [
            int(number)
            for number in _ip("netns", "pids", self.name).split()
            if word in _command_line(number)
        ]

    def shape(self, rate: str) -> None:
        """Limit what leaves the host to this rate, as tc writes it: 100mbit. The burst is 5 ms at
        100 Mbit/s."""
        bucket = ["tbf", "rate", rate, "burst", "64kb", "latency", "200ms"]
        _ip(
            "netns", "exec", self.name, "tc", "qdisc", "add", "dev", self.interface, "root", *bucket
        )


def _written(file: IO[bytes]) -> str:
    """The whole file. The program shares the position in it, so that this must not move."""
    return os.pread(file.fileno(), 1 << 24, 0).decode()


def _command_line(process: str) -> str:
    try:
        return Path("/proc", process, "cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:  # gone meanwhile
        return ""


def torchrun(
    hosts: Sequence[Host],
    words: Sequence[str],
    environments: Sequence[Mapping[str, str]] = ({}, {}),
) -> list[Program]:
    """Start the same command on all hosts, one process on each; the first host is torchrun's
    master."""
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        str(len(hosts)),
        "--nproc-per-node",
        "1",
    ]
    master = ["--master-addr", hosts[0].address, "--master-port", str(MASTER_PORT)]
    return [
        host.start([*launcher, *master, "--node-rank", str(number), *words], environment)
        for number, (host, environment) in enumerate(zip(hosts, environments, strict=True))
    ]


def wait(programs: Sequence[Program], seconds: float) -> None:
    """Wait for all of them. If some take longer, kill them and raise TimeoutError with what all
    have written."""
    until = time.monotonic() + seconds
    try:
        for program in programs:
            program.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        for program in programs:
            if program.poll() is None:
                os.killpg(program.pid, signal.SIGKILL)
                program.wait()
        raise TimeoutError(
            "\n".join(f"{program.output}\n{program.messages}" for program in programs)
        ) from None


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two joined hosts; they are removed afterwards with every process that still runs on them.

    Raises NoHosts where namespaces cannot be made.
    """
    if shutil.which("ip") is None or os.geteuid() != 0:
        raise NoHosts(
            "several hosts are network namespaces, which take Linux, root and the command ip"
        )
    _remove_left_overs()
    number = next(_numbers)
    first, second = hosts = [
        Host(f"nanoserve-{os.getpid()}-{number}-{end}", f"10.199.{number}.{place}", f"cable-{end}")
        for place, end in ((1, "a"), (2, "b"))
    ]
    try:
        try:
            _join(first, second)
        except subprocess.CalledProcessError as error:
            raise NoHosts(
                f"this machine makes no network namespaces: {error.stderr.strip()}"
            ) from None
        yield first, second
    finally:
        for host in hosts:
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
    """Interfaces go with the namespace, and the namespace goes with its last process."""
    for process in _ip("netns", "pids", name, check=False).split():
        with suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)
    _ip("netns", "delete", name, check=False)


def _remove_left_overs() -> None:
    """Remove the hosts of test runs that were killed."""
    for line in _ip("netns", "list", check=False).splitlines():
        made_by = _NAME.match(line)
        if made_by is not None and not Path("/proc", made_by[1]).exists():
            _remove(made_by[0])


def _ip(*words: str, check: bool = True) -> str:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=check).stdout


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Run a command by torchrun on two hosts of this one machine."
    )
    parser.add_argument(
        "--rate", help="of the cable, as tc writes it: 100mbit; default: as fast as it goes"
    )
    parser.add_argument("--seconds", type=float, default=3600.0, help="after which all is ended")
    parser.add_argument("words", nargs="+", help="what torchrun runs, behind --: -m nanoserve ...")
    options = parser.parse_args()
    with two_hosts() as hosts:
        if options.rate is not None:
            for host in hosts:
                host.shape(options.rate)
        first, second = programs = torchrun(hosts, options.words)
        wait(programs, options.seconds)
        print(first.output, end="")
        print(first.messages, end="", file=sys.stderr)
        if second.returncode != 0:
            print(second.messages, end="", file=sys.stderr)
    sys.exit(first.returncode or second.returncode)


if __name__ == "__main__":
    main()
