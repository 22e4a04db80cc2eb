"""gLLM, section 4.3: maximum throughput on one, two and four devices, within a node and across nodes (figure 12)."""

from collections.abc import Mapping, Sequence

from nanoserve.benchmarks.tables import Column
from nanoserve.papers.cases import Case, System
from nanoserve.papers.charts import Chart, Curve, Panel
from nanoserve.papers.claims import Claim
from nanoserve.papers.framework import Finding, Outcomes, Run, Scale
from nanoserve.papers.gllm.systems import A100, GLLM, L20, QWEN_14B, QWEN_32B, SGLANG, SHAREGPT, VLLM, throughput
from nanoserve.papers.tuning import TOKEN_BUDGETS, over_seeds, ratio, spread, tuned, with_budget

_PLACES = {L20: "within a node, L20", A100: "across nodes, A100"}
_REQUESTS_PER_DEVICE = 1000
"""More devices hold more running answers, and it takes more requests until these fill the memory."""

Key = tuple[str, str, str, int]
"""Model, machine, label of the system, devices."""


def scaling(scale: Scale, run: Run) -> Finding:
    """Figure 12."""
    systems = scale.pick((GLLM, SGLANG), (VLLM, SGLANG, GLLM))
    models = scale.pick((QWEN_14B,), (QWEN_14B, QWEN_32B))
    cases: dict[Key, list[Case]] = {}
    for model in models:
        for machine in _PLACES:
            for system in systems:
                for devices in _counts(model, system, scale):
                    found = _cases(scale, run, model, machine, system, devices)
                    cases[model, machine, system.label, devices] = found
    outcomes = run(case for several in cases.values() for case in several)
    rows = [
        {
            "model": model,
            "place": _PLACES[machine],
            "system": label,
            "devices": devices,
            "budget": several[0].system.token_budget,
            "throughput": spread(several, outcomes, throughput).mean,
        }
        for (model, machine, label, devices), several in cases.items()
    ]
    columns = [
        Column("model", "model"),
        Column("place", "place", justify="left"),
        Column("system", "system", justify="left"),
        Column("devices", "devices", "d"),
        Column("budget", "budget", ",d"),
        Column("tok/s", "throughput", ",.0f"),
    ]
    return Finding(_claims(cases, outcomes, scale), _chart(cases, outcomes), rows, columns)


def _counts(model: str, system: System, scale: Scale) -> Sequence[int]:
    """Numbers of devices; 32B fits on two at least."""
    if model == QWEN_32B:
        return (2, 4)
    return (1, 4) if system is SGLANG and not scale.full else (1, 2, 4)


def _cases(scale: Scale, run: Run, model: str, machine: str, system: System, devices: int) -> list[Case]:
    """One for each seed, with the budget that is best for the first seed; throttling keeps the paper's MaxP."""
    case = Case(
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


def _claims(cases: Mapping[Key, Sequence[Case]], outcomes: Outcomes, scale: Scale) -> list[Claim]:
    pipeline = "stages of equal cost; a backlog that outlasts the filling of memory"
    memory = "activations hide behind computing; one device has little memory beside the weights, so it batches few"
    reduced = [
        (L20, GLLM, 2, "2.1x", 1.9, 2.2, pipeline),
        (L20, GLLM, 4, "4.0x", 3.5, 4.2, pipeline),
        (A100, GLLM, 2, "1.9x", 1.9, 2.2, memory),
        (A100, GLLM, 4, "3.7x", 3.5, 4.2, memory),
        (
            L20,
            SGLANG,
            4,
            "1.8x",
            1.5,
            2.3,
            "all-reduces at 20.79 GB/s of bus bandwidth; best budget on one and on four",
        ),
        (A100, SGLANG, 4, "0.6x", None, 1.1, "all-reduces at 73.28 Gbps, ring; best budget on one and on four"),
    ]
    coupled = "vLLM with its best budget loses 17 % to inputs on any number of devices, and nothing to bubbles"
    full = [
        (L20, VLLM, 4, "2.6x", 2.3, 2.9, coupled),
        (A100, VLLM, 4, "2.6x", 2.3, 2.9, coupled),
    ]
    return [
        Claim(
            figure="12",
            says=f"{QWEN_14B}, {_PLACES[machine]}: {system.label} on {devices} over 1",
            paper=paper,
            ours=ratio(
                cases[QWEN_14B, machine, system.label, devices],
                cases[QWEN_14B, machine, system.label, 1],
                outcomes,
                throughput,
            ),
            form="{:.2f}x",
            at_least=low,
            at_most=high,
            assumption=why,
        )
        for machine, system, devices, paper, low, high, why in [*reduced, *scale.pick([], full)]
    ]


def _chart(cases: Mapping[Key, Sequence[Case]], outcomes: Outcomes) -> Chart:
    panels = []
    for model, machine in dict.fromkeys((model, machine) for model, machine, _, _ in cases):
        labels = dict.fromkeys(key[2] for key in cases if key[:2] == (model, machine))
        counts = sorted({key[3] for key in cases if key[:2] == (model, machine)})
        curves = []
        for label in labels:
            known = {count: cases.get((model, machine, label, count)) for count in counts}
            heights = [spread(several, outcomes, throughput).mean if several else 0.0 for several in known.values()]
            curves.append(Curve(label=label, xs=tuple(map(str, counts)), ys=tuple(heights)))
        panels.append(
            Panel(
                title=f"{model}, {_PLACES[machine]}",
                x="devices",
                y="throughput, tokens/s",
                curves=tuple(curves),
                kind="bar",
            )
        )
    return Chart(title="gLLM, figure 12: maximum throughput", panels=tuple(panels), columns=2)
