"""Engines side by side: the same work in interleaved rounds, with the machine's read bandwidth looked at in between.

A round counts only if the bandwidth before and after it differs by less than ``MAX_DRIFT``; ratios are formed within
a round and never across rounds, and are reported for each bandwidth state apart. No torch.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from nanoserve.benchmarks.cpu_load import ForeignLoad
from nanoserve.benchmarks.metrics import BatchRates
from nanoserve.benchmarks.peers.protocol import Batch, Peer
from nanoserve.benchmarks.workloads import Case, random_prompts

MAX_DRIFT = 0.10
STATE_WIDTH = 1.25
"""Readings within this factor of a state's lowest belong to it."""
BUSY_CORES = 0.2
"""With others keeping more of the processor busy than this during any engine's turn, a round is told apart."""
MAX_ATTEMPTS = 2
"""Rounds tried for every round that is wanted, when some do not count."""
GIGA = 1e9
METRICS = ("decode", "prefill", "output")


class EngineRound(msgspec.Struct, frozen=True):
    """One engine in one round: tokens per second, and seconds to the first token of all."""

    rates: BatchRates
    ttft: float
    foreign_cores: float | None


class Round(msgspec.Struct, frozen=True):
    """One round of one case; the bandwidths are in GB/s."""

    case: str
    number: int
    bandwidth_before: float
    bandwidth_after: float
    engines: dict[str, EngineRound]
    same_tokens: dict[str, float]

    @property
    def drift(self) -> float:
        """How far apart the two readings are, relative to the lower one."""
        low, high = sorted((self.bandwidth_before, self.bandwidth_after))
        return high / low - 1

    @property
    def counts(self) -> bool:
        return self.drift < MAX_DRIFT

    @property
    def is_busy(self) -> bool:
        """Whether other processes were at work beside an engine."""
        return any((engine.foreign_cores or 0.0) > BUSY_CORES for engine in self.engines.values())

    @property
    def bandwidth(self) -> float:
        return (self.bandwidth_before + self.bandwidth_after) / 2


class Ratio(msgspec.Struct, frozen=True):
    """Ours over a peer's, in the rounds of one case and one bandwidth state."""

    case: str
    peer: str
    metric: str
    state: str
    rounds: int
    median: float
    low: float
    high: float


def run_rounds(
    case: Case, peers: Sequence[Peer], *, rounds: int, vocab_size: int, probe: Callable[[], float], foreign: ForeignLoad
) -> Iterator[Round]:
    """Rounds of one case as they are done, until enough count or too many were tried.

    Every engine first runs the case once unmeasured. In each round the first engine is another one.
    """
    counted = 0
    for peer in peers:
        peer.run(_batch(case, vocab_size, seed=0))
    for number in range(1, rounds * MAX_ATTEMPTS + 1):
        turn = (number - 1) % len(peers)
        order = [*peers[turn:], *peers[:turn]]
        done = _one_round(case, order, number, _batch(case, vocab_size, seed=number), probe, foreign)
        yield done
        counted += done.counts
        if counted == rounds:
            return


def _batch(case: Case, vocab_size: int, seed: int) -> Batch:
    prompts = random_prompts([case.input_tokens] * case.batch, vocab_size, seed)
    return Batch(tuple(prompts), case.output_tokens)


def _one_round(
    case: Case, peers: Sequence[Peer], number: int, batch: Batch, probe: Callable[[], float], foreign: ForeignLoad
) -> Round:
    before = probe() / GIGA
    engines: dict[str, EngineRound] = {}
    answers: dict[str, tuple[tuple[int, ...], ...]] = {}
    for peer in peers:
        foreign.read()
        result = peer.run(batch)
        load = foreign.read()
        rates = BatchRates.of(result.timings)
        engines[peer.name] = EngineRound(rates, max(timing.ttft for timing in result.timings), load)
        answers[peer.name] = result.tokens
    return Round(case.name, number, before, probe() / GIGA, engines, _agreement(answers))


def _agreement(answers: dict[str, tuple[tuple[int, ...], ...]]) -> dict[str, float]:
    """For each peer, which share of the first tokens is ours: that everyone did the same work with the same weights."""
    ours = answers.get("nanoserve")
    if ours is None:
        return {}
    return {
        name: statistics.mean(mine[0] == theirs[0] for mine, theirs in zip(ours, tokens, strict=True))
        for name, tokens in answers.items()
        if name != "nanoserve"
    }


def bandwidth_states(rounds: Sequence[Round]) -> dict[int, str]:
    """Which state each counting round (by its place in the sequence) was in, named by the bandwidths seen in it.

    Memory bandwidth of a virtual machine may sit at one of two levels for minutes and then flip. Rounds beside a busy
    neighbour are states of their own.
    """
    groups: list[list[int]] = []
    counting = [place for place, done in enumerate(rounds) if done.counts]
    for place in sorted(counting, key=lambda place: (rounds[place].is_busy, rounds[place].bandwidth)):
        first = rounds[groups[-1][0]] if groups else None
        here = rounds[place]
        if first and here.is_busy == first.is_busy and here.bandwidth < STATE_WIDTH * first.bandwidth:
            groups[-1].append(place)
        else:
            groups.append([place])
    return {place: _state_name([rounds[member] for member in group]) for group in groups for place in group}


def _state_name(rounds: Sequence[Round]) -> str:
    low, high = f"{rounds[0].bandwidth:.0f}", f"{rounds[-1].bandwidth:.0f}"
    extent = low if low == high else f"{low}-{high}"
    return f"{extent} GB/s" + (", busy" if rounds[0].is_busy else "")


def ratios(rounds: Sequence[Round], ours: str = "nanoserve") -> list[Ratio]:
    """Medians and extremes of ours over theirs, for every case, peer, metric and bandwidth state."""
    states = bandwidth_states(rounds)
    values: dict[tuple[str, str, str, str], list[float]] = {}
    for place, state in sorted(states.items()):
        done = rounds[place]
        for peer, other in done.engines.items():
            for metric in METRICS if peer != ours else ():
                mine, theirs = getattr(done.engines[ours].rates, metric), getattr(other.rates, metric)
                if mine is not None and theirs is not None:
                    values.setdefault((done.case, peer, metric, state), []).append(mine / theirs)
    return [
        Ratio(*key, rounds=len(found), median=statistics.median(found), low=min(found), high=max(found))
        for key, found in values.items()
    ]


def summarize(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """For every case, state and engine: the median of each rate over the counting rounds."""
    states = bandwidth_states(rounds)
    groups: dict[tuple[str, str, str], list[EngineRound]] = {}
    for place, state in sorted(states.items()):
        for name, engine in rounds[place].engines.items():
            groups.setdefault((rounds[place].case, state, name), []).append(engine)
    rows = []
    for (case, state, name), engines in groups.items():
        decodes = [engine.rates.decode for engine in engines if engine.rates.decode is not None]
        loads = [engine.foreign_cores for engine in engines if engine.foreign_cores is not None]
        rows.append(
            {
                "case": case,
                "state": state,
                "engine": name,
                "rounds": len(engines),
                "ttft_ms": 1000 * statistics.median(engine.ttft for engine in engines),
                "prefill": statistics.median(engine.rates.prefill for engine in engines),
                "decode": statistics.median(decodes) if decodes else None,
                "output": statistics.median(engine.rates.output for engine in engines),
                "foreign_cores": max(loads, default=None),
            }
        )
    return rows
