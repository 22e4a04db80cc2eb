"""Who may import whom (docs/tour.md, the floors), checked on the source and by importing with torch blocked."""

import ast
import subprocess
import sys
from collections.abc import Mapping
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TORCH_FREE = [
    *("request", "layout", "config", "engine_config", "errors", "processes", "outputs", "measures", "kv"),
    *(
        "costs",
        "speculation",
        "scheduler",
        "record",
        "engine",
        "dispatcher",
        "simulator",
        "papers",
        "text",
        "grammar",
        "client",
    ),
    "commands",
]

# Each room may import the rooms named here, and itself.
FLOORS: dict[str, set[str]] = {
    "errors": set(),
    "processes": {"errors"},
    "request": {"errors"},
    "cache_groups": set(),
    "quantization": {"errors"},
    "config": {"errors", "processes", "quantization", "cache_groups"},
    "layout": {"errors", "config"},
    "checkpoint_names": {"config"},
    "measures": {"errors", "processes", "request"},
    "kv": {"errors", "request", "config", "cache_groups"},
    "scheduler": {"errors", "processes", "request", "kv"},
    "costs": {
        *("errors", "processes", "layout", "cache_groups", "quantization", "config", "checkpoint_names", "scheduler"),
    },
    "engine_config": {"errors", "processes", "layout", "quantization", "scheduler"},
    "record": {"errors", "layout", "request", "measures", "scheduler"},
    "engine": {"errors", "request", "config", "kv", "scheduler", "record"},
    "dispatcher": {"errors", "request", "record", "engine"},
    "simulator": {
        *("errors", "request", "config", "engine_config", "measures", "kv", "costs", "scheduler", "record", "engine"),
        *("dispatcher", "cache_groups"),
    },
    "papers": {
        *("errors", "processes", "config", "measures", "costs", "scheduler", "record", "simulator", "benchmarks"),
        *("request", "models", "llm", "layout"),
    },
    "text": {"errors", "processes"},
    "grammar": {"errors", "processes", "text"},
    "outputs": {"errors", "request", "text"},
    "models": {
        *(
            "errors",
            "processes",
            "config",
            "checkpoint_names",
            "quantization",
            "engine_config",
            "layout",
            "costs",
            "triton_ops",
        ),
    },
    "runtime": {
        *("errors", "processes", "config", "request", "measures", "scheduler", "record", "grammar"),
        *("models", "triton_ops", "costs", "layout", "engine_config", "cache_groups"),
    },
    "client": {"errors"},
    "benchmarks": {
        *("client", "errors", "processes", "config", "request", "measures", "costs", "scheduler", "record", "engine"),
        *("models", "assembly", "llm", "runtime", "simulator", "triton_ops", "layout", "engine_config"),
        *("dispatcher", "cache_groups"),
    },
    "choosing": {
        *("errors", "config", "costs", "request", "layout", "engine_config", "models", "runtime", "simulator"),
    },
    "assembly": {
        *("errors", "processes", "config", "costs", "request", "scheduler", "record", "engine", "grammar", "models"),
        *("runtime", "dispatcher", "measures", "triton_ops", "engine_config", "choosing"),
        *("text", "cache_groups"),
    },
    "server": {
        *("errors", "processes", "config", "request", "scheduler", "record", "engine", "dispatcher", "text", "grammar"),
        *("outputs", "models", "assembly", "engine_config"),
    },
    "triton_ops": set(),
}

DECIDING = {"errors", "processes", "request", "cache_groups", "kv", "scheduler"}
LOOP = {*DECIDING, "record", "engine"}
OFFLINE = {
    *LOOP,
    *("layout", "quantization", "config", "checkpoint_names", "engine_config", "costs", "text", "grammar", "outputs"),
    *("models", "runtime", "dispatcher", "assembly", "llm"),
}
CLOSURES = {
    "nanoserve.scheduler.scheduler": (DECIDING, 31),
    "nanoserve.engine": (LOOP, 38),
    "nanoserve.llm": (OFFLINE, 125),
}
"""The rooms that importing a module may load, and the most modules: deciding needs no cost model, the loop none either,
and an engine that predicts nothing does without the simulator, the benchmarks and the traces."""

FRONT_END = ["app", "serving", "service", "engine_client"]
"""Modules of the server that run beside the engine process, not in it."""


PART_OF = {"speculation": "scheduler"}
"""Folders that are part of a room: draft tokens are chosen by the scheduler."""


def _room(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    if parts[0] == "triton_ops":
        return "triton_ops"
    name = parts[1].removesuffix(".py")
    return PART_OF.get(name, name)


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
                rooms.add(PART_OF.get(parts[1], parts[1]))
    return rooms


@pytest.mark.parametrize("room", FLOORS)
def test_no_room_imports_a_floor_above_it(room: str) -> None:
    sources = [*(ROOT / "nanoserve").rglob("*.py"), *(ROOT / "triton_ops").rglob("*.py")]
    mine = [path for path in sources if _room(path) == room]
    assert mine
    for path in mine:
        assert _imported_rooms(path) <= FLOORS[room] | {room}, path


def test_no_rooms_lie_above_each_other() -> None:
    TopologicalSorter(FLOORS).prepare()  # which raises CycleError and names them


def test_no_modules_import_each_other_in_a_circle() -> None:
    sources = [*(ROOT / "nanoserve").rglob("*.py"), *(ROOT / "triton_ops").rglob("*.py")]
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sources}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    TopologicalSorter({name: _imported_at_start(modules[name], modules) for name in modules}).prepare()


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
    program = f"import sys, {module}\nprint(*[name for name in sys.modules if name.startswith('nanoserve')])"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded, (rooms, most) = ran.stdout.split(), CLOSURES[module]
    names = {name.split(".")[1] for name in loaded if "." in name}
    assert {PART_OF.get(name, name) for name in names} <= rooms
    assert len(loaded) <= most, sorted(loaded)


def test_the_torch_free_floors_work_without_torch() -> None:
    program = (
        "import sys, importlib\n"
        "sys.modules['torch'] = None\n"
        "import nanoserve\n"
        f"for name in {TORCH_FREE!r}: importlib.import_module('nanoserve.' + name)\n"
        f"for name in {FRONT_END!r}: importlib.import_module('nanoserve.server.' + name)\n"
        "import nanoserve.models.hub, nanoserve.text.tokenizer\n"
        "import nanoserve.scheduler.scheduler, nanoserve.kv, nanoserve.commands.main\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
