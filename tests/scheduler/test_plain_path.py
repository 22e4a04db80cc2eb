"""The plain path: a scheduler without mechanisms makes the same plans where none of their folders
can be imported."""

import ast
import subprocess
import sys
from pathlib import Path

from nanoserve.engine.engine import Engine
from nanoserve.request import Request, SamplingParams
from nanoserve.scheduler.policies.baselines import ChunkedPrefill
from nanoserve.scheduler.scheduler import Scheduler
from tests.fakes.memory_checking_executor import MemoryCheckingExecutor

ROOT = Path(__file__).parent.parent.parent
SCHEDULER = ROOT / "nanoserve/scheduler"
MECHANISMS = (
    "host_tier",
    "cpu_attention",
    "layout_change",
    "speculation",
    "recurrent_state",
    "canvas",
)
PUT_TOGETHER = {"scheduler/assembly.py", "engine/extensions.py"}
"""The files that import the mechanisms' folders, beside these and the laboratory, which looks into
everything."""

PROGRAM = """
import sys
for name in {blocked!r}:
    sys.modules["nanoserve.scheduler." + name] = None
from nanoserve.request import Request, SamplingParams
from nanoserve.scheduler.plan import Answer, StepResult
from nanoserve.scheduler.policies.baselines import ChunkedPrefill
from nanoserve.scheduler.scheduler import Scheduler

for async_scheduling in (False, True):
    scheduler = Scheduler(
        ChunkedPrefill(8), num_blocks=9, block_size=2, max_model_len=16, max_num_seqs=3,
        async_scheduling=async_scheduling
    )
    for number, (length, samples) in enumerate([(7, 1), (5, 2), (3, 1), (9, 1)]):
        params = SamplingParams(max_tokens=5, n=samples, ignore_eos=True)
        scheduler.add(Request(f"r{{number}}", tuple(range(length)), params, seed=number))
    waiting = []
    while scheduler.has_work:
        plan = scheduler.schedule(0.0)
        if plan is not None:
            print(plan)
            waiting.append(plan)
        if plan is None or not async_scheduling:
            ended = waiting.pop(0)
            answers = tuple(Answer(row.sequence, (row.start % 5,)) for row in ended.rows if row.sample)
            for update in scheduler.apply(StepResult(ended.step, answers), 0.0):
                print(update.request_id, update.index, update.new_tokens, update.finished)
    print(scheduler.steps, scheduler.table.preemptions, scheduler.pool.free_blocks)
"""


def _printed(blocked: tuple[str, ...]) -> str:
    program = [sys.executable, "-c", PROGRAM.format(blocked=blocked)]
    return subprocess.run(program, capture_output=True, text=True, check=True, cwd=ROOT).stdout


def test_a_plain_scheduler_makes_the_same_plans_without_the_mechanisms() -> None:
    """Prompts are cut, share a prefix, fork and are preempted."""
    plain = _printed(MECHANISMS)
    assert plain == _printed(())
    for line in (line for line in plain.splitlines() if not line.startswith(("Step", "r"))):
        steps, preemptions, free_blocks = map(int, line.split())
        assert steps > 10 and preemptions > 0 and free_blocks == 9


def test_a_plain_sequence_has_no_part_of_a_mechanism() -> None:
    """Whether it waits, runs, is preempted or has ended."""
    scheduler = Scheduler(ChunkedPrefill(8), num_blocks=7, block_size=2, max_model_len=16)
    engine = Engine(scheduler, MemoryCheckingExecutor(7, 2), vocab_size=50)
    for name in "abc":
        engine.add(Request(name, (1, 2, 3), SamplingParams(max_tokens=8, ignore_eos=True), seed=0))
    while engine.has_work:
        sequences = list(scheduler.table.sequences.values())
        engine.step()
        for sequence in sequences:
            parts = (
                sequence.fork,
                sequence.placeholders,
                sequence.window_start,
                sequence.host_table,
                sequence.state,
            )
            assert parts == (None, None, None, None, None)
    assert scheduler.table.preemptions > 0


def test_no_plain_file_imports_a_mechanism() -> None:
    importing = set()
    for path in (ROOT / "nanoserve").rglob("*.py"):
        name = path.relative_to(ROOT / "nanoserve").as_posix()
        is_theirs = name.startswith(tuple(f"scheduler/{folder}/" for folder in MECHANISMS))
        if (
            not is_theirs
            and not name.startswith("lab/")
            and any(map(_is_of_a_mechanism, _imported(path)))
        ):
            importing.add(name)
    assert importing == PUT_TOGETHER


def _imported(path: Path) -> set[str]:
    """List the modules that a file imports, in functions too."""
    found: set[str] = set()
    nodes: list[ast.AST] = [ast.parse(path.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom):
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
        nodes.extend(ast.iter_child_nodes(node))
    return found


def _is_of_a_mechanism(name: str) -> bool:
    return name.startswith(tuple(f"nanoserve.scheduler.{folder}." for folder in MECHANISMS))
