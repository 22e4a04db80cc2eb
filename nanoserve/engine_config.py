"""EngineConfig: how the engine runs a model. Every setting is checked before anything is loaded. No torch here."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from nanoserve.config.quantization import Rounding
from nanoserve.errors import UsageError, shown
from nanoserve.layout import ParallelLayout
from nanoserve.scheduler.policies import POLICIES
from nanoserve.utils.threads import MOST_THREADS

MOST_PARALLEL = 64
"""Limit of each degree: pipeline stages, tensor-parallel ranks, engines."""
PAIR_OPTIONS = ("--prefill-parallel", "--decode-parallel")
"""The options that name two layouts, in the order of their numbers."""
DEFAULT_POLICY, POLICY_OF_TWO_LAYOUTS = "sarathi", "seesaw"
"""What runs unless another is asked for. With two layouts it is the one policy that changes the layout."""
AUTO = "auto"
"""The layout, or the policy, that is predicted best."""
DRAFTERS = {"ngram": "", "draft": "MODEL", "eagle": "PATH", "medusa": "PATH", "auto": ""}
"""What guesses tokens, by name, and what is named behind a colon."""
HEADS = ("eagle", "medusa")
"""Drafters that read the model's hidden states."""
_BOUNDS = {
    "max_model_len": (2, 2**31),
    "kv_cache_memory": (1, 2**50),
    "block_size": (1, 1024),
    "max_num_seqs": (1, 65536),
    "max_num_batched_tokens": (1, 2**31),
    **dict.fromkeys(("pipeline_parallel", "tensor_parallel", "data_parallel", "devices"), (1, MOST_PARALLEL)),
    "host_kv_memory": (1, 2**50),
    "host_threads": (1, MOST_THREADS),
}


def layout_settings(layouts: Sequence[ParallelLayout]) -> dict[str, Any]:
    """The fields of EngineConfig for the only layout of all engines together, or for those of prompts and decodes."""
    first, *others = layouts
    return {
        "pipeline_parallel": first.pipeline_parallel,
        "tensor_parallel": first.tensor_parallel,
        "data_parallel": first.data_parallel,
        "decode_layout": replace(others[0], data_parallel=1) if others else None,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How the engine runs a model. Raises UsageError if a number is out of range, or settings contradict each other."""

    dtype: str = "auto"
    """auto, bfloat16, float16 or float32, for weights and KV cache."""
    quantization: str | None = None
    """int4 or int8: weights are rounded to nearest while they load; None leaves them as they are stored. The columns
    that share a scale may be named: int4:64."""
    device: str = "cpu"
    """cpu, cuda or cuda:N. With several workers, cuda gives each worker the GPU of its number on its machine."""
    max_model_len: int | None = None
    """Longest sequence in tokens; None takes the model's limit, or what the cache holds."""
    kv_cache_memory: int | None = None
    """Bytes of each engine's KV cache; None takes a share of the free memory."""
    block_size: int = 16
    """Tokens per KV block."""
    max_num_seqs: int = 256
    """Sequences that hold blocks at a time."""
    max_num_batched_tokens: int = 2048
    """Token budget of a step."""
    policy: str | None = None
    """A scheduling policy as `make_policy` names it, or auto; None takes the default (`policy_name`), with
    ``parallel`` the one that is predicted best."""
    enable_prefix_caching: bool = True
    """Share the KV of equal prefixes."""
    eager: bool = False
    """Never run compiled layers or captured steps."""
    batch_invariant: bool = False
    """Answers do not depend on the batch, on chunks, or on the number of pipeline stages. CPU and 16 bits only."""
    speculate: str | None = None
    """What guesses tokens that steps then check, as in DRAFTERS; None: nothing does."""
    offline: bool = False
    """Never use the network."""
    seed: int | None = None
    """Seeds of requests without a seed are drawn from this; None draws differently in each run."""
    pipeline_parallel: int = 1
    """Pipeline stages, each in its own worker process."""
    tensor_parallel: int = 1
    """Workers that share the heads and channels of each stage."""
    pipeline_split: tuple[int, ...] | None = None
    """Layers of each stage; together they are all layers of the model. None divides by cost."""
    parallel: str | None = None
    """auto: layout and policy are chosen before anything is loaded. None: the layout is the one given here."""
    devices: int | None = None
    """How many workers ``parallel`` divides the model over; None takes the processes of torchrun."""
    data_parallel: int = 1
    """Whole engines behind one dispatcher, each with its own workers."""
    decode_layout: ParallelLayout | None = None
    """A second layout of one engine's workers, for decodes; the first is then for prompts. None: one layout."""
    host_kv_memory: int | None = None
    """Bytes of host memory for KV blocks, for all engines of a machine together. None: a share of the free memory with
    two layouts or a policy that attends on the host, else nothing."""
    host_threads: int | None = None
    """CPU threads for attention in host memory, pinned to their own cores. None: half of the cores if the device is the
    CPU itself, else all but two."""
    profile: str | None = None
    """File of `nanoserve profile`, for policies that attend in host memory; None: it is measured at start."""
    trace: str | None = None
    """File for a Chrome trace of the run."""

    @property
    def num_workers(self) -> int:
        """Devices of one engine; if there are several, each has its own process."""
        return self.pipeline_parallel * self.tensor_parallel

    @property
    def layouts(self) -> tuple[ParallelLayout, ...]:
        """Layouts of one engine by number: the only one, or the one for prompts and the one for decodes."""
        first = ParallelLayout(tensor_parallel=self.tensor_parallel, pipeline_parallel=self.pipeline_parallel)
        return (first,) if self.decode_layout is None else (first, self.decode_layout)

    @property
    def whole_layouts(self) -> tuple[ParallelLayout, ...]:
        """The same of all engines together."""
        return tuple(replace(layout, data_parallel=self.data_parallel) for layout in self.layouts)

    @property
    def leaves_open(self) -> bool:
        """Whether the layout or the policy is chosen by what is measured and predicted."""
        return AUTO in (self.parallel, self.policy)

    @property
    def policy_name(self) -> str:
        """The policy that runs: the one asked for, or the default for this number of layouts."""
        asked = None if self.policy == AUTO else self.policy
        return asked or (DEFAULT_POLICY if self.decode_layout is None else POLICY_OF_TWO_LAYOUTS)

    @property
    def attends_on_host(self) -> bool:
        """Whether the CPU attends to keys and values in host memory beside the device's steps."""
        name, *_ = self.policy_name.split(":")  # a policy from a file never does, and workers must not read the file
        return name in POLICIES and POLICIES[name].attends_on_host

    @property
    def uses_host_memory(self) -> bool:
        """Whether there are KV blocks in host memory: asked for, or needed."""
        return self.host_kv_memory is not None or self.decode_layout is not None or self.attends_on_host

    def __post_init__(self) -> None:
        if self.quantization is not None:
            Rounding.parse(self.quantization)
        for name, (low, high) in _BOUNDS.items():
            if (value := getattr(self, name)) is not None and not low <= value <= high:
                raise UsageError(f"{name} must be from {low} to {high}, not {value}")
        if (workers := self.data_parallel * self.num_workers) > 1 and ":" in self.device:
            raise UsageError(
                f"device {self.device} with {workers} workers: say cuda, and choose GPUs by "
                "CUDA_VISIBLE_DEVICES; each worker takes the one of its number"
            )
        self._check_choice()
        if self.decode_layout is not None:
            self._check_pair(self.decode_layout)
        if self.pipeline_split is not None:
            self._check_split(self.pipeline_split)
        if self.batch_invariant:
            self._check_batch_invariance()
        self._check_host_attention()
        if self.speculate is not None:
            self._check_drafter(*self.speculate.partition(":"))

    def _check_drafter(self, kind: str, colon: str, named: str) -> None:
        if kind not in DRAFTERS or bool(named) != bool(DRAFTERS[kind]) or bool(named) != bool(colon):
            known = ", ".join(f"{name}:{what}" if what else name for name, what in DRAFTERS.items())
            raise UsageError(f"--speculate {shown(self.speculate)} is none of {known}")
        if self.decode_layout is not None:
            raise UsageError(f"--speculate works in one layout: leave it out with {' and '.join(PAIR_OPTIONS)}")
        if self.attends_on_host:
            raise UsageError(
                f"--speculate: --policy {self.policy} attends in host memory, where nothing is guessed; leave one out"
            )

    def _check_choice(self) -> None:
        if self.parallel not in (None, AUTO):
            raise UsageError(f"parallel is auto or left out, not {shown(self.parallel)}")
        if self.parallel is None:
            if self.devices is not None:
                raise UsageError("--devices is for --parallel auto, which chooses their layout: give both, or neither")
            return
        given = self.data_parallel, self.pipeline_parallel, self.tensor_parallel, self.pipeline_split
        if given != (1, 1, 1, None) or self.decode_layout is not None:
            raise UsageError(
                "--parallel auto chooses the layout itself: leave out --dp, --pp, --tp, --pp-split and "
                + " and ".join(PAIR_OPTIONS)
            )
        if self.attends_on_host:
            raise UsageError(f"--parallel auto predicts no attention in host memory: leave out --policy {self.policy}")

    def _check_batch_invariance(self) -> None:
        if self.device != "cpu":
            raise UsageError(f"--batch-invariant is for --device cpu, not {self.device}: leave it out")
        if len(degrees := {layout.tensor_parallel for layout in self.layouts}) > 1 or max(degrees) > 2:
            raise UsageError("--batch-invariant: sums over ranks would differ; choose one degree of --tp, 1 or 2")

    def _check_pair(self, decode: ParallelLayout) -> None:
        if decode.data_parallel > 1:
            raise UsageError(f"decode_layout {decode.name} is that of one engine: leave the D to data_parallel")
        if max(decode.tensor_parallel, decode.pipeline_parallel) > MOST_PARALLEL:
            raise UsageError(f"decode_layout {decode.name}: a degree must be from 1 to {MOST_PARALLEL}")
        whole = self.whole_layouts
        first, second = (f"{option} {layout.name}" for option, layout in zip(PAIR_OPTIONS, whole, strict=True))
        devices = [layout.devices for layout in whole]
        if devices[0] != devices[1]:
            raise UsageError(f"{first} takes {devices[0]} devices and {second} {devices[1]}: both run on the same ones")
        if whole[0] == whole[1]:
            raise UsageError(f"{first} and {second} are one layout: there is nothing to change between them")
        if self.pipeline_split is not None:
            raise UsageError(f"--pp-split is for one layout; leave it out with {' and '.join(PAIR_OPTIONS)}")
        if self.policy_name.partition(":")[0] != POLICY_OF_TWO_LAYOUTS:
            raise UsageError(
                f"--policy {self.policy} runs under one layout; leave it out with {' and '.join(PAIR_OPTIONS)}, "
                f"which {POLICY_OF_TWO_LAYOUTS} is for"
            )

    def _check_split(self, split: tuple[int, ...]) -> None:
        if len(split) != self.pipeline_parallel:
            raise UsageError(
                f"--pp-split {','.join(map(str, split))} names {len(split)} stages, but --pp is "
                f"{self.pipeline_parallel}: give one number for each stage"
            )
        if min(split) < 1:
            raise UsageError(f"--pp-split {','.join(map(str, split))}: every stage needs at least one layer")

    def _check_host_attention(self) -> None:
        if self.attends_on_host:
            if self.tensor_parallel > 1:
                raise UsageError(
                    f"--policy {self.policy} has the CPU attend beside whole layers, which --tp {self.tensor_parallel} "
                    "divides: leave --tp out or choose another policy"
                )
            return
        *most, last = [name for name, entry in POLICIES.items() if entry.attends_on_host]
        for option, value in (("--host-threads", self.host_threads), ("--profile", self.profile)):
            if value is not None:
                raise UsageError(
                    f"{option} is for policies that attend in host memory, which {self.policy_name} does not: leave it "
                    f"out or choose --policy {', '.join(most)} or {last}"
                )
