"""gLLM, section 4.3: maximum throughput on one, two and four devices, within a node and across
nodes (figure 12)."""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from nanoserve.commands.tables import columns
from nanoserve.lab.charts import Chart, panel
from nanoserve.lab.papers.cases import TOKEN_BUDGETS, Case, Runs, System, over_seeds, tuned
from nanoserve.lab.papers.claims import claims
from nanoserve.lab.papers.framework import Finding, Run, Scale
from nanoserve.lab.papers.gllm.systems import (
    A100,
    GLLM,
    L20,
    QWEN_14B,
    QWEN_32B,
    SGLANG,
    VLLM,
    on_devices,
    throughput,
)

_Key = tuple[str, str, str, int]
_PLACES = {L20: "within a node, L20", A100: "across nodes, A100"}
_REQUESTS_PER_DEVICE = 1000
"""More devices hold more running answers, and it takes more requests until these fill the
memory."""
_SYSTEMS = (VLLM, SGLANG, GLLM)
_OF_FOUR = [(machine, system, 4) for system in (SGLANG, VLLM) for machine in _PLACES]
_CLAIMED = [(L20, GLLM, 2), (L20, GLLM, 4), (A100, GLLM, 2), (A100, GLLM, 4)] + _OF_FOUR
"""Machine, system, and how many devices are compared with one."""


SCALING_COLUMNS = columns(
    ("", "model"),
    ("<", "place", "system"),
    ("d", "devices"),
    (",d", "budget"),
    (",.0f", ("tok/s", "throughput")),
)


def scaling(scale: Scale, run: Run) -> Finding:
    """Figure 12."""
    cases = {
        (model, machine, system.label, devices): on_devices(
            system,
            model=model,
            machine=machine,
            devices=devices,
            requests=_REQUESTS_PER_DEVICE * devices,
            steady=(0.6, 0.95),
            ends_steady=True,
        )
        for model in scale.pick((QWEN_14B,), (QWEN_14B, QWEN_32B))
        for machine in _PLACES
        for system in _SYSTEMS
        for devices in _counts(model, system, scale)
    }
    jobs = {key: over_seeds(case, scale.seeds) for key, case in _tuned(cases, scale, run).items()}
    runs = Runs(run, jobs)
    rows = [
        {
            "model": model,
            "place": _PLACES[machine],
            "system": label,
            "devices": devices,
            "budget": several[0].system.token_budget,
            "throughput": runs.mean((model, machine, label, devices), throughput),
        }
        for (model, machine, label, devices), several in jobs.items()
    ]
    over_one = {
        f"12 {machine} {system.label} {devices}": runs.ratio(
            (QWEN_14B, machine, system.label, devices),
            (QWEN_14B, machine, system.label, 1),
            throughput,
        )
        for machine, system, devices in _CLAIMED
    }
    panels = []
    for model, machine in dict.fromkeys((model, machine) for model, machine, _, _ in jobs):
        here = [key for key in jobs if key[:2] == (model, machine)]
        counts = sorted({devices for *_, devices in here})
        heights = {label: [0.0] * len(counts) for _, _, label, _ in here}
        for key in here:
            heights[key[2]][counts.index(key[3])] = runs.mean(key, throughput)
        title, names = f"{model}, {_PLACES[machine]}", list(map(str, counts))
        panels.append(panel(title, "devices", "throughput, tokens/s", names, heights, kind="bar"))
    return Finding(
        claims("gllm", over_one),
        Chart("gLLM, figure 12: maximum throughput", panels, columns=2),
        rows,
    )


def _counts(model: str, system: System, scale: Scale) -> Sequence[int]:
    """Numbers of devices; 32B fits on two at least."""
    if model == QWEN_32B:
        return (2, 4)
    if system is GLLM or scale.full:
        return (1, 2, 4)
    return (1, 4)


def _tuned(cases: Mapping[_Key, Case], scale: Scale, run: Run) -> dict[_Key, Case]:
    """With the budget that is best for the first seed; throttling keeps the paper's MaxP."""
    searched = {
        key: replace(case, seed=scale.seeds[0])
        for key, case in cases.items()
        if case.system is not GLLM
    }
    found = tuned(
        list(searched.values()), run, throughput, scale.pick((512, 1024, 2048, 4096), TOKEN_BUDGETS)
    )
    return {**cases, **dict(zip(searched, found, strict=True))}
