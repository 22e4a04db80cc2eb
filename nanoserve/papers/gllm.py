"""gLLM's evaluation (section 4), simulated: Token Throttling beside the systems that the paper compares with.

Figures 1 and 4 show why: under one token budget for prompts and answers (Sarathi-Serve), micro-batches of a pipeline
are uneven, and what is uneven leaves stages idle.
"""

from nanoserve.benchmarks.tables import Column
from nanoserve.papers.cases import Case, Outcome, System
from nanoserve.papers.claims import Claim
from nanoserve.papers.framework import Finding, Paper, PaperFigure, Run, Scale
from nanoserve.papers.tuning import over_seeds, ratio, spread

GLLM = System(label="gLLM", policy="throttling")
WITH_CK = System(label="gLLM w/ CK", policy="sarathi")
VLLM = System(label="vLLM", policy="sarathi", runtime="coupled")
SGLANG = System(label="SGLang", policy="sarathi", tensor_parallel=True)


def _deep(scale: Scale, system: System) -> list[Case]:
    case = Case(
        system=system,
        model="qwen2.5-32b",
        machine="gllm-l20",
        devices=4,
        lengths="sharegpt-gllm",
        requests=scale.pick(6000, 10000),
    )
    return over_seeds(case, scale.seeds)


def _maximum_throughput(scale: Scale, run: Run) -> Finding:
    def throughput(outcome: Outcome) -> float:
        return outcome.steady.tokens_per_second

    systems = {system.label: _deep(scale, system) for system in (GLLM, WITH_CK, VLLM, SGLANG)}
    outcomes = run(case for cases in systems.values() for case in cases)
    rows = [{"system": name, "tokens": spread(cases, outcomes, throughput).mean} for name, cases in systems.items()]
    claim = Claim(
        figure="10",
        says="maximum throughput over Sarathi-Serve's policy on the same runtime",
        paper="+29 % to +150 % over vLLM",
        ours=ratio(systems["gLLM"], systems["gLLM w/ CK"], outcomes, throughput),
        form="{:.2f}x",
        at_least=1.3,
        at_most=2.3,
        assumption="a backlog that outlasts the filling of memory",
    )
    return Finding([claim], None, rows, [Column("system", "system"), Column("tok/s", "tokens", ",.0f")])


PAPER = Paper(
    title="gLLM",
    setting=("6,000 requests", "10,000 requests"),
    figures=[PaperFigure(number="10", title="maximum throughput", make=_maximum_throughput)],
)
