"""Settings that the user leaves open are chosen from measured speeds; here by speeds of a made-up
machine."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nanoserve.config.published_shapes import load_shape
from nanoserve.costs.hardware import MachineSpeeds
from nanoserve.costs.step_costs import StepCosts
from nanoserve.engine_config import EngineConfig
from nanoserve.errors import UsageError
from nanoserve.executor.start.rendezvous import TorchrunProcess
from nanoserve.lab import auto_parallel
from nanoserve.lab.auto_parallel import choose_settings
from nanoserve.layout import ParallelLayout
from nanoserve.models.hub import ResolvedModel
from nanoserve.request import RequestShape

MODEL = load_shape("qwen3-0.6b")
SPEEDS = MachineSpeeds(
    memory_bandwidth=7e9, flops=5e11, host_link_bandwidth=7e9, link_bandwidth=2e8, link_latency=2e-5
)
SOME = [RequestShape(512, 64)] * 16
"""For these, with this link, prompts belong in a pipeline, and answers do not."""


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineConfig, int]]:
    """The calls for a measurement, which takes no time."""
    calls: list[tuple[EngineConfig, int]] = []

    def measure(resolved: ResolvedModel, config: EngineConfig, devices: int, progress: Any) -> Any:
        calls.append((config, devices))
        machine = SPEEDS.machine(devices=devices, memory_bytes=8e9, host_memory_bytes=8e9 * devices)
        return type(
            "Measured",
            (),
            {"costs": staticmethod(lambda model, layout: StepCosts(model, machine, layout))},
        )

    monkeypatch.setattr(auto_parallel, "measure_layouts", measure)
    return calls


def choose(config: EngineConfig, shapes: Sequence[RequestShape] = ()) -> tuple[EngineConfig, str]:
    resolved = ResolvedModel("dummy:qwen3-0.6b", None, Path("tokenizer"))
    return choose_settings(resolved, config, MODEL, None, lambda longest: shapes)


def test_what_is_given_is_not_chosen() -> None:
    assert not EngineConfig(tensor_parallel=2, policy="throttling").leaves_open
    assert (
        EngineConfig(policy="auto").leaves_open
        and EngineConfig(parallel="auto", devices=2).leaves_open
    )


def test_a_known_batch_may_run_under_two_layouts(measured: list[Any]) -> None:
    config, said = choose(EngineConfig(parallel="auto", devices=2, max_num_seqs=64), SOME)
    assert config == EngineConfig(
        pipeline_parallel=2,
        decode_layout=ParallelLayout(tensor_parallel=2),
        policy="seesaw",
        max_num_seqs=64,
    )
    assert said.startswith("P2->T2 with seesaw: predicted ") and "\n" not in said
    assert measured == [(EngineConfig(max_num_seqs=64), 2)]


def test_without_requests_the_usual_ones_come_at_a_rate(measured: list[Any]) -> None:
    config, said = choose(EngineConfig(parallel="auto", devices=2))
    assert config.decode_layout is None
    assert "requests/s; next " in said


def test_a_small_pool_or_a_given_policy_leaves_pairs_out(measured: list[Any]) -> None:
    ask = partial(EngineConfig, parallel="auto", devices=2)
    assert choose(ask(host_kv_memory=2**20), SOME)[0].decode_layout is None
    kept, _ = choose(ask(policy="throttling:iterations=4"), SOME)
    assert (kept.decode_layout, kept.policy) == (None, "throttling:iterations=4")


def test_the_policy_of_given_layouts_is_chosen_where_there_is_a_choice(measured: list[Any]) -> None:
    stages, said = choose(EngineConfig(pipeline_parallel=2, policy="auto"), SOME)
    assert stages.policy in ("sarathi", "throttling", "adaptive") and stages.pipeline_parallel == 2
    assert "; next P2 with " in said
    assert len(measured) == 1
    for config, policy in (
        (EngineConfig(policy="auto"), "sarathi"),
        (EngineConfig(policy="auto", host_kv_memory=2**30), "hybrid"),
        (
            EngineConfig(
                policy="auto", tensor_parallel=2, decode_layout=ParallelLayout(pipeline_parallel=2)
            ),
            "seesaw",
        ),
    ):
        assert choose(config) == (
            EngineConfig(
                **{name: getattr(config, name) for name in config.__slots__} | {"policy": policy}
            ),
            f"{policy}: no other policy suits this layout",
        )
    assert len(measured) == 1


def test_the_number_of_workers_is_given_or_torchruns(
    measured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="--parallel auto: say by --devices how many workers"):
        choose(EngineConfig(parallel="auto"))
    process = TorchrunProcess(0, 2, 0, 1, "10.0.0.1", 29500, "run")
    monkeypatch.setattr(auto_parallel.TorchrunProcess, "from_environment", lambda: process)
    for shared, layouts in ((True, 2), (False, 1)):  # a pair's workers share a pool
        monkeypatch.setattr(auto_parallel, "on_one_machine", lambda process, shared=shared: shared)
        assert len(choose(EngineConfig(parallel="auto"), SOME)[0].layouts) == layouts
    assert [devices for _, devices in measured] == [2, 2]


@pytest.mark.parametrize(
    "settings, says",
    [
        (
            {"parallel": "auto", "tensor_parallel": 2},
            "--parallel auto chooses the layout itself: leave out --dp, --pp",
        ),
        ({"parallel": "auto", "data_parallel": 2}, "--parallel auto chooses the layout itself"),
        ({"parallel": "auto", "pipeline_parallel": 2}, "--parallel auto chooses the layout itself"),
        (
            {"parallel": "auto", "decode_layout": ParallelLayout(pipeline_parallel=1)},
            "leave out .* and --prefill-parallel and --decode-parallel",
        ),
        (
            {"parallel": "auto", "policy": "hybrid"},
            "predicts no attention in host memory: leave out --policy hybrid",
        ),
        ({"parallel": "p2"}, "parallel is auto or left out, not 'p2'"),
        ({"devices": 2}, "--devices is for --parallel auto"),
        ({"parallel": "auto", "devices": 0}, "devices must be from 1 to 64, not 0"),
    ],
)
def test_contradictions_are_one_line(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says) as refused:
        EngineConfig(**settings)
    assert "\n" not in str(refused.value)
