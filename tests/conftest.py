"""Fixtures and settings that several test modules share."""

import gc
import os
import signal

# The tests' models are tiny: one thread computes them fastest, and a busy neighbour cannot make it
# wait for another. Read when torch is first imported, here and in the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:  # it imports torch, and the processes that test are started before that
    from nanoserve import LLM

# How long an example takes says more of the machine than of us. Fifty are enough, for many tests
# share each property.
settings.register_profile("untimed", deadline=None, max_examples=50)
settings.load_profile("untimed")

# Triton's interpreter is switched on for a whole process: these tests have an invocation of their
# own.
collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreter"]


def pytest_configure(config: pytest.Config) -> None:
    """Have commands keep conversations in a directory of the tests. Let xdist run files in their
    order: it would begin with those of the most tests, and end with one process in a file of few
    long tests while the others have nothing to do."""
    state = TemporaryDirectory(prefix="nanoserve-tests-")
    config.add_cleanup(state.cleanup)
    os.environ["XDG_STATE_HOME"] = state.name
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


@pytest.hookimpl(wrapper=True)
def pytest_sessionstart(session: pytest.Session) -> Iterator[None]:
    """Where several processes run the tests, build the CPU operators beside the first of them, once
    these processes have begun. Otherwise each would come to a test that waits for the compiler, and
    have nothing to do."""
    yield
    option = session.config.option
    if getattr(option, "numprocesses", None) and not hasattr(session.config, "workerinput"):
        from triton_ops.cpu import cpu_operators

        cpu_operators().start(waited=True)


def _keep_all_objects() -> None:
    """Spare the garbage collector a look at all objects that are alive now. Each executor that is
    closed collects garbage: this takes 0.4 s with all that tests import, and a few milliseconds
    without."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    """Modules and tests live until the end."""
    _keep_all_objects()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Objects that are alive after the last test of a file was imported or compiled there, and lives until
    the end too."""
    yield
    if nextitem is not None and nextitem.path != item.path:
        _keep_all_objects()


def pytest_runtest_setup() -> None:
    """Commands that ran in this process before may have changed what Ctrl-C does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def storyteller() -> "Iterator[LLM]":
    """The bundled model, loaded once, in float32 and with a small cache."""
    from nanoserve import LLM

    with LLM(dtype="float32", kv_cache_memory=64 << 20, seed=7) as llm:
        yield llm
