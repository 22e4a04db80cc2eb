"""What is fixed before the first step: the model's shape (from a config.json) and the engine's settings.

No torch here: the scheduler, the simulator and `--help` read these without loading it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nanoserve.errors import UsageError

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
"""Stages of a pipeline, and ranks of a tensor-parallel group: more than a layout of use has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How the engine runs a model.

    Attributes:
        dtype: of weights and KV cache: auto, bfloat16, float16 or float32.
        device: cpu, cuda or cuda:N; with several workers, cuda is for each the GPU of its number on its machine.
        max_model_len: longest sequence in tokens; None takes the model's limit, or what the cache holds.
        kv_cache_memory: bytes of the KV cache; None takes a share of what is free.
        block_size: tokens per KV block.
        max_num_seqs: sequences that hold blocks at a time.
        max_num_batched_tokens: token budget of a step.
        policy: name of a scheduling policy.
        enable_prefix_caching: share the KV of equal prefixes.
        eager: never run compiled layers or captured steps.
        offline: never use the network.
        seed: makes the seeds repeatable that requests without one are given.
        pipeline_parallel: stages that the layers are divided over, each in a worker process of its own.
        tensor_parallel: workers that share the heads and channels of each stage.
        pipeline_split: layers of each stage, all of the model's together; None divides by cost.
        trace: file that the Chrome trace of the run is written to.

    Raises:
        UsageError: if a number is out of range, or the split is not one of so many stages.
    """

    dtype: str = "auto"
    device: str = "cpu"
    max_model_len: int | None = None
    kv_cache_memory: int | None = None
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    policy: str = "sarathi"
    enable_prefix_caching: bool = True
    eager: bool = False
    offline: bool = False
    seed: int | None = None
    pipeline_parallel: int = 1
    tensor_parallel: int = 1
    pipeline_split: tuple[int, ...] | None = None
    trace: str | None = None

    @property
    def num_workers(self) -> int:
        """Devices that compute, each in a process of its own when there are several."""
        return self.pipeline_parallel * self.tensor_parallel

    def __post_init__(self) -> None:
        bounds = {
            "max_model_len": (self.max_model_len, 2, 2**31),
            "kv_cache_memory": (self.kv_cache_memory, 1, 2**50),
            "block_size": (self.block_size, 1, 1024),
            "max_num_seqs": (self.max_num_seqs, 1, 65536),
            "max_num_batched_tokens": (self.max_num_batched_tokens, 1, 2**31),
            "pipeline_parallel": (self.pipeline_parallel, 1, MOST_PARALLEL),
            "tensor_parallel": (self.tensor_parallel, 1, MOST_PARALLEL),
        }
        for name, (value, low, high) in bounds.items():
            if value is not None and not low <= value <= high:
                raise UsageError(f"{name} must be from {low} to {high}, not {value}")
        if self.num_workers > 1 and ":" in self.device:
            raise UsageError(
                f"device {self.device} with {self.num_workers} workers: say cuda, and choose GPUs by "
                "CUDA_VISIBLE_DEVICES; each worker takes the one of its number"
            )
        if self.pipeline_split is not None:
            self._check_split(self.pipeline_split)

    def _check_split(self, split: tuple[int, ...]) -> None:
        if len(split) != self.pipeline_parallel:
            raise UsageError(
                f"--pp-split {','.join(map(str, split))} names {len(split)} stages, but --pp is "
                f"{self.pipeline_parallel}: give one number for each stage"
            )
        if min(split) < 1:
            raise UsageError(f"--pp-split {','.join(map(str, split))}: every stage needs at least one layer")
