"""Arrays that are staged arrive in their own shape and dtype, in one copy, and are not overwritten by the
next step."""

from collections.abc import Sequence
from itertools import cycle

import numpy as np
import pytest
import torch

from nanoserve.executor.step.staging import HostBuffer, Staging

CPU = torch.device("cpu")


def arrays(seed: int, length: int) -> list[np.ndarray]:
    """One of each kind that a step has, some empty, one that is a part of a larger one."""
    random = np.random.default_rng(seed)
    return [
        random.integers(0, 2, (3, length)).astype(np.bool_),
        random.integers(0, 1000, (3, 2 * length))[:, :length],
        random.integers(0, 1000, length).astype(np.int32),
        random.random((length, 3), np.float32),
        np.zeros((0, 2), np.int64),
        random.random(length),
        random.integers(0, 255, (2, length)).astype(np.uint8),
    ]


def assert_equal(tensors: Sequence[torch.Tensor], expected: Sequence[np.ndarray]) -> None:
    for tensor, array in zip(tensors, expected, strict=True):
        assert torch.equal(tensor, torch.from_numpy(array))
        assert tensor.dtype == torch.from_numpy(array).dtype


def packed(buffer: HostBuffer, some: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """Where a step's arrays are on the device, once the device has come there."""
    buffer.begin()
    tensors = [buffer.add(array) for array in some]
    buffer.transfer()
    return tensors


def test_a_packed_copy_equals_its_arrays_also_once_it_had_to_grow() -> None:
    buffer, copies = HostBuffer(CPU), []
    for seed, length in enumerate([5, 1, 40_000, 33, 40_000]):
        copies.append((packed(buffer, arrays(seed, length)), arrays(seed, length)))
    for place, (tensors, expected) in enumerate(copies):  # later copies changed nothing
        assert_equal(tensors, expected)
        storage = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        assert len(storage) == 1 or place == 2, (
            "one buffer on the device, so one copy, but in the step that it grew in"
        )
        assert all(tensor.data_ptr() % 16 == 0 for tensor in tensors if tensor.numel())


@pytest.mark.parametrize("buffers", [0, 2])
def test_staged_arrays_arrive_with_the_transfer(buffers: int) -> None:
    staging = Staging(CPU)
    if buffers:  # as on a GPU
        staging._buffers = cycle([HostBuffer(CPU) for _ in range(buffers)])
    for seed in range(4):
        expected = arrays(seed, 9)
        staged = [staging.add(array) for array in expected]
        staging.transfer()
        assert_equal(staged, expected)
    later = staging.add(expected[1])
    staging.transfer()
    assert_equal([later], expected[1:2])
    assert_equal(staged, expected)


def test_memory_is_used_again_when_its_copy_is_done_and_not_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The copy runs on the stream of the buffer's device, whichever device is current."""
    order: list[str] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")

    class Event:
        def synchronize(self) -> None:
            order.append("waited")

        def record(self, stream: str) -> None:
            order.append(f"copied on the {stream}")

    buffer = HostBuffer(CPU)
    buffer._copied = Event()  # type: ignore[assignment]
    for seed in range(3):
        assert_equal(packed(buffer, arrays(seed, 4)), arrays(seed, 4))
    assert order == ["waited", "copied on the stream of cpu"] * 3


def test_on_the_cpu_nothing_is_copied() -> None:
    staging, array = Staging(CPU), np.arange(7)
    staged = staging.add(array)
    staging.transfer()
    array[3] = 99
    assert staged[3] == 99


class Owner:
    """Whoever has arrays that never change."""


@pytest.mark.parametrize("buffers", [0, 2])
def test_fixed_arrays_are_moved_once_and_stay(buffers: int) -> None:
    staging, moved = Staging(CPU), list[np.ndarray]()
    if buffers:  # as on a GPU
        staging._buffers = cycle([HostBuffer(CPU) for _ in range(buffers)])
    add = staging.add

    def watched(array: np.ndarray) -> torch.Tensor:
        moved.append(array)
        return add(array)

    staging.add = watched  # type: ignore[method-assign]
    owners = {Owner(): arrays(seed, 9)[:4] for seed in range(3)}
    for _ in range(5):  # they take turns, and other arrays come with each
        for seed, (owner, fixed) in enumerate(owners.items()):
            tensors = staging.add_fixed(owner, fixed)
            others = arrays(seed + 7, 40)
            staged = [add(array) for array in others]
            staging.transfer()
            assert_equal(tensors, fixed)
            assert_equal(staged, others)
    assert len(moved) == 3 * 4
    for seed in range(20):  # of so many that none is remembered
        tensors = staging.add_fixed(Owner(), arrays(seed, 5))
        staging.transfer()
        assert_equal(tensors, arrays(seed, 5))


def test_fixed_arrays_of_a_step_that_failed_come_with_the_next_transfer() -> None:
    staging, owner = Staging(CPU), Owner()
    staging._buffers = cycle([HostBuffer(CPU) for _ in range(2)])
    staging.add_fixed(owner, arrays(1, 9))  # and nothing is transferred
    tensors = staging.add_fixed(owner, arrays(1, 9))
    staging.transfer()
    assert_equal(tensors, arrays(1, 9))
    kept = staging.add_fixed(owner, arrays(1, 9))
    assert_equal(kept, arrays(1, 9))
    assert staging.add_fixed(owner, arrays(1, 9)) is kept, "nothing is left to be moved"
