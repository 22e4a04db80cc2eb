"""gLLM's evaluation (section 4), simulated: Token Throttling beside the systems that the paper
compares with.

Read systems.py (the systems and settings), balance.py (why: uneven micro-batches), serving.py
(latency, throughput and SLO attainment), scaling.py, ablation.py (what each part and each parameter
does) and code_size.py (table 1). The policy itself is scheduler/policies/token_throttling.py, the
runtime's share of it simulator/pipeline.py.
"""

from nanoserve.lab.papers.framework import Paper, PaperFigure
from nanoserve.lab.papers.gllm.ablation import PARAMETER_COLUMNS, ablation, sensitivity
from nanoserve.lab.papers.gllm.balance import (
    CAP_COLUMNS,
    TOKEN_COLUMNS,
    caps,
    lengths,
    token_counts,
    utilization,
)
from nanoserve.lab.papers.gllm.code_size import CODE_COLUMNS, lines_of_code
from nanoserve.lab.papers.gllm.scaling import SCALING_COLUMNS, scaling
from nanoserve.lab.papers.gllm.serving import (
    ATTAINMENT_COLUMNS,
    RATE_COLUMNS,
    cross_node,
    intra_node,
    slo_attainment,
)

PAPER = Paper(
    title="gLLM: global balanced pipeline parallelism with Token Throttling",
    setting=(
        "simulated, reduced: 5,000 requests in a backlog, 60 s at each rate, one setting of "
        "figures 10, 13 and 14",
        "simulated, full: 10,000 requests in a backlog, 90 s at each rate, all settings",
    ),
    figures=(
        PaperFigure(
            number="1", title="tokens of each micro-batch", make=token_counts, columns=TOKEN_COLUMNS
        ),
        PaperFigure(number="4", title="utilization of the stages", make=utilization),
        PaperFigure(
            number="10",
            title="latency and throughput in a node",
            make=intra_node,
            columns=RATE_COLUMNS,
        ),
        PaperFigure(
            number="cap", title="the cap on running sequences", make=caps, columns=CAP_COLUMNS
        ),
        PaperFigure(
            number="11",
            title="lengths of requests",
            make=lengths,
            counted="drawn requests, one seed",
        ),
        PaperFigure(number="12", title="scaling", make=scaling, columns=SCALING_COLUMNS),
        PaperFigure(
            number="13",
            title="latency and throughput across nodes",
            make=cross_node,
            columns=RATE_COLUMNS,
        ),
        PaperFigure(
            number="14",
            title="SLO attainment across nodes",
            make=slo_attainment,
            columns=ATTAINMENT_COLUMNS,
        ),
        PaperFigure(number="15", title="ablation", make=ablation, columns=PARAMETER_COLUMNS),
        PaperFigure(
            number="16",
            title="sensitivity to the parameters",
            make=sensitivity,
            columns=PARAMETER_COLUMNS,
        ),
        PaperFigure(
            number="table1",
            title="lines of code",
            make=lines_of_code,
            counted="the installed source files",
            columns=CODE_COLUMNS,
        ),
    ),
)
