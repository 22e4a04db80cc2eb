"""Read a Hugging Face model directory: config.json and safetensors, in one file or in several.

Other formats are not read: a `.bin` checkpoint is a pickle, and unpickling can run code.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanoserve.config.model_config import ModelConfig
from nanoserve.config.quantization import BLOCK_TYPES
from nanoserve.errors import ModelError, shown
from nanoserve.models.decoder import Decoder, TensorParallelGroup
from nanoserve.models.dtypes import default_dtype, format_name, resolve_dtype
from nanoserve.models.hub import LINK_NAME
from nanoserve.models.packed import MatrixForm, pack_decoder, region_of, rounded_forms
from nanoserve.models.quantized_tensors import INTEGERS, Decode, OpenFile, find_matrix
from nanoserve.models.shards import Shard
from nanoserve.models.tensor_parts import TensorPart
from nanoserve.models.weights import may_be_ignored, shard_parts, tensor_parts, tied_parts
from nanoserve.utils.files import read_json_object, unusable_file
from nanoserve.utils.interrupts import deferred_interrupts
from triton_ops import GroupQuantized, PackedFormat, pack, round_to_nearest
from triton_ops.packed import ROWS

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_STORED_BYTES: Mapping[str, float] = {"F64": 8.0, INTEGERS: 1.0} | {
    found.name: found.num_bytes / found.size for found in BLOCK_TYPES.values()
}
"""Bytes per number of the formats that are read, by the name in the file."""
_MAPPED_BYTES = 64 << 20
"""Bytes to read before a file is opened again: until then, its mapped pages count as this process's
memory."""

# safetensors turns a KeyboardInterrupt inside a read into a ValueError
_reading = deferred_interrupts()

Progress = Callable[[int, int], None]
"""Called with (bytes read, bytes in all) while a checkpoint is read."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The place and form of a tensor of the checkpoint, from the header of its file; its numbers
    are not read."""

    path: Path
    name: str
    """In the file."""
    shape: tuple[int, ...]
    dtype: str
    decode: Decode | None = None
    """Reads rows of a quantized matrix, of the files that its first argument opens; None for other
    tensors."""
    form: MatrixForm | None = None
    """How a matrix of integers is packed."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An open model directory with checked headers."""

    parts: list[TensorPart]
    """Every tensor of the whole model."""
    stored: Mapping[str, StoredTensor]
    _files: Mapping[Path, Any]
    _kept: dict[Path, Any] = field(default_factory=dict)
    """The files once more, for readers that outlive the checkpoint."""

    def view(self, part: TensorPart) -> Tensor:
        """A part in its stored format, in the mapped memory of its file, which is read when the
        part is used. The mapping lives as long as the view, even if the checkpoint is closed and
        its files are deleted."""
        stored = self.stored[part.name]
        return _view(part, stored, self._files[stored.path])

    def reader(self, part: TensorPart, *, packed: bool) -> Callable[[], Tensor]:
        """Reads the part as its parameter holds it, perhaps packed. A matrix of integers needs the
        open checkpoint."""
        stored = self.stored[part.name]
        if stored.decode is None:
            view = self.view(part)
            return lambda: view
        for path in self._files:
            if path not in self._kept:
                self._kept[path] = _open(path)
        return partial(_read, part, stored, self._kept.__getitem__, packed=packed)

    def rounded(self, config: ModelConfig) -> "Checkpoint":
        """Add the matrices that the config says are rounded while they are read."""
        if config.quantization is None or config.quantization.method != "rounding":
            return self
        stored = dict(self.stored)
        for name, form in rounded_forms(self.parts, config).items():
            decode = partial(_decode_rounded, stored[name], form)
            stored[name] = replace(stored[name], decode=decode, form=MatrixForm(form, None))
        return replace(self, stored=stored)

    def prepare(self, decoder: Decoder) -> None:
        """Give the decoder packed layers for the matrices that are stored as integers."""
        forms = {name: found.form for name, found in self.stored.items() if found.form is not None}
        pack_decoder(decoder, shard_parts(self.parts, decoder.model_config, decoder.shard), forms)


CPU = torch.device("cpu")


def load_model(
    directory: str | Path,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
    *,
    shard: Shard | None = None,
    group: TensorParallelGroup | None = None,
    quantization: str | None = None,
) -> tuple[Decoder, ModelConfig]:
    """The decoder of a model directory with its weights, ready for inference, and the whole model's
    config.

    `dtype` is as in `resolve_dtype`; `shard` and `group` are as in `Decoder`. For a shard, only its
    own slices are read, but all headers of the checkpoint are checked. Raises ModelError, one line
    naming the file (and the tensor), and UsageError for an unknown dtype.
    """
    path = Path(directory)
    device = torch.device(device)
    config = ModelConfig.from_directory(path).rounded(quantization, on_gpu=device.type == "cuda")
    with open_checkpoint(path, config) as opened:
        number_format = resolve_dtype(dtype, device, config.dtype)
        decoder = empty_decoder(config, number_format, CPU, shard=shard, group=group)
        checkpoint = opened.rounded(config)
        checkpoint.prepare(decoder)
        place(decoder, device)
    parts = list(shard_parts(checkpoint.parts, config, decoder.shard))
    _fill(decoder, parts, checkpoint.stored, progress)
    return decoder, config


@contextmanager
def open_checkpoint(directory: Path, config: ModelConfig) -> Iterator[Checkpoint]:
    """The checkpoint of a model directory, whose files are closed afterwards. Raises ModelError if
    a file or tensor is missing, damaged or of another model; one line that names it."""
    with ExitStack() as opened:
        files = {}
        for path in _weight_files(directory):
            files[path] = opened.enter_context(_open(path))
        stored = _with_embedding(_stored_tensors(files), config)
        stored = _with_matrices(tensor_parts(config), stored, config, files.__getitem__)
        parts = _check(tensor_parts(config), stored, config, files)
        checkpoint = Checkpoint(parts, stored, files)
        _check_tied(checkpoint, config)
        yield checkpoint


def fill_layers(
    decoder: Decoder, parts: Sequence[TensorPart], path: Path, config: ModelConfig
) -> None:
    """Fill a decoder's layers, which are not packed, from a file of a quantized checkpoint that
    holds exactly these parts. Raises ModelError."""
    with _OpenFiles() as files:
        opened = {path: files(path)}
        stored = _with_matrices(parts, _stored_tensors(opened), config, files)
        checked = _check(parts, stored, config, opened)
    _fill(decoder, checked, stored, None)


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """The tensors of a directory by their names, as they are stored, in the mapped memory of their
    files. Raises ModelError."""
    tensors = {}
    with _OpenFiles() as files:
        opened = {path: files(path) for path in _weight_files(directory)}
        for name, stored in _stored_tensors(opened).items():
            whole = TensorPart(name, "", stored.shape)
            tensors[name] = _view(whole, stored, opened[stored.path])
    return tensors


def empty_decoder(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    shard: Shard | None = None,
    group: TensorParallelGroup | None = None,
    zeroed: bool = True,
) -> Decoder:
    """A decoder with parameters that are allocated, not trainable and not initialized. On a CPU,
    large ones take no memory until they are written. But if `zeroed`, biases are zero, as a
    checkpoint may have them for some rows alone, and so is everything on a tensor-parallel rank:
    its padding stays zero."""
    # The meta device is not used: torch imports its compiler for it, which takes longer than
    # loading a small model.
    with default_dtype(dtype), device:
        decoder = Decoder(config, initialize=False, shard=shard, group=group)
    decoder.requires_grad_(False)
    if zeroed:
        for name, parameter in decoder.named_parameters():
            if decoder.shard.degree > 1 or name.endswith(".bias"):
                parameter.zero_()
    return decoder.eval()


def place(decoder: Decoder, device: torch.device) -> None:
    """Move a decoder from the CPU before it has weights: they are zero then. A GPU never holds a
    matrix that is packed in 16 bits."""
    if device.type == "cpu":
        return
    for parameter in decoder.parameters():
        if parameter.dtype == torch.int64:  # an order of columns
            parameter.data = parameter.to(device)
        else:
            parameter.data = torch.zeros_like(parameter, device=device)
    decoder.rotary.to(device)


def _weight_files(directory: Path) -> list[Path]:
    """The files of the weights: those that an index names, or model.safetensors, or the only
    safetensors file."""
    single = directory / SINGLE_NAME
    index = _find_index(directory)
    if index is not None:
        named = set(_weight_map(index).values())
        # Beside a whole file, an index that does not name it was left there by an earlier save.
        if SINGLE_NAME in named or not single.is_file():
            for name in named:
                if not (directory / name).is_file():
                    raise ModelError(f"{directory / name}: missing; {index.name} names it")
            return [directory / name for name in sorted(named)]
    if single.is_file():
        return [single]
    found = list(directory.glob("*.safetensors"))
    if len(found) == 1:
        return found
    link = directory / LINK_NAME
    if link.is_symlink():
        return [link.readlink()]
    for path in directory.glob("*"):
        if path.suffix in (".bin", ".pt"):
            raise ModelError(
                f"{directory}: only {path.suffix} weights found, which are not read; convert them "
                "to safetensors"
            )
    raise ModelError(f"{directory}: no weights found ({SINGLE_NAME} or {INDEX_NAME})")


def _find_index(directory: Path) -> Path | None:
    """The file that says which tensor is in which file, if there is one; quantizers give it names
    of their own."""
    usual = directory / INDEX_NAME
    found = list(directory.glob("*.safetensors.index.json"))
    if usual in found:
        return usual
    if len(found) == 1:
        return found[0]
    return None


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: no weight_map")
    for name in weight_map.values():
        # Files lie beside their index; another path would read files that the user did not offer.
        if (
            not isinstance(name, str)
            or Path(name).name != name
            or not name.endswith(".safetensors")
        ):
            raise ModelError(
                f"{index}: {shown(name)} is not the name of a safetensors file in this directory"
            )
    return weight_map


def _open(path: Path) -> Any:
    if not _is_safetensors(path):
        from nanoserve.models.gguf_checkpoint import GgufCheckpoint

        return GgufCheckpoint(path)
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())
        raise unusable_file(path, f"{path}: not a complete safetensors file ({reason})") from error


def _is_safetensors(path: Path) -> bool:
    """Whether a file of weights is one of safetensors; else it is a GGUF file, which may have any
    name."""
    return path.suffix == ".safetensors"


def _text_name(name: str) -> str:
    """A tensor's name without that of the text model, where that is a part of another model."""
    for prefix in ("model.language_model.", "language_model.model."):
        if name.startswith(prefix):
            return "model." + name.removeprefix(prefix)
    return name.removeprefix("language_model.")


def _stored_tensors(handles: Mapping[Path, Any]) -> dict[str, StoredTensor]:
    stored: dict[str, StoredTensor] = {}
    for path, handle in handles.items():
        for stored_name in handle.keys():  # noqa: SIM118  (a safetensors file is not a mapping)
            name = _text_name(stored_name)
            if name in stored:
                raise ModelError(f"{path}: tensor {name} is also in {stored[name].path.name}")
            header = handle.get_slice(stored_name)
            found = StoredTensor(path, stored_name, tuple(header.get_shape()), header.get_dtype())
            if not _is_safetensors(path) and header.form is not None:
                decode = partial(_decode_blocks, path, name)
                found = replace(found, decode=decode, form=header.form)
            stored[name] = found
    return stored


def _with_embedding(
    stored: dict[str, StoredTensor], config: ModelConfig
) -> dict[str, StoredTensor]:
    """The tensors with the output matrix as the embedding, if config.json ties the two and the
    embedding is missing."""
    embedding, head = tied_parts(config)
    if not config.tie_word_embeddings or embedding.name in stored or head.name not in stored:
        return stored
    renamed = dict(stored)
    renamed[embedding.name] = renamed.pop(head.name)
    return renamed


def _decode_blocks(path: Path, name: str, open_file: OpenFile, rows: slice) -> GroupQuantized:
    found: GroupQuantized = open_file(path).get_slice(name).quantized(rows)
    return found


@_reading
def _with_matrices(
    parts: Iterable[TensorPart],
    stored: dict[str, StoredTensor],
    config: ModelConfig,
    open_file: OpenFile,
) -> dict[str, StoredTensor]:
    """The tensors with each quantized matrix in the place of those that make it. It stops at the
    first missing part."""
    left = dict(stored)
    found_parts = set[str]()
    for part in parts:
        if part.name in found_parts:
            continue
        found_parts.add(part.name)
        matrix = find_matrix(part, stored, config, open_file)
        if matrix is None:
            if part.name not in stored:
                break
            continue
        names, decode = matrix
        first_rows = decode(open_file, slice(0, ROWS))
        form = None
        if isinstance(first_rows, GroupQuantized) and first_rows.format.can_be_packed:
            form = MatrixForm(first_rows.format, first_rows.order)
        for name in names:
            left.pop(name, None)
        path = stored[names[0]].path
        left[part.name] = StoredTensor(path, part.name, part.shape, INTEGERS, decode, form)
    return left


def _decode_rounded(
    stored: StoredTensor, form: PackedFormat, open_file: OpenFile, rows: slice
) -> GroupQuantized:
    if stored.decode is None:
        numbers = open_file(stored.path).get_slice(stored.name)[rows]
    else:
        numbers = stored.decode(open_file, rows)
    assert isinstance(numbers, Tensor), "what is quantized already is not rounded again"
    return round_to_nearest(numbers, form.bits, form.group)


def _check(
    wanted_parts: Iterable[TensorPart],
    stored: Mapping[str, StoredTensor],
    config: ModelConfig,
    files: Mapping[Path, Any],
) -> list[TensorPart]:
    """The parts, after a check that the checkpoint holds each in the right shape, and nothing else.
    It stops at the first missing part, because a config may name any number of experts."""
    parts = list[TensorPart]()
    known: dict[str, TensorPart] = {}
    for part in wanted_parts:
        parts.append(part)
        if part.name in known:
            continue
        found = stored.get(part.name)
        if found is None:
            raise _missing(part.name, stored, list(files))
        tensor = f"{found.path}: tensor {part.name}"
        if found.shape != part.shape:
            raise ModelError(
                f"{tensor} has shape {list(found.shape)}, config.json says {list(part.shape)}"
            )
        if found.dtype not in _STORED_BYTES:
            raise ModelError(
                f"{tensor} is stored as {found.dtype}; only {', '.join(_STORED_BYTES)} are read"
            )
        if found.decode is not None and len(part.shape) != 2:
            raise ModelError(f"{tensor} is stored as {found.dtype}; only matrices may be")
        known[part.name] = part
    for name, found in stored.items():
        if (
            name in known
            or may_be_ignored(name, config)
            or _adds_nothing(name, found, known, files)
        ):
            continue
        raise ModelError(
            f"{found.path}: tensor {name} does not belong to a {config.family} model of this config"
        )
    return parts


def _missing(name: str, stored: Mapping[str, StoredTensor], files: Sequence[Path]) -> ModelError:
    """The error for a tensor that is not stored. If an index says in which of the files it should
    be, or a tensor of which the matrix is made, the error names that file."""
    directory = files[0].parent
    index = _find_index(directory)
    if index is not None:
        for promised, file in _weight_map(index).items():
            path = directory / file
            promised_name = _text_name(promised)
            is_part = promised_name.startswith(name.removesuffix("weight"))
            if is_part and promised_name not in stored and path in files:
                return ModelError(
                    f"{path}: tensor {promised} is missing; {index.name} says it is here"
                )
    place = directory
    if len(files) == 1:
        place = files[0]
    return ModelError(f"{place}: tensor {name} is missing from the checkpoint")


def _adds_nothing(
    name: str, found: StoredTensor, known: Mapping[str, TensorPart], files: Mapping[Path, Any]
) -> bool:
    """Whether a tensor is the bias of a matrix that has none in this model, and is zero: AutoGPTQ
    writes one for every matrix."""
    if not name.endswith(".bias"):
        return False
    module = name.removesuffix(".bias")
    matrix = known.get(f"{module}.weight")
    if matrix is None or found.shape != matrix.shape[:1]:
        return False
    if found.decode is not None or found.dtype not in _STORED_BYTES:
        return False
    bias = _view(TensorPart(name, "", found.shape), found, files[found.path])
    return not bool(bias.any())


def _check_tied(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Check that a stored output matrix equals the embedding, if config.json ties the two."""
    embedding, head = tied_parts(config)
    stored = checkpoint.stored.get(head.name)
    if not config.tie_word_embeddings or stored is None:
        return
    _check([head], {head.name: stored}, config, checkpoint._files)
    for piece in embedding.pieces(_MAPPED_BYTES // 8):
        of_embedding = checkpoint.view(piece)
        of_head = checkpoint.view(replace(piece, name=head.name))
        if not bool((of_embedding == of_head).all()):
            raise ModelError(
                f"{stored.path}: tensor {head.name} differs from {embedding.name}, to which "
                "config.json ties it;"
                ' set "tie_word_embeddings" to false there to use it'
            )


def _fill(
    decoder: Decoder,
    parts: list[TensorPart],
    stored: Mapping[str, StoredTensor],
    progress: Progress | None,
) -> None:
    pieces = [piece for part in parts for piece in part.pieces(_MAPPED_BYTES // 8)]
    pieces.sort(key=lambda piece: stored[piece.name].path)
    sizes = [int(piece.size * _STORED_BYTES[stored[piece.name].dtype]) for piece in pieces]
    total, done = sum(sizes), 0
    with _OpenFiles() as files:
        for piece, size in zip(pieces, sizes, strict=True):
            found = stored[piece.name]
            done += size
            # Other ranks' columns are on the same pages.
            files.enter_portion(found.path, done * decoder.shard.degree // _MAPPED_BYTES)
            region = region_of(decoder, piece)
            packed = not region.is_floating_point()
            region.copy_(_read(piece, found, files, packed=packed))
            if not packed:
                check_finite(region, piece.name, found.path)
            if progress is not None:
                progress(done, total)


class _OpenFiles(ExitStack):
    """Files of a checkpoint, each opened when it is first asked for, and closed together."""

    def __init__(self) -> None:
        super().__init__()
        self._files: dict[Path, Any] = {}
        self._portion: tuple[Path, int] | None = None

    def __call__(self, path: Path) -> Any:
        if path not in self._files:
            self._files[path] = self.enter_context(_open(path))
        return self._files[path]

    def enter_portion(self, path: Path, number: int) -> None:
        """Go on in a portion of a file. All files are closed before another portion, which frees
        their mapped pages."""
        if self._portion not in (None, (path, number)):
            self._files.clear()
            self.close()
        self._portion = path, number


@_reading
def _view(part: TensorPart, stored: StoredTensor, file: Any) -> Tensor:
    try:
        view: Tensor = file.get_slice(stored.name)[part.source]
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{stored.path}: tensor {part.name} cannot be read ({error})") from error
    return view


@_reading
def _read(part: TensorPart, stored: StoredTensor, open_file: OpenFile, *, packed: bool) -> Tensor:
    """A part as its parameter holds it: numbers, or packed integers."""
    if stored.decode is None:
        return _view(part, stored, open_file(stored.path))
    taken = part.source[0]
    found = stored.decode(open_file, taken)
    columns = part.columns
    if isinstance(found, GroupQuantized):
        if not found.is_finite():
            raise ModelError(
                f"{stored.path}: tensor {part.name} has scales that are NaN or infinite; the file "
                "is damaged"
            )
        if packed:
            if columns is not None:
                found = found.columns(columns)
            return pack(found)
        found = found.dequantize()
    if columns is None:
        return found
    return found[:, columns.start : columns.stop]


def check_finite(values: Tensor, name: str, path: Path) -> None:
    """Raise ModelError if the values, from the tensor `name` of the file, hold NaN or infinity."""
    # NaN propagates to both extremes; nothing large is allocated.
    if not all(extreme.isfinite() for extreme in values.aminmax()):
        raise ModelError(
            f"{path}: tensor {name} has NaN or infinite values as {format_name(values.dtype)};"
            " the file is damaged, or --dtype is too narrow for it"
        )
