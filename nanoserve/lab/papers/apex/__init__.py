"""APEX's evaluation (section 5), simulated: overlap beside NEO's asymmetric pipelining and the
device alone.

Read settings.py (platforms, workloads, systems, one simulation), throughput.py (figures 5 and 7,
and what the order of systems depends on), ours.py (figure 6, and the list on which our policy has
to be as good as any) and decoding.py (figure 1b, and the bounds of what the CPU can add). The
policies are in scheduler/policies/, their execution is simulator/host_attention.py.
"""

from nanoserve.lab.papers.apex.decoding import BOUND_COLUMNS, bounds, processor_speed
from nanoserve.lab.papers.apex.ours import LATENCY_COLUMNS, LIST_COLUMNS, fixed_list, latency
from nanoserve.lab.papers.apex.throughput import (
    BACKLOG_COLUMNS,
    PROCESSOR_COLUMNS,
    output_lengths,
    processors,
    throughput_figure,
)
from nanoserve.lab.papers.framework import Paper, PaperFigure

_COSTS = "the cost model alone: no requests, no seeds"
_STEPS = "one step after another without prompts: no arrivals, no seeds"

PAPER = Paper(
    title="APEX: parallel CPU-GPU execution for LLM inference on constrained GPUs",
    setting=(
        "reduced: backlogs of 1,000 requests on A10 and 300 on T4, of 40 to 240 in the list and "
        "figure 6",
        "full: backlogs of 3,000 requests on A10 and 1,000 on T4, of 80 to 480 in the list and "
        "figure 6",
    ),
    figures=(
        PaperFigure(
            number="1b", title="attention on device and CPU", make=processor_speed, counted=_COSTS
        ),
        PaperFigure(
            number="bounds",
            title="decodes alone, beside the closed forms",
            make=bounds,
            counted=_STEPS,
            columns=BOUND_COLUMNS,
        ),
        PaperFigure(
            number="5", title="throughput", make=throughput_figure, columns=BACKLOG_COLUMNS
        ),
        PaperFigure(
            number="7",
            title="throughput by output length",
            make=output_lengths,
            columns=BACKLOG_COLUMNS,
        ),
        PaperFigure(
            number="list",
            title="our policy beside all others",
            make=fixed_list,
            columns=LIST_COLUMNS,
        ),
        PaperFigure(number="6", title="latency per token", make=latency, columns=LATENCY_COLUMNS),
        PaperFigure(
            number="cpu",
            title="how fast the CPUs attend",
            make=processors,
            columns=PROCESSOR_COLUMNS,
        ),
    ),
)
