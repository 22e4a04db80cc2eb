"""Seesaw's evaluation, simulated: one parallel layout for prompts and one for answers, against the
best single one.

Read settings.py (what is run, and the ways to spread it over devices), search.py (the best
configuration, found in the same way for both sides), then the figures: model.py (why prompts want a
pipeline and answers tensors), schedules.py (when to change), throughput.py (the gain) and
sensitivity.py (what it is made of and depends on). The policy itself is
scheduler/policies/transition_minimizing.py, the performance model costs/.
"""

from nanoserve.lab.papers.framework import Paper, PaperFigure
from nanoserve.lab.papers.seesaw.model import (
    DISAGGREGATION_COLUMNS,
    LAYOUT_COLUMNS,
    REPLICA_COLUMNS,
    data_parallelism,
    disaggregation,
    layouts,
)
from nanoserve.lab.papers.seesaw.schedules import (
    SCHEDULE_COLUMNS,
    TIER_COLUMNS,
    three_schedules,
    tiers,
)
from nanoserve.lab.papers.seesaw.sensitivity import (
    BANDWIDTH_COLUMNS,
    BREAKDOWN_COLUMNS,
    OUTPUT_COLUMNS,
    bandwidth,
    breakdown,
    output_length,
)
from nanoserve.lab.papers.seesaw.throughput import GAIN_COLUMNS, on_a10_and_l4, on_a100

_COSTS = "the cost model alone: no requests, no seeds"

PAPER = Paper(
    title="Seesaw: high-throughput LLM inference via model re-sharding",
    setting=(
        "reduced: 250 requests of arxiv and 1,000 of sharegpt, half of the paper's; figure 13: 80 "
        "requests",
        "full: 500 requests of arxiv and 2,000 of sharegpt, as the paper; figure 13: 400 requests",
    ),
    figures=(
        PaperFigure(
            number="1",
            title="prefill and decode by layout",
            make=layouts,
            counted=_COSTS,
            columns=LAYOUT_COLUMNS,
        ),
        PaperFigure(
            number="2",
            title="when to change the layout",
            make=three_schedules,
            columns=SCHEDULE_COLUMNS,
        ),
        PaperFigure(
            number="4",
            title="prefill and decode on devices of their own",
            make=disaggregation,
            counted=_COSTS,
            columns=DISAGGREGATION_COLUMNS,
        ),
        PaperFigure(
            number="6",
            title="both tiers of the KV cache over time",
            make=tiers,
            columns=TIER_COLUMNS,
        ),
        PaperFigure(
            number="10",
            title="end-to-end throughput on A10 and L4",
            make=on_a10_and_l4,
            columns=GAIN_COLUMNS,
        ),
        PaperFigure(
            number="11",
            title="70B on A100, with PCIe and with NVLink",
            make=on_a100,
            columns=GAIN_COLUMNS,
        ),
        PaperFigure(
            number="12",
            title="where the time goes: 34B on 4 A10",
            make=breakdown,
            columns=BREAKDOWN_COLUMNS,
        ),
        PaperFigure(
            number="13",
            title="output length: 70B on 8 A10",
            make=output_length,
            columns=OUTPUT_COLUMNS,
        ),
        PaperFigure(
            number="14",
            title="all-reduce bandwidth: 34B on 8 A10",
            make=bandwidth,
            columns=BANDWIDTH_COLUMNS,
        ),
        PaperFigure(
            number="15",
            title="data parallelism in decode",
            make=data_parallelism,
            counted=_COSTS,
            columns=REPLICA_COLUMNS,
        ),
    ),
)
