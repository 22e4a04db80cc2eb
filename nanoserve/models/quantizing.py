"""Quantize a checkpoint layer by layer into one of compressed-tensors, as `nanoserve quantize`
does.

Each layer is computed in float32 on the CPU, first as it was, then as it was written, so only one
is in memory. Its tensors go into a file of their own. After an interruption, a run computes the
layers that are there and continues.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from nanoserve.config.checkpoint_names import checkpoint_names
from nanoserve.config.model_config import ModelConfig
from nanoserve.config.quantization import CALIBRATING, Quantization
from nanoserve.errors import RuntimeFailure, UsageError
from nanoserve.models import rounding
from nanoserve.models.checkpoint_writing import (
    copy_other_files,
    file_names,
    write_config,
    write_index,
    write_tensors,
)
from nanoserve.models.decoder import Decoder, DecoderLayer
from nanoserve.models.loading import (
    INDEX_NAME,
    Checkpoint,
    Progress,
    fill_layers,
    load_model,
    open_checkpoint,
)
from nanoserve.models.packed import region_of
from nanoserve.models.quantized_tensors import pack_words
from nanoserve.models.shards import Shard
from nanoserve.models.tensor_parts import TensorPart
from nanoserve.models.weights import shard_parts, tied_parts
from nanoserve.utils.files import read_optional_json_object, replace_file, unwritable_as_failure
from triton_ops import GroupQuantized

_STATE_NAME = "quantize.json"
"""The settings of an unfinished run. It is removed at the end."""
_SMALLEST_GROUP = 32


@dataclass(frozen=True, slots=True)
class Recipe:
    """How matrices are quantized."""

    method: str
    """One of WEIGHT_BITS."""
    bits: int
    group: int
    """Columns that share a scale; -1 means all of a row."""
    act_order: bool = False
    """Whether columns of large inputs are rounded first, as in `gptq`."""

    def section(self, ignored: Sequence[str]) -> dict[str, Any]:
        """The `quantization_config` of config.json, with the modules that are not quantized."""
        symmetric = {"num_bits": self.bits, "type": "int", "symmetric": True, "dynamic": False}
        weights = symmetric | {"strategy": "group", "group_size": self.group, "actorder": None}
        if self.group == -1:
            weights |= {"strategy": "channel", "group_size": None}
        if self.act_order:
            weights["actorder"] = "weight"
        scheme = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": None,
            "output_activations": None,
        }
        stored_format = "pack-quantized"
        if self.method == "llm-int8":
            scheme["input_activations"] = symmetric | {"strategy": "token", "dynamic": True}
            stored_format = "int-quantized"
        return {
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "format": stored_format,
            "config_groups": {"group_0": scheme},
            "ignore": list(ignored),
        }

    def quantize(self, weight: Tensor, gram: Tensor | None, dtype: torch.dtype) -> GroupQuantized:
        """The matrix, with scales of this dtype; `gram` is as in `gptq`."""
        if self.method != "gptq":
            return rounding.rtn(weight, self.bits, self.group, scale_dtype=dtype)
        assert gram is not None
        return rounding.gptq(
            weight, gram, self.bits, self.group, act_order=self.act_order, scale_dtype=dtype
        )

    def stored(self, module: str, matrix: GroupQuantized) -> dict[str, Tensor]:
        """The tensors of a module, by their names in the checkpoint."""
        codes = matrix.codes
        found = {"weight_scale": matrix.scales}
        if self.method == "llm-int8":
            found["weight"] = codes
        else:
            if self.bits == 8:
                codes = codes.to(torch.int16) + 128
            found["weight_packed"] = pack_words(codes, self.bits)
            found["weight_shape"] = torch.tensor(codes.shape)
        return {f"{module}.{name}": tensor.contiguous() for name, tensor in found.items()}


@torch.inference_mode()
def quantize_checkpoint(
    source: Path,
    output: Path,
    recipe: Recipe,
    calibration: Sequence[Tensor],
    held_out: Sequence[Tensor],
    progress: Progress,
) -> tuple[float, float] | None:
    """Write the model directory `source` quantized to `output`, which is new, empty, or the
    unfinished output of the same work. Texts are token ids, int64 [T] each. Returns the
    perplexities of the held-out texts before and after, None if there are none. `progress` is
    called with the layers that are done.

    Raises ModelError if the model cannot be read, UsageError if it or the output does not suit, and
    RuntimeFailure if it cannot be written; an error or Ctrl-C leaves whole layers behind, and says
    how to continue.
    """
    config = ModelConfig.from_directory(source)
    with open_checkpoint(source, config) as checkpoint:
        _check(source, config, recipe, [part for part in checkpoint.parts if _is_quantized(part)])
        _begin(output, recipe, checkpoint, calibration)
        count = config.num_layers
        files = file_names(output, count + 1)
        section = recipe.section(_ignored(checkpoint, config))
        quantized = replace(config, quantization=Quantization.from_hf(section, str(output)))
        before = list(held_out)
        after = list(held_out)
        calibrating = list(calibration)
        with _resumable(output, files):
            if not files[0].exists():
                write_tensors(files[0], _tensors_beside_layers(checkpoint))
            for index, path in enumerate(files[1:]):
                progress(index, count)
                shard = Shard(range(index, index + 1), index, count)
                decoder, _ = load_model(source, "float32", shard=shard)
                parts = [
                    part
                    for part in shard_parts(checkpoint.parts, config, shard)
                    if "layers." in part.parameter
                ]
                before = rounding.run_texts(decoder, before)
                if not path.exists():
                    write_tensors(
                        path, _quantized_layer(decoder, parts, checkpoint, recipe, calibrating)
                    )
                fill_layers(decoder, parts, path, quantized)
                after = rounding.run_texts(decoder, after)
                calibrating = rounding.run_texts(decoder, calibrating)
            _finish(source, output, files, section)
    if not held_out:
        return None
    return rounding.perplexity(decoder, before, held_out), rounding.perplexity(
        decoder, after, held_out
    )


def _ignored(checkpoint: Checkpoint, config: ModelConfig) -> list[str]:
    """The modules that are not quantized: routers and the output matrix."""
    _, head = tied_parts(config)
    parts = [part for part in checkpoint.parts if part.parameter.endswith("router.weight")]
    parts.append(head)
    return [part.name.removesuffix(".weight") for part in parts]


def _tensors_beside_layers(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The embedding and other tensors outside the layers, as they are stored."""
    tensors = {}
    for part in checkpoint.parts:
        if not part.parameter.startswith("layers."):
            tensors[part.name] = checkpoint.view(part)
    return tensors


def _check(
    source: Path, config: ModelConfig, recipe: Recipe, matrices: Sequence[TensorPart]
) -> None:
    if config.tensor_names == "gguf":
        raise UsageError(
            "a GGUF file cannot be quantized again; give the Hugging Face directory of the model"
        )
    if config.quantization is not None:
        raise UsageError(
            f"{source} is quantized already ({config.quantization.method}); give the model in 16 "
            "bits"
        )
    if config.recurrent is not None and config.recurrent.mixer.matrix_shape is not None:
        raise UsageError(
            f"the layers of {config.family} with a recurrent state are not quantized here; round "
            "the model as it is loaded, by --quantization"
        )
    if config.moe is not None and config.moe.style == "gpt_oss":
        raise UsageError(
            f"the experts of {config.family} are not quantized here; take its checkpoint in MXFP4"
        )
    if config.moe is not None and len(checkpoint_names(config).layer.expert_gate_up) == 1:
        raise UsageError(
            f"the experts of {config.family}, which are one tensor, are not quantized here; round "
            "the model as it is loaded, by --quantization"
        )
    if config.moe is not None and recipe.method in CALIBRATING:
        raise UsageError(
            f"--method {recipe.method} does not quantize the experts of {config.family}; choose "
            "rtn or llm-int8"
        )
    if recipe.method == "awq" and config.norms.places not in ("before", "around"):
        raise UsageError(
            f"--method awq needs norms before both parts of a layer, which {config.family} has "
            "not; choose gptq"
        )
    if recipe.method == "awq" and config.recurrent is not None:
        raise UsageError(
            f"--method awq does not scale the layers of {config.family} that have a recurrent "
            "state; choose gptq"
        )
    divisor = recipe.group
    if recipe.group == -1:
        divisor = _SMALLEST_GROUP
    for part in matrices:
        columns = part.shape[1]
        if columns % divisor:
            problem = f"--group {recipe.group} does not divide the {columns} columns of {part.name}"
            raise UsageError(f"{problem}; {_fitting_groups(matrices)}")


def _fitting_groups(matrices: Sequence[TensorPart]) -> str:
    """The advice for a group that does not fit."""
    fitting = []
    for size in (128, 64, 32):
        if all(part.shape[1] % size == 0 for part in matrices):
            fitting.append(str(size))
    if not fitting:
        return "this model cannot be quantized"
    return f"choose {' or '.join(fitting)}"


def _is_quantized(part: TensorPart) -> bool:
    if len(part.shape) != 2 or part.parameter.endswith("router.weight"):
        return False
    return "layers." in part.parameter


def _begin(
    output: Path, recipe: Recipe, checkpoint: Checkpoint, calibration: Sequence[Tensor]
) -> None:
    """Make the output directory, or check that it holds the beginning of the same work."""
    model = []
    for path in sorted({found.path for found in checkpoint.stored.values()}):
        status = path.stat()
        model.append([str(path.resolve()), status.st_size, status.st_mtime_ns])
    texts = json.dumps([text.tolist() for text in calibration])
    state = asdict(recipe)
    state["model"] = model
    state["calibration"] = hashlib.blake2s(texts.encode()).hexdigest()
    with unwritable_as_failure(output):
        output.mkdir(parents=True, exist_ok=True)
        is_empty = not any(output.iterdir())
    begun = read_optional_json_object(output / _STATE_NAME)
    if not begun and not is_empty:
        raise UsageError(f"{output} exists and is not empty; choose another --output")
    differing = [name for name in state if begun.get(name) != state[name]]
    if begun and differing:
        names = ", ".join(differing)
        raise UsageError(
            f"{output} was begun with another {names}; give the same to go on, or choose another "
            "--output"
        )
    for draft in output.glob(".*.safetensors.*"):  # of a process that was killed
        draft.unlink(missing_ok=True)
    (output / INDEX_NAME).unlink(missing_ok=True)
    replace_file(output / _STATE_NAME, json.dumps(state))


@contextmanager
def _resumable(output: Path, files: Sequence[Path]) -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, RuntimeFailure) as error:
        done = sum(path.exists() for path in files[1:])
        told = (
            f"{done} of {len(files) - 1} layers are in {output}; the same command continues after "
            "them"
        )
        if str(error):
            told = f"{error}; {told}"
        raise type(error)(told) from error


def _quantized_layer(
    decoder: Decoder,
    parts: Sequence[TensorPart],
    checkpoint: Checkpoint,
    recipe: Recipe,
    inputs: Sequence[Tensor],
) -> dict[str, Tensor]:
    """The tensors that are stored for the only layer of the decoder."""
    layer = cast(DecoderLayer, decoder.layers[0])
    statistics: dict[str, rounding.InputStatistics] = {}
    if recipe.method in CALIBRATING:
        with rounding.input_statistics(layer) as statistics:
            rounding.run_texts(decoder, inputs)
    if recipe.method == "awq":
        rounding.fold_awq_scales(layer, statistics, recipe.bits, recipe.group)
    stored: dict[str, Tensor] = {}
    matrices: dict[tuple[str, int | None], list[TensorPart]] = defaultdict(list)
    for part in parts:
        if _is_quantized(part):
            matrices[part.parameter, part.expert].append(part)
        else:
            dtype = checkpoint.view(part).dtype
            stored[part.name] = region_of(decoder, part).to(dtype)
    for (parameter, expert), filling in matrices.items():
        weight: Tensor = decoder.get_parameter(parameter)
        if expert is not None:
            weight = weight[expert]
        gram = None
        name = parameter.removeprefix("layers.0.").removesuffix(".weight")
        if name in statistics:
            gram = statistics[name].gram
        dtype = checkpoint.view(filling[0]).dtype
        matrix = recipe.quantize(weight, gram, dtype)
        for part in filling:
            rows = torch.arange(part.first_row, part.first_row + part.shape[0])
            module = part.name.removesuffix(".weight")
            stored |= recipe.stored(module, matrix.rows(rows))
    return stored


def _finish(source: Path, output: Path, files: Sequence[Path], section: Mapping[str, Any]) -> None:
    """Write all but the weights; config.json is the last."""
    copy_other_files(source, output)
    write_index(output, files)
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = section
    write_config(output, config)
    (output / _STATE_NAME).unlink()
