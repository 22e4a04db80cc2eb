"""Who may import whom (docs/tour.md, the floors), checked on the source and by importing with torch
blocked."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TORCH_FREE = [
    "request",
    "layout",
    "config",
    "engine_config",
    "errors",
    "utils",
    "costs",
    "scheduler",
    "record",
    "text",
]
TORCH_FREE += ["engine.engine", "engine.dispatcher", "engine.outputs", "server.client", "commands"]
TORCH_FREE += ["lab", "lab.charts", "lab.workloads", "lab.simulator", "lab.papers"]

# Each room may import the rooms named here, and itself.
FLOORS: dict[str, set[str]] = {
    "errors": set(),
    "utils": {"errors"},
    "request": {"errors"},
    "config": {"errors", "utils"},
    "layout": {"errors", "config"},
    "scheduler": {"errors", "utils", "request"},
    "costs": {"errors", "utils", "config", "layout", "scheduler"},
    "engine_config": {"errors", "utils", "config", "layout", "scheduler"},
    "record": {"errors", "utils", "request", "layout", "scheduler"},
    "text": {"errors", "utils"},
    "triton_ops": set(),
    "models": {"errors", "utils", "config", "layout", "costs", "engine_config", "triton_ops"},
    "executor": {
        *(
            "errors",
            "utils",
            "request",
            "config",
            "layout",
            "scheduler",
            "costs",
            "engine_config",
            "record",
            "text",
        ),
        *("models", "triton_ops"),
    },
    "engine": {
        *(
            "errors",
            "request",
            "config",
            "layout",
            "scheduler",
            "costs",
            "engine_config",
            "record",
            "text",
            "models",
        ),
        *("executor", "triton_ops"),
    },
    "llm": {"errors", "utils", "request", "engine_config", "record", "text", "models", "engine"},
    "server": {"errors", "utils", "request", "engine_config", "record", "text", "models", "engine"},
    "commands": {
        *(
            "errors",
            "utils",
            "request",
            "config",
            "layout",
            "scheduler",
            "engine_config",
            "record",
            "text",
            "models",
        ),
        *("executor", "engine", "llm", "server"),
    },
    "lab": {
        *(
            "errors",
            "utils",
            "request",
            "config",
            "layout",
            "scheduler",
            "costs",
            "engine_config",
            "record",
            "models",
        ),
        *("executor", "engine", "llm", "server", "commands", "triton_ops"),
    },
}
MOST_ENTRIES = 17
"""Files and folders that stand side by side in the package, beside the doors and what is no
code."""
MOST_FLOORS = 13
NO_ROOM = {"__init__", "__main__", "py.typed", "assets", "__pycache__"}

DECIDING = {"errors", "utils", "request", "scheduler"}
LOOP = {*DECIDING, "record", "engine"}
OFFLINE = {*LOOP, "layout", "config", "engine_config", "text", "models", "executor", "llm"}
CLOSURES = {
    "nanoserve.scheduler.scheduler": (DECIDING, 31),
    "nanoserve.engine.engine": (LOOP, 35),
    "nanoserve.llm": (OFFLINE, 106),
}
"""The rooms that importing a module may load, and the most modules: deciding needs no cost model,
the loop none either, and an engine that predicts nothing does without the laboratory."""

LOOP_KNOWS_OF_RECORDS = {
    "nanoserve.record",
    "nanoserve.record.counters",
    "nanoserve.record.engine_observer",
}
"""Modules of record/ that the loop loads: its status, and the contract of those who listen."""

LABORATORY_IS_NAMED = {"nanoserve/commands/main.py", "nanoserve/engine/settings_chooser.py"}
"""The files outside of the laboratory that name its modules: the table of commands, and the look-up
of what chooses."""

MOST_LAZY_IMPORTS = 88
LAZY_IMPORTS: dict[str, list[str]] = {
    "It imports torch, which takes a second: options are checked, and help is printed, without it.": [
        "commands/engine_options.py: llm",
        "commands/generate.py: commands.batch",
        "commands/prune.py: models.pruning.trimming",
        "commands/quantize.py: models.quantizing",
        "commands/torchrun.py: executor.workers.agent",
        "lab/commands/bench_compare.py: lab.benchmarks.peers",
        "lab/commands/bench_compare.py: lab.benchmarks.roofline",
        "lab/commands/bench_compare.py: lab.benchmarks.settling",
        "lab/commands/bench_compare.py: lab.benchmarks.speculation",
        "lab/commands/bench_compare.py: lab.benchmarks.policies.rounds",
        "lab/commands/bench_gpu.py: executor.start.model_loading",
        "lab/commands/bench_gpu.py: lab.benchmarks.gpu.device",
        "lab/commands/bench_hybrid.py: lab.benchmarks.policies",
        "lab/commands/bench_operators.py: lab.benchmarks.operators",
        "lab/commands/bench_operators.py: lab.benchmarks.roofline",
        "lab/commands/bench_options.py: lab.benchmarks.local",
        "lab/commands/bench_options.py: lab.benchmarks.settling",
        "lab/commands/bench_pipeline.py: lab.benchmarks.policies",
        "lab/commands/bench_pipeline.py: lab.benchmarks.roofline",
        "lab/commands/bench_pipeline.py: models.dtypes",
        "lab/commands/bench_quality.py: lab.benchmarks.peers.engine_peers",
        "lab/commands/bench_quality.py: lab.benchmarks.peers.weights",
        "lab/commands/bench_reshard.py: lab.benchmarks.policies",
        "lab/commands/bench_variants.py: executor.start.model_loading",
        "lab/commands/bench_variants.py: lab.benchmarks.peers.weights",
        "lab/commands/bench_variants.py: lab.benchmarks.roofline",
        "lab/commands/plan.py: executor.profiling.layout_profile",
        "lab/commands/plan.py: executor.start.model_loading",
        "lab/commands/profile.py: executor.cpu_attention.host_processor",
        "lab/commands/profile.py: executor.start.model_loading",
        "lab/commands/profile.py: lab.benchmarks.profiling",
        "lab/papers/lecture.py: lab.papers.drafted_stories",
        "lab/papers/lecture.py: lab.papers.quantized_stories",
    ],
    "The prompt of a chat appears before it is imported: it imports rich, or what speaks HTTP.": [
        "commands/chat.py: commands.printers",
        "commands/chat.py: commands.remote_model",
    ],
    "It sets the number of threads before torch is imported.": ["__init__.py: utils.threads"],
    "Ctrl-C is answered in one line while it is imported.": ["commands/entry.py: commands.main"],
    "A server needs it: it imports what speaks HTTP, and the options are checked before.": [
        "commands/serve.py: server.service",
        "commands/serve.py: server.serving",
        "lab/commands/bench_serve.py: lab.benchmarks.serving.sending",
    ],
    "The process is told what it is before it imports its part.": [
        "executor/workers/process.py: executor.workers.building",
        "executor/workers/process.py: executor.workers.measuring",
        "server/engine_process.py: engine.assembly",
        "text/grammar/checker.py: text.grammar.compiler",
    ],
    "Most engines do without it: several workers, a predictor, a trace, several machines, a download.": [
        "engine/assembly.py: engine.extensions",
        "engine/assembly.py: executor.start.predictors",
        "engine/assembly.py: executor.workers.executor",
        "engine/assembly.py: engine.tracing",
        "engine/assembly.py: record.forecasts",
        "executor/start/rendezvous.py: utils.sockets",
        "models/shards.py: costs.counts",
        "models/hub.py: models.hub_download",
    ],
    "A mechanism is put together only for the engines that use it: the plain path runs without its folder.": [
        "engine/assembly.py: executor.cpu_attention.host_processor",
        "engine/assembly.py: executor.kv_transfer.host_pool",
        "executor/start/device_start.py: executor.async_scheduling.placeholder_tokens",
        "executor/start/device_start.py: executor.canvas.choice",
        "executor/start/device_start.py: executor.cpu_attention.cpu_attention",
        "executor/start/device_start.py: executor.cpu_attention.pipeline",
        "executor/start/device_start.py: executor.drafting.drafting",
        "executor/start/device_start.py: executor.drafting.verification",
        "executor/start/device_start.py: executor.kv_transfer.gpu_staging",
        "executor/start/device_start.py: executor.kv_transfer.transfer",
        "executor/start/device_start.py: executor.recurrent_state.state_storage",
        "executor/start/device_start.py: executor.start.drafters",
    ],
    "It is for GPUs.": [
        "executor/compile/layer_runner.py: executor.compile.fused_layer",
        "executor/start/device_start.py: executor.start",
    ],
    "It is for models of another kind: GGUF files, random weights, weights under several layouts, recurrent states.": [
        "executor/compile/aot_build.py: models.mixer",
        "executor/start/gpu_start.py: models.mixer",
        "models/attention.py: models.mixer",
        "models/decoder.py: models.recurrent",
        "executor/start/model_loading.py: models.dummy",
        "executor/start/model_loading.py: models.resharding",
        "models/hub.py: models.gguf_directory",
        "models/loading.py: models.gguf_checkpoint",
    ],
    "It makes a ModelConfig, so it imports the module that asks it.": [
        "config/model_config.py: config.config_reader"
    ],
    "Its import is a part of what is timed, or a child process imports it.": [
        "lab/benchmarks/starting.py: llm",
        "lab/benchmarks/starting.py: request",
        "lab/benchmarks/starting.py: lab.benchmarks.settling",
        "lab/benchmarks/gpu/running.py: lab.benchmarks.gpu.device",
    ],
    "Few runs of the benchmark need it.": [
        "lab/benchmarks/gpu/running.py: lab.benchmarks.gpu.tuning",
        "lab/benchmarks/peers/weights.py: lab.benchmarks.peers.llama_cpp_peer",
        "lab/commands/bench_options.py: lab.simulator.workload",
    ],
}
"""Imports of nanoserve inside functions, by why they are there."""

FRONT_END = ["app", "serving", "service", "engine_client"]
"""Modules of the server that run beside the engine process, not in it."""


def _room(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    if parts[0] == "triton_ops":
        return "triton_ops"
    return parts[1].removesuffix(".py")


def _imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            parts = name.split(".")
            if parts[0] == "triton_ops":
                rooms.add("triton_ops")
            elif parts[0] == "nanoserve" and len(parts) > 1:
                rooms.add(parts[1])
    return rooms


@pytest.mark.parametrize("room", FLOORS)
def test_no_room_imports_a_floor_above_it(room: str) -> None:
    sources = [*(ROOT / "nanoserve").rglob("*.py"), *(ROOT / "triton_ops").rglob("*.py")]
    mine = [path for path in sources if _room(path) == room]
    assert mine
    for path in mine:
        assert _imported_rooms(path) <= FLOORS[room] | {room}, path


def floors() -> dict[str, int]:
    """The floor of each room, counted from 1: above all rooms that it may import."""
    found: dict[str, int] = {}
    # raises CycleError if rooms lie above each other
    for room in TopologicalSorter(FLOORS).static_order():
        found[room] = 1 + max((found[below] for below in FLOORS[room]), default=0)
    return found


def test_rooms_lie_on_few_floors() -> None:
    assert max(floors().values()) <= MOST_FLOORS, floors()


def test_the_tour_draws_the_rooms_on_their_floors() -> None:
    tour = (ROOT / "docs/tour.md").read_text()
    lines = re.findall(r"^ *(\d+)  ([\w· ]+)$", tour, flags=re.MULTILINE)
    assert {room: int(floor) for floor, rooms in lines for room in rooms.split(" · ")} == floors()
    (table,) = re.findall(r"^\| room \|.*\n\|[-|]+\n((?:\|.*\n)+)", tour, flags=re.MULTILINE)
    first_cells = [row.split("|")[1] for row in table.splitlines()]
    assert {
        name for cell in first_cells for name in re.findall(r"`(\w+)/?`", cell)
    } == FLOORS.keys()


def test_few_rooms_stand_side_by_side() -> None:
    found = {path.name.removesuffix(".py") for path in (ROOT / "nanoserve").iterdir()} - NO_ROOM
    assert found == FLOORS.keys() - {"triton_ops"}
    assert len(found) <= MOST_ENTRIES, sorted(found)


def test_the_engine_names_its_laboratory_in_two_places() -> None:
    """Strings count as well as imports."""
    naming = set()
    for path in [*(ROOT / "nanoserve").rglob("*.py"), *(ROOT / "triton_ops").rglob("*.py")]:
        if _room(path) == "lab":
            continue
        strings = [
            node.value
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Constant)
        ]
        if any(isinstance(value, str) and "nanoserve.lab" in value for value in strings):
            naming.add(path.relative_to(ROOT).as_posix())
    assert naming == LABORATORY_IS_NAMED


def test_imports_inside_functions_have_a_reason() -> None:
    """They hide what a module needs, so each stands in this list, and the list says why."""
    found = [
        f"{path.relative_to(ROOT / 'nanoserve').as_posix()}: {module.removeprefix('nanoserve.')}"
        for path in sorted((ROOT / "nanoserve").rglob("*.py"))
        for module in _imported_in_functions(path)
    ]
    assert set(found) == {pair for pairs in LAZY_IMPORTS.values() for pair in pairs}
    assert len(found) <= MOST_LAZY_IMPORTS


def test_no_modules_import_each_other_in_a_circle() -> None:
    sources = [*(ROOT / "nanoserve").rglob("*.py"), *(ROOT / "triton_ops").rglob("*.py")]
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sources}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    TopologicalSorter(
        {name: _imported_at_start(modules[name], modules) for name in modules}
    ).prepare()


def _imported_in_functions(path: Path) -> Iterator[str]:
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nanoserve"):
                yield node.module or ""
            elif isinstance(node, ast.Import):
                yield from (
                    alias.name for alias in node.names if alias.name.startswith("nanoserve")
                )


def _imported_at_start(path: Path, modules: Mapping[str, Path]) -> set[str]:
    """The modules that it imports outside of functions, when it runs."""
    found: set[str] = set()
    nodes: list[ast.AST] = [ast.parse(path.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            members = [f"{node.module}.{alias.name}" for alias in node.names]
            found.update(member if member in modules else node.module for member in members)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            nodes.extend(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            nodes.extend(ast.iter_child_nodes(node))
    return found & modules.keys()


@pytest.mark.parametrize("module", CLOSURES)
def test_a_module_loads_only_what_it_needs(module: str) -> None:
    program = (
        f"import sys, {module}\nprint(*[name for name in sys.modules if "
        "name.startswith('nanoserve')])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    loaded, (rooms, most) = ran.stdout.split(), CLOSURES[module]
    names = {name.split(".")[1] for name in loaded if "." in name}
    assert names <= rooms
    assert {name for name in loaded if name.startswith("nanoserve.record")} <= LOOP_KNOWS_OF_RECORDS
    assert len(loaded) <= most, sorted(loaded)


def test_the_torch_free_floors_work_without_torch() -> None:
    program = (
        "import sys, importlib\n"
        "sys.modules['torch'] = None\n"
        "import nanoserve\n"
        f"for name in {TORCH_FREE!r}: importlib.import_module('nanoserve.' + name)\n"
        f"for name in {FRONT_END!r}: importlib.import_module('nanoserve.server.' + name)\n"
        "import nanoserve.models.hub, nanoserve.text.tokenizer\n"
        "import nanoserve.scheduler.scheduler, nanoserve.scheduler.kv, nanoserve.commands.main\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
