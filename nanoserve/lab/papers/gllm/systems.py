"""The systems and settings of gLLM, section 4.1, and the metrics that are read off their runs."""

from collections.abc import Callable, Iterable
from typing import Any

from nanoserve.commands.tables import Column
from nanoserve.lab.papers.cases import Case, Metric, Outcome, System, mean_of, over_seeds
from nanoserve.lab.papers.framework import Scale

_AS_PUBLISHED = (("admission_reserve", False),)
"""The reserve is nanoserve's own. Systems of the paper go without it, except SGLang, which has one
like it."""
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


def deep_backlog(scale: Scale, system: System, **fields: Any) -> list[Case]:
    """32B on 4 x L20, more requests at once than memory can hold at a time: the highest throughput
    of a system.

    Memory is full of running answers only when their long tail has gathered, after some 2,500
    requests; the steady state is looked at from there until all but 5 % of the requests have their
    first tokens. ``fields`` are other fields of Case.
    """
    requests = scale.pick(5000, 10000)
    steady = (scale.pick(0.6, 0.4), 0.95)
    case = on_devices(system, requests=requests, steady=steady, logged_steps=200, **fields)
    return over_seeds(case, scale.seeds)


def at_rate(system: System, rate: float, seconds: float, seeds: Iterable[int]) -> list[Case]:
    """32B on 4 x L20 with ShareGPT's lengths, for ``seconds`` of Poisson arrivals."""
    case = on_devices(system, requests=round(rate * seconds), rate=rate, steady=(0.3, 0.9))
    return over_seeds(case, seeds)


def on_devices(system: System, *, devices: int = 4, **fields: Any) -> Case:
    """A model on some devices as the system spreads it; ``fields`` are other fields of Case, with
    defaults here."""
    defaults = {"model": QWEN_32B, "machine": L20, "lengths": SHAREGPT, "steady": (0.5, 0.95)}
    return Case(system=system, layouts=(system.layout(devices),), **{**defaults, **fields})


def throughput(outcome: Outcome) -> float:
    """Prompt and output tokens per second, in the steady state."""
    return outcome.steady.tokens_per_second


ttft, tpot, e2el = mean_of("ttft_ms", 1e3), mean_of("tpot_ms"), mean_of("e2el_ms", 1e3)
"""Mean latencies: TTFT and E2EL in seconds, TPOT in milliseconds."""


def bubbles(outcome: Outcome) -> float:
    """Share of the time in which a stage computes nothing, in per cent, in the steady state."""
    return 100 * outcome.steady.bubble_share


METRICS: dict[str, Metric] = {"TTFT": ttft, "TPOT": tpot, "E2EL": e2el, "throughput": throughput}
UNITS = {"TTFT": "s", "TPOT": "ms", "E2EL": "s", "throughput": "tokens/s"}
FORMS = {"TTFT": ",.2f", "TPOT": ",.0f", "E2EL": ",.1f"}


def metric_columns(name: Callable[[str], str]) -> list[Column]:
    """Columns of the four metrics, ``name`` turning a metric into the field of a row."""
    latencies = [
        Column(f"{metric} {UNITS[metric]}", name(metric), form) for metric, form in FORMS.items()
    ]
    return latencies + [Column("tok/s", name("throughput"), ",.0f")]
