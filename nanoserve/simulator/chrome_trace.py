"""ChromeTrace: the time of stages, host link and CPU as a file for ui.perfetto.dev or chrome://tracing."""

from collections.abc import Sequence

from nanoserve.costs.work import StepWork
from nanoserve.measures.chrome_trace import ChromeTraceFile, Track
from nanoserve.scheduler.plan import StepPlan, Swap
from nanoserve.simulator.pipeline import Passage

_DEVICES, _HOST, _SCHEDULER = "devices", "host", "scheduler"


class ChromeTrace(ChromeTraceFile):
    """A context in which every step becomes one bar per stage, with swaps, transitions and host attention beside them.

    Args:
        path: of the JSON file.

    Raises:
        RuntimeFailure: from every method, if it cannot be written.
    """

    def on_step(self, now: float, plan: StepPlan, work: StepWork, passages: Sequence[Passage]) -> None:
        """Write one step."""
        prompt = work.tokens - work.decodes
        name = f"{work.decodes} decodes + {prompt} prompt tokens"
        arguments = {"step": plan.step, "decodes": work.decodes, "prompt_tokens": prompt}
        self.counter(_SCHEDULER, "tokens of a step", now, {"decodes": work.decodes, "prompt tokens": prompt})
        for stage, passage in enumerate(passages):
            self.bar(Track(_DEVICES, f"stage {stage}"), name, *passage, arguments)

    def on_swap(self, now: float, swap: Swap, tokens: int, passage: Passage) -> None:
        """Write the move of a sequence's blocks over the host link."""
        arguments = {"swap": swap.swap, "sequence": swap.sequence}
        self.bar(Track(_HOST, f"link {swap.direction}"), f"{tokens} tokens {swap.direction}", *passage, arguments)

    def on_transition(self, now: float, plan: StepPlan, passage: Passage) -> None:
        """Write the reload of another layout's weights over the host link."""
        name = f"weights of layout {plan.transition}"
        self.bar(Track(_HOST, "link in"), name, *passage, {"step": plan.step})

    def on_host_attention(self, passage: Passage, seconds: float, rows: int) -> None:
        """Write what the CPU computes."""
        arguments = {"rows": rows, "seconds": seconds}
        self.bar(Track(_HOST, "CPU"), f"attention of {rows}", *passage, arguments)
