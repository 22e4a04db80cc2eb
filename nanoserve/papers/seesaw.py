"""Seesaw's evaluation, simulated: one parallel layout for prompts and one for answers, against the best single one.

Where the paper is in nanoserve: transition_minimizing.py is its schedule (section 4.2), the Scheduler's tiers and
layouts its mechanism (4.1), costs/ its performance model (Appendix A). Here are its figures:

* seesaw_model.py: figures 1, 4 and 15, from the cost model alone: why prompts want a pipeline and answers tensors.
* seesaw_schedules.py: figures 2 and 6, when to change and what the two tiers of the KV cache then hold.
* seesaw_throughput.py: figures 10 and 11, the gain over the best static configuration.
* seesaw_sensitivity.py: figures 12, 13 and 14, what the gain is made of and what it depends on.

A setting (seesaw_settings.py) is run under a configuration (seesaw_runs.py); the best ones are searched for
(seesaw_estimate.py, seesaw_search.py), in the same way and over the same token budgets for both sides.
"""

from nanoserve.papers import seesaw_model, seesaw_schedules, seesaw_sensitivity, seesaw_throughput
from nanoserve.papers.framework import Paper

_FIGURES = (
    *seesaw_model.FIGURES,
    *seesaw_schedules.FIGURES,
    *seesaw_throughput.FIGURES,
    *seesaw_sensitivity.FIGURES,
)

PAPER = Paper(
    title="Seesaw",
    setting=(
        "250 requests of arxiv and 1,000 of sharegpt, half of the paper's; figure 13: 80 requests",
        "500 requests of arxiv and 2,000 of sharegpt, as the paper; figure 13: 400 requests",
    ),
    figures=sorted(_FIGURES, key=lambda figure: int(figure.number)),
)
