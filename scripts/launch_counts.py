"""Count what a GPU is given to launch, without one: `python -m scripts.launch_counts [NAME...]`.

torch's compiler makes code for tensors that are said to be on an H200 and have no memory. The code
is counted and never run: kernels of Triton, calls of torch's own products and other operators, and
calls of nanoserve's operators. Such a call counts as one launch, which attention of single tokens
is; what others launch in turn is not counted. Where a step of one token runs fused layers, the
operators that they call are counted. Of sampling, the programs are counted that would be launched.
"step" is what the graphs of a decode step of Qwen3 launch beside its layers.

NAME is a family ("llama"), "sampling" or "step"; without one, all are counted. The table is written
as CSV. tests/gpu/launch_counts.csv has the committed one, in which counts may only fall.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch._inductor.config as inductor_config
from torch import Tensor
from torch._dynamo import device_interface
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from nanoserve.config.model_config import ModelConfig
from nanoserve.executor.compile.aot_build import (
    FunctionalLayer,
    layer_kind,
    layer_without_numbers,
)
from nanoserve.executor.compile.fused_layer import FusedLayer, can_be_fused
from nanoserve.executor.compile.layer_runner import mark_any_length
from nanoserve.executor.step.decode_graphs import DecodeGraphs, Recorded, StaticInputs
from nanoserve.executor.step.forward_pass import StepInputs
from nanoserve.executor.step.sampling_graphs import SamplingGraphs
from nanoserve.models.attention import PagedAttention
from nanoserve.models.decoder import Decoder, DecoderLayer
from nanoserve.models.dtypes import default_dtype
from triton_ops.gpu import sampling

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 128},
    "qwen2": {},
    "mistral": {},
    "gemma3_text": {"head_dim": 128, "query_pre_attn_scalar": 128, "sliding_window": 512},
    "olmo3": {"sliding_window": 512, "layer_types": ["sliding_attention"]},
    "smollm3": {"no_rope_layers": [1]},
    "cohere2": {"sliding_window": 512, "layer_types": ["sliding_attention"], "logit_scale": 1.0},
}
SHAPE = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
}
TOKENS = (1, 256)
ROWS = (1, 256)
VOCABULARY = 151_936
BLOCK_SIZE = 16
SAMPLERS = ("greedy", "temperature", "top_p", "top_k")
# Without it torch asks a device guard of CUDA for the device at every index of a tensor.
_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace { using Guard = c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>; }
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
"""


class Launches(NamedTuple):
    """Launches of a layer, of one way to sample, or of a step beside its layers."""

    name: str
    size: int
    """Tokens of a layer, or rows of a step."""
    launches: int


# ---- a GPU that is not there ---------------------------------------------------------------------


def pretend_gpu() -> None:
    """Have torch's compiler believe for the rest of this process that there is an H200."""
    _load_guard()
    properties = SimpleNamespace(
        name="NVIDIA H200",
        major=9,
        minor=0,
        multi_processor_count=132,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
        total_memory=140 << 30,
    )
    answers: dict[str, Callable[..., Any]] = {
        "get_device_properties": lambda device=None: properties,
        "get_compute_capability": lambda device=None: 90,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "is_triton_capable": lambda device=None: True,
        "raise_if_triton_unavailable": lambda device=None: None,
        "is_bf16_supported": lambda including_emulation=False: True,
        "get_raw_stream": lambda index: 0,
    }
    interface: Any = device_interface.CudaInterface
    for name, answer in answers.items():
        setattr(interface, name, staticmethod(answer))
    for name in ("get_device_properties", "current_device"):
        setattr(interface.Worker, name, staticmethod(answers[name]))
    cuda: Any = torch.cuda
    cuda.get_device_properties = answers["get_device_properties"]
    cuda.get_device_capability = lambda device=None: (9, 0)
    cuda.current_device = answers["current_device"]
    version: Any = torch.version
    version.cuda = "13.0"
    _pretend_triton_driver()
    # it would compute constants on the device
    inductor_config.joint_graph_constant_folding = False


def _load_guard() -> None:
    headers = Path(torch.__file__).parent
    with TemporaryDirectory() as folder:
        source, library = Path(folder) / "guard.cpp", Path(folder) / "guard.so"
        source.write_text(_GUARD, encoding="utf-8")
        command = ["g++", "-shared", "-fPIC", "-std=c++20", "-O0", f"-I{headers}/include"]
        linked = [f"-L{headers}/lib", "-lc10"]
        subprocess.run([*command, str(source), "-o", str(library), *linked], check=True)
        ctypes.CDLL(str(library))


def _pretend_triton_driver() -> None:
    import torch._inductor.scheduler as scheduler
    import torch.utils._triton as torch_triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Driver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

    driver.set_active(Driver())
    for module in (torch_triton, scheduler):
        module.has_triton = lambda: True  # type: ignore[attr-defined]


# ---- code ----------------------------------------------------------------------------------------


class _Generated(Exception):
    """Raised with the code in the place of running it."""


@contextmanager
def _stopped_at_code() -> Iterator[None]:
    generate = GraphLowering.codegen

    def stop(graph: GraphLowering) -> None:
        code, _ = generate(graph)
        raise _Generated(getattr(code, "value", code))

    with mock.patch.object(GraphLowering, "codegen", stop):
        yield


def generated_code(
    function: Callable[..., object], make_arguments: Callable[[], Sequence[Any]], **options: Any
) -> str:
    """The Python module that Inductor makes of a function for these arguments."""
    torch._dynamo.reset()
    with FakeTensorMode(allow_non_fake_inputs=True), _stopped_at_code(), torch.no_grad():
        arguments = make_arguments()
        try:
            torch.compile(function, fullgraph=True, options=options)(*arguments)
        except Exception as error:  # the compiler wraps what is raised within it
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, _Generated):
                cause = cause.__cause__ or cause.__context__
            if cause is None:
                raise
            return str(cause)
    raise AssertionError("the compiler has made no code")


def count_launches(code: str) -> int:
    """Count the launches in a module that Inductor made."""
    calls = code[code.index("def call(") : code.index("def get_args(")]
    kernels = len(re.findall(r"\.run\(", calls))
    others = len(re.findall(r"(?:extern_kernels|aten|torch\.ops\.aten)\.\w+(?:\.\w+)?\(", calls))
    # a product that adds to a matrix, and not to a bias, copies that first
    added = re.findall(r"extern_kernels\.addmm\((\w+),", calls)
    biases = [name for name in added if re.search(rf"_stride\({name}, \(\d+, \)", code)]
    copies = len(added) - len(biases)
    own = len(re.findall(r"torch\.ops\.nanoserve\.\w+", calls))
    return kernels + others + copies + own


# ---- what is counted -----------------------------------------------------------------------------


def layer_launches(family: str, tokens: int) -> int:
    """Launches of a layer in a decode step of so many rows, in bfloat16."""
    config = ModelConfig.from_hf({"model_type": family, **SHAPE, **FAMILIES[family]})
    kind = layer_kind("layer", config, 0)
    layer = layer_without_numbers(kind, torch.bfloat16)
    if tokens == 1 and can_be_fused(kind):
        with FakeTensorMode(allow_non_fake_inputs=True), OperatorCounter() as counter:
            FusedLayer(layer)(*layer_arguments(layer, tokens))
        launches: int = counter.launches
        return launches
    function = FunctionalLayer(layer.requires_grad_(False).eval(), "layer")

    def arguments() -> tuple[tuple[Tensor, ...], list[Tensor]]:
        tensors, weights = layer_arguments(layer, tokens)
        for tensor in tensors:
            mark_any_length(tensor)
        return tensors, weights

    return count_launches(generated_code(function.forward, arguments))


def layer_arguments(layer: DecoderLayer, tokens: int) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """A step's tensors and a layer's weights, as a CompiledPart takes them. They have no memory."""
    config = layer.config

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    angles = (tokens, 1, config.rope.rotary_dim // 2)
    cache = (100, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    tensors = (
        empty(tokens, config.hidden_size),
        empty(*angles),
        empty(*angles),
        empty(*cache),
        empty(*cache),
        empty(tokens, 40, dtype=torch.int32),
        empty(tokens + 1, dtype=torch.int32),
        empty(tokens, dtype=torch.int32),
        empty(tokens, dtype=torch.int64),
    )
    return tensors, [empty(*weight.shape, dtype=weight.dtype) for weight in layer.parameters()]


class OperatorCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that launch something. Views and memory without numbers do not."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_question = func.namespace == "prim"  # such as which device a tensor is on
        makes_memory = "empty" in func.__name__
        result = func(*args, **(kwargs or {}))
        is_view = func.is_view and not _has_memory_of_its_own(result, args[0])
        if not is_view and not is_question and not makes_memory:
            self.launches += 1
        return result


def _has_memory_of_its_own(result: object, tensor: Tensor) -> bool:
    """Whether the result of a view of this tensor is none: a conversion to another dtype and a
    contiguous form may be either."""
    if not isinstance(result, Tensor):
        return False
    return result.untyped_storage()._cdata != tensor.untyped_storage()._cdata


def sampling_launches(way: str, rows: int) -> int:
    """Launches that sample so many rows in one way: of programs, and of torch's operators, such as
    the one that makes zeros."""
    compiled = 0
    if way == "top_k":
        compiled = count_launches(top_k_code(rows))
    programs: list[object] = []

    def launch(program: object, *arguments: object, **options: object) -> None:
        programs.append(program)

    with (
        FakeTensorMode(),
        mock.patch.object(JITFunction, "run", launch),
        mock.patch.object(torch.cuda, "device_of", lambda tensor: nullcontext()),
    ):
        sampling.arrival_counters.cache_clear()
        tensors = sampling_arguments(rows)
        sampling.likeliest_tokens(tensors[0])  # once ahead, so that its counters are there
        programs.clear()
        with OperatorCounter() as counter:
            sampling.likeliest_tokens(tensors[0])
            if way in ("temperature", "top_p"):
                uses = {"uses_top_p": way == "top_p", "uses_min_p": False}
                sampling.draw_tokens(*tensors, largest_top_k=0, **uses)
    sampling.arrival_counters.cache_clear()
    operators: int = counter.launches
    return compiled + len(programs) + operators


def sampling_arguments(rows: int) -> list[Tensor]:
    """The tensors that `draw_tokens` takes for so many rows. They have no memory."""
    double = torch.float64
    shapes: list[tuple[tuple[int, ...], torch.dtype]] = [
        ((rows, VOCABULARY), torch.float32),
        ((rows,), torch.float32),
        ((rows,), torch.int64),
        ((rows, 2), torch.int32),
        ((rows,), torch.float32),
        ((rows,), torch.int64),
        ((rows,), double),
        ((rows,), double),
    ]
    return [torch.empty(shape, dtype=dtype, device="cuda") for shape, dtype in shapes]


def top_k_code(rows: int) -> str:
    """The code of the function that draws so many rows by top_k."""

    def arguments() -> list[Tensor]:
        made = sampling_arguments(rows)
        if rows > 1:
            sampling.mark_any_rows(made[:2], made[2:])
        return made

    def draw(*tensors: Tensor) -> object:
        return sampling.draw_by_top_k(64, *tensors)

    return generated_code(draw, arguments, **sampling.COMPILER["options"])


class _CountingRecorder:
    """A GraphRecorder that counts what each graph launches."""

    def __init__(self) -> None:
        self.launches: list[int] = []

    def record(self, step: Callable[[], Recorded]) -> tuple[Callable[[], None], Recorded]:
        with OperatorCounter() as counter:
            result = step()
        self.launches.append(counter.launches)
        return lambda: None, result


def step_launches(rows: int) -> dict[str, int]:
    """Launches of a captured decode step beside its layers, by its way to sample."""
    config = ModelConfig.from_hf({"model_type": "qwen3", **SHAPE, **FAMILIES["qwen3"]})
    recorder = _CountingRecorder()
    with FakeTensorMode(allow_non_fake_inputs=True):
        with default_dtype(torch.bfloat16), torch.device("cuda"):
            decoder = Decoder(config, initialize=False)

        def skip_layer(layer: DecoderLayer, hidden: Tensor, *arguments: Any) -> Tensor:
            return hidden

        def forward(inputs: StepInputs) -> Tensor:
            attention = PagedAttention(config, [], [], inputs.batch)
            hidden: Tensor = decoder(inputs.token_ids, inputs.positions, attention, skip_layer)
            return hidden

        static = StaticInputs([(rows, 1)], most_blocks=1, device=decoder.device)
        DecodeGraphs(forward, static).capture(recorder)
        SamplingGraphs(decoder, [rows]).capture(recorder)
    before_sampling, drawn, greedy = recorder.launches
    return {"greedy": before_sampling + greedy, "temperature": before_sampling + drawn}


def count(names: Sequence[str]) -> Iterator[Launches]:
    """Count layers of families, all ways of sampling, and steps beside their layers."""
    for name in names:
        if name == "sampling":
            for way, rows in product(SAMPLERS, ROWS):
                yield Launches(f"sampling, {way}", rows, sampling_launches(way, rows))
        elif name == "step":
            by_rows = {rows: step_launches(rows) for rows in ROWS}
            for way, rows in product(("greedy", "temperature"), ROWS):
                yield Launches(f"step, {way}", rows, by_rows[rows][way])
        else:
            for tokens in TOKENS:
                yield Launches(name, tokens, layer_launches(name, tokens))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = [*FAMILIES, "sampling", "step"]
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(known))
    options = parser.parse_args(arguments)
    for name in options.names:
        if name not in known:
            parser.error(f"{name} is not known; choose from {', '.join(known)}")
    pretend_gpu()
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(Launches._fields)
    for row in count(options.names or known):
        table.writerow(row)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
