"""Lengths by the names that the command line, the planner and the papers' figures share."""

from collections.abc import Iterator, Sequence

from nanoserve.errors import UsageError
from nanoserve.measures.workloads import RequestShape, parse_sizes
from nanoserve.simulator.length_tables import length_tables
from nanoserve.simulator.lengths import fixed_lengths, lognormal_lengths

GLLMS_SHAREGPT = "sharegpt-gllm"
_SHAREGPT_MOMENTS = (222.0, 127.0, 1.2, 1.0)
"""gLLM's ShareGPT: mean input and output tokens (Azure's over 5.21 and 1.66), and sigmas of heavy tails."""


def named_lengths(name: str, seed: int, others: Sequence[str] = ()) -> Iterator[RequestShape]:
    """Lengths by a shipped table's name, gLLM's moments, or fixed as 512+128.

    Raises:
        UsageError: listing the names, after ``others`` that the caller knows.
    """
    if name == GLLMS_SHAREGPT:
        return lognormal_lengths(*_SHAREGPT_MOMENTS, seed=seed)
    if name in length_tables():
        return length_tables()[name].draw(seed)
    parts = name.split("+")
    if len(parts) != 2:
        known = ", ".join((*others, GLLMS_SHAREGPT, *length_tables()))
        raise UsageError(f"--lengths takes tokens in and out such as 512+128, or one of {known}; not {name!r}")
    return fixed_lengths(*(parse_sizes(part, "--lengths")[0] for part in parts))
