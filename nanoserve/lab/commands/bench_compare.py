"""``nanoserve bench compare``: the same work for nanoserve and other engines, interleaved in one
run."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from operator import eq
from pathlib import Path
from typing import Any

import msgspec

from nanoserve.commands.engine_options import EngineOptions, locate_model
from nanoserve.commands.options import option
from nanoserve.commands.progress import show_progress
from nanoserve.commands.tables import columns, print_table
from nanoserve.commands.terminal import remark
from nanoserve.engine_config import DEFAULT_POLICY
from nanoserve.errors import NanoserveError, UsageError, shown
from nanoserve.lab.benchmarks.driving import EngineRun
from nanoserve.lab.benchmarks.machine import ForeignLoad, available_cores
from nanoserve.lab.benchmarks.peers.process import PEERS, Opening, PeerProcess
from nanoserve.lab.benchmarks.report import Report
from nanoserve.lab.benchmarks.rounds import (
    Bracketed,
    Key,
    Repeating,
    bracket,
    counting_words,
    grouped,
    in_states,
    most_known,
    rotated,
)
from nanoserve.lab.benchmarks.verdicts import spread_text
from nanoserve.lab.commands.bench_options import (
    GridOptions,
    ResultOptions,
    RoundOptions,
    engine_title,
    print_head,
    settled_operators,
)
from nanoserve.lab.workloads import BatchCase, random_prompts
from nanoserve.models.hub import ResolvedModel
from nanoserve.record.metrics import MILLISECONDS, BatchRates

OURS = "nanoserve"
METRICS = ("decode", "prefill", "output")
DEFAULT_MODEL = "dummy:qwen3-0.6b"
_RATES = columns(
    (",.1f", ("prefill tok/s", "prefill"), ("decode tok/s", "decode"), ("output tok/s", "output"))
)
_KEYS = columns(("", ("batch x in+out", "case"), ("read", "state")))
_ENGINE_COLUMNS = (
    _KEYS + columns(("", "engine", "rounds"), (",.0f", ("TTFT ms", "ttft_ms"))) + _RATES
)
_RATIO_COLUMNS = _KEYS + columns(
    ("", ("against", "peer"), "metric", "rounds"), (".2f", "median", "low", "high")
)
_SPECULATION_COLUMNS = _KEYS + columns(
    ("", "rounds"),
    (",.1f", ("speculation tok/s", "decode")),
    ("", "speedup"),
    (".2f", "tokens_a_step", "predicted"),
)


class CompareOptions(GridOptions, RoundOptions, EngineOptions, ResultOptions):
    peers: str = option("transformers,llama.cpp", "Engines to compare with.", metavar="NAME,NAME")
    workloads: str = option(
        "edits,stories,random", "Kind of prompts with --speculate.", metavar="NAME,NAME"
    )
    rounds: int = option(5, "Rounds that count, for each case.", minimum=1)


def run(options: CompareOptions) -> None:
    """A round counts only if the machine's read bandwidth before and after it differs by less than
    10 %, and others keep at most 0.2 cores busy. Each engine has a process of its own, the same
    weights, number format and threads. Default model: dummy:qwen3-0.6b. The peer "server" is
    nanoserve itself, asked over HTTP: the ratio is what serving costs. With --quantization,
    llama.cpp reads its own Q4_0 or Q8_0 of the weights; of a GGUF file, both read that file.

    With --speculate it is compared with plain decoding instead, by default of the bundled
    storyteller. The workload "scripted 0.6" drafts right that often; there are 0 and 0.8 too.

    [bold]Examples[/bold]

      nanoserve bench compare --dtype bfloat16 --batch-sizes 1,4 \\
        --json compare.json
      nanoserve bench compare --quantization int4 --peers llama.cpp
      nanoserve bench compare --peers server --batch-sizes 16
      nanoserve bench compare --speculate ngram --workloads edits,random
    """
    options.check_is_for_cpu()
    if options.speculate is not None:
        return _compare_speculation(options)
    names = [name.strip() for name in options.peers.split(",") if name.strip()]
    cases = options.cases()
    if unknown := [name for name in names if name not in PEERS]:
        raise UsageError(f"--peers {shown(unknown[0])} is not one of {', '.join(PEERS)}")
    present = [name for name in names if not PEERS[name].missing]
    if names and not present:
        commands = dict.fromkeys(PEERS[name].install for name in names)
        raise UsageError(
            f"nothing to compare with is installed; first run: {' && '.join(commands)}"
        )
    settings = {"peers": present, "cases": [case.name for case in cases], "rounds": options.rounds}
    with options.reported("compare", settings, _show) as report, ExitStack() as opened:
        for name in names:
            if name not in present:
                note = (
                    f"{name} is not installed and left out; to compare with it, first run: "
                    f"{PEERS[name].install}"
                )
                remark(note)
                report.note(note)
        peers = _open_peers(present, options, report, opened)
        _measure(peers, cases, options.rounds, report, options.repeating())


def _compare_speculation(options: CompareOptions) -> None:
    """Two engines in this process, one of which drafts."""
    settled_operators(options.threads)
    from nanoserve.lab.benchmarks.settling import settle
    from nanoserve.lab.benchmarks.speculation import (
        WORKLOADS,
        SpeculationBench,
        summarize_speculation,
    )

    names, cases = (
        [name.strip() for name in options.workloads.split(",") if name.strip()],
        options.cases(),
    )
    if unknown := [name for name in names if name not in WORKLOADS]:
        raise UsageError(f"--workloads {shown(unknown[0])} is not one of {', '.join(WORKLOADS)}")
    settings = {
        "workloads": names,
        "cases": [case.name for case in cases],
        "rounds": options.rounds,
    }
    settings |= {"speculate": options.speculate}
    show = partial(_show_speculation, summarize=summarize_speculation)
    with (
        options.reported("speculation", settings, show) as report,
        ExitStack() as opened,
    ):
        llms = [
            opened.enter_context(replace(options, speculate=one).open_llm())
            for one in (None, options.speculate)
        ]
        report.put("engine", [settle(llm, remark) for llm in llms][-1])
        bench, work, repeating = (
            SpeculationBench(*llms),
            list(product(names, cases)),
            options.repeating(),
        )
        progress = opened.enter_context(show_progress())
        for place, (name, case) in enumerate(work):
            remark(f"comparing {name}, {case.name}")
            for done in bench.rounds(name, case, options.rounds, repeating):
                report.add(
                    {"case": done.case, "round": done, "drift": done.drift, "counts": done.counts}
                )
                number = min(done.number, options.rounds)
                progress("rounds", place * options.rounds + number, len(work) * options.rounds)


def _show_speculation(
    report: Report,
    options: ResultOptions,
    *,
    summarize: Callable[[Sequence[Any]], list[dict[str, Any]]],
) -> str:
    from nanoserve.lab.benchmarks.policies.rounds import PolicyRound

    done = [msgspec.convert(row["round"], PolicyRound) for row in report.rows]
    report.put("summary", summary := summarize(done))
    print_head(report)
    facts = report.document["engine"]
    title = f"{facts['model']}, {report.document['settings']['speculate']}, {engine_title(facts)}"
    print_table(title, _SPECULATION_COLUMNS, summary, keys=2)
    bars = columns((",.1f", ("plain", "plain"), ("speculative", "decode")))
    options.draw_bars(report, title, "{case} ({state})", bars, summary)
    figures = [one.variants["speculative"] for one, _ in in_states(done)]
    gains = spread_text(one["decode"] / one["plain"] for one in figures)
    return f"Speculation decodes {gains} times as fast as plain decoding; {counting_words(done)}."


@contextmanager
def _needed(name: str) -> Iterator[None]:
    """Add to an error how to do without that peer: a comparison never goes on with fewer peers than
    were asked for."""
    try:
        yield
    except NanoserveError as error:
        if name == OURS:
            raise
        raise type(error)(
            f"{error} (to compare without {name}, leave it out of --peers)"
        ) from error


def _open_peers(
    names: Sequence[str], options: CompareOptions, report: Report, opened: ExitStack
) -> list[PeerProcess]:
    """All engines, ours first, until ``opened`` ends; weights are written before for those that
    read other files."""
    operators = settled_operators(options.threads)
    from nanoserve.lab.benchmarks.peers import weights

    model = locate_model(options.model or DEFAULT_MODEL, offline=options.offline)
    config = weights.model_config(model)
    shared: dict[str, Any] = {
        "dtype": weights.dtype_name(options.dtype, config),
        "threads": options.threads or available_cores(),
        "policy": options.policy or DEFAULT_POLICY,
        "quantization": options.quantization,
    }
    report.put(
        "engine",
        {"model": model.name, **shared, "vocab_size": config.vocab_size, "operators": operators},
    )
    if "transformers" in names and (
        options.quantization or config.quantization or weights.own_gguf_file(model)
    ):
        names = [name for name in names if name != "transformers"]
        report.note(
            "transformers is left out: it would compute with 16-bit copies of the quantized weights"
        )
    files: dict[str, Callable[[ResolvedModel, str], Path]] = {
        "transformers": weights.checkpoint_directory,
        "llama.cpp": partial(weights.gguf_file, quantization=options.quantization),
    }
    sources = {}
    for name in (OURS, *names):
        remark(f"preparing {name}")
        with _needed(name):
            # A model of the hub is found once, and never looked up again.
            own = weights.own_gguf_file(model) or model.directory
            found = own
            if name in files:
                found = files[name](model, shared["dtype"])
        sources[name] = str(found or model.name)
    peers: list[PeerProcess] = []
    shared |= {"max_batch": max(options.batch_sizes), "eager": options.eager}
    shared |= {"max_length": max(shape.total_tokens for shape in options.lengths)}
    for name, source in sources.items():
        with _needed(name):
            peers.append(PeerProcess(Opening(engine=name, model=source, **shared)))
        opened.callback(peers[-1].close)
    report.put("descriptions", {peer.name: peer.description for peer in peers})
    return peers


def _measure(
    peers: Sequence[PeerProcess],
    cases: Sequence[BatchCase],
    rounds: int,
    report: Report,
    repeating: Repeating,
) -> None:
    from nanoserve.lab.benchmarks.roofline import BandwidthProbe

    probe, foreign = BandwidthProbe().read, ForeignLoad([peer.process_id for peer in peers])
    vocab_size, total = report.document["engine"]["vocab_size"], len(cases) * rounds
    with show_progress() as progress:
        for place, case in enumerate(cases):
            remark(f"comparing {case.name}")
            counted = place * rounds
            progress("rounds", counted, total)
            settings: dict[str, Any] = {
                "vocab_size": vocab_size,
                "probe": probe,
                "foreign": foreign,
            }
            for done in run_rounds(case, peers, rounds=rounds, repeating=repeating, **settings):
                report.put("descriptions", {peer.name: peer.description for peer in peers})
                report.add(
                    {"case": case.name, "round": done, "drift": done.drift, "counts": done.counts}
                )
                counted += done.counts
                progress("rounds", counted, total)


def _show(report: Report, options: ResultOptions) -> str:
    done = [msgspec.convert(row["round"], Round) for row in report.rows]
    summary, compared = summarize(done), ratios(done)
    report.put("summary", summary)
    report.put("ratios", compared)
    report.put("samples", samples(done))
    descriptions = report.document["descriptions"]
    ours = descriptions[OURS]
    facts: dict[str, Any] = report.document["engine"] | {"layers": ours["layers"]}
    print_head(report)
    title = f"{facts['model']}, {engine_title(facts)}"
    print_table(title, _ENGINE_COLUMNS, summary)
    if compared:
        print_table(
            "nanoserve over the peer (above 1: nanoserve is faster)", _RATIO_COLUMNS, compared
        )
    options.draw_bars(report, title, "{case} {engine} ({state})", _RATES, summary)
    return sentence(
        done, {name: one["trouble"] for name, one in descriptions.items() if "trouble" in one}
    )


def sentence(rounds: "Sequence[Round]", troubles: Mapping[str, str]) -> str:
    """How many times as fast ours is as each peer, over all cases, and what ``troubles`` the peers
    had."""
    found: dict[str, list[float]] = {}
    for done, _ in in_states(rounds):
        for (_, peer, metric), ratio in _ratios_within(done).items():
            if (peer == "server" and metric == "output") or (
                peer != "server" and metric == "decode"
            ):
                found.setdefault(peer, []).append(ratio)
    compared = [
        f"{spread_text(several)} times as fast as {peer}" for peer, several in found.items()
    ]
    words = "There was nothing to compare decoding with"
    if compared:
        words = f"nanoserve decodes {' and '.join(compared)}"
    told = [f"{peer} {trouble}" for peer, trouble in troubles.items()]
    return "; ".join([words, counting_words(rounds)] + told) + "."


class EngineRound(msgspec.Struct, frozen=True):
    """One engine in one round: tokens per second, and seconds to the first token of all."""

    rates: BatchRates
    ttft: float
    foreign_cores: float | None

    @property
    def figures(self) -> dict[str, float]:
        """Its metrics that are known, by name."""
        found = {"ttft_ms": MILLISECONDS * self.ttft, **msgspec.structs.asdict(self.rates)}
        return {name: value for name, value in found.items() if value is not None}


class Round(Bracketed, frozen=True, kw_only=True):
    """One round of one case: every engine once."""

    engines: dict[str, EngineRound]
    same_tokens: dict[str, float]
    """For each peer, which share of its first tokens is ours: that all did the same work with the
    same weights."""


def run_rounds(
    case: BatchCase,
    peers: Sequence[PeerProcess],
    *,
    rounds: int,
    vocab_size: int,
    probe: Callable[[], float],
    foreign: ForeignLoad,
    repeating: Repeating,
) -> Iterator[Round]:
    """Rounds of one case as they are done, until enough count or the time for ``repeating`` them is
    spent. Every engine first runs the case once unmeasured. In each round the first engine is
    another one."""

    def run(peer: PeerProcess, seed: int) -> EngineRun:
        prompts = random_prompts([case.input_tokens] * case.batch, vocab_size, seed)
        return peer.run(tuple(prompts), case.output_tokens)

    def one_round(number: int) -> Round:
        engines: dict[str, EngineRound] = {}
        first_tokens: dict[str, list[int]] = {}
        with bracket(case.name, number, probe) as fields:
            for peer in rotated(peers, number - 1):
                foreign.read()
                result = run(peer, number)
                load, ttft = foreign.read(), max(timing.ttft for timing in result.timings)
                engines[peer.name] = EngineRound(BatchRates.of(result.timings), ttft, load)
                if all(result.tokens):  # a server tells no token ids
                    first_tokens[peer.name] = [tokens[0] for tokens in result.tokens]
        ours = first_tokens.pop(OURS, [])
        return Round(
            **fields,
            foreign_cores=most_known(engine.foreign_cores for engine in engines.values()),
            engines=engines,
            same_tokens={
                name: statistics.mean(map(eq, ours, theirs))
                for name, theirs in first_tokens.items()
            },
        )

    for peer in peers:
        run(peer, 0)
    return repeating.rounds(one_round, rounds)


def ratios(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """Medians and extremes of ours over theirs, for every case, peer, metric and bandwidth
    state."""
    rows = []
    for (case, peer, metric, state), found in grouped(rounds, _ratios_within).items():
        spread = {
            "rounds": len(found),
            "median": statistics.median(found),
            "low": min(found),
            "high": max(found),
        }
        rows.append({"case": case, "peer": peer, "metric": metric, "state": state, **spread})
    return rows


def samples(rounds: Sequence[Round]) -> dict[str, dict[str, list[float]]]:
    """The ratios of every counting round for ``bench diff``: they hold in any bandwidth state,
    unlike the rates."""
    found: dict[str, dict[str, list[float]]] = {}
    for done in rounds:
        for (case, peer, metric), ratio in _ratios_within(done).items() if done.counts else ():
            found.setdefault(f"{case} over {peer}", {}).setdefault(f"{metric}_ratio", []).append(
                ratio
            )
    return found


def _ratios_within(done: Round) -> dict[Key, float]:
    """(case, peer, metric) -> ours over theirs, in one round."""
    ours = done.engines[OURS].figures
    return {
        (done.case, peer, metric): ours[metric] / engine.figures[metric]
        for peer, engine in done.engines.items()
        for metric in METRICS
        if peer != OURS and metric in ours and metric in engine.figures
    }


def summarize(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """For every case, state and engine: the median of each rate over its rounds."""
    found = grouped(
        rounds, lambda done: {(done.case, name): engine for name, engine in done.engines.items()}
    )
    rows = []
    for (case, name, state), engines in found.items():
        row = {"case": case, "state": state, "engine": name, "rounds": len(engines)}
        for metric in ("ttft_ms", "prefill", "decode", "output"):
            known = [engine.figures[metric] for engine in engines if metric in engine.figures]
            row[metric] = None
            if known:
                row[metric] = statistics.median(known)
        rows.append(
            {**row, "foreign_cores": most_known(engine.foreign_cores for engine in engines)}
        )
    return rows
