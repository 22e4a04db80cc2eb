"""Thread settings must be in place before torch is imported, because OpenMP reads them once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanoserve.utils.threads import SPIN_COUNT, physical_cores, prepare_threads, threads_of_each

SHOW_TORCH = """
from nanoserve.utils.threads import prepare_threads
prepare_threads(1)
import json, os, torch
print(json.dumps([torch.get_num_threads(), os.environ.get("GOMP_SPINCOUNT"), torch.ones(2**20).sum().item()]))
"""
# The process ends where it would begin to import torch, which takes seconds.
SHOW_ENVIRONMENT = """
import json, os, sys
class EndAtTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(json.dumps([os.environ.get("OMP_NUM_THREADS"), os.environ.get("GOMP_SPINCOUNT")]), flush=True)
            os._exit(0)
sys.meta_path.insert(0, EndAtTorch())
"""


def shown_by(program: str) -> list[object]:
    """Output of a fresh process without thread settings."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))
    }
    answer = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    return json.loads(answer.stdout)


@pytest.mark.slow
def test_settings_take_effect_beside_a_busy_neighbour() -> None:
    """Torch has the threads and the spin count, and computes a sum with them."""
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        found = shown_by(SHOW_TORCH)
    finally:
        busy.kill()
        busy.wait()
    assert found == [1, str(SPIN_COUNT), 2.0**20]


def test_the_offline_api_prepares_itself() -> None:
    assert shown_by(SHOW_ENVIRONMENT + "from nanoserve import LLM") == [
        str(physical_cores()),
        str(SPIN_COUNT),
    ]


@pytest.mark.parametrize("command", ["generate x", "bench latency", "bench throughput"])
def test_commands_set_the_threads_before_torch_is_imported(command: str) -> None:
    words = [*command.split(), "--threads", "1"]
    found = shown_by(SHOW_ENVIRONMENT + f"from nanoserve.commands.main import main; main({words})")
    assert found == ["1", str(SPIN_COUNT)]


def test_what_the_user_has_set_stays() -> None:
    mine = {"OMP_NUM_THREADS": "5", "OMP_WAIT_POLICY": "ACTIVE", "THP_MEM_ALLOC_ENABLE": "0"}
    prepare_threads(environment=mine)
    assert mine == {
        "OMP_NUM_THREADS": "5",
        "OMP_WAIT_POLICY": "ACTIVE",
        "THP_MEM_ALLOC_ENABLE": "0",
    }
    prepare_threads(2, mine)
    assert mine["OMP_NUM_THREADS"] == "2"


def test_two_threads_of_a_core_count_once_and_a_limit_counts(tmp_path: Path) -> None:
    for number in os.sched_getaffinity(0):
        topology = tmp_path / f"cpu{number}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text("0-63\n")
    assert physical_cores(tmp_path, tmp_path / "missing") == 1
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert physical_cores(tmp_path / "missing", tmp_path / "cpu.max") == 1


@pytest.mark.parametrize(("together", "each"), [("8", 2), ("9", 2), ("2", 1), ("8,2", 2)])
def test_the_workers_of_a_machine_share_its_threads(together: str, each: int) -> None:
    assert threads_of_each(4, {"OMP_NUM_THREADS": together}) == each


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_the_library_of_torch_is_loaded_without_torch() -> None:
    program = (
        "import sys; from nanoserve.utils.threads import load_library_of_torch;"
        "load_library_of_torch();"
        "print('libtorch_cpu.so' in open('/proc/self/maps').read(), 'torch' in sys.modules)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ran.stdout == "True False\n"
