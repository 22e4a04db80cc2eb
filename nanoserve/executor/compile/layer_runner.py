"""LayerRunner runs the layers of a decoder: compiled where Inductor has compiled them, eagerly
elsewhere.

Only here the engine meets torch's compiler. On a CPU another process compiles layers ahead of time
(AOTInductor) into libraries in a cache folder, which are loaded between two steps. On a GPU
torch.compile compiles layers in this process when they first run, and keeps its kernels in torch's
own cache.
"""

import hashlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, cast

import msgspec
import torch
from torch import Tensor

import nanoserve
import triton_ops
from nanoserve.errors import first_line
from nanoserve.executor.compile.aot_build import (
    CompiledKind,
    FunctionalLayer,
    LayerJob,
    LayerPart,
    layer_kind,
    layer_without_numbers,
    step_arguments,
)
from nanoserve.executor.start.memory import out_of_memory
from nanoserve.models.attention import AttentionFunction
from nanoserve.models.decoder import Decoder, DecoderLayer
from nanoserve.models.packed import packed_shapes
from triton_ops.cpu import BackgroundLibrary, CannotBuild, CpuOperators, cache_directory

if TYPE_CHECKING:  # for GPUs, and for models with such layers
    from nanoserve.executor.compile.fused_layer import FusedLayer
    from nanoserve.models.recurrent import RecurrentLayer

CompiledPart = Callable[[tuple[Tensor, ...], list[Tensor]], Sequence[Tensor] | None]
"""Runs one kind of layer on a step's tensors and a layer's weights; None while it is not compiled.
Raises CannotBuild if it cannot be compiled."""
_AROUND_ATTENTION: tuple[LayerPart, ...] = ("pre_attention", "post_attention")
"""All parts that are compiled where rows attend by spans: whole layers have causal attention."""
_PARTS: tuple[LayerPart, ...] = ("layer", *_AROUND_ATTENTION)
_SOURCES = (
    *sorted((Path(nanoserve.__file__).parent / "models").glob("*.py")),
    *sorted(Path(triton_ops.__file__).parent.glob("*.py")),
    Path(__file__).with_name("aot_build.py"),
)
_BUILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from triton_ops.cpu.building import begin; begin(sys.argv); "
    "from nanoserve.executor.compile.aot_build import main; sys.exit(0 if main(sys.argv[2]) else 1)"
)


class LayerRunner:
    """Runs layers whole (it is a LayerFunction) or as the two pieces around attention.

    Steps use the pieces where attention is computed elsewhere, or not for all rows at once: part of
    the rows may attend on the CPU (APEX, Asynchronous Overlap), or two sub-batches take turns (NEO,
    Asymmetric Pipelining). Each piece takes a batch of any size, its rows in any order. On a CPU
    the ranks of a tensor-parallel group use pieces too.

    Made without arguments it runs everything eagerly. `ahead_of_time` loads the libraries that an
    earlier process compiled; `start` compiles the missing ones in the background, a Stage loads
    them between two steps, and `wait` waits for them ahead of long or timed work. `torch_compile`
    needs none of these three.
    """

    def __init__(
        self,
        compiled: Mapping[LayerPart, Sequence[CompiledPart | None]] | None = None,
        weights: Sequence[list[Tensor]] = (),
    ) -> None:
        """compiled: what runs a part of each layer, None and other parts run eagerly; weights: each
        layer's parameters."""
        self.problem: str | None = None
        """Why torch.compile gave up, the first time. Layers of that kind run eagerly from then
        on."""
        self._failed = set[CompiledPart]()
        self._compiled = compiled or {}
        self._weights = weights
        found = dict.fromkeys(chain.from_iterable(self._compiled.values()))
        self.libraries = [one for one in found if isinstance(one, LayerLibrary)]
        """One for each kind of layer and piece that is compiled ahead of time."""

    @classmethod
    def ahead_of_time(
        cls,
        decoder: Decoder,
        *,
        block_size: int,
        operators: CpuOperators,
        with_pieces: bool = False,
    ) -> "LayerRunner":
        """Layers on a CPU, from libraries of ahead-of-time Inductor, which call the CPU operators.
        If these cannot be built, neither can libraries: the same compiler is missing, and its
        notice has been shown."""
        if operators.problem is not None:
            return cls()
        parts = _PARTS if with_pieces else _PARTS[:1]
        if decoder.config.canvas is not None:
            parts = _AROUND_ATTENTION
        if decoder.shard.degree > 1:  # no library can add up over ranks
            config = decoder.config
            apart: dict[LayerPart, bool] = {
                "pre_attention": not config.attention.qk_norm_spans_heads,
                "between_sums": config.norms.places != "shared",
            }
            parts = tuple(part for part, sums_nothing in apart.items() if sums_nothing)
        return cls._of_kinds(
            decoder, parts, lambda kind: LayerLibrary(kind, decoder, block_size, operators)
        )

    @classmethod
    def torch_compile(
        cls, decoder: Decoder, *, backend: str | Callable[..., object] = "inductor"
    ) -> "LayerRunner":
        """Layers and pieces compiled by torch.compile in this process, each kind when it first
        runs."""
        parts = _PARTS if decoder.config.canvas is None else _AROUND_ATTENTION
        return cls._of_kinds(decoder, parts, lambda kind: _TorchCompiled(kind, decoder, backend))

    @classmethod
    def _of_kinds(
        cls,
        decoder: Decoder,
        parts: Iterable[LayerPart],
        compiled: Callable[[CompiledKind], CompiledPart],
    ) -> "LayerRunner":
        """Make one compiled part for each kind of layer and piece, and share it between the layers
        of the kind. A layer with a state has no pieces around attention."""
        config = decoder.config
        packed = [packed_shapes(layer) for layer in decoder.layers]
        made: dict[CompiledKind, CompiledPart] = {}
        shared: dict[LayerPart, list[CompiledPart | None]] = {}
        for part in parts:
            shared[part] = []
            for index, own in enumerate(packed):
                if config.is_recurrent(index) and part in ("pre_attention", "post_attention"):
                    shared[part].append(None)
                    continue
                kind = layer_kind(part, config, index, own)
                if kind not in made:
                    made[kind] = compiled(kind)
                shared[part].append(made[kind])
        return cls(shared, [list(layer.parameters()) for layer in decoder.layers])

    @property
    def loaded(self) -> bool:
        """Whether all parts that are to be compiled run compiled."""
        return (
            bool(self._compiled)
            and self.problem is None
            and all(library.loaded for library in self.libraries)
        )

    @property
    def pending(self) -> bool:
        return any(library.pending for library in self.libraries)

    def start(self, *, waited: bool = False) -> None:
        """Begin to compile the missing libraries; `waited` as in `BackgroundLibrary.start`."""
        for library in self.libraries:
            library.start(waited=waited)

    def wait(self) -> None:
        for library in self.libraries:
            library.wait()

    def __call__(
        self,
        layer: DecoderLayer,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        attention: AttentionFunction,
    ) -> Tensor:
        if "layer" in self._compiled:
            outputs = self._run("layer", layer, step_arguments(layer, hidden, cos, sin, attention))
            if outputs is not None:
                return outputs[0]
        elif self._compiled:
            return self.in_pieces(layer, hidden, cos, sin, attention)
        # After a failed torch.compile this writes the cache once more, with the same numbers.
        output: Tensor = layer(hidden, cos, sin, attention)
        return output

    def pre_attention(
        self, layer: DecoderLayer, hidden: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [T, hidden_size], cos, sin [T, 1, rotary_dim / 2], T > 0 -> query [T, num_heads,
        head_dim], key, value [T, num_kv_heads, head_dim]."""
        outputs = self._run("pre_attention", layer, (hidden, cos, sin))
        if outputs is None:
            return layer.pre_attention(hidden, cos, sin)
        query, key, value = outputs
        return query, key, value

    def post_attention(
        self, layer: DecoderLayer, attention_output: Tensor, residual: Tensor
    ) -> Tensor:
        """attention_output [T, num_heads * value_dim] and residual [T, hidden_size], T > 0 -> [T,
        hidden_size]."""
        outputs = self._run("post_attention", layer, (attention_output, residual))
        if outputs is not None:
            return outputs[0]
        return layer.post_attention(attention_output, residual, partial(self._between_sums, layer))

    def _between_sums(
        self, layer: DecoderLayer, attended: Tensor, residual: Tensor
    ) -> tuple[Tensor, Tensor]:
        outputs = self._run("between_sums", layer, (attended, residual))
        if outputs is None:
            return layer.between_sums(attended, residual)
        fed, residual = outputs
        return fed, residual

    def in_pieces(
        self,
        layer: DecoderLayer,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        attention: AttentionFunction,
    ) -> Tensor:
        """A LayerFunction that runs a layer piece by piece, with attention for all rows in
        between. The first piece of a layer with a state is not compiled."""
        if layer.has_state:
            mixed = cast("RecurrentLayer", layer).mix(hidden, attention)
            return self.post_attention(layer, mixed, hidden)
        query, key, value = self.pre_attention(layer, hidden, cos, sin)
        return self.post_attention(layer, layer.attend(attention, query, key, value), hidden)

    def _run(
        self, part: LayerPart, layer: DecoderLayer, tensors: tuple[Tensor, ...]
    ) -> Sequence[Tensor] | None:
        """The compiled part's outputs; None where the caller is to run it eagerly."""
        compiled = self._compiled.get(part)
        if compiled is None:
            return None
        own = compiled[layer.index]
        if own is None or own in self._failed:
            return None
        try:
            return own(tensors, self._weights[layer.index])
        except CannotBuild as reason:
            self._failed.add(own)
            if self.problem is None:
                self.problem = str(reason)
                logging.getLogger("nanoserve").warning(
                    "nanoserve: %s: %s", LayerLibrary.without, reason
                )
            return None


class LayerLibrary(BackgroundLibrary):
    """A CompiledPart from the cache of ahead-of-time libraries, for a dtype, a block size and the
    number of threads that torch has when it is made."""

    without = "layers run uncompiled, which is slower"

    def __init__(
        self, kind: CompiledKind, decoder: Decoder, block_size: int, operators: CpuOperators
    ) -> None:
        super().__init__()
        block_size = block_size if kind.part == "layer" else 0  # pieces do not depend on it
        dtype, threads = str(decoder.dtype).removeprefix("torch."), torch.get_num_threads()
        described = msgspec.json.encode(
            (kind, dtype, block_size, threads), order="deterministic"
        ).decode()
        try:
            # The operators' key stands for the C++ compiler, torch and the processor.
            depends_on = [
                operators.shelf.key,
                described,
                *(path.read_text(encoding="utf-8") for path in _SOURCES),
            ]
            key = hashlib.sha256("\0".join(depends_on).encode()).hexdigest()[:24]
            directory = str(cache_directory(os.environ, "layers"))
        except CannotBuild as reason:
            self.give_up(str(reason))
            return
        self._job = LayerJob(key, directory, kind, dtype, block_size, threads)
        self.load()

    @property
    def shelf(self) -> LayerJob:
        return self._job

    def command(self) -> list[str]:
        return [
            sys.executable,
            "-I",
            "-c",
            _BUILD,
            json.dumps(sys.path),
            msgspec.json.encode(self._job).decode(),
        ]

    def open(self, library: Path) -> None:
        self._runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(library), 1)

    def __call__(self, tensors: tuple[Tensor, ...], weights: list[Tensor]) -> list[Tensor] | None:
        if not self.loaded:
            return None
        # a library ignores strides, and rows of a hybrid step may lie apart
        if self._job.kind.part != "layer":
            tensors = tuple(tensor.contiguous() for tensor in tensors)
        outputs: list[Tensor] = self._runner.run([*tensors, *weights])
        return outputs


class _TorchCompiled:
    """A CompiledPart of torch.compile, with the all-reduces of a tensor-parallel group: Inductor
    knows collectives. Where a layer can be fused, steps of few tokens run without the compiler."""

    def __init__(
        self, kind: CompiledKind, decoder: Decoder, backend: str | Callable[..., object]
    ) -> None:
        # weights are arguments: these are never used
        layer = layer_without_numbers(kind, decoder.dtype, decoder.group)
        # torch compiles one code object at most 8 times, then gives up on it: each kind of layer
        # has its own.
        forward = FunctionalLayer.forward
        own = FunctionType(forward.__code__.replace(), forward.__globals__, forward.__name__)
        function = MethodType(own, FunctionalLayer(layer.requires_grad_(False).eval(), kind.part))
        self._function: Callable[..., tuple[Tensor, ...]] = torch.compile(
            function, fullgraph=True, backend=backend
        )
        self._has_run = False
        self._has_run_fused = False
        self._fused: FusedLayer | None = None
        if decoder.shard.degree == 1:
            from nanoserve.executor.compile.fused_layer import fuse  # CPUs have no such layers

            self._fused = fuse(kind, layer)

    def __call__(self, tensors: tuple[Tensor, ...], weights: list[Tensor]) -> tuple[Tensor, ...]:
        if self._fused is not None and self._fused.takes(tensors):
            fused = self._run_fused(self._fused, tensors, weights)
            if fused is not None:
                return fused
        for tensor in tensors:
            mark_any_length(tensor)
        try:
            outputs = self._function(tensors, weights)
        except Exception as error:  # torch's compiler may fail in any way
            # After a first run other errors are the step's own, unless torch says that they are its
            # compiler's.
            of_compiler = not self._has_run or isinstance(
                error, torch._dynamo.exc.TorchDynamoException
            )
            if out_of_memory(error) or not of_compiler:
                raise
            cause = getattr(error, "inner_exception", error)  # torch wraps what its backends raise
            raise CannotBuild(f"{type(cause).__name__}: {first_line(cause)}") from error
        self._has_run = True
        return outputs

    def _run_fused(
        self, layer: "FusedLayer", tensors: tuple[Tensor, ...], weights: list[Tensor]
    ) -> tuple[Tensor, ...] | None:
        """Run the fused layer. If it cannot even run once, a notice says so, nothing is returned,
        and the compiled layer takes its place."""
        try:
            outputs = layer(tensors, weights)
        except Exception as error:  # Triton may fail in any way
            if self._has_run_fused or out_of_memory(error):
                raise
            notice = "nanoserve: steps of one token run compiled, which is slower: %s"
            logging.getLogger("nanoserve").warning(notice, first_line(error))
            self._fused = None
            return None
        self._has_run_fused = True
        return outputs


def mark_any_length(tensor: Tensor) -> None:
    """Have torch compile for any first size of a tensor, and for any width of a block table.

    Sizes that only our operators learn of are unbacked, so that 1 is no other case. The number of
    tokens is not, as Inductor fuses nothing across sizes without an example, not even a norm; so
    one token has code of its own.
    """
    if tensor.dtype == torch.int32 or tensor.dim() == 4:
        if not hasattr(tensor, "_dynamo_unbacked_indices"):
            torch._dynamo.decorators.mark_unbacked(tensor, [0, 1] if tensor.dim() == 2 else 0)
    elif len(tensor) > 1 and not hasattr(tensor, "_dynamo_dynamic_indices"):
        torch._dynamo.decorators.mark_dynamic(tensor, 0)
