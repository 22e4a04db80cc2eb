"""Engines side by side: the same work in interleaved rounds, with the machine's read bandwidth looked at in between.

No torch.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from nanoserve.benchmarks.cpu_load import ForeignLoad
from nanoserve.benchmarks.peers.process import Batch, Peer
from nanoserve.benchmarks.rounds import GIGA, Bracketed, grouped, in_states, rotated, until_enough_count
from nanoserve.measures.metrics import BatchRates
from nanoserve.measures.workloads import BatchCase, random_prompts

METRICS = ("decode", "prefill", "output")


class EngineRound(msgspec.Struct, frozen=True):
    """One engine in one round: tokens per second, and seconds to the first token of all."""

    rates: BatchRates
    ttft: float
    foreign_cores: float | None


class Round(Bracketed, frozen=True, kw_only=True):
    """One round of one case: every engine once, and which share of each peer's first tokens is ours."""

    engines: dict[str, EngineRound]
    same_tokens: dict[str, float]


def run_rounds(
    case: BatchCase,
    peers: Sequence[Peer],
    *,
    rounds: int,
    vocab_size: int,
    probe: Callable[[], float],
    foreign: ForeignLoad,
) -> Iterator[Round]:
    """Rounds of one case as they are done, until enough count or too many were tried.

    Every engine first runs the case once unmeasured. In each round the first engine is another one.
    """
    for peer in peers:
        peer.run(_batch(case, vocab_size, seed=0))

    def one_round(number: int) -> Round:
        batch, before = _batch(case, vocab_size, seed=number), probe() / GIGA
        engines: dict[str, EngineRound] = {}
        answers: dict[str, tuple[tuple[int, ...], ...]] = {}
        for peer in rotated(peers, number - 1):
            foreign.read()
            result = peer.run(batch)
            load, ttft = foreign.read(), max(timing.ttft for timing in result.timings)
            engines[peer.name] = EngineRound(BatchRates.of(result.timings), ttft, load)
            answers[peer.name] = result.tokens
        return Round(
            case=case.name,
            number=number,
            bandwidth_before=before,
            bandwidth_after=probe() / GIGA,
            foreign_cores=_most(engines.values()),
            engines=engines,
            same_tokens=_agreement(answers),
        )

    return until_enough_count(one_round, rounds)


def _most(engines: Iterable[EngineRound]) -> float | None:
    """The most cores that others kept busy beside any of these."""
    return max((engine.foreign_cores for engine in engines if engine.foreign_cores is not None), default=None)


def _batch(case: BatchCase, vocab_size: int, seed: int) -> Batch:
    prompts = random_prompts([case.input_tokens] * case.batch, vocab_size, seed)
    return Batch(tuple(prompts), case.output_tokens)


def _agreement(answers: dict[str, tuple[tuple[int, ...], ...]]) -> dict[str, float]:
    """For each peer, which share of the first tokens is ours: that everyone did the same work with the same weights."""
    ours = answers.get("nanoserve")
    if ours is None:
        return {}
    return {
        name: statistics.mean(mine[0] == theirs[0] for mine, theirs in zip(ours, tokens, strict=True))
        for name, tokens in answers.items()
        if name != "nanoserve" and all(tokens)  # a server tells no token ids
    }


def ratios(rounds: Sequence[Round], ours: str = "nanoserve") -> list[dict[str, Any]]:
    """Medians and extremes of ours over theirs, for every case, peer, metric and bandwidth state."""
    values = grouped(
        ((done.case, peer, metric, state), ratio)
        for done, state in in_states(rounds)
        for peer, metric, ratio in _ratios_within(done, ours)
    )
    return [
        dict(zip(("case", "peer", "metric", "state"), key, strict=True))
        | {"rounds": len(found), "median": statistics.median(found), "low": min(found), "high": max(found)}
        for key, found in values.items()
    ]


def samples(rounds: Sequence[Round], ours: str = "nanoserve") -> dict[str, dict[str, list[float]]]:
    """The ratios of every counting round for ``bench diff``: they hold in any bandwidth state, unlike the rates."""
    found: dict[str, dict[str, list[float]]] = {}
    for done in rounds:
        for peer, metric, ratio in _ratios_within(done, ours) if done.counts else ():
            found.setdefault(f"{done.case} over {peer}", {}).setdefault(f"{metric}_ratio", []).append(ratio)
    return found


def _ratios_within(done: Round, ours: str) -> Iterator[tuple[str, str, float]]:
    """Peer, metric, and ours over theirs, in one round."""
    for peer, other in done.engines.items():
        for metric in METRICS if peer != ours else ():
            mine, theirs = getattr(done.engines[ours].rates, metric), getattr(other.rates, metric)
            if mine is not None and theirs is not None:
                yield peer, metric, mine / theirs


def summarize(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """For every case, state and engine: the median of each rate over the counting rounds."""
    groups = grouped(
        ((done.case, state, name), engine) for done, state in in_states(rounds) for name, engine in done.engines.items()
    )
    rows = []
    for (case, state, name), engines in groups.items():
        decodes = [engine.rates.decode for engine in engines if engine.rates.decode is not None]
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
                "foreign_cores": _most(engines),
            }
        )
    return rows
