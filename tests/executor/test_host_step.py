"""The host's part of a decode step, in calls: they are the same on every machine, however busy it
is. Steps are those of scripts/host_step.py, without text."""

import inspect
import sys
from typing import Any

import pytest

from nanoserve.request import Request, SamplingParams
from scripts.host_step import BLOCK_SIZE, make_engine

DEVICE_WORK = {"begin", "compute", "sample"}
STEPS = BLOCK_SIZE  # so that each row takes one block


def _calls_of_a_step(rows: int, temperature: float) -> float:
    """Calls of Python and of C functions in a step of so many decodes, on average, but for what is
    called to have the device work."""
    engine, runner = make_engine(rows, BLOCK_SIZE, 8 * STEPS)
    params = SamplingParams(temperature=temperature, ignore_eos=True)
    for index in range(rows):
        engine.add(Request(str(index), (index,) * BLOCK_SIZE, params, seed=index))
    while len(engine.step()) < rows:
        pass
    engine.step()
    device_code = {inspect.unwrap(getattr(runner, name)).__code__ for name in DEVICE_WORK}
    calls = inside = 0

    def count(frame: Any, event: str, argument: object) -> None:
        nonlocal calls, inside
        if frame.f_code in device_code and event in ("call", "return"):
            inside += 1 if event == "call" else -1
        elif inside == 0:
            calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        for _ in range(STEPS):
            engine.step()
    finally:
        sys.setprofile(None)
    engine.close()
    return calls / STEPS


@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_a_row_is_a_few_calls_and_a_step_some_hundreds(temperature: float) -> None:
    one, few, many = (_calls_of_a_step(rows, temperature) for rows in (1, 32, 96))
    assert one < 420
    assert (many - few) / 64 < 22, "none for what no row uses, such as grammars"
