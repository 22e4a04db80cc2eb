"""Settings of Seesaw's evaluation (section 6.1): models, machines, systems and requests, and the
ways to spread them."""

from typing import Any

from nanoserve.config.published_shapes import load_shape
from nanoserve.costs.hardware import GIBI
from nanoserve.costs.step_costs import DoesNotFit
from nanoserve.lab.papers.cases import BLOCK_SIZE, Case, System
from nanoserve.layout import ParallelLayout, tensor_degrees

# tokens of a request, prompt and answer: what LLaMA2-70B can hold, and where the paper's figure 9
# ends
LONGEST = 4096
HOST_BYTES_PER_DEVICE = 80 * GIBI  # section 6.1: the pool in which Seesaw keeps prompts
_AS_VLLM = (("admission_reserve", False), ("virtual_engines", True))
"""Parameters of static configurations: no admission reserve, and each micro-batch has its share of
the answers."""
STATIC = System(label="vLLM", policy="sarathi", parameters=_AS_VLLM)
WHOLE_PROMPTS = System(
    label="vLLM without chunked prefill", policy="prefill-first", parameters=_AS_VLLM
)
RESHARDING = System(label="Seesaw", policy="seesaw")
A10, L4 = "seesaw-a10", "seesaw-l4"
PCIE, NVLINK = "seesaw-a100-pcie", "seesaw-a100-nvlink"


def closed_batch(
    model: str, machine: str, devices: int, lengths: str, requests: int, **options: Any
) -> Case:
    """All requests at once, on devices whose layout is still to be chosen; ``options`` are other
    fields of Case."""
    return Case(
        system=STATIC,
        model=model,
        machine=machine,
        layouts=(ParallelLayout(pipeline_parallel=devices),),
        lengths=lengths,
        longest=LONGEST,
        requests=requests,
        **{"host_bytes": HOST_BYTES_PER_DEVICE, **options},
    )


def fitting_layouts(case: Case) -> list[ParallelLayout]:
    """All ways to spread the model over all devices that leave room for the longest request, D x T
    x P."""
    devices = case.layouts[0].devices
    found = [
        ParallelLayout(
            data_parallel=data, tensor_parallel=tensor, pipeline_parallel=devices // (tensor * data)
        )
        for tensor in tensor_degrees(load_shape(case.model))
        for data in range(1, devices // tensor + 1)
        if devices % (tensor * data) == 0
    ]
    return [layout for layout in found if _fits(case, layout)]


def _fits(case: Case, layout: ParallelLayout) -> bool:
    try:
        return case.costs(layout).memory.kv_blocks(BLOCK_SIZE) * BLOCK_SIZE > LONGEST
    except DoesNotFit:
        return False
