"""--pp, --tp, --pp-split and --trace: on their way from the command line to the engine's settings."""

from typing import Any

import msgspec
import pytest

from nanoserve.commands.application import application
from nanoserve.commands.workers_options import ServingOptions, WorkersOptions
from nanoserve.config import EngineConfig
from nanoserve.errors import UsageError
from nanoserve.server.messages import EngineStart


def engine_of(*words: str) -> WorkersOptions:
    """What a command is handed as its engine."""
    import typer

    action: Any = typer.main.get_command(application()).main(args=list(words), standalone_mode=False)
    engine = action.keywords["engine"]
    assert isinstance(engine, WorkersOptions)
    return engine


@pytest.mark.parametrize("command", [["generate", "Once"], ["chat"], ["serve"], ["bench", "latency"]])
def test_the_layout_reaches_the_engines_settings(command: list[str]) -> None:
    config = EngineConfig(**engine_of(*command, "--pp", "2", "--tp", "3", "--pp-split", "20,10").settings())

    assert (config.pipeline_parallel, config.tensor_parallel, config.pipeline_split) == (2, 3, (20, 10))
    assert config.num_workers == 6


def test_the_trace_of_a_run_is_not_the_trace_that_gives_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine_of("generate", "Once", "--trace", "run.json").settings()["trace"] == "run.json"
    assert engine_of("bench", "throughput", "--trace", "lengths.csv").settings()["trace"] is None
    assert engine_of("bench", "throughput", "--trace-out", "run.json").settings()["trace"] == "run.json"
    monkeypatch.setenv("NANOSERVE_TRACE", "lengths.csv")  # must not be written over by a command that draws its run
    assert engine_of("generate", "Once").settings()["trace"] is None


def test_a_server_that_bench_starts_is_told_the_layout() -> None:
    flags = engine_of("bench", "serve", "--pp", "2", "--pp-split", "4,2", "--trace-out", "run.json").flags()

    assert engine_of("serve", *flags).settings()["pipeline_split"] == (4, 2)
    assert engine_of("serve", *flags).settings()["trace"] == "run.json"


def test_the_engine_process_reads_the_layout_that_it_is_sent() -> None:
    config = EngineConfig(pipeline_parallel=2, tensor_parallel=2, pipeline_split=(4, 2), trace="run.json")
    start = EngineStart("storyteller", None, "tokenizer", config)

    assert msgspec.json.decode(msgspec.json.encode(start), type=EngineStart) == start


@pytest.mark.parametrize("split", ["", "4,", "4;2", "four", "-4,2", "٤,2", "4,2.0"])
def test_a_split_that_is_none_is_one_clear_line(split: str) -> None:
    with pytest.raises(UsageError, match=r"--pp-split .* is no list of layers such as 14,14"):
        ServingOptions(pp=2, pp_split=split).settings()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pipeline_parallel": 0}, "pipeline_parallel must be from 1 to 64, not 0"),
        ({"tensor_parallel": 65}, "tensor_parallel must be from 1 to 64, not 65"),
        ({"pipeline_parallel": 2, "device": "cuda:1"}, "device cuda:1 with 2 workers: say cuda"),
        ({"pipeline_split": (4, 2)}, "--pp-split 4,2 names 2 stages, but --pp is 1: give one number for each stage"),
        ({"pipeline_parallel": 2, "pipeline_split": (6, 0)}, "--pp-split 6,0: every stage needs at least one layer"),
    ],
)
def test_layouts_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        EngineConfig(**settings)
