"""Layouts, the size of host memory and --record: on their way from the command line to the settings
of the engine."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from nanoserve.commands.engine_options import WorkersOptions
from nanoserve.commands.main import application
from nanoserve.engine_config import EngineConfig
from nanoserve.errors import UsageError
from nanoserve.executor.workers.messages import WorkerStart
from nanoserve.lab.commands.bench_pipeline import PipelineOptions, StageComparison
from nanoserve.layout import ParallelLayout
from nanoserve.models.hub import ResolvedModel
from nanoserve.scheduler import POLICIES
from nanoserve.server.messages import EngineStart


def engine_of(*words: str) -> WorkersOptions:
    """Stands for the engine that a command is handed."""

    action: Any = application().main(args=list(words), standalone_mode=False)
    (engine,) = action.args
    assert isinstance(engine, WorkersOptions)
    return engine


@pytest.mark.parametrize(
    "command", [["generate", "Once"], ["chat"], ["serve"], ["bench", "latency"]]
)
def test_the_layout_reaches_the_engines_settings(command: list[str]) -> None:
    config = EngineConfig(
        **engine_of(*command, "--pp", "2", "--tp", "3", "--pp-split", "20,10").settings()
    )

    assert (config.pipeline_parallel, config.tensor_parallel, config.pipeline_split) == (
        2,
        3,
        (20, 10),
    )
    assert config.num_workers == 6


def test_the_trace_of_a_run_is_not_the_trace_that_gives_lengths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert engine_of("generate", "Once", "--record", "run.json").settings()["trace"] == "run.json"
    assert engine_of("bench", "throughput", "--trace", "lengths.csv").settings()["trace"] is None
    assert (
        engine_of("bench", "throughput", "--record", "run.json").settings()["trace"] == "run.json"
    )
    # must not be written over by a command that draws its run
    monkeypatch.setenv("NANOSERVE_TRACE", "lengths.csv")
    assert engine_of("generate", "Once").settings()["trace"] is None


def test_a_server_that_bench_starts_is_told_the_layout() -> None:
    flags = engine_of(
        "bench", "serve", "--pp", "2", "--pp-split", "4,2", "--record", "run.json"
    ).flags()

    assert engine_of("serve", *flags).settings()["pipeline_split"] == (4, 2)
    assert engine_of("serve", *flags).settings()["trace"] == "run.json"


def test_the_engine_process_reads_the_layout_that_it_is_sent() -> None:
    config = EngineConfig(
        pipeline_parallel=2, tensor_parallel=2, pipeline_split=(4, 2), trace="run.json"
    )
    start = EngineStart(ResolvedModel("storyteller", None, Path("tokenizer")), config)

    line = msgspec.json.encode(start, enc_hook=str)
    assert (
        msgspec.json.decode(line, type=EngineStart, dec_hook=lambda kind, text: kind(text)) == start
    )


def test_an_open_layout_reaches_the_engines_settings() -> None:
    engine = engine_of("serve", "--parallel", "auto", "--devices", "2", "--policy", "auto")
    assert EngineConfig(**engine.settings()) == EngineConfig(
        parallel="auto", devices=2, policy="auto"
    )
    assert engine_of("generate", "Once", *engine.flags()).settings() == engine.settings()
    with pytest.raises(UsageError, match="--parallel auto chooses the layout itself"):
        words = ["--prefill-parallel", "p2", "--decode-parallel", "t2", "--parallel", "auto"]
        EngineConfig(**engine_of("generate", "Once", *words).settings())


PAIR = EngineConfig(
    tensor_parallel=2,
    pipeline_parallel=2,
    data_parallel=2,
    decode_layout=ParallelLayout(tensor_parallel=4),
    host_kv_memory=4 * 1024**3,
)


@pytest.mark.parametrize(
    "command", [["generate", "Once"], ["chat"], ["serve"], ["bench", "throughput"]]
)
def test_two_layouts_reach_the_engines_settings(command: list[str]) -> None:
    words = [
        "--prefill-parallel",
        "d2t2p2",
        "--decode-parallel",
        "D2T4",
        "--host-kv-memory",
        "4GiB",
    ]
    config = EngineConfig(**engine_of(*command, *words).settings())

    assert config == PAIR
    assert [layout.name for layout in config.layouts] == ["T2P2", "T4"]
    assert (config.num_workers, config.policy_name) == (4, "seesaw")


@pytest.mark.parametrize(
    "command", [["generate", "Once"], ["chat"], ["serve"], ["bench", "throughput"]]
)
def test_attention_in_host_memory_reaches_the_engines_settings(command: list[str]) -> None:
    words = [
        "--policy",
        "hybrid",
        "--host-kv-memory",
        "1GiB",
        "--host-threads",
        "3",
        "--profile",
        "profile.json",
    ]
    config = EngineConfig(**engine_of(*command, *words).settings())

    assert (config.host_kv_memory, config.host_threads, config.profile) == (
        1024**3,
        3,
        "profile.json",
    )
    assert config.attends_on_host and config.uses_host_memory


def test_attention_in_host_memory_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NANOSERVE_POLICY", "neo")
    monkeypatch.setenv("NANOSERVE_HOST_THREADS", "3")
    monkeypatch.setenv("NANOSERVE_PROFILE", "profile.json")
    config = EngineConfig(**engine_of("generate", "Once").settings())

    assert (config.policy_name, config.host_threads, config.profile) == ("neo", 3, "profile.json")


def test_the_engine_knows_which_policies_attend_in_host_memory() -> None:
    on_host = ["neo", "overlap", "apex", "hybrid"]
    assert [name for name, entry in POLICIES.items() if entry.attends_on_host] == on_host
    assert [name for name in POLICIES if EngineConfig(policy=name).uses_host_memory] == on_host


def test_two_layouts_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOSERVE_PREFILL_PARALLEL", "d2t2p2")
    monkeypatch.setenv("NANOSERVE_DECODE_PARALLEL", "d2t4")
    monkeypatch.setenv("NANOSERVE_HOST_KV_MEMORY", "4GiB")

    assert EngineConfig(**engine_of("generate", "Once").settings()) == PAIR


def test_one_layout_has_the_default_policy_and_no_host_memory() -> None:
    config = EngineConfig(**engine_of("generate", "Once", "--pp", "2").settings())

    assert config.layouts == (ParallelLayout(pipeline_parallel=2),)
    assert (config.policy_name, config.data_parallel, config.host_kv_memory) == ("sarathi", 1, None)


def test_several_engines_have_one_layout_too() -> None:
    engine = engine_of("generate", "Once", "--dp", "3", "--tp", "2")
    assert engine.layouts() == (ParallelLayout(data_parallel=3, tensor_parallel=2),)
    config = EngineConfig(**engine.settings())
    assert (config.data_parallel, config.layouts) == (3, (ParallelLayout(tensor_parallel=2),))


def test_a_worker_reads_the_layouts_that_it_is_sent() -> None:
    start = WorkerStart(
        rank=0,
        local_rank=0,
        plans="plans",
        reports="reports",
        engine_key="k" * 40,
        init_method="file",
        model=ResolvedModel("storyteller", None, Path("tokenizer")),
        config=PAIR,
    )
    read = WorkerStart.read(start.line())

    assert read == start
    assert read.config.layouts == PAIR.layouts


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["--prefill-parallel", "p4"],
            "give both --prefill-parallel and --decode-parallel, or neither",
        ),
        (
            ["--decode-parallel", "t4"],
            "give both --prefill-parallel and --decode-parallel, or neither",
        ),
        (["--prefill-parallel", "x4", "--decode-parallel", "t4"], "'x4' is no layout such as P4"),
        (
            ["--prefill-parallel", "p4", "--decode-parallel", "t2"],
            "--prefill-parallel P4 takes 4 devices and --decode-parallel T2 2: both run on the "
            "same ones",
        ),
        (
            ["--prefill-parallel", "d2p2", "--decode-parallel", "d2t4"],
            "--prefill-parallel D2P2 takes 4 devices and --decode-parallel D2T4 8: both run on the "
            "same ones",
        ),
        (
            ["--prefill-parallel", "d2p2", "--decode-parallel", "t4"],
            "--prefill-parallel D2P2 and --decode-parallel T4 differ in D, the number of whole "
            "engines: give both",
        ),
        (
            ["--prefill-parallel", "t1", "--decode-parallel", "t1"],
            "--prefill-parallel T1 and --decode-parallel T1 are one layout: there is nothing to "
            "change",
        ),
        (
            ["--prefill-parallel", "p65", "--decode-parallel", "t65"],
            "pipeline_parallel must be from 1 to 64, not 65",
        ),
        (
            ["--prefill-parallel", "t5p13", "--decode-parallel", "p65"],
            "decode_layout P65: a degree must be from 1",
        ),
        (
            ["--prefill-parallel", "d65p2", "--decode-parallel", "d65t2"],
            "data_parallel must be from 1 to 64, not 65",
        ),
        (
            ["--prefill-parallel", "p2", "--decode-parallel", "t2", "--policy", "sarathi"],
            "--policy sarathi runs under one layout; leave it out with --prefill-parallel and "
            "--decode-parallel, which",
        ),
        *(
            (
                ["--prefill-parallel", "p2", "--decode-parallel", "t2", *more],
                "--prefill-parallel and --decode-parallel replace --dp, --pp, --tp and --pp-split: "
                "leave these out",
            )
            for more in (["--dp", "2"], ["--pp", "2"], ["--tp", "2"], ["--pp-split", "3,3"])
        ),
        (
            ["--prefill-parallel", "p2", "--decode-parallel", "t2", "--policy", "hybrid"],
            "--policy hybrid runs under one layout; leave it out with --prefill-parallel and "
            "--decode-parallel, which",
        ),
        (
            ["--policy", "neo", "--tp", "2"],
            "--policy neo has the CPU attend beside whole layers, which --tp 2 divides",
        ),
        (
            ["--host-threads", "2"],
            "--host-threads is for policies that attend in host memory, which sarathi does not",
        ),
        (
            ["--policy", "throttling", "--profile", "profile.json"],
            "--profile is for policies that attend in host memory, which throttling does not: "
            "leave it out or choose "
            "--policy neo, overlap, apex or hybrid",
        ),
        (["--host-kv-memory", "much"], "'much' is not a size"),
        (["--host-kv-memory", "1025tib"], "host_kv_memory must be from 1 to"),
    ],
)
def test_layouts_and_sizes_that_make_no_sense_are_one_clear_line(
    words: list[str], line: str
) -> None:
    with pytest.raises(UsageError) as caught:
        EngineConfig(**engine_of("generate", "Once", *words).settings())
    assert str(caught.value).startswith(line)


def test_policies_are_compared_on_one_layout() -> None:
    engine = engine_of(
        "bench", "pipeline", "--pp", "1", "--prefill-parallel", "p2", "--decode-parallel", "t2"
    )
    assert isinstance(engine, PipelineOptions)

    with pytest.raises(UsageError, match="policies are compared on one layout"):
        StageComparison(engine)


def test_bench_alone_is_the_benchmark_of_everyday_use() -> None:
    assert engine_of("bench") == engine_of("bench", "latency")


@pytest.mark.parametrize("split", ["", "4,", "4;2", "four", "-4,2", "٤,2", "4,2.0"])
def test_a_split_that_is_none_is_one_clear_line(split: str) -> None:
    with pytest.raises(UsageError, match=r"--pp-split .* is no list of layers such as 14,14"):
        WorkersOptions(pp=2, pp_split=split).settings()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pipeline_parallel": 0}, "pipeline_parallel must be from 1 to 64, not 0"),
        ({"policy": "neo", "host_threads": 0}, "host_threads must be from 1 to 1024, not 0"),
        ({"policy": "neo", "host_threads": 1025}, "host_threads must be from 1 to 1024, not 1025"),
        ({"tensor_parallel": 65}, "tensor_parallel must be from 1 to 64, not 65"),
        ({"pipeline_parallel": 2, "device": "cuda:1"}, "device cuda:1 with 2 workers: say cuda"),
        (
            {"pipeline_split": (4, 2)},
            "--pp-split 4,2 names 2 stages, but --pp is 1: give one number for each stage",
        ),
        (
            {
                "pipeline_parallel": 2,
                "pipeline_split": (4, 2),
                "decode_layout": ParallelLayout(tensor_parallel=2),
            },
            "--pp-split is for one layout; leave it out with --prefill-parallel and "
            "--decode-parallel",
        ),
        (
            {"pipeline_parallel": 2, "decode_layout": ParallelLayout(data_parallel=2)},
            "decode_layout D2 is that of one engine: leave the D to data_parallel",
        ),
        (
            {"pipeline_parallel": 2, "pipeline_split": (6, 0)},
            "--pp-split 6,0: every stage needs at least one layer",
        ),
    ],
)
def test_layouts_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        EngineConfig(**settings)
