"""What is fixed before the first step: the model's shape (from a config.json) and the engine's settings.

No torch here: the scheduler, the simulator and `--help` read these without loading it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from nanoserve.errors import UsageError
from nanoserve.layout import ParallelLayout
from nanoserve.processes.threads import MOST_THREADS

# ------------------------------------------------------------------------------------------------- Model

RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: which frequencies, how stretched, how many dimensions of a head rotate.

    `kind` is the scaling rule: linear (position interpolation), llama3 (Llama 3.1's piecewise rule) or yarn
    (arXiv 2309.00071). `interleaved` rotates neighbouring pairs (GLM) instead of the two halves of the head.
    """

    rotary_dim: int
    theta: float = 10000.0
    kind: RopeKind = "default"
    interleaved: bool = False
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Mixture of experts: a sparse layer sends each token to `experts_per_token` of its `num_experts`."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalize_weights: bool
    sparse_layers: frozenset[int]


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What generation_config.json recommends; None where it says nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """All that tells one decoder family from another; the Decoder is built from this and nothing else."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norms_per_layer: Literal[2, 4] = 2
    sliding_windows: tuple[int, ...] = ()
    """Per layer: how many of the last positions a query sees, itself included; 0 or an empty tuple = all."""
    moe: MoeConfig | None = None
    tie_word_embeddings: bool = False
    dtype: str = "float32"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    renamed_as_chatglm: bool = False
    """The checkpoint uses the tensor names of the older GLM releases."""

    @property
    def group_size(self) -> int:
        """Query heads that share one key-value head."""
        return self.num_heads // self.num_kv_heads

    def sliding_window(self, layer: int) -> int:
        """Positions a query of this layer sees, itself included; 0 means all."""
        return self.sliding_windows[layer] if self.sliding_windows else 0

    def is_sparse(self, layer: int) -> bool:
        """Whether this layer's feed-forward part is a mixture of experts."""
        return self.moe is not None and layer in self.moe.sparse_layers

    @classmethod
    def from_directory(cls, directory: str | Path) -> "ModelConfig":
        """Read config.json and generation_config.json, if there is one. Raises ModelError naming the file."""
        from nanoserve.config_json import read_model_config

        return read_model_config(Path(directory))

    @classmethod
    def from_hf(
        cls,
        config: Mapping[str, Any],
        generation_config: Mapping[str, Any] | None = None,
        *,
        source: str = "config.json",
    ) -> "ModelConfig":
        """Translate a parsed config.json. Raises ModelError, one line that begins with `source`."""
        from nanoserve.config_json import translate

        return translate(config, generation_config or {}, source)


# ------------------------------------------------------------------------------------------------ Engine

MOST_PARALLEL = 64
"""Stages of a pipeline, ranks of a tensor-parallel group, whole engines: more than a layout of use has."""
PAIR_OPTIONS = ("--prefill-parallel", "--decode-parallel")
"""What two layouts are asked for by, in the order of their numbers."""
POLICY_NAMES = (
    *("prefill-first", "decode-first", "sarathi", "throttling", "adaptive", "seesaw"),
    *("neo", "overlap", "apex", "hybrid"),
)
"""Those of the scheduler's POLICIES, for a help that does not import them."""
DEFAULT_POLICY, POLICY_OF_TWO_LAYOUTS = "sarathi", "seesaw"
"""What runs next unless something else is asked for: the one policy that ever changes the layout, if there are two."""
POLICIES_ON_HOST = ("neo", "overlap", "apex", "hybrid")
"""Those that have the CPU attend to keys and values in host memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How the engine runs a model.

    Raises:
        UsageError: if a number is out of range, the split is not one of so many stages, the two layouts do not suit
            each other, or the policy does not suit the layout or what is said of host memory.
    """

    dtype: str = "auto"
    """Of weights and KV cache: auto, bfloat16, float16 or float32."""
    device: str = "cpu"
    """Cpu, cuda or cuda:N; with several workers, cuda is for each the GPU of its number on its machine."""
    max_model_len: int | None = None
    """Longest sequence in tokens; None takes the model's limit, or what the cache holds."""
    kv_cache_memory: int | None = None
    """Bytes of the KV cache, of each engine; None takes a share of what is free."""
    block_size: int = 16
    """Tokens per KV block."""
    max_num_seqs: int = 256
    """Sequences that hold blocks at a time."""
    max_num_batched_tokens: int = 2048
    """Token budget of a step."""
    policy: str | None = None
    """Name of a scheduling policy; None takes `policy_name`."""
    enable_prefix_caching: bool = True
    """Share the KV of equal prefixes."""
    eager: bool = False
    """Never run compiled layers or captured steps."""
    offline: bool = False
    """Never use the network."""
    seed: int | None = None
    """Makes the seeds repeatable that requests without one are given."""
    pipeline_parallel: int = 1
    """Stages that the layers are divided over, each in a worker process of its own."""
    tensor_parallel: int = 1
    """Workers that share the heads and channels of each stage."""
    pipeline_split: tuple[int, ...] | None = None
    """Layers of each stage, all of the model's together; None divides by cost."""
    data_parallel: int = 1
    """Whole engines, each with workers of its own, behind one dispatcher."""
    decode_layout: ParallelLayout | None = None
    """A second layout of one engine's workers, which decodes run under; the first is then that of prompts. None: one
    layout."""
    host_kv_memory: int | None = None
    """Bytes in host memory for KV blocks, of all engines of a machine together; None: a share of what is free with two
    layouts or a policy that attends there, else nothing."""
    host_threads: int | None = None
    """CPU threads that attend to keys and values in host memory, on cores of their own; None: half of the cores where
    the device is the CPU itself, else all but two."""
    profile: str | None = None
    """File of `nanoserve profile` for the policies that attend in host memory; None: one is measured."""
    trace: str | None = None
    """File that the Chrome trace of the run is written to."""

    @property
    def num_workers(self) -> int:
        """Devices of one engine that compute, each in a process of its own when there are several."""
        return self.pipeline_parallel * self.tensor_parallel

    @property
    def layouts(self) -> tuple[ParallelLayout, ...]:
        """Of one engine, by number: the only one, or that of prompts and that of decodes."""
        first = ParallelLayout(tensor_parallel=self.tensor_parallel, pipeline_parallel=self.pipeline_parallel)
        return (first,) if self.decode_layout is None else (first, self.decode_layout)

    @property
    def policy_name(self) -> str:
        """The policy that runs: the one asked for, or the default of so many layouts."""
        return self.policy or (DEFAULT_POLICY if self.decode_layout is None else POLICY_OF_TWO_LAYOUTS)

    @property
    def attends_on_host(self) -> bool:
        """Whether the CPU attends to keys and values in host memory beside the device's steps."""
        return self.policy_name in POLICIES_ON_HOST

    @property
    def uses_host_memory(self) -> bool:
        """Whether there are KV blocks in host memory: asked for, or needed."""
        return self.host_kv_memory is not None or self.decode_layout is not None or self.attends_on_host

    def __post_init__(self) -> None:
        bounds = {
            "max_model_len": (self.max_model_len, 2, 2**31),
            "kv_cache_memory": (self.kv_cache_memory, 1, 2**50),
            "block_size": (self.block_size, 1, 1024),
            "max_num_seqs": (self.max_num_seqs, 1, 65536),
            "max_num_batched_tokens": (self.max_num_batched_tokens, 1, 2**31),
            "pipeline_parallel": (self.pipeline_parallel, 1, MOST_PARALLEL),
            "tensor_parallel": (self.tensor_parallel, 1, MOST_PARALLEL),
            "data_parallel": (self.data_parallel, 1, MOST_PARALLEL),
            "host_kv_memory": (self.host_kv_memory, 1, 2**50),
            "host_threads": (self.host_threads, 1, MOST_THREADS),
        }
        for name, (value, low, high) in bounds.items():
            if value is not None and not low <= value <= high:
                raise UsageError(f"{name} must be from {low} to {high}, not {value}")
        if (workers := self.data_parallel * self.num_workers) > 1 and ":" in self.device:
            raise UsageError(
                f"device {self.device} with {workers} workers: say cuda, and choose GPUs by "
                "CUDA_VISIBLE_DEVICES; each worker takes the one of its number"
            )
        if self.decode_layout is not None:
            self._check_pair(self.decode_layout)
        if self.pipeline_split is not None:
            self._check_split(self.pipeline_split)
        self._check_host_attention()

    def _check_pair(self, decode: ParallelLayout) -> None:
        if decode.data_parallel > 1:
            raise UsageError(f"decode_layout {decode.name} is that of one engine: leave the D to data_parallel")
        if max(decode.tensor_parallel, decode.pipeline_parallel) > MOST_PARALLEL:
            raise UsageError(f"decode_layout {decode.name}: a degree must be from 1 to {MOST_PARALLEL}")
        whole = [replace(layout, data_parallel=self.data_parallel) for layout in self.layouts]
        first, second = (f"{option} {layout.name}" for option, layout in zip(PAIR_OPTIONS, whole, strict=True))
        devices = [layout.devices for layout in whole]
        if devices[0] != devices[1]:
            raise UsageError(f"{first} takes {devices[0]} devices and {second} {devices[1]}: both run on the same ones")
        if whole[0] == whole[1]:
            raise UsageError(f"{first} and {second} are one layout: there is nothing to change between them")
        if self.pipeline_split is not None:
            raise UsageError(f"--pp-split is for one layout; leave it out with {' and '.join(PAIR_OPTIONS)}")
        if self.policy_name != POLICY_OF_TWO_LAYOUTS:
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
        for option, value in (("--host-threads", self.host_threads), ("--profile", self.profile)):
            if value is not None:
                raise UsageError(
                    f"{option} is for policies that attend in host memory, which {self.policy_name} does not: leave it "
                    f"out or choose --policy {', '.join(POLICIES_ON_HOST[:-1])} or {POLICIES_ON_HOST[-1]}"
                )
