"""The engine against itself: captured graphs against eager steps, overlapped steps against plain ones."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from nanoserve.benchmarks.gpu.cases import Case
from nanoserve.benchmarks.gpu.engines import EngineSettings, EngineShelf
from nanoserve.benchmarks.gpu.families import FAMILIES, VOCAB_SIZE
from nanoserve.measures.workloads import random_prompts

SPARSE = ("mixtral", "qwen3_moe")
CHECKED = ("qwen3", "mistral", "qwen3_moe")
"""One with norms of queries and keys, one with windows, one with experts."""
PROMPT_LENGTHS = tuple(5 + 9 * place % 83 for place in range(20))
OUTPUT_LENGTHS = tuple(3 + 7 * place % 29 for place in range(20))
"""Requests come and go in the midst of others, so that batches grow, shrink, and mix prompts with single tokens."""

Tokens = tuple[tuple[int, ...], ...]


def engine_check_cases(shelf: EngineShelf, families: Sequence[str]) -> Iterator[Case]:
    """In float32, where rounding does not decide between tokens."""
    for family in families:
        yield Case(f"graph against eager, {family}", partial(_check_graphs, shelf, family))
        yield Case(f"overlapped against plain, {family}", partial(_check_overlap, shelf, family))


def _settings(shelf: EngineShelf, family: str, *, eager: bool) -> EngineSettings:
    return EngineSettings(
        shape=shelf.config_file(family, FAMILIES[family]),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        kv_cache_memory=32 * 2**20,
        eager=eager,
    )


def _check_graphs(shelf: EngineShelf, family: str) -> dict[str, Any]:
    eager = _generate(shelf, _settings(shelf, family, eager=True), overlapped=False)
    settings = _settings(shelf, family, eager=False)
    captured = _generate(shelf, settings, overlapped=False)
    fields, facts = same_tokens("graph against eager", captured, eager), shelf.get(settings).llm.gpu
    if facts is None:  # a dry run has no graphs
        return fields
    # Experts in float32 wait to learn how many tokens each gets: such steps are compiled, and cannot be captured.
    as_meant = facts.graphs > 0 or FAMILIES[family]["model_type"] in SPARSE
    return _as_meant(fields, "" if as_meant else "no decode step was captured") | {"graphs": facts.graphs}


def _check_overlap(shelf: EngineShelf, family: str) -> dict[str, Any]:
    settings = _settings(shelf, family, eager=False)
    plain = _generate(shelf, settings, overlapped=False)
    overlapped = _generate(shelf, settings, overlapped=True)
    fields, engine = same_tokens("overlapped against plain", overlapped, plain), shelf.get(settings)
    as_meant = engine.overlaps or engine.llm.gpu is None  # a CPU has nothing to gain by it
    in_flight = engine.llm.engine.executor.max_in_flight
    return _as_meant(fields, "" if as_meant else "steps were not overlapped") | {"in_flight": in_flight}


def _as_meant(fields: dict[str, Any], problem: str) -> dict[str, Any]:
    """The same tokens prove nothing if what was to be checked did not run."""
    return fields | {"ok": False, "problem": problem} if problem else fields


def _generate(shelf: EngineShelf, settings: EngineSettings, *, overlapped: bool) -> Tokens:
    engine = shelf.get(settings)
    engine.overlap(steps=overlapped)
    prompts = random_prompts(PROMPT_LENGTHS, VOCAB_SIZE, seed=0)
    return engine.driver.run(prompts, OUTPUT_LENGTHS).tokens


def same_tokens(what: str, found: Sequence[tuple[int, ...]], expected: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    """The fields of a check."""
    different = [place for place, (one, other) in enumerate(zip(found, expected, strict=True)) if one != other]
    return {"check": what, "requests": len(expected), "different_requests": different, "ok": not different}
