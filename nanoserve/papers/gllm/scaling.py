"""gLLM, section 4.3: maximum throughput on one, two and four devices, within a node and across nodes (figure 12)."""

from collections.abc import Sequence

from nanoserve.benchmarks.tables import Column
from nanoserve.papers.cases import TOKEN_BUDGETS, PipelineCase, Runs, System, over_seeds, tuned, with_budget
from nanoserve.papers.charts import Chart, panel
from nanoserve.papers.claims import claims
from nanoserve.papers.framework import Finding, Run, Scale
from nanoserve.papers.gllm.systems import A100, GLLM, L20, QWEN_14B, QWEN_32B, SGLANG, SHAREGPT, VLLM, throughput

_PLACES = {L20: "within a node, L20", A100: "across nodes, A100"}
_REQUESTS_PER_DEVICE = 1000
"""More devices hold more running answers, and it takes more requests until these fill the memory."""
_PIPELINE = "stages of equal cost; a backlog that outlasts the filling of memory"
_MEMORY = "activations hide behind computing; one device has little memory beside the weights, so it batches few"
_BUS = "all-reduces at 20.79 GB/s of bus bandwidth; best budget on one and on four"
_RING = "all-reduces at 73.28 Gbps, ring; best budget on one and on four"
_COUPLED = "vLLM with its best budget loses 17 % to inputs on any number of devices, and nothing to bubbles"
_CLAIMED = [
    (L20, GLLM, 2, "2.1x", "1.90x to 2.20x", _PIPELINE),
    (L20, GLLM, 4, "4.0x", "3.50x to 4.20x", _PIPELINE),
    (A100, GLLM, 2, "1.9x", "1.90x to 2.20x", _MEMORY),
    (A100, GLLM, 4, "3.7x", "3.50x to 4.20x", _MEMORY),
    (L20, SGLANG, 4, "1.8x", "1.50x to 2.30x", _BUS),
    (A100, SGLANG, 4, "0.6x", "at most 1.10x", _RING),
    (L20, VLLM, 4, "2.6x", "2.30x to 2.90x", _COUPLED),
    (A100, VLLM, 4, "2.6x", "2.30x to 2.90x", _COUPLED),
]
"""Machine, system, devices, the paper's number over one device, what is asked, and why."""


def scaling(scale: Scale, run: Run) -> Finding:
    """Figure 12."""
    systems = scale.pick((GLLM, SGLANG), (VLLM, SGLANG, GLLM))
    jobs = {
        (model, machine, system.label, devices): _cases(scale, run, model, machine, system, devices)
        for model in scale.pick((QWEN_14B,), (QWEN_14B, QWEN_32B))
        for machine in _PLACES
        for system in systems
        for devices in _counts(model, system, scale)
    }
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
    claimed = [
        (
            f"{QWEN_14B}, {_PLACES[machine]}: {system.label} on {devices} over 1",
            paper,
            runs.ratio((QWEN_14B, machine, system.label, devices), (QWEN_14B, machine, system.label, 1), throughput),
            asked,
            why,
        )
        for machine, system, devices, paper, asked, why in _CLAIMED
        if system in systems
    ]
    panels = []
    for model, machine in dict.fromkeys((model, machine) for model, machine, _, _ in jobs):
        here = [key for key in jobs if key[:2] == (model, machine)]
        counts = sorted({devices for *_, devices in here})
        heights = {
            label: [
                runs.mean(key, throughput) if (key := (model, machine, label, count)) in jobs else 0.0
                for count in counts
            ]
            for label in dict.fromkeys(label for _, _, label, _ in here)
        }
        title, names = f"{model}, {_PLACES[machine]}", [*map(str, counts)]
        panels.append(panel(title, "devices", "throughput, tokens/s", names, heights, kind="bar"))
    return Finding(
        claims("12", claimed),
        Chart("gLLM, figure 12: maximum throughput", panels, columns=2),
        rows,
        [
            Column("model", "model"),
            Column("place", "place", justify="left"),
            Column("system", "system", justify="left"),
            Column("devices", "devices", "d"),
            Column("budget", "budget", ",d"),
            Column("tok/s", "throughput", ",.0f"),
        ],
    )


def _counts(model: str, system: System, scale: Scale) -> Sequence[int]:
    """Numbers of devices; 32B fits on two at least."""
    if model == QWEN_32B:
        return (2, 4)
    return (1, 4) if system is SGLANG and not scale.full else (1, 2, 4)


def _cases(scale: Scale, run: Run, model: str, machine: str, system: System, devices: int) -> list[PipelineCase]:
    """One for each seed, with the budget that is best for the first seed; throttling keeps the paper's MaxP."""
    case = PipelineCase(
        system=system,
        model=model,
        machine=machine,
        devices=devices,
        lengths=SHAREGPT,
        requests=_REQUESTS_PER_DEVICE * devices,
        steady=(0.6, 0.95),
    )
    if system is not GLLM:
        budgets = scale.pick((512, 1024, 2048, 4096), TOKEN_BUDGETS)
        (found,) = tuned(over_seeds(case, scale.first_seed.seeds), run, throughput, budgets)
        case = with_budget(case, found.system.token_budget)
    return over_seeds(case, scale.seeds)
