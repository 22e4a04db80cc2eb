"""Agents, torchrun's other processes, between meetings; with workers, on two hosts, it is
tests/multi_node's."""

from pathlib import Path

import msgspec
import pytest

from nanoserve.errors import ModelError, RuntimeFailure
from nanoserve.executor.start.rendezvous import Presence, SharedKeys, TorchrunProcess, open_store
from nanoserve.executor.workers.agent import WorkerAgent
from nanoserve.models.hub import ResolvedModel

SECOND = TorchrunProcess(1, 2, 0, 1, "127.0.0.1", 29500, "none/0")


@pytest.fixture
def keys(tmp_path: Path) -> SharedKeys:
    """A store in which an engine has called a first meeting."""
    shared = SharedKeys(open_store(f"file://{tmp_path}/store", -1))
    shared.set("1/engine", msgspec.msgpack.encode(Presence.here("storyteller")))
    return shared


def storyteller() -> ResolvedModel:
    return ResolvedModel("storyteller", Path("model"), Path("model"))


def missing() -> ResolvedModel:
    raise ModelError("no model at ./models/x")


def presence(keys: SharedKeys, number: int) -> Presence:
    return msgspec.msgpack.decode(keys.get(f"{number}/present/1"), type=Presence)


def test_a_model_that_is_missing_there_is_told_to_the_engine(keys: SharedKeys) -> None:
    with pytest.raises(ModelError, match="no model at"):
        WorkerAgent(SECOND, keys, missing).keep()

    assert presence(keys, 1).problem == "no model at ./models/x"


def test_another_model_is_refused_and_the_engine_can_say_so_too(keys: SharedKeys) -> None:
    other = ResolvedModel("qwen3-8b", None, Path("model"))
    with pytest.raises(RuntimeFailure, match=r"unequal models: qwen3-8b on .*, storyteller on"):
        WorkerAgent(SECOND, keys, lambda: other).keep()

    assert presence(keys, 1).model == "qwen3-8b"


def test_a_meeting_that_is_over_is_not_attended(keys: SharedKeys) -> None:
    # which it attends, and then refuses
    keys.set("2/engine", msgspec.msgpack.encode(Presence.here("qwen3-8b")))
    with pytest.raises(RuntimeFailure, match="unequal models"):
        WorkerAgent(SECOND, keys, storyteller).keep()

    assert not keys.has("1/present/1")
    assert presence(keys, 2).model == "storyteller"


@pytest.mark.parametrize(("code", "fails"), [(0, False), (2, True)])
def test_it_ends_as_the_command_does(keys: SharedKeys, code: int, *, fails: bool) -> None:
    keys.set_finished(code)
    keeper = WorkerAgent(SECOND, keys, storyteller)
    if not fails:
        keeper.keep()
        return
    with pytest.raises(RuntimeFailure, match="the command failed on the first machine"):
        keeper.keep()
