"""Two workers whose link gets slower and slower: which parallel layout is best for prompts, and for answers?

Needs Linux, root and the command ip. The workers run in two network namespaces of this machine, joined by a cable that
tc shapes (see `two_hosts`); they share the machine's memory, and with it the KV blocks on the host that two layouts
want. At each rate every layout and pair of layouts is started and does the same work, in rounds, one after the other::

    python -m scripts.slow_link --rates 1gbit,100mbit --rounds 3 --json slow_link.json

Prints a table of medians. The model has random weights; its shape is that of few and wide layers.
"""

import argparse
import json
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from nanoserve.benchmarks.cpu_load import ForeignLoad
from nanoserve.benchmarks.machine import describe_machine, describe_run
from nanoserve.benchmarks.tables import Column, print_table
from scripts.two_hosts import Host, Program, torchrun, two_hosts

UNSHAPED = "unshaped"
RATES = (UNSHAPED, "10gbit", "3gbit", "1gbit", "300mbit", "100mbit", "30mbit")
CONTENDERS = {
    "T2": {"tp": 2},
    "P2": {"pp": 2, "policy": "throttling"},
    "P2 -> T2": {"prefill_parallel": "p2", "decode_parallel": "t2"},
    "T2 -> P2": {"prefill_parallel": "t2", "decode_parallel": "p2"},
}
"""Options of each; T shares every layer, P gives each worker half of the layers.

A pipeline is best run with Token Throttling: by the default policy, all that was prefilled together would decode in one
micro-batch, while the other stage waits. Two layouts have a policy of their own."""
DEFAULT_CONTENDERS = ("T2", "P2", "P2 -> T2")
MODEL = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 4096,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
"""Few and wide layers, as large models have in relation to what they send: 8 KiB per token and sum."""
ENGINE = {
    "dtype": "float32",
    "eager": True,
    "threads": 1,
    "kv_cache_memory": "256MiB",
    "max_num_batched_tokens": 256,
    "max_num_seqs": 8,
}
"""What all variants have in common. Ranks of one stage run eagerly on CPUs, so all do."""
HOST_KV_MEMORY = "256MiB"
START_SECONDS, RUN_SECONDS = 180.0, 240.0
_FIRST_PORT = 29500


@dataclass(frozen=True, slots=True)
class Work:
    """Equal requests that are issued together, each with so many tokens."""

    name: str
    requests: int
    input_tokens: int
    output_tokens: int


WORKS = (Work("prefill", 2, 256, 1), Work("balanced", 24, 64, 16), Work("decode", 8, 16, 32))


# ------------------------------------------------------------------------------------------------- an engine


def serve(options: dict[str, Any], address: str) -> int:
    """On both hosts, by torchrun: the first runs the engine for who listens at a Unix address, the other a worker."""
    from nanoserve.commands.engine_options import WorkersOptions
    from nanoserve.commands.torchrun import on_all_machines

    @on_all_machines
    def run(options: WorkersOptions) -> int:
        with options.open_llm() as llm, socket.socket(socket.AF_UNIX) as line:
            line.connect(address)
            with line.makefile("rw") as words:
                _work_for(llm, words)
        return 0

    return run(WorkersOptions(**options))


def _work_for(llm: Any, words: IO[str]) -> None:
    """A line says what to do, a line answers how long it took; the first one, that all is ready."""
    from nanoserve.benchmarks.driving import EngineDriver
    from nanoserve.measures.workloads import random_prompts

    driver = EngineDriver(llm.engine)
    print(json.dumps({}), file=words, flush=True)
    for seed, line in enumerate(words):
        work = Work(**json.loads(line))
        transitions = llm.status.transitions
        prompts = random_prompts([work.input_tokens] * work.requests, llm.config.vocab_size, seed)
        timings = driver.run(prompts, [work.output_tokens] * work.requests).timings
        figures = {
            "seconds": max(timing.e2el for timing in timings),
            "prefill_seconds": max(timing.ttft for timing in timings),
            "transitions": llm.status.transitions - transitions,
        }
        print(json.dumps(figures), file=words, flush=True)


class RemoteEngine:
    """One that runs on both hosts, and does what it is told.

    Raises:
        RuntimeError: if it does not start, with all that it has written.
    """

    def __init__(self, hosts: Sequence[Host], options: dict[str, Any], directory: Path, number: int) -> None:
        address = str(directory / f"engine-{number}")
        words = ["-m", "scripts.slow_link", "--serve", json.dumps(options), "--address", address]
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()
            self._programs = torchrun(hosts, words, port=_FIRST_PORT + number)
            try:
                self._connection = _accept(listener, self._programs)
            except BaseException:
                self._kill()
                raise
        self._words = self._connection.makefile("rw")
        self._answer(START_SECONDS)

    def run(self, work: Work) -> dict[str, float]:
        """Do the work; how long it took.

        Raises:
            RuntimeError: if it fails, with all that it has written.
        """
        print(json.dumps(asdict(work)), file=self._words, flush=True)
        return self._answer(RUN_SECONDS)

    def _answer(self, seconds: float) -> dict[str, float]:
        self._connection.settimeout(seconds)
        try:
            line = self._words.readline()
        except TimeoutError:
            line = ""
        if not line:
            raise RuntimeError(_said(self._programs))
        answer: dict[str, float] = json.loads(line)
        return answer

    def close(self) -> None:
        """Let it end by itself, if it does so soon."""
        self._words.close()
        self._connection.close()
        until = time.monotonic() + 20.0
        for program in self._programs:
            program.ends_before(until)
        self._kill()

    def _kill(self) -> None:
        for program in self._programs:
            program.kill()


def _accept(listener: socket.socket, programs: Sequence[Program]) -> socket.socket:
    """The engine's call, which comes when it has loaded."""
    until = time.monotonic() + START_SECONDS
    listener.settimeout(1.0)
    while time.monotonic() < until and all(program.process.poll() is None for program in programs):
        try:
            return listener.accept()[0]
        except TimeoutError:
            continue
    raise RuntimeError(_said(programs))


def _said(programs: Sequence[Program]) -> str:
    return "an engine does not answer:\n" + "\n".join(program.output + program.errors for program in programs)


# ------------------------------------------------------------------------------------------------- measuring


@contextmanager
def open_engines(rate: str, variants: Sequence[str], directory: Path) -> Iterator[dict[str, RemoteEngine]]:
    """All variants on two hosts with a cable of that rate, started one after the other."""
    with two_hosts() as hosts, ExitStack() as closing:
        for host in hosts:
            if rate != UNSHAPED:
                host.shape(rate)
        engines = {}
        for number, name in enumerate(variants):
            options = ENGINE | CONTENDERS[name] | {"model": f"dummy:{directory / 'config.json'}"}
            if "decode_parallel" in options:
                options["host_kv_memory"] = HOST_KV_MEMORY
            place = directory / f"{rate}-{number}"
            place.mkdir()
            engines[name] = RemoteEngine(hosts, options, place, number)
            closing.callback(engines[name].close)
        yield engines


def measure(rates: Sequence[str], variants: Sequence[str], works: Sequence[Work], rounds: int) -> list[dict[str, Any]]:
    """A row for every run; before the first round each engine has done a little of each work, unmeasured."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="ns-") as name:
        directory = Path(name)
        (directory / "config.json").write_text(json.dumps(MODEL))
        for rate in rates:
            with open_engines(rate, variants, directory) as engines:
                for engine in engines.values():
                    engine.run(Work("warm-up", 2, 64, 4))
                load = ForeignLoad()
                for number in range(rounds):
                    for work in works:
                        for variant in _rotated(list(engines), number):
                            figures = engines[variant].run(work)
                            row = {"rate": rate, "round": number, "work": work.name, "variant": variant, **figures}
                            rows.append(row | {"foreign_cores": load.read()})
                            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def _rotated(names: list[str], number: int) -> list[str]:
    """In every round another one is the first."""
    return names[number % len(names) :] + names[: number % len(names)]


def summarize(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each rate and work: the median seconds of each variant, the best static layout, and how the pairs compare.

    Ratios are formed within a round, and are medians over the rounds.
    """
    cells: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for row in rows:
        cell = cells.setdefault((row["rate"], row["work"]), {})
        cell.setdefault(row["variant"], {})[row["round"]] = row["seconds"]
    summary = []
    for (rate, work), found in cells.items():
        medians = {name: statistics.median(seconds.values()) for name, seconds in found.items()}
        static = [name for name in found if "->" not in name]
        best = min(static, key=medians.__getitem__)
        over = {
            name: statistics.median(found[name][number] / found[best][number] for number in found[name])
            for name in found
            if name not in static
        }
        summary.append({"rate": rate, "work": work, "seconds": medians, "best static": best, "over": over})
    return summary


def show(summary: Sequence[dict[str, Any]]) -> None:
    """As a table."""
    names = list(summary[0]["seconds"])
    columns = [
        Column("link", "rate", justify="left"),
        Column("work", "work", justify="left"),
        *(Column(f"{name} s", f"seconds.{name}", ".2f") for name in names),
        Column("best static", "best static"),
        *(Column(f"{name} over best static", f"over.{name}", ".2f") for name in names if "->" in name),
    ]
    print_table("the same requests, medians", columns, summary, keys=2)


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description="Layouts of two workers, whose link gets slower and slower.")
    parser.add_argument("--rates", default=",".join(RATES), help=f"as tc writes them, or {UNSHAPED}")
    parser.add_argument("--variants", default=",".join(DEFAULT_CONTENDERS), help=f"of {', '.join(CONTENDERS)}")
    parser.add_argument("--works", default=",".join(work.name for work in WORKS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write every run there")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        sys.exit(serve(json.loads(options.serve), options.address))
    works = [work for work in WORKS if work.name in options.works.split(",")]
    rows = measure(options.rates.split(","), options.variants.split(","), works, options.rounds)
    summary = summarize(rows)
    if options.json is not None:
        document = {
            "run": describe_run(),
            "machine": describe_machine(),
            "model": MODEL,
            "engine": ENGINE,
            "works": [asdict(work) for work in works],
            "summary": summary,
            "rows": rows,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    show(summary)


if __name__ == "__main__":
    main()
