"""The device that runs a model, whether it can, and the model on it: for the engine's own process
and for a worker.

What is wrong with a machine is said before anything is loaded.
"""

import atexit
import logging
import os
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from subprocess import CalledProcessError
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

import torch

from nanoserve.config.model_config import ModelConfig
from nanoserve.config.model_parts import CanvasConfig
from nanoserve.engine_config import AUTO, DENOISING, RENOISE, Denoising, EngineConfig
from nanoserve.errors import RuntimeFailure, UsageError, first_line, shown
from nanoserve.executor.start.memory import memory_errors
from nanoserve.models.decoder import Decoder, TensorParallelGroup
from nanoserve.models.dtypes import resolve_dtype
from nanoserve.models.hub import ProgressCallback, ResolvedModel, dummy_config
from nanoserve.models.loading import load_model
from nanoserve.models.shards import Shard, shards_of_layouts
from nanoserve.scheduler.windows import longest_sequence, most_tokens
from nanoserve.utils.files import unreadable_as_model_error
from nanoserve.utils.sizes import format_size
from nanoserve.utils.temporary import choose_directory, make_directory, remove_directory
from triton_ops.gpu.configurations import (
    OLDEST_GENERATION,
    UnsupportedByGpu,
    attention_configuration,
    program_shape,
)

if TYPE_CHECKING:
    from nanoserve.models.resharding import ReshardableWeights

_CACHE_VARIABLE = "TRITON_CACHE_DIR"


def usable_device(name: str) -> torch.device:
    """The device called `name`: cpu, cuda (the current GPU) or cuda:N; UsageError if none is there,
    or too old."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UsageError(
            f"unknown device {shown(name)}; choose cpu, cuda or cuda:N with N the number of a GPU"
        )
    if device.type == "cpu":
        return torch.device("cpu")
    return usable_gpu(device.index, asked=f"--device {name}", instead="choose --device cpu")


def check_cuda(*, asked: str, instead: str) -> None:
    """See that torch finds a GPU, and take none of its memory. Raises UsageError if it finds none,
    which begins with what needs it, `asked`, and ends with what to do `instead`."""
    if torch.version.cuda is None:
        raise UsageError(
            f"{asked}: torch {torch.__version__} was built without CUDA; install a CUDA build of "
            f"torch, or {instead}"
        )
    if not torch.cuda.is_available():
        raise UsageError(
            f"{asked}: no NVIDIA GPU can be used here; see that nvidia-smi lists one and that its "
            "driver is"
            f" recent enough for CUDA {torch.version.cuda}, or {instead}"
        )


def usable_gpu(index: int | None, *, asked: str, instead: str) -> torch.device:
    """The GPU of that number, or the current one; `asked` and `instead` as for `check_cuda`. Raises
    UsageError if there is no such GPU, or it is too old for the kernels."""
    check_cuda(asked=asked, instead=instead)
    count = torch.cuda.device_count()
    if index is None:
        index = torch.cuda.current_device()
    if index >= count:
        numbers = "there is cuda:0 only" if count == 1 else f"there are cuda:0 to cuda:{count - 1}"
        raise UsageError(f"{asked}: no such GPU; {numbers}")
    device = torch.device("cuda", index)
    major, minor = torch.cuda.get_device_capability(device)
    if major < OLDEST_GENERATION:
        raise UsageError(
            f"{asked}: {torch.cuda.get_device_name(device)} is too old, its compute capability is"
            f" {major}.{minor} and {OLDEST_GENERATION}.0 is needed (A100, RTX 30 and later); "
            f"{instead}"
        )
    return device


def check_model(device: torch.device, config: ModelConfig, dtype: str, block_size: int) -> None:
    """Raise UsageError if a GPU's attention cannot run a model in this dtype, named as for
    `resolve_dtype`."""
    if config.head_dim == 0:  # the model has none
        return
    width = resolve_dtype(dtype, device, config.dtype).itemsize
    generation, _ = torch.cuda.get_device_capability(device)
    try:
        for own in {config.of_shape(shape) for shape in config.layers.shapes or (None,)}:
            shape = program_shape(
                head_dim=own.head_dim,
                value_dim=own.value_dim,
                block_size=block_size,
                heads_per_kv_head=own.group_size,
            )
            attention_configuration(generation, width, shape)
    except UnsupportedByGpu as reason:
        raise UsageError(f"--device {device}: {reason}") from None


def use_writable_triton_cache(environment: MutableMapping[str, str] = os.environ) -> None:
    """Have Triton keep what it compiles where that can be written: elsewhere, for this process, if
    need be."""
    home = environment.get("HOME") or os.path.expanduser("~")
    wanted = Path(environment.get(_CACHE_VARIABLE) or Path(home, ".triton", "cache"))
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=wanted):
            return
    except OSError as error:
        reason = error.strerror
    instead = choose_directory()
    make_directory(instead)
    atexit.register(remove_directory, instead)
    environment[_CACHE_VARIABLE] = str(instead)
    logging.getLogger("nanoserve").warning(
        "nanoserve: kernels are compiled again in every process: the Triton cache folder %s cannot "
        "be written (%s); set"
        " %s to one of your own",
        wanted,
        reason,
        _CACHE_VARIABLE,
    )


@contextmanager
def compiler_errors(device: torch.device) -> Iterator[None]:
    """Say in one line what keeps Triton from launching a kernel for the first time, when it builds
    a small library. Raises RuntimeFailure, within, if there is no C compiler, or it fails, or the
    GPU is too small for the kernel."""
    try:
        yield
    except Exception as error:
        reason = first_line(error)
        if type(error).__name__ == "OutOfResources":  # Triton's, which is not installed everywhere
            raise RuntimeFailure(
                f"{device} is too small for a kernel: {reason}; choose --device cpu"
            ) from error
        if not isinstance(error, CalledProcessError) and not (
            "C compiler" in reason and isinstance(error, RuntimeError)
        ):
            raise
        raise RuntimeFailure(
            f"kernels cannot be launched on {device}: install gcc and Python's headers, or set CC "
            "to a C compiler"
            f" ({reason})"
        ) from error


@unreadable_as_model_error()
def read_config(
    resolved: ResolvedModel, quantization: str | None = None, device: str = "cpu"
) -> ModelConfig:
    """The model's shape, with its weights rounded for the device if that is asked for; nothing else
    of it is read. Raises ModelError if it cannot be used, UsageError if it is quantized already."""
    if resolved.directory is None:
        found = dummy_config(resolved.name)
    else:
        found = ModelConfig.from_directory(resolved.directory)
    return found.rounded(quantization, on_gpu=device.startswith("cuda"))


def keeps_all_positions(model: ModelConfig, config: EngineConfig) -> str | None:
    """Name the setting that forces sliding-window layers to keep full KV, or None. Such a setting
    does not support cache groups yet: all layers share one block table, and windows are masks."""
    has_windows = any(
        0 < window < model.max_position_embeddings for window in model.layers.sliding_windows
    )
    if not has_windows and not model.layers.shapes:
        return None
    shares_host_memory = config.uses_host_memory and config.num_workers > 1
    asked = {
        "attention in host memory": config.attends_on_host,
        f"--speculate {config.speculate}": config.speculate not in (None, "ngram"),
        "host memory of several workers": bool(model.layers.shapes) and shares_host_memory,
    }
    return next((name for name, is_asked in asked.items() if is_asked), None)


def with_cache_groups(model: ModelConfig, config: EngineConfig) -> ModelConfig:
    """The model with the cache groups that an engine like this uses, whatever groups it has. Raises
    UsageError if it can have no such ones."""
    if (asked := keeps_all_positions(model, config)) is None:
        starts = {
            shard.layers.start for shards in shards_of_layouts(model, config) for shard in shards
        }
        return replace(model, groups=model.cut(tuple(sorted(starts))))
    if model.layers.shapes:
        raise UsageError(
            f"{asked}: layers of {model.family} differ in their keys and values; leave it out"
        )
    return model.in_one_group()


def refuse_states(model: ModelConfig, asked: str, instead: str = "leave it out") -> None:
    """Raise UsageError for what does not go together with recurrent states, if the model has
    any."""
    if model.recurrent is not None:
        raise UsageError(
            f"{asked}: layers of {model.family} have recurrent states, which do not support it; "
            f"{instead}"
        )


def check_state_settings(config: EngineConfig, model: ModelConfig) -> None:
    """Refuse settings that do not go together with recurrent states, if the model has any."""
    asked = {
        f"--speculate {config.speculate}": config.speculate is not None,
        "--decode-parallel": config.decode_layout is not None,
        "--host-kv-memory": config.host_kv_memory is not None,
        f"--policy {config.policy_name}": config.attends_on_host,
    }
    for name, is_asked in asked.items():
        if is_asked:
            refuse_states(model, name)


def refuse_canvases(model: ModelConfig, asked: str, instead: str = "leave it out") -> None:
    """Raise UsageError for what does not go together with canvases, if the model writes any."""
    if model.canvas is not None:
        raise UsageError(
            f"{asked}: {model.family} writes {model.canvas.length} tokens at a time, which does "
            f"not support it; {instead}"
        )


_LEAST_CANVASES = 4
"""Aligned canvases that the token budget of a step must hold: a row is a settled one and the next,
and so long may a prompt's last row be beyond its budget. Of free ones it must hold one."""


def check_canvas_settings(config: EngineConfig, model: ModelConfig) -> None:
    """Refuse settings that do not go together with canvases, if the model writes any, and settings
    for canvases if it does not."""
    if model.canvas is None:
        if config.denoising is not None:
            raise UsageError(
                f"--denoising {config.denoising}: {model.family} writes one token after the other; "
                "leave it out"
            )
        return
    asked = {
        f"--speculate {config.speculate}": config.speculate is not None,
        "--decode-parallel": config.decode_layout is not None,
        "--host-kv-memory": config.host_kv_memory is not None,
        f"--policy {config.policy_name}": config.attends_on_host,
        "--parallel auto": config.parallel is not None,
        "--policy auto": config.policy == AUTO,
    }
    least = _LEAST_CANVASES * model.canvas.length
    if model.canvas.is_free:  # soft embeddings are in the process that embeds, and of all logits
        asked[f"--device {config.device}"] = config.device != "cpu"
        asked["--pp"] = config.pipeline_parallel > 1
        asked["--tp"] = config.tensor_parallel > 1
        least = model.canvas.length
    for name, is_asked in asked.items():
        if is_asked:
            refuse_canvases(model, name)
    _check_denoising(config, model.canvas, model.family)
    if config.max_num_batched_tokens < least:
        raise UsageError(
            f"--max-num-batched-tokens {config.max_num_batched_tokens}: {model.family} writes "
            f"{model.canvas.length} tokens at a time; give at least {least}"
        )
    if config.max_model_len is not None and config.max_model_len < 2 * model.canvas.length:
        raise UsageError(
            f"--max-model-len {config.max_model_len}: {model.family} writes "
            f"{model.canvas.length} tokens at a time; give at least {2 * model.canvas.length}"
        )


def _check_denoising(config: EngineConfig, canvas: CanvasConfig, family: str) -> None:
    """Refuse ways of denoising that are for the other kind of canvases."""
    if config.denoising is None:
        return
    asked = f"--denoising {config.denoising}"
    chosen = Denoising.parse(config.denoising)
    if canvas.renoising is None:
        if chosen.strategy == RENOISE:
            others = ", ".join(name for name in DENOISING if name != RENOISE)
            raise UsageError(
                f"{asked}: canvases of {family} begin as masks; choose one of {others}"
            )
        return
    if chosen.strategy != RENOISE:
        raise UsageError(f"{asked}: canvases of {family} begin as random tokens; choose {RENOISE}")
    try:
        canvas.renoising.changed(chosen.settings)
    except UsageError as error:
        raise UsageError(f"{asked}: {error}") from error


def longest_with_canvas(
    canvas: CanvasConfig, windows: tuple[int, ...], num_blocks: int, block_size: int, most: int
) -> int:
    """Tokens of the longest sequence that fits these blocks of cache groups with these windows. Its
    last canvas ends within the ``most`` positions that there may be. Raises UsageError if none
    fits."""
    if canvas.is_free:
        longest = longest_sequence(windows, num_blocks, block_size, canvas.length, most)
    else:
        longest = most_tokens(windows, num_blocks, block_size, most)
        longest -= longest % canvas.length
    if longest < 2:  # a token of a prompt, and one of an answer
        raise UsageError(
            f"the KV cache of {num_blocks} blocks of {block_size} tokens does not hold a canvas of "
            f"{canvas.length}; raise --kv-cache-memory"
        )
    return longest


def load_decoder(
    resolved: ResolvedModel,
    config: EngineConfig,
    device: torch.device,
    progress: ProgressCallback | None,
    *,
    shard: Shard | None = None,
    group: TensorParallelGroup | None = None,
) -> tuple[Decoder, ModelConfig]:
    """The decoder with its weights, or a shard of it, and the config of the whole model. Raises
    ModelError if the model cannot be used; UsageError if a setting makes no sense for it;
    RuntimeFailure if the memory does not suffice."""
    settings: dict[str, Any] = {"shard": shard, "group": group, "quantization": config.quantization}
    told = None if progress is None else partial(progress, "loading")
    with _loading(resolved, config, device):
        if resolved.directory is None:
            from nanoserve.models.dummy import make_dummy_model

            decoder, model = make_dummy_model(resolved.name, config.dtype, device, told, **settings)
        else:
            decoder, model = load_model(resolved.directory, config.dtype, device, told, **settings)
    if (used := with_cache_groups(model, config)) is not model:
        numbers = used.layer_kv_numbers(decoder.shard.degree)
        decoder.config = replace(
            decoder.config, groups=used.cache_groups.of_layers(decoder.shard.layers, numbers)
        )
    return decoder, used


def load_layouts(
    resolved: ResolvedModel,
    config: EngineConfig,
    device: torch.device,
    progress: ProgressCallback | None,
    *,
    shards: Sequence[Shard],
    groups: Sequence[TensorParallelGroup | None],
) -> "ReshardableWeights":
    """A worker's decoders under several layouts, the first of which is in place. The model is in a
    directory; a dummy is written to one first. Raises ModelError, UsageError, RuntimeFailure as
    `load_decoder`."""
    from nanoserve.models.resharding import ReshardableWeights

    model = with_cache_groups(read_config(resolved, config.quantization, config.device), config)
    directory = resolved.directory
    assert directory is not None, "weights that are read more than once are in files"
    told = None if progress is None else partial(progress, "loading")
    with _loading(resolved, config, device):
        dtype = resolve_dtype(config.dtype, device, model.dtype)
        return ReshardableWeights(
            directory,
            model,
            dtype=dtype,
            device=device,
            shards=shards,
            groups=groups,
            progress=told,
        )


@contextmanager
def _loading(resolved: ResolvedModel, config: EngineConfig, device: torch.device) -> Iterator[None]:
    """Check that a GPU can run the model, and say in one line what keeps it from being loaded."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # kernels of our own are launched on the current one
        use_writable_triton_cache()
        model = read_config(resolved, config.quantization, config.device)
        check_model(device, model, config.dtype, config.block_size)
    files = () if resolved.directory is None else resolved.directory.glob("*.safetensors")
    size = sum(file.stat().st_size for file in files)
    problem = (
        f"a checkpoint of {format_size(size)} does not fit" if size else "the weights do not fit"
    )
    advice = "choose a smaller model or --dtype, or free some memory"
    with unreadable_as_model_error(), memory_errors(device, problem, advice):
        yield
