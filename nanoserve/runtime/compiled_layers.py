"""The layers of a decoder, compiled: each kind of layer is one library, which all layers of the kind share."""

import hashlib
import json
import os
import sys
from pathlib import Path

import msgspec
import torch
from torch import Tensor

import nanoserve
import triton_ops
from nanoserve.config import ModelConfig
from nanoserve.models.attention import AttentionFunction
from nanoserve.models.decoder import Decoder, DecoderLayer
from nanoserve.runtime.layer_compiler import LayerJob, layer_config, step_arguments
from triton_ops.cpu import BackgroundLibrary, CannotBuild, CpuOperators, cache_directory

_SOURCES = (
    *sorted((Path(nanoserve.__file__).parent / "models").glob("*.py")),
    *sorted(Path(triton_ops.__file__).parent.glob("*.py")),
    Path(__file__).with_name("layer_compiler.py"),
)
_COMPILE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from nanoserve.runtime.layer_compiler import main; sys.exit(0 if main(sys.argv[2]) else 1)"
)


class LayerLibrary(BackgroundLibrary):
    """One kind of layer, compiled for a dtype, a block size and the number of threads that torch has now."""

    without = "layers run uncompiled, which is slower"

    def __init__(self, config: ModelConfig, dtype: torch.dtype, block_size: int, operators: CpuOperators) -> None:
        super().__init__()
        try:
            self._job = _make_job(config, dtype, block_size, operators)
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

    def run(self, arguments: list[Tensor]) -> Tensor:
        """Arguments as in `layer_compiler`, in a flat list."""
        (hidden,) = self._runner.run(arguments)
        return hidden


class CompiledLayers:
    """A LayerFunction: layers whose library is loaded run compiled, others eagerly.

    Created, it loads what an earlier process compiled. `start` compiles the rest in the background, and `poll` loads
    that between two steps, so nobody waits for a compiler; `wait` does, for work that is long or timed.
    """

    def __init__(self, decoder: Decoder, *, block_size: int, operators: CpuOperators) -> None:
        config, dtype = decoder.config, decoder.dtype
        self.libraries: dict[ModelConfig, LayerLibrary] = {}
        kinds = [layer_config(config, index) for index in range(config.num_layers)]
        if operators.problem is None:  # else a compiler is missing that is needed here too, and that has been said
            self.libraries = {kind: LayerLibrary(kind, dtype, block_size, operators) for kind in dict.fromkeys(kinds)}
        self._of_layer = [self.libraries.get(kind) for kind in kinds]
        self._weights = [list(layer.parameters()) for layer in decoder.layers]

    @property
    def loaded(self) -> bool:
        """Whether all layers run compiled."""
        return all(library is not None and library.loaded for library in self._of_layer)

    @property
    def pending(self) -> bool:
        """Whether some are being compiled."""
        return any(library.pending for library in self.libraries.values())

    def start(self) -> None:
        """Begin to compile what is missing."""
        for library in self.libraries.values():
            library.start()

    def poll(self) -> None:
        """Load what is ready. Between steps only."""
        for library in self.libraries.values():
            library.poll()

    def wait(self) -> None:
        """Wait for what has been started."""
        for library in self.libraries.values():
            library.wait()

    def __call__(
        self, layer: DecoderLayer, hidden: Tensor, cos: Tensor, sin: Tensor, attention: AttentionFunction
    ) -> Tensor:
        library, index = self._of_layer[layer.index], layer.index
        if library is None or not library.loaded:
            output: Tensor = layer(hidden, cos, sin, attention)
            return output
        return library.run([*step_arguments(index, hidden, cos, sin, attention), *self._weights[index]])


def _make_job(config: ModelConfig, dtype: torch.dtype, block_size: int, operators: CpuOperators) -> LayerJob:
    """Raises CannotBuild if there is no place to keep the library."""
    described = msgspec.json.encode(config, order="deterministic").decode()
    name, threads = str(dtype).removeprefix("torch."), torch.get_num_threads()
    # The operators' key stands for the compiler, torch and the processor.
    parts = [operators.shelf.key, described, name, str(block_size), str(threads)]
    parts += [path.read_text(encoding="utf-8") for path in _SOURCES]
    return LayerJob(
        key=hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24],
        directory=str(cache_directory(os.environ, "layers")),
        config=described,
        dtype=name,
        block_size=block_size,
        threads=threads,
    )
