"""Engines side by side: the same work in interleaved rounds, with the machine's read bandwidth looked at in between.

No torch.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from operator import eq
from typing import Any

import msgspec

from nanoserve.benchmarks.cpu_load import ForeignLoad
from nanoserve.benchmarks.driving import EngineRun
from nanoserve.benchmarks.peers.process import PeerProcess
from nanoserve.benchmarks.rounds import Bracketed, Key, bracket, grouped, most_known, rotated, until_enough_count
from nanoserve.measures.metrics import MILLISECONDS, BatchRates
from nanoserve.measures.workloads import BatchCase, random_prompts

OURS = "nanoserve"
METRICS = ("decode", "prefill", "output")


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
    """For each peer, which share of its first tokens is ours: that all did the same work with the same weights."""


def run_rounds(
    case: BatchCase,
    peers: Sequence[PeerProcess],
    *,
    rounds: int,
    vocab_size: int,
    probe: Callable[[], float],
    foreign: ForeignLoad,
) -> Iterator[Round]:
    """Rounds of one case as they are done, until enough count or too many were tried.

    Every engine first runs the case once unmeasured. In each round the first engine is another one.
    """

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
            same_tokens={name: statistics.mean(map(eq, ours, theirs)) for name, theirs in first_tokens.items()},
        )

    for peer in peers:
        run(peer, 0)
    return until_enough_count(one_round, rounds)


def ratios(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """Medians and extremes of ours over theirs, for every case, peer, metric and bandwidth state."""
    rows = []
    for (case, peer, metric, state), found in grouped(rounds, _ratios_within).items():
        spread = {"rounds": len(found), "median": statistics.median(found), "low": min(found), "high": max(found)}
        rows.append({"case": case, "peer": peer, "metric": metric, "state": state, **spread})
    return rows


def samples(rounds: Sequence[Round]) -> dict[str, dict[str, list[float]]]:
    """The ratios of every counting round for ``bench diff``: they hold in any bandwidth state, unlike the rates."""
    found: dict[str, dict[str, list[float]]] = {}
    for done in rounds:
        for (case, peer, metric), ratio in _ratios_within(done).items() if done.counts else ():
            found.setdefault(f"{case} over {peer}", {}).setdefault(f"{metric}_ratio", []).append(ratio)
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
    """For every case, state and engine: the median of each rate over the counting rounds."""
    found = grouped(rounds, lambda done: {(done.case, name): engine for name, engine in done.engines.items()})
    rows = []
    for (case, name, state), engines in found.items():
        row = {"case": case, "state": state, "engine": name, "rounds": len(engines)}
        for metric in ("ttft_ms", "prefill", "decode", "output"):
            known = [engine.figures[metric] for engine in engines if metric in engine.figures]
            row[metric] = statistics.median(known) if known else None
        rows.append({**row, "foreign_cores": most_known(engine.foreign_cores for engine in engines)})
    return rows
