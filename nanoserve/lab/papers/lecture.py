"""CS336, lecture 10 (efficient inference), with numbers: rooflines, batches, what a sequence keeps,
what smaller caches cost, what models recall, text diffusion, paging, few bits, pruning, speculative
sampling.

Nothing is simulated: operations and bytes are counted exactly (costs/counts.py) and put beside the
lecture's closed forms (costs/closed_forms.py); requests' lengths are drawn from the shipped tables.
Perplexity and what drafters foresee are measured. Small models that recall, those with smaller
caches, and pruned ones were trained once.
"""

from collections.abc import Callable, Sequence
from itertools import chain, count, islice, product
from typing import TYPE_CHECKING, Any

import numpy as np

from nanoserve.commands.tables import columns
from nanoserve.config.published_shapes import load_shape
from nanoserve.costs.analysis import Analysis
from nanoserve.costs.closed_forms import attention_intensity, decode_seconds, mlp_intensity
from nanoserve.costs.hardware import Efficiency, Machine, load_machine
from nanoserve.costs.step_costs import StepCosts
from nanoserve.lab.charts import Chart, ChartCurve, Note, Panel, panel
from nanoserve.lab.papers.claims import Claim, claims
from nanoserve.lab.papers.framework import Finding, Paper, PaperFigure, Run, Scale
from nanoserve.lab.papers.kv_quality import KV_QUALITY_COLUMNS, KV_QUALITY_COUNTED, kv_quality
from nanoserve.lab.papers.pruned_perplexity import PRUNING_COLUMNS, PRUNING_COUNTED, pruning
from nanoserve.lab.papers.ratio_test import acceptance_probability
from nanoserve.lab.papers.recall_accuracy import RECALL_COLUMNS, RECALL_COUNTED, recall
from nanoserve.lab.papers.sequence_memory import KV_COLUMNS, STATE_COLUMNS, kv, state
from nanoserve.lab.papers.text_diffusion import (
    DIFFUSION_COLUMNS,
    DIFFUSION_COUNTED,
    diffusion,
)
from nanoserve.lab.simulator.workload import length_tables
from nanoserve.record.metrics import Spread
from nanoserve.request import RequestShape
from nanoserve.scheduler.speculation.draft_lengths import COUNTS, expected_tokens
from nanoserve.scheduler.work import StepWork

if TYPE_CHECKING:
    from nanoserve.lab.papers.quantized_stories import Outliers

MODEL, DEVICE = "llama-2-13b", "h100"
"""The lecture's own examples; this model has as many key as query heads, as the lecture's formulas
have."""
GROUPED_MODEL = "llama-3.1-8b"
CONTEXT = 1024
BATCHES = (1, 4, 16, 64, 256, 295, 512, 1024)


def _ideal(model: str = MODEL) -> StepCosts:
    """All that the data sheet promises: the limits that closed forms describe."""
    return StepCosts(load_shape(model), load_machine(DEVICE), efficiency=Efficiency.ideal())


def _intensity(costs: StepCosts, work: StepWork, *names: str, weight_bits: float = 16) -> float:
    """Operations per byte of some operators together, whose costs are those of weights of 16
    bits."""
    found = [one for one in costs.counts.operators(work, 0) if one.name in names]
    saved = sum(one.weight_bytes for one in found) * (1 - weight_bits / 16)
    return sum(one.flops for one in found) / (sum(one.bytes for one in found) - saved)


def _feed_forward(costs: StepCosts, batch: int, context: int, weight_bits: float = 16) -> float:
    return _intensity(
        costs, costs.work([context] * batch), "gate_up", "down", weight_bits=weight_bits
    )


def _bound_by_operations(costs: StepCosts, weight_bits: float = 16) -> int:
    """Decoding sequences from which on the feed-forward part takes no less time to compute than to
    read."""
    balance = costs.machine.device.intensity
    return next(
        batch for batch in count(1) if _feed_forward(costs, batch, 1, weight_bits) >= balance
    )


def _attention(costs: StepCosts, batch: int = 1) -> float:
    return _intensity(costs, costs.work([CONTEXT] * batch), "attention")


_ROOFLINE_COLUMNS = columns(
    (",d", ("sequences decoding", "batch")),
    (",.1f", ("feed-forward: exact", "mlp"), ("equation (10)", "mlp_closed")),
    (".2f", ("attention: exact", "attention"), ("equation (13)", "attention_closed")),
)


def roofline(scale: Scale, run: Run) -> Finding:
    """Sections 1.2 to 1.6: operations per byte of each part, against the device's 295."""
    costs, model = _ideal(), load_shape(MODEL)
    rows = [
        {
            "batch": batch,
            "mlp": _feed_forward(costs, batch, CONTEXT),
            "mlp_closed": mlp_intensity(batch, model.hidden_size, model.intermediate_size),
            "attention": _attention(costs, batch),
            "attention_closed": attention_intensity(CONTEXT, 1),
        }
        for batch in BATCHES
    ]
    balance, one = costs.machine.device.intensity, _attention(costs)
    ours = {
        "1.3": balance,
        "1.5": _bound_by_operations(costs),
        "1.6 one": one,
        "1.6 many": _attention(costs, 256) / one,
        "2.1": _attention(_ideal(GROUPED_MODEL)) / one,
        "1.6 prompt": _intensity(costs, costs.work([], [(0, CONTEXT)]), "attention"),
    }
    return Finding(
        claims("lecture", ours, balance=balance), _roofline_chart(costs.machine, rows), rows
    )


def _roofline_chart(machine: Machine, rows: Sequence[dict[str, float]]) -> Chart:
    device = machine.device

    def curve(label: str, intensities: Sequence[float], style: str) -> ChartCurve:
        heights = [min(device.flops, one * device.memory_bandwidth) / 1e12 for one in intensities]
        return ChartCurve(label, intensities, heights, style=style)

    curves = (
        curve(device.name, (0.3, device.intensity, 3000.0), "k-"),
        curve("feed-forward part", [row["mlp"] for row in rows], "o"),
        curve("attention", [row["attention"] for row in rows], "s"),
    )
    title = f"decoding, {MODEL}, batches of {BATCHES[0]} to {BATCHES[-1]}"
    both = Panel(
        title=title, x="FLOP per byte", y="TFLOP per second", curves=curves, log_x=True, log_y=True
    )
    return Chart(f"Roofline of an {DEVICE.upper()}", [both])


_BATCH_COLUMNS = columns(
    (",d", ("sequences decoding", "batch")),
    (",.2f", ("ms: exact", "latency"), ("L(B)", "closed"), ("with efficiencies", "real")),
    (",.0f", ("tok/s: exact", "throughput"), ("B / L(B)", "throughput_closed")),
    ("", "fits"),
)


def batches(scale: Scale, run: Run) -> Finding:
    """Section 1.7: latency and throughput of decoding against batch size."""
    costs = _ideal()
    most = Analysis(costs, CONTEXT, 1).largest_batch
    rows = _batch_rows(costs, most)
    ten, one = (costs.stage_seconds(costs.work([CONTEXT] * batch), 0) for batch in (10, 1))
    ours = {
        "1.1": 10 * one / ten,
        "1.7 L(B)": max(row["latency"] / row["closed"] for row in rows if row["fits"] == "yes"),
        "1.7 most": most,
    }
    closed, real = "closed form: L(B), B / L(B)", "with efficiencies"
    panels = [
        panel(
            title,
            "sequences decoding",
            y,
            [float(batch) for batch in BATCHES],
            {label: [row[field] for row in rows] for label, field in fields.items()},
            styles={closed: "--", real: "s-"},
            log_x=True,
            vertical_marks=(float(most),),
            notes=(
                Note(
                    f"{most} fit",
                    most,
                    max(row[field] for row in rows for field in fields.values()),
                    right=-4,
                ),
            ),
        )
        for title, y, fields in (
            ("latency", "ms per token", {"exact": "latency", closed: "closed", real: "real"}),
            (
                "throughput",
                "tokens per second",
                {"exact": "throughput", closed: "throughput_closed"},
            ),
        )
    ]
    chart = Chart(f"Decoding, {MODEL} on an {DEVICE.upper()}, context {CONTEXT}", panels, columns=2)
    return Finding(claims("lecture", ours), chart, rows)


def _batch_rows(costs: StepCosts, most: int) -> list[dict[str, Any]]:
    weights = costs.counts.stage_weight_bytes(0)
    kv, bandwidth = (
        costs.counts.kv_bytes_per_token(0) * CONTEXT,
        costs.machine.device.memory_bandwidth,
    )
    real = StepCosts(load_shape(MODEL), load_machine(DEVICE))
    rows = []
    for batch in BATCHES:
        seconds = costs.stage_seconds(costs.work([CONTEXT] * batch), 0)
        closed = decode_seconds(batch, weights, kv, bandwidth)
        fits = "no"
        if batch <= most:
            fits = "yes"
        row = {
            "batch": batch,
            "latency": seconds * 1e3,
            "closed": closed * 1e3,
            "real": real.step_seconds(real.work([CONTEXT] * batch)) * 1e3,
            "throughput": batch / seconds,
            "throughput_closed": batch / closed,
            "fits": fits,
        }
        rows.append(row)
    return rows


BLOCK = 16


_PAGING_COLUMNS = columns(
    ("", "trace"),
    (",.0f", ("tokens held, mean", "held")),
    (",d", ("longest sequence", "longest")),
    (
        ".1%",
        ("slots in use: region", "contiguous"),
        "prompt_known",
        (f"blocks of {BLOCK}", "paged"),
    ),
    (".1f", ("sequences, blocks over region", "gain")),
)


def paging(scale: Scale, run: Run) -> Finding:
    """Section 4.2: the share of a running sequence's slots that hold a token, averaged over its
    life.

    A contiguous region must hold the longest sequence there can be; here it is only the longest of
    the trace. "Prompt known" reserves what the prompt takes and the longest answer. Blocks are
    taken as they are needed.
    """
    rows: list[dict[str, Any]] = [
        {"trace": name, **memory_use(list(islice(table.draw(seed=0), scale.pick(5_000, 20_000))))}
        for name, table in length_tables().items()
    ]
    ours = {
        "4.2 slots": Spread.of(100 * row["paged"] for row in rows),
        "4.2 sequences": Spread.of(row["gain"] for row in rows),
    }
    fields = {
        "longest sequence": "contiguous",
        "prompt known": "prompt_known",
        f"blocks of {BLOCK}": "paged",
    }
    bars = panel(
        "slots that hold a token",
        "trace",
        "share of what is reserved, %",
        [row["trace"] for row in rows],
        {label: [100 * row[field] for row in rows] for label, field in fields.items()},
        kind="bar",
    )
    return Finding(
        claims("lecture", ours), Chart("Paging against contiguous reservation", [bars]), rows
    )


def memory_use(shapes: Sequence[RequestShape]) -> dict[str, float]:
    """How much of what is reserved holds tokens, over all steps of all these requests."""
    longest = max(shape.total_tokens for shape in shapes)
    longest_answer = max(shape.output_tokens for shape in shapes)
    steps = sum(shape.output_tokens for shape in shapes)
    held = sum(_sum_to(shape.total_tokens) - _sum_to(shape.input_tokens) for shape in shapes)
    paged = sum(_slots_to(shape.total_tokens) - _slots_to(shape.input_tokens) for shape in shapes)
    known = sum(shape.output_tokens * (shape.input_tokens + longest_answer) for shape in shapes)
    return {
        "held": held / steps,
        "longest": longest,
        "contiguous": held / (steps * longest),
        "prompt_known": held / known,
        "paged": held / paged,
        "gain": steps * longest / paged,
    }


def _sum_to(tokens: int) -> int:
    """1 + 2 + ... + tokens: what a sequence holds, summed over the steps in which it grows to that
    length."""
    return tokens * (tokens + 1) // 2


def _slots_to(tokens: int) -> int:
    """Sum 1 to `tokens` as `_sum_to` does, each term rounded up to whole blocks."""
    blocks, rest = divmod(tokens, BLOCK)
    return BLOCK * (BLOCK * _sum_to(blocks) + rest * (blocks + 1))


_STORED_BITS = {"int8": 8.25, "int4": 4.25}  # a 16-bit scale is shared by 64 weights


_OUTLIERS: Sequence["Outliers"] = ("natural weights", "8 salient outliers", "3 random outliers")
_QUANTIZATION_COLUMNS = columns(
    ("", "method"), *(("", (kind, f"{kind} text")) for kind in _OUTLIERS)
)


def quantization(scale: Scale, run: Run) -> Finding:
    """Section 2.3: perplexity of the storyteller in few bits, and what fewer bits of weights do for
    intensity."""
    from nanoserve.lab.papers.quantized_stories import DrawnStories, QuantizedReading

    drawing = DrawnStories(scale.seeds, readings=scale.pick(6, 12))
    texts = dict(zip(scale.seeds, run([drawing])[drawing], strict=True))
    jobs = {
        kind: [QuantizedReading(kind, seed, *texts[seed]) for seed in scale.seeds]
        for kind in _OUTLIERS
    }
    outcomes = run(chain.from_iterable(jobs.values()))
    found = {kind: [outcomes[job] for job in own] for kind, own in jobs.items()}
    rows: list[dict[str, Any]] = []
    for method in found[_OUTLIERS[0]][0].perplexities:
        spreads: dict[str, Spread] = {
            kind: Spread.of(one.perplexities[method] for one in found[kind]) for kind in _OUTLIERS
        }
        shown_texts = {f"{kind} text": spread.text("{:.2f}") for kind, spread in spreads.items()}
        rows.append({"method": method, **spreads, **shown_texts})

    def lost(method: str, kind: "Outliers" = "8 salient outliers") -> Spread:
        """Perplexity over that of float32."""
        return Spread.of(
            one.perplexities[method] / one.perplexities["float32"] for one in found[kind]
        )

    ours = {
        "2.3.2 RTN": lost("RTN, 4 bits"),
        "2.3.2 natural": lost("RTN, 4 bits", "natural weights"),
        "2.3.2 random": lost("RTN, 4 bits", "3 random outliers"),
        "2.3.2 mixed": lost("mixed, 4 bits"),
        "2.3.2 AWQ": lost("AWQ, 4 bits"),
        "2.3.2 tensor": lost("per tensor, W8A8"),
        "2.3.2 LLM.int8()": lost("LLM.int8(), W8A8"),
        "2.3.2 share": Spread.of(
            100 * (1 - one.exact_share) for one in found["8 salient outliers"]
        ),
    }
    heights: dict[str, list[float]] = {kind: [row[kind].mean for row in rows] for kind in _OUTLIERS}
    names = [row["method"] for row in rows]
    points = panel(
        "mean over seeds", "method", "perplexity", names, heights, styles="o", log_y=True
    )
    chart = Chart("The storyteller in few bits, and in float32", [points])
    return Finding([*claims("lecture", ours), *_intensity_claims()], chart, rows)


def _intensity_claims() -> list[Claim]:
    costs, found = _ideal(), list[Claim]()
    for name, bits in _STORED_BITS.items():
        exact, balance = _bound_by_operations(costs, bits), costs.machine.device.intensity
        gain = _feed_forward(costs, 1, CONTEXT, bits) / _feed_forward(costs, 1, CONTEXT)
        limit = balance * bits / 16  # a multiply-add for each sequence and weight
        ours = {f"2.3.1 {name}": gain, f"2.3.1 {name} batch": limit}
        found += claims("lecture", ours, bits=bits, exact=exact)
    return found


_DRAFT_SHARE = 0.05
"""The time to draft a token, over that of the model's step."""
_RATES, _LOOKAHEADS = (0.8, 0.6), (1, 2, 4, 7)


_SPECULATIVE_COLUMNS = columns(
    (".1f", ("a draft token is right", "rate")),
    (",d", ("sequences decoding", "batch")),
    (
        ".2f",
        ("K = 1", "1"),
        ("2", "2"),
        ("4", "4"),
        ("7", "7"),
        ("K = 4, products alone", "closed"),
    ),
    (".2f", ("best K of 0 to 7", "chosen")),
)


def _speedup_panel(rows: list[dict[str, Any]], rate: float) -> Panel:
    """Draw the speedups where a draft token is right with this probability."""
    labels = {f"K = {draft_tokens}": f"{draft_tokens}" for draft_tokens in _LOOKAHEADS}
    labels["best K"] = "chosen"
    at_rate = [row for row in rows if row["rate"] == rate]
    return panel(
        f"a draft token is right with {rate}",
        "sequences decoding",
        "speedup",
        [float(batch) for batch in BATCHES],
        {label: [row[field] for row in at_rate] for label, field in labels.items()},
        styles={"best K": "k--"},
        log_x=True,
    )


def speculative(scale: Scale, run: Run) -> Finding:
    """Section 3.1: what K draft tokens a sequence gain, over batches. Operations idle in small ones
    alone."""
    costs, balance = _ideal(GROUPED_MODEL), load_machine(DEVICE).device.intensity

    def exact(tokens: int) -> float:
        return costs.layers_seconds(tokens, 0) + costs.ends_seconds(
            StepWork(decodes=tokens, sampled=tokens), 0
        )

    def closed(tokens: int) -> float:
        # products alone: their weights are read, or multiplied with
        return max(1.0, tokens / balance)

    def speedup(
        rate: float, draft_tokens: int, batch: int, seconds: Callable[[int], float] = exact
    ) -> float:
        plain = seconds(batch)
        spent = seconds(batch * (1 + draft_tokens)) + draft_tokens * _DRAFT_SHARE * plain
        return expected_tokens(rate, draft_tokens) * plain / spent

    rows: list[dict[str, Any]] = [
        {
            "rate": rate,
            "batch": batch,
            **{
                f"{draft_tokens}": speedup(rate, draft_tokens, batch)
                for draft_tokens in _LOOKAHEADS
            },
            "closed": speedup(rate, 4, batch, closed),
            "chosen": max(speedup(rate, draft_tokens, batch) for draft_tokens in COUNTS),
        }
        for rate, batch in product(_RATES, BATCHES)
    ]
    accepted = acceptance_probability(np.array([0.6, 0.8]), np.array([0.7, 0.4]))
    ours = {
        "3.1.3": 1 + float(accepted.cumprod().sum()),
        "3.1 one": speedup(0.8, 4, 1),
        "3.1 many": speedup(0.8, 4, 295),
        "3.1 chosen": min(row["chosen"] for row in rows),
    }
    panels = [_speedup_panel(rows, rate) for rate in _RATES]
    chart = Chart(
        f"Speculative sampling, {GROUPED_MODEL} on an {DEVICE.upper()}", panels, columns=2
    )
    return Finding(claims("lecture", ours, closed=speedup(0.8, 4, 295, closed)), chart, rows)


_DRAFT_COLUMNS = columns(
    ("", "drafter", "drawn", ("tokens a step", "text")),
    (".2f", ("draft token 1 kept", "1"), ("2", "2"), ("3", "3"), ("4", "4")),
)


def drafts(scale: Scale, run: Run) -> Finding:
    """Section 3.1.5: tokens that a step of the storyteller answers, by drafter, with four draft
    tokens at most."""
    from nanoserve.lab.papers.drafted_stories import DRAFTERS, LOOKAHEAD, DraftedStories

    seeds, stories = scale.seeds, scale.pick(4, 16)
    jobs = [
        DraftedStories(name, greedy, seeds, stories)
        for name, greedy in product(DRAFTERS, (True, False))
    ]
    outcomes = run(jobs)
    rows: list[dict[str, Any]] = []
    for job in jobs:
        found = outcomes[job]
        spread = Spread.of(one.tokens_a_step for one in found)
        places = [sum(one.accepted[place] for one in found) for place in range(LOOKAHEAD)]
        checked = max(1, sum(one.rows for one in found))
        kept = {f"{place + 1}": number / checked for place, number in enumerate(places)}
        drawn = "as the model card says"
        if job.greedy:
            drawn = "greedy"
        rows.append(
            {
                "drafter": job.drafter,
                "drawn": drawn,
                "tokens": spread,
                "text": spread.text("{:.2f}"),
                **kept,
            }
        )
    tokens = {(row["drafter"], row["drawn"]): row["tokens"] for row in rows}
    ours = {
        "3.1.5 draft": tokens["draft:storyteller-draft", "greedy"],
        "3.1.5 ngram": tokens["ngram", "greedy"],
    }
    names, kinds = (
        list(dict.fromkeys(row["drafter"] for row in rows)),
        dict.fromkeys(row["drawn"] for row in rows),
    )
    heights = {kind: [tokens[name, kind].mean for name in names] for kind in kinds}
    bars = panel("mean over seeds", "drafter", "tokens a step", names, heights, kind="bar")
    return Finding(
        claims("lecture", ours), Chart("What drafters foresee of the storyteller", [bars]), rows
    )


PAPER = Paper(
    title="CS336, lecture 10: efficient inference",
    spread_over="traces or seeds",
    setting=(
        "counted; lengths of 5,000 requests of each trace",
        "counted; lengths of 20,000 requests of each trace",
    ),
    figures=(
        PaperFigure(
            number="roofline",
            title=f"FLOP per byte, {MODEL} at a context of {CONTEXT}",
            make=roofline,
            columns=_ROOFLINE_COLUMNS,
        ),
        PaperFigure(
            number="batch",
            title=f"decoding, {MODEL} on an {DEVICE.upper()}, context {CONTEXT}",
            make=batches,
            columns=_BATCH_COLUMNS,
        ),
        PaperFigure(
            number="kv",
            title="keys and values of a sequence against its length, in 16 bits",
            make=kv,
            columns=KV_COLUMNS,
        ),
        PaperFigure(
            number="kv-quality",
            title="validation loss of small models, by the keys and values that they keep",
            counted=KV_QUALITY_COUNTED,
            make=kv_quality,
            columns=KV_QUALITY_COLUMNS,
        ),
        PaperFigure(
            number="state",
            title="bytes of a sequence against its length: states beside keys and values",
            make=state,
            columns=STATE_COLUMNS,
        ),
        PaperFigure(
            number="recall",
            title="associative recall of small models: answers that are right",
            counted=RECALL_COUNTED,
            make=recall,
            columns=RECALL_COLUMNS,
        ),
        PaperFigure(
            number="diffusion",
            title="speedup of text diffusion over a token a step",
            counted=DIFFUSION_COUNTED,
            make=diffusion,
            columns=DIFFUSION_COLUMNS,
        ),
        PaperFigure(
            number="paging",
            title="slots that hold a token, over the life of a sequence",
            make=paging,
            columns=_PAGING_COLUMNS,
        ),
        PaperFigure(
            number="quantization",
            title="perplexity of stories drawn from the storyteller itself",
            counted=(
                "3,066 tokens of stories for each seed (--full: 6,132); mean [lowest..highest] "
                "over seeds"
            ),
            make=quantization,
            columns=_QUANTIZATION_COLUMNS,
            measured=True,
        ),
        PaperFigure(
            number="pruning",
            title="perplexity of the storyteller without its least important parts",
            counted=PRUNING_COUNTED,
            make=pruning,
            columns=PRUNING_COLUMNS,
        ),
        PaperFigure(
            number="speculative",
            title=f"speedup by draft tokens, {GROUPED_MODEL}",
            make=speculative,
            columns=_SPECULATIVE_COLUMNS,
        ),
        PaperFigure(
            number="drafts",
            title="tokens a step of the storyteller, by drafter",
            counted=(
                "4 stories of 128 tokens for each seed (--full: 16); mean [lowest..highest] over "
                "seeds"
            ),
            make=drafts,
            columns=_DRAFT_COLUMNS,
            measured=True,
        ),
    ),
)
