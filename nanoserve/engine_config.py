"""EngineConfig: the settings of an engine. Every setting is checked before anything is loaded. No
torch here."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, NamedTuple

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
"""The policies that run unless another is asked for, with one layout and with two. Only seesaw
changes layouts."""
AUTO = "auto"
"""The layout, or the policy, that is predicted best."""
DRAFTERS = {"ngram": "", "draft": "MODEL", "eagle": "PATH", "medusa": "PATH", "auto": ""}
"""Drafters by name, each with the argument behind its colon."""
HEADS = ("eagle", "medusa")
"""Drafters that read the model's hidden states."""
DRAFTER_NAMES = tuple(f"{name}:{named}".removesuffix(":") for name, named in DRAFTERS.items())


def setting(default: Any, help: str, *, least: int = 1, most: int | None = None) -> Any:
    """A field of EngineConfig: its default, its meaning, and the range of a number with a ``most``.
    The command line shows ``help`` for its option; None stands for the "default" that help
    names."""
    limits = None if most is None else (least, most)
    return field(default=default, metadata={"help": help, "range": limits})


_degree = partial(setting, 1, most=MOST_PARALLEL)


def layout_settings(layouts: Sequence[ParallelLayout]) -> dict[str, Any]:
    """The fields of EngineConfig for one layout of all engines together, or for layouts of prompts
    and of decodes."""
    first = layouts[0]
    settings: dict[str, Any] = {
        "pipeline_parallel": first.pipeline_parallel,
        "tensor_parallel": first.tensor_parallel,
        "data_parallel": first.data_parallel,
        "decode_layout": None,
    }
    if len(layouts) > 1:
        settings["decode_layout"] = replace(layouts[1], data_parallel=1)
    return settings


class _Setting(NamedTuple):
    """A number that a way of denoising takes."""

    default: float | None
    """None: what the model says."""
    least: float
    most: float


RENOISE = "renoise"
_STEPS = _Setting(0.0, 0.0, 1024.0)
DENOISING: dict[str, dict[str, _Setting]] = {
    "confidence": {"threshold": _Setting(0.85, 0.0, 1.0), "steps": _STEPS},
    "static": {"steps": _STEPS},
    "entropy": {"bound": _Setting(0.35, 0.0, 1e6)},
    RENOISE: {
        "max_denoising_steps": _Setting(None, 1.0, 1024.0),
        "entropy_bound": _Setting(None, 0.0, 1e6),
        "t_min": _Setting(None, 0.0, 100.0),
        "t_max": _Setting(None, 0.0, 100.0),
        "stability_threshold": _Setting(None, 0.0, 1024.0),
        "confidence_threshold": _Setting(None, 0.0, 1e6),
    },
}
"""How a diffusion model may settle the tokens of a canvas, with the settings of each way. Defaults
are those of SDAR's own script. There, steps are those that the positions of a whole canvas are
shared out to; 0: one for each. RENOISE is for canvases that begin as random tokens: its settings
are those of generation_config.json, which says what the others are."""


@dataclass(frozen=True, slots=True)
class Denoising:
    """How a diffusion model settles the tokens of a canvas, as ``--denoising`` names it."""

    strategy: str = "confidence"
    settings: dict[str, float] = field(default_factory=lambda: _default_settings("confidence"))

    @classmethod
    def parse(cls, text: str) -> "Denoising":
        """Read "confidence:threshold=0.9" or "static:steps=2". Raises UsageError if it makes no
        sense."""
        strategy, *words = text.split(":")
        asked = f"--denoising {shown(text)}"
        if strategy not in DENOISING:
            raise UsageError(f"{asked}: choose one of {', '.join(DENOISING)}")
        known = DENOISING[strategy]
        settings = dict[str, float]()
        for word in words:
            name, _, value = word.partition("=")
            if name not in known or name in settings:
                raise UsageError(f"{asked}: {strategy} has {' and '.join(known)}, each once")
            try:
                settings[name] = float(value)
            except ValueError:
                raise UsageError(f"{asked}: say {name}=NUMBER") from None
            _, least, most = known[name]
            if not least <= settings[name] <= most:
                raise UsageError(f"{asked}: {name} must be from {least:g} to {most:g}")
        return cls(strategy, _default_settings(strategy) | settings)


def _default_settings(strategy: str) -> dict[str, float]:
    """The settings of a way of denoising that do not depend on the model."""
    known = DENOISING[strategy].items()
    return {name: one.default for name, one in known if one.default is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All settings of an engine. Raises UsageError if a number is out of range, or settings
    contradict each other."""

    dtype: str = setting("auto", "Number format of weights and KV cache.")
    """auto, float32, bfloat16 or float16."""
    quantization: str | None = setting(
        None,
        "Round weights to integers while they load: int4 or int8, or in groups of N columns, as "
        "int4:64.",
    )
    device: str = setting("cpu", "Device that computes: cpu, cuda or cuda:N.")
    """With several workers, cuda gives each worker the GPU of its number on its machine."""
    max_model_len: int | None = setting(
        None, "Longest context in tokens; default: model's.", least=2, most=2**31
    )
    kv_cache_memory: int | None = setting(
        None, "Memory of the KV cache, such as 2GiB; default: from what is free.", most=2**50
    )
    """In bytes, for each engine."""
    block_size: int = setting(16, "Tokens in a KV block.", most=1024)
    max_num_seqs: int = setting(256, "Most sequences in one step.", most=65536)
    max_num_batched_tokens: int = setting(2048, "Token budget of one step.", most=2**31)
    policy: str | None = setting(
        None,
        f"Scheduling policy; default: {DEFAULT_POLICY}, with two layouts {POLICY_OF_TWO_LAYOUTS}. "
        "One of "
        f"{', '.join(POLICIES)}, FILE.py:CLASS, which is executed, or auto, the one that is "
        "predicted best.",
    )
    enable_prefix_caching: bool = setting(True, "Share the KV of equal prefixes.")
    eager: bool = setting(False, "Compile and capture nothing; slower, same answers.")
    batch_invariant: bool = setting(
        False, "Answers that do not depend on the batch: 16 bits on a CPU, slower."
    )
    speculate: str | None = setting(
        None,
        f"Draft tokens and check several in one step; same answers. {', '.join(DRAFTER_NAMES)}.",
    )
    denoising: str | None = setting(
        None,
        f"How a diffusion model settles tokens: {', '.join(DENOISING)}, as "
        "confidence:threshold=0.9; default: confidence, or the model's own renoise.",
    )
    offline: bool = setting(False, "Never use the network.")
    seed: int | None = setting(None, "Makes the run repeatable; default: a new one each time.")
    """Seeds of requests without a seed are drawn from it."""
    pipeline_parallel: int = _degree("Pipeline stages: each worker has some of the layers.")
    tensor_parallel: int = _degree("Tensor parallel degree: this many workers share each layer.")
    pipeline_split: tuple[int, ...] | None = setting(
        None, "Layers of each stage, such as 14,14; default: by cost."
    )
    parallel: str | None = setting(
        None, "auto: the layout, or two of them, and the policy that are predicted best."
    )
    devices: int | None = setting(
        None, "Workers for --parallel auto; default: torchrun's processes.", most=MOST_PARALLEL
    )
    data_parallel: int = _degree(
        "Whole engines, each with workers of its own: a request goes to the least busy."
    )
    decode_layout: ParallelLayout | None = None
    """A second layout of one engine's workers, for decodes; the first is then for prompts. None:
    one layout."""
    host_kv_memory: int | None = setting(
        None,
        "Host memory for KV blocks, as 4GiB; default: from what is free if layouts or policy need "
        "it.",
        most=2**50,
    )
    """In bytes, for all engines of a machine together."""
    host_threads: int | None = setting(
        None,
        "CPU threads that attend in host memory; default: half of the cores, with a GPU all but "
        "two.",
        most=MOST_THREADS,
    )
    """Each is pinned to a core of its own."""
    profile: str | None = setting(
        None,
        "Profile of this machine by nanoserve profile, to predict steps; default: measured at "
        "start.",
    )
    trace: str | None = setting(
        None, "Write a timeline of the workers, for Perfetto or chrome://tracing."
    )

    @property
    def num_workers(self) -> int:
        """Devices of one engine; if there are several, each has its own process."""
        return self.pipeline_parallel * self.tensor_parallel

    @property
    def layouts(self) -> tuple[ParallelLayout, ...]:
        """Layouts of one engine by number: the only one, or the one for prompts and the one for
        decodes."""
        first = ParallelLayout(
            tensor_parallel=self.tensor_parallel, pipeline_parallel=self.pipeline_parallel
        )
        if self.decode_layout is None:
            return (first,)
        return first, self.decode_layout

    @property
    def whole_layouts(self) -> tuple[ParallelLayout, ...]:
        """The layouts of all engines together."""
        return tuple(replace(layout, data_parallel=self.data_parallel) for layout in self.layouts)

    @property
    def leaves_open(self) -> bool:
        """Whether the layout or the policy is chosen by what is measured and predicted."""
        return AUTO in (self.parallel, self.policy)

    @property
    def policy_name(self) -> str:
        """The policy that runs: the one asked for, or the default for this number of layouts."""
        if self.policy and self.policy != AUTO:
            return self.policy
        if self.decode_layout is None:
            return DEFAULT_POLICY
        return POLICY_OF_TWO_LAYOUTS

    @property
    def attends_on_host(self) -> bool:
        """Whether the CPU attends to keys and values in host memory beside the device's steps."""
        # a policy from a file never does, and workers must not read the file
        name = self.policy_name.partition(":")[0]
        return name in POLICIES and POLICIES[name].attends_on_host

    @property
    def uses_host_memory(self) -> bool:
        """Whether there are KV blocks in host memory: asked for, or needed."""
        return (
            self.host_kv_memory is not None
            or self.decode_layout is not None
            or self.attends_on_host
        )

    def __post_init__(self) -> None:
        if self.quantization is not None:
            Rounding.parse(self.quantization)
        if self.denoising is not None:
            Denoising.parse(self.denoising)
        for declared in fields(self):
            value, limits = getattr(self, declared.name), declared.metadata.get("range")
            if limits is not None and value is not None and not limits[0] <= value <= limits[1]:
                raise UsageError(
                    f"{declared.name} must be from {limits[0]} to {limits[1]}, not {value}"
                )
        workers = self.data_parallel * self.num_workers
        if workers > 1 and ":" in self.device:
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
            self._check_drafter(self.speculate)

    def _check_drafter(self, drafter: str) -> None:
        kind, colon, named = drafter.partition(":")
        takes_argument = DRAFTERS.get(kind, "") != ""
        if (
            kind not in DRAFTERS
            or (colon != "") != takes_argument
            or (named != "") != takes_argument
        ):
            raise UsageError(
                f"--speculate {shown(self.speculate)} is none of {', '.join(DRAFTER_NAMES)}"
            )
        if self.decode_layout is not None:
            raise UsageError(
                f"--speculate works in one layout: leave it out with {' and '.join(PAIR_OPTIONS)}"
            )
        if self.attends_on_host:
            raise UsageError(
                f"--speculate: --policy {self.policy} attends in host memory, where nothing is "
                "drafted; leave one out"
            )

    def _check_choice(self) -> None:
        if self.parallel not in (None, AUTO):
            raise UsageError(f"parallel is auto or left out, not {shown(self.parallel)}")
        if self.parallel is None:
            if self.devices is not None:
                raise UsageError(
                    "--devices is for --parallel auto, which chooses their layout: give both, or "
                    "neither"
                )
            return
        given = (
            self.data_parallel,
            self.pipeline_parallel,
            self.tensor_parallel,
            self.pipeline_split,
        )
        if given != (1, 1, 1, None) or self.decode_layout is not None:
            raise UsageError(
                "--parallel auto chooses the layout itself: leave out --dp, --pp, --tp, --pp-split "
                "and " + " and ".join(PAIR_OPTIONS)
            )
        if self.attends_on_host:
            raise UsageError(
                "--parallel auto predicts no attention in host memory: leave out --policy "
                f"{self.policy}"
            )

    def _check_batch_invariance(self) -> None:
        if self.device != "cpu":
            raise UsageError(
                f"--batch-invariant is for --device cpu, not {self.device}: leave it out"
            )
        degrees = {layout.tensor_parallel for layout in self.layouts}
        if len(degrees) > 1 or max(degrees) > 2:
            raise UsageError(
                "--batch-invariant: sums over ranks would differ; choose one degree of --tp, 1 or 2"
            )

    def _check_pair(self, decode: ParallelLayout) -> None:
        if decode.data_parallel > 1:
            raise UsageError(
                f"decode_layout {decode.name} is that of one engine: leave the D to data_parallel"
            )
        if max(decode.tensor_parallel, decode.pipeline_parallel) > MOST_PARALLEL:
            raise UsageError(
                f"decode_layout {decode.name}: a degree must be from 1 to {MOST_PARALLEL}"
            )
        whole = self.whole_layouts
        first, second = (
            f"{option} {layout.name}" for option, layout in zip(PAIR_OPTIONS, whole, strict=True)
        )
        devices = [layout.devices for layout in whole]
        if devices[0] != devices[1]:
            raise UsageError(
                f"{first} takes {devices[0]} devices and {second} {devices[1]}: both run on the "
                "same ones"
            )
        if whole[0] == whole[1]:
            raise UsageError(
                f"{first} and {second} are one layout: there is nothing to change between them"
            )
        if self.pipeline_split is not None:
            raise UsageError(
                f"--pp-split is for one layout; leave it out with {' and '.join(PAIR_OPTIONS)}"
            )
        if self.policy_name.partition(":")[0] != POLICY_OF_TWO_LAYOUTS:
            raise UsageError(
                f"--policy {self.policy} runs under one layout; leave it out with "
                f"{' and '.join(PAIR_OPTIONS)}, "
                f"which {POLICY_OF_TWO_LAYOUTS} is for"
            )

    def _check_split(self, split: tuple[int, ...]) -> None:
        if len(split) != self.pipeline_parallel:
            raise UsageError(
                f"--pp-split {','.join(map(str, split))} names {len(split)} stages, but --pp is "
                f"{self.pipeline_parallel}: give one number for each stage"
            )
        if min(split) < 1:
            raise UsageError(
                f"--pp-split {','.join(map(str, split))}: every stage needs at least one layer"
            )

    def _check_host_attention(self) -> None:
        if self.attends_on_host and self.tensor_parallel > 1:
            raise UsageError(
                f"--policy {self.policy} has the CPU attend beside whole layers, which --tp "
                f"{self.tensor_parallel} "
                "divides: leave --tp out or choose another policy"
            )
        if self.attends_on_host:
            return
        *most, last = [name for name, entry in POLICIES.items() if entry.attends_on_host]
        for option, value in (("--host-threads", self.host_threads), ("--profile", self.profile)):
            if value is not None:
                raise UsageError(
                    f"{option} is for policies that attend in host memory, which "
                    f"{self.policy_name} does not: leave it "
                    f"out or choose --policy {', '.join(most)} or {last}"
                )
