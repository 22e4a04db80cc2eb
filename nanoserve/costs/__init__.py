"""How long a step takes on hardware that need not be here: exact operation counts over data-sheet numbers. No torch.

What a simulator, a planner or a policy asks:

    model, machine = load_shape("qwen2.5-32b"), load_machine("gllm-l20")
    costs = StepCosts(model, machine, ParallelLayout(pipeline_parallel=4))
    work = costs.work(decode_contexts=[120, 455], chunks=[(0, 512)], sampled=2)   # once per micro-batch, O(rows)
    costs.stage_seconds(work, stage)      # device time of one pipeline stage: operators, kernels, all-reduces
    costs.send_seconds(work, stage)       # activations from this stage to the next one; 0 after the last
    costs.host_seconds(work)              # the CPU's part of a step: schedule, prepare inputs, take results back
    costs.swap_seconds(tokens, stage)     # the KV of this many tokens between device and host, one way, per stage
    costs.reload_seconds(stage)           # the stage's weights from host memory (Seesaw's re-sharding)
    costs.host_attention_seconds(context)   # one layer's decode attention on the CPU (APEX) ...
    costs.host_exchange_seconds(rows)     # ... and its queries, keys and values there, its result back
    costs.memory.kv_blocks(block_size)    # device blocks that fit; raises DoesNotFit, saying what would fit

``StepWork`` aggregates a micro-batch; equal work costs the same whichever sequences it is. Times are seconds, sizes
bytes, everything per device of a stage unless it says otherwise. Formulas and factors: docs/costs.md. What was measured
on the machine at hand (profile.py) answers the same questions (measured_times.py).
"""

from nanoserve.costs.counts import Precision
from nanoserve.costs.efficiency import Efficiency
from nanoserve.costs.hardware import Machine, load_machine
from nanoserve.costs.memory import DoesNotFit
from nanoserve.costs.step_costs import StepCosts
from nanoserve.costs.tables import load_shape
from nanoserve.costs.work import StepWork
from nanoserve.layout import ParallelLayout

__all__ = [
    "DoesNotFit",
    "Efficiency",
    "Machine",
    "ParallelLayout",
    "Precision",
    "StepCosts",
    "StepWork",
    "load_machine",
    "load_shape",
]
