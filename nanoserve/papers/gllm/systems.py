"""The systems and settings of gLLM, section 4.1, and the figures that are read off their runs."""

from collections.abc import Iterable

from nanoserve.papers.cases import Case, Outcome, System
from nanoserve.papers.framework import Scale
from nanoserve.papers.tuning import over_seeds

_AS_PUBLISHED = (("admission_reserve", False),)
"""The reserve is nanoserve's own: whoever is named after a system goes without, but SGLang, which has one like it."""
GLLM = System(label="gLLM", policy="throttling", parameters=_AS_PUBLISHED)
WITH_CK = System(label="gLLM w/ CK", policy="sarathi", parameters=_AS_PUBLISHED)
"""Section 4.1: Sarathi-Serve's policy in gLLM's runtime."""
WITH_CK_AND_RESERVE = System(label="gLLM w/ CK, with the admission reserve", policy="sarathi")
VLLM = System(label="vLLM", policy="sarathi", parameters=_AS_PUBLISHED, runtime="coupled")
SGLANG = System(label="SGLang", policy="sarathi", tensor_parallel=True)
WITHOUT_WT = GLLM.with_("gLLM w/o WT", without_wt=True)
WITHOUT_UT = GLLM.with_("gLLM w/o UT", without_ut=True)

SHAREGPT, AZURE = "sharegpt-gllm", "azure-conv"
QWEN_14B, QWEN_32B, LLAMA_100B = "qwen2.5-14b", "qwen2.5-32b", "llama-3.1-100b"
L20, A100, A800 = "gllm-l20", "gllm-a100", "gllm-a800"


def deep_backlog(scale: Scale, system: System, *, max_num_seqs: int = 4096) -> list[Case]:
    """32B on 4 x L20, more requests at once than memory can hold at a time: the most that a system can do.

    Memory is full of running answers only when their long tail has gathered, after some 2,500 requests; the steady
    state is looked at from there until all but 5 % of the requests have their first tokens.
    """
    case = Case(
        system=system,
        model=QWEN_32B,
        machine=L20,
        devices=4,
        lengths=SHAREGPT,
        requests=scale.pick(5000, 10000),
        steady=(scale.pick(0.6, 0.4), 0.95),
        max_num_seqs=max_num_seqs,
        logged_steps=200,
    )
    return over_seeds(case, scale.seeds)


def at_rate(system: System, rate: float, seconds: float, seeds: Iterable[int]) -> list[Case]:
    """32B on 4 x L20 with ShareGPT's lengths, for so many seconds of Poisson arrivals."""
    case = Case(
        system=system,
        model=QWEN_32B,
        machine=L20,
        devices=4,
        lengths=SHAREGPT,
        requests=round(rate * seconds),
        rate=rate,
        steady=(0.3, 0.9),
    )
    return over_seeds(case, seeds)


def throughput(outcome: Outcome) -> float:
    """Prompt and output tokens per second, in the steady state."""
    return outcome.steady.tokens_per_second


def ttft(outcome: Outcome) -> float:
    """Mean time to first token, in seconds."""
    assert outcome.result.ttft_ms is not None, "every request has a first token"
    return outcome.result.ttft_ms.mean / 1e3


def tpot(outcome: Outcome) -> float:
    """Mean time per output token, in milliseconds."""
    assert outcome.result.tpot_ms is not None, "some answers have two tokens"
    return outcome.result.tpot_ms.mean


def e2el(outcome: Outcome) -> float:
    """Mean end-to-end latency, in seconds."""
    assert outcome.result.e2el_ms is not None, "every request ends"
    return outcome.result.e2el_ms.mean / 1e3


def bubbles(outcome: Outcome) -> float:
    """Share of the time in which a stage computes nothing, in per cent, in the steady state."""
    return 100 * outcome.steady.bubble_share
