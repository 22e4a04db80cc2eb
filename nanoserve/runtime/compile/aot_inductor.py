"""The layers of a decoder, compiled: each kind of layer is one library, which all layers of the kind share.

So is each kind of a layer's pieces, where they are wanted.
"""

import hashlib
import json
import os
import sys
from itertools import chain
from pathlib import Path

import msgspec
import torch
from torch import Tensor

import nanoserve
import triton_ops
from nanoserve.config import ModelConfig
from nanoserve.models.attention import AttentionFunction
from nanoserve.models.decoder import Decoder, DecoderLayer
from nanoserve.runtime.compile.layer_compiler import LayerJob, LayerPart, layer_config, piece_config, step_arguments
from triton_ops.cpu import BackgroundLibrary, CannotBuild, CpuOperators, cache_directory

_SOURCES = (
    *sorted((Path(nanoserve.__file__).parent / "models").glob("*.py")),
    *sorted(Path(triton_ops.__file__).parent.glob("*.py")),
    Path(__file__).with_name("layer_compiler.py"),
)
_COMPILE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from triton_ops.cpu.building import begin; begin(sys.argv); "
    "from nanoserve.runtime.compile.layer_compiler import main; sys.exit(0 if main(sys.argv[2]) else 1)"
)


class LayerLibrary(BackgroundLibrary):
    """One kind of layer or piece, compiled for a dtype, a block size and the number of threads that torch has now."""

    without = "layers run uncompiled, which is slower"

    def __init__(
        self, config: ModelConfig, part: LayerPart, dtype: torch.dtype, block_size: int, operators: CpuOperators
    ) -> None:
        """Arguments as in LayerJob."""
        super().__init__()
        try:
            self._job = _make_job(config, part, dtype, block_size, operators)
        except CannotBuild as reason:
            self.give_up(str(reason))
        else:
            self.load()

    @property
    def shelf(self) -> LayerJob:
        return self._job

    def command(self) -> list[str]:
        job = msgspec.json.encode(self._job).decode()
        return [sys.executable, "-I", "-c", _COMPILE, json.dumps(sys.path), job]

    def open(self, library: Path) -> None:
        self._runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(library), 1)

    def run(self, arguments: list[Tensor]) -> list[Tensor]:
        """Arguments as in `layer_compiler`, in a flat list."""
        outputs: list[Tensor] = self._runner.run(arguments)
        return outputs


class AotInductorLayers:
    """A LayerFunction, and LayerPieces: what has its library loaded runs compiled, the rest eagerly.

    Created, it loads what an earlier process compiled. `start` compiles what is missing in the background, and `poll`
    loads that between two steps, so nobody waits for a compiler; `wait` does, for work that is long or timed.
    """

    def __init__(
        self, decoder: Decoder, *, block_size: int, operators: CpuOperators, with_pieces: bool = False
    ) -> None:
        """with_pieces: compile these too, for steps part of whose attention is computed elsewhere."""
        config, dtype = decoder.config, decoder.dtype
        indices = range(config.num_layers)
        kinds: dict[LayerPart, list[ModelConfig]] = {"layer": [layer_config(config, index) for index in indices]}
        if with_pieces:
            of_layers = [piece_config(config, index) for index in indices]
            kinds |= {"pre_attention": of_layers, "post_attention": of_layers}
        self._of_layers: dict[LayerPart, list[LayerLibrary]] = {}
        if operators.problem is None:  # else a compiler is missing that is needed here too, and that has been said
            for part, of_part in kinds.items():
                size = block_size if part == "layer" else 0
                made = {kind: LayerLibrary(kind, part, dtype, size, operators) for kind in dict.fromkeys(of_part)}
                self._of_layers[part] = [made[kind] for kind in of_part]
        # one for each kind of layer and piece.
        self.libraries = list(dict.fromkeys(chain.from_iterable(self._of_layers.values())))
        self._weights = [list(layer.parameters()) for layer in decoder.layers]

    @property
    def loaded(self) -> bool:
        """Whether all layers run compiled, and the pieces that are wanted."""
        return bool(self.libraries) and all(library.loaded for library in self.libraries)

    @property
    def pending(self) -> bool:
        """Whether some are being compiled."""
        return any(library.pending for library in self.libraries)

    def start(self, *, waited: bool = False) -> None:
        """Begin to compile what is missing; `waited` as for one library."""
        for library in self.libraries:
            library.start(waited=waited)

    def poll(self) -> None:
        """Load what is ready. Between steps only."""
        for library in self.libraries:
            library.poll()

    def wait(self) -> None:
        """Wait for what has been started."""
        for library in self.libraries:
            library.wait()

    def __call__(
        self, layer: DecoderLayer, hidden: Tensor, cos: Tensor, sin: Tensor, attention: AttentionFunction
    ) -> Tensor:
        library = self._loaded("layer", layer)
        if library is None:
            output: Tensor = layer(hidden, cos, sin, attention)
            return output
        step = step_arguments(layer.index, hidden, cos, sin, attention)
        (output,) = library.run([*step, *self._weights[layer.index]])
        return output

    def pre_attention(
        self, layer: DecoderLayer, hidden: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        library = self._loaded("pre_attention", layer)
        if library is None:
            return layer.pre_attention(hidden, cos, sin)
        query, key, value = self._run_piece(library, layer, (hidden, cos, sin))
        return query, key, value

    def post_attention(self, layer: DecoderLayer, attention_output: Tensor, residual: Tensor) -> Tensor:
        library = self._loaded("post_attention", layer)
        if library is None:
            return layer.post_attention(attention_output, residual)
        (output,) = self._run_piece(library, layer, (attention_output, residual))
        return output

    def _run_piece(self, library: LayerLibrary, layer: DecoderLayer, tensors: tuple[Tensor, ...]) -> list[Tensor]:
        # A library reads its arguments without looking at their strides.
        contiguous = [tensor.contiguous() for tensor in tensors]
        return library.run([*contiguous, *self._weights[layer.index]])

    def _loaded(self, part: LayerPart, layer: DecoderLayer) -> LayerLibrary | None:
        libraries = self._of_layers.get(part)
        if libraries is None or not libraries[layer.index].loaded:
            return None
        return libraries[layer.index]


def _make_job(
    config: ModelConfig, part: LayerPart, dtype: torch.dtype, block_size: int, operators: CpuOperators
) -> LayerJob:
    """Raises CannotBuild if there is no place to keep the library."""
    described = msgspec.json.encode(config, order="deterministic").decode()
    name, threads = str(dtype).removeprefix("torch."), torch.get_num_threads()
    # The operators' key stands for the compiler, torch and the processor.
    parts = [operators.shelf.key, described, part, name, str(block_size), str(threads)]
    parts += [path.read_text(encoding="utf-8") for path in _SOURCES]
    return LayerJob(
        key=hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24],
        directory=str(cache_directory(os.environ, "layers")),
        config=described,
        part=part,
        dtype=name,
        block_size=block_size,
        threads=threads,
    )
