"""Questions to the planner before a batch, and the notice where it has no answer."""

from collections.abc import Sequence
from typing import Any

import pytest

from nanoserve.commands.batch import advice_for
from nanoserve.costs.hardware import MachineSpeeds
from nanoserve.engine_config import EngineConfig
from nanoserve.lab import auto_parallel
from nanoserve.lab.simulator.planning import PlannedWork
from nanoserve.layout import ParallelLayout
from nanoserve.models.hub import dummy_config
from nanoserve.request import RequestShape, SamplingParams
from tests.commands.fake_llm import FakeLLM

PAIR = (
    ParallelLayout(data_parallel=2, pipeline_parallel=2),
    ParallelLayout(data_parallel=2, tensor_parallel=2),
)


def make_llm(**speeds: float) -> Any:
    """An LLM whose engines have ten blocks on their devices together, and four in host memory."""
    llm: Any = FakeLLM()
    llm.built.model = dummy_config("qwen3-0.6b")
    llm.built.config = EngineConfig(
        pipeline_parallel=2,
        data_parallel=2,
        decode_layout=ParallelLayout(tensor_parallel=2),
        dtype="float32",
    )
    if speeds:
        llm.built.speeds = MachineSpeeds(**speeds)
    return llm


MEASURED = {
    "memory_bandwidth": 1e10,
    "flops": 1e11,
    "host_link_bandwidth": 1e10,
    "link_bandwidth": 1e9,
}


class Asked:
    """Stands in for the planner and keeps what it was told."""

    def __init__(self) -> None:
        self.shapes: Sequence[RequestShape] = ()
        self.settings: dict[str, Any] = {}

    def __call__(self, costs_of: Any, chosen: Any, work: PlannedWork, **settings: Any) -> str:
        self.shapes, self.settings = (
            work.shapes,
            settings | {"machine": costs_of(chosen[0]).machine, "chosen": chosen},
        )
        return "fine"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    asked = Asked()
    monkeypatch.setattr(auto_parallel, "advise", asked)
    return asked


def test_the_planner_is_told_how_long_rows_are_and_what_the_caches_hold(asked: Asked) -> None:
    rows: list[Any] = [
        ("a b c", SamplingParams(max_tokens=20)),
        ([{"role": "user", "content": "a"}], SamplingParams(max_tokens=5, n=3)),
        ("a", SamplingParams(max_tokens=None)),
    ]
    assert advice_for(make_llm(**MEASURED), PAIR, rows) == "fine"

    assert list(asked.shapes) == [RequestShape(3, 20), RequestShape(3, 15), RequestShape(1, 199)]
    block = 2 * 28 * 8 * 128 * 16 * 4  # K and V, layers, heads, channels, tokens, bytes
    limits, machine = asked.settings["limits"], asked.settings["machine"]
    assert (limits.device_bytes, limits.host_bytes) == (5 * block, 4 * block)
    assert machine.devices_per_node == 4
    assert asked.settings["chosen"] == PAIR


def test_many_rows_are_taken_to_be_like_some_of_them(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [("word " * (1 + row // 500), SamplingParams(max_tokens=7)) for row in range(1000)]
    llm = make_llm(**MEASURED)
    encoded: list[str] = []
    encode = llm.tokenizer.encode
    monkeypatch.setattr(llm.tokenizer, "encode", lambda text: encoded.append(text) or encode(text))
    advice_for(llm, PAIR, rows)

    assert len(encoded) == 200
    assert [(shape.input_tokens, shape.output_tokens) for shape in asked.shapes] == [
        (1, 7)
    ] * 500 + [(2, 7)] * 500


def test_prompts_that_will_be_refused_are_left_out(asked: Asked) -> None:
    params = SamplingParams(max_tokens=3)
    rows = [("word " * 300, params), ("", params), ("a b", params)]
    advice_for(make_llm(**MEASURED), PAIR, rows)

    assert set(asked.shapes) == {RequestShape(2, 3)}
    assert advice_for(make_llm(**MEASURED), PAIR, rows[:1]) is None


def test_without_measured_speeds_nothing_is_said(asked: Asked) -> None:
    assert advice_for(make_llm(), PAIR, [("a", SamplingParams())]) is None


def test_what_the_planner_refuses_is_a_line() -> None:
    said = advice_for(make_llm(**MEASURED), PAIR, [("word " * 100, SamplingParams(max_tokens=50))])
    assert said is not None
    assert said.startswith("nothing can be predicted: its KV cache holds 80 tokens")


def test_the_planner_answers() -> None:
    said = advice_for(
        make_llm(**MEASURED), PAIR, [("word " * 8, SamplingParams(max_tokens=4))] * 20
    )
    assert said is not None
    assert said.startswith("predicted: ")
    assert "under D2P2->D2T2" in said
