"""Getting a GPU ready, on the CPU: the largest step really runs, and what it is told about memory
is put to use."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from subprocess import CalledProcessError

import pytest
import torch
from torch import Tensor

from nanoserve import LLM
from nanoserve.config.model_parts import CanvasConfig, LayerDifferences, MoeConfig
from nanoserve.engine_config import EngineConfig
from nanoserve.errors import RuntimeFailure
from nanoserve.executor.compile.layer_runner import LayerRunner
from nanoserve.executor.drafting.draft_model import DraftModel
from nanoserve.executor.local import LocalExecutor
from nanoserve.executor.start import gpu_start, predictors
from nanoserve.executor.start.gpu_start import GpuStart, run_largest_step
from nanoserve.executor.step.decode_graphs import DecodeGraphs
from nanoserve.executor.step.forward_pass import ForwardPass
from nanoserve.models.attention import AttentionFunction, PagedAttention
from nanoserve.models.decoder import Decoder, DecoderLayer
from nanoserve.models.packed import PackedShape, Segment, pack_layers
from nanoserve.models.shards import make_shards
from nanoserve.request import SamplingParams
from nanoserve.scheduler.plan import Begin, Row, StepPlan
from tests.executor.fake_graphs import (
    CPU,
    STEP_MEMORY,
    FakeRecorder,
    answer_calls_of_cuda,
    put_cpu_in_place_of_gpu,
)
from tests.executor.small_model import dense_greedy, local_executor, small_config, small_decoder
from tests.models.thread_ranks import ThreadGroup, on_every_rank
from triton_ops import PackedFormat

PROMPT = (7, 3, 58, 21, 9)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRecorder]:
    yield answer_calls_of_cuda(monkeypatch)
    torch._dynamo.reset()


@pytest.fixture
def compiled(recorder: FakeRecorder, monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """List the functions that the compiler has been given so far."""
    graphs: list[torch.fx.GraphModule] = []

    def trace(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    monkeypatch.setattr(
        LayerRunner, "torch_compile", partial(LayerRunner.torch_compile, backend=trace)
    )
    return graphs


def executor_of(decoder: Decoder, start: GpuStart) -> LocalExecutor:
    return local_executor(decoder, num_blocks=8, block_size=4, layers=start.layers)


def greedy(executor: LocalExecutor, count: int) -> list[int]:
    tokens = list(PROMPT)
    for step in range(count):
        start = 0 if step == 0 else len(tokens) - 1
        begin = (
            (Begin(1, PROMPT, len(PROMPT), 0, 0, SamplingParams(temperature=0.0)),)
            if step == 0
            else ()
        )
        row = Row(1, start, tuple(tokens[start:]), True, (0, 1, 2) if step == 0 else ())
        executor.submit(StepPlan(step, begin=begin, rows=(row,)))
        (result,) = executor.collect(None)
        tokens += result.answers[0].tokens
    return tokens[len(PROMPT) :]


def test_a_gpu_is_warmed_measured_and_captured(
    recorder: FakeRecorder, compiled: list[torch.fx.GraphModule]
) -> None:
    """Each kind of layer is compiled by the largest step, for more than one token: one token runs
    fused layers. Captures, prompts and decodes find that done."""
    decoder = small_decoder().requires_grad_(False)
    config = EngineConfig(max_num_seqs=3, max_num_batched_tokens=12, block_size=4)
    start, told = GpuStart(decoder, config, CPU), list[tuple[str, int, int]]()
    reserved = start.measure(128, lambda *now: told.append(now))
    graphs = 3 * gpu_start.GRAPH_BYTES + gpu_start.CAPTURE_WORKSPACE
    # of three rows in float32; two graphs for each bucket: the tokens are drawn or not
    sampling = 4 * 3 * decoder.config.vocab_size + 2 * 3 * 2**20
    assert reserved == STEP_MEMORY + STEP_MEMORY * 3 // 12 + graphs + sampling
    assert len(compiled) == 1
    executor = executor_of(decoder, start)
    facts = start.capture(executor.runner, 20, lambda *now: told.append(now))
    assert (facts.compiled, facts.step_memory, facts.graphs, facts.graph_memory) == (
        True,
        STEP_MEMORY,
        3,
        300,
    )
    # many tokens, one token, the other ways of sampling
    assert told[:4] == [("compiling layers", done, 3) for done in range(4)]
    assert [stage for stage, _, _ in told] == ["compiling layers"] * 4 + [
        "capturing decode steps"
    ] * 4
    assert greedy(executor, 4) == dense_greedy(decoder, PROMPT, 4)
    assert recorder.replayed == [1, 1, 1], "the prompt runs plainly"
    assert recorder.sampled == [1, 1, 1, 1], "and is sampled by a graph"
    assert "compiled layers" in str(facts) and "3 decode steps captured" in str(facts)
    assert len(compiled) == 1, "nothing was left to be compiled"


def test_an_engine_on_a_gpu_gives_the_answers_of_the_cpu(
    recorder: FakeRecorder, monkeypatch: pytest.MonkeyPatch, storyteller: LLM
) -> None:
    """All that is done for a GPU, with the CPU in its place: steps overlap too."""
    put_cpu_in_place_of_gpu(monkeypatch)
    prompts = ["Once upon a time", "The cat", "One day, a boy named Tim went to"]
    params = [
        SamplingParams(temperature=0.0, max_tokens=9),
        SamplingParams(temperature=0.8, top_p=0.9, max_tokens=7, seed=3),
        SamplingParams(temperature=1.0, top_k=5, repetition_penalty=1.2, max_tokens=11, seed=4),
    ]
    expected = [output.outputs[0].token_ids for output in storyteller.generate(prompts, params)]
    settings = {
        "dtype": "float32",
        "kv_cache_memory": 2**24,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
    }
    with LLM(device="cuda", **settings) as llm:
        assert llm.built.compiled and llm.built.gpu is not None and llm.built.gpu.graphs == 3
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, params)] == expected
    assert {1, 2, 4} == set(recorder.replayed)


def test_graphs_sample_what_is_all_greedy_or_all_by_temperature(
    recorder: FakeRecorder, monkeypatch: pytest.MonkeyPatch, storyteller: LLM
) -> None:
    """Tokens and log probabilities are the CPU's, in steps that overlap; batches of both kinds, and
    all others, are sampled without a graph."""
    put_cpu_in_place_of_gpu(monkeypatch)
    greedy_one, drawn = SamplingParams(temperature=0.0, max_tokens=6), {"max_tokens": 6, "seed": 5}
    batches = {
        "greedy": [greedy_one] * 3,
        "drawn": [SamplingParams(temperature=value, **drawn) for value in (0.5, 1.0, 2.0)],
        "both": [greedy_one, SamplingParams(temperature=1.0, **drawn)],
        "min_p": [SamplingParams(temperature=1.5, min_p=0.2, **drawn)] * 2,
        "log probabilities": [SamplingParams(temperature=1.0, logprobs=2, **drawn)] * 2,
        "penalties": [SamplingParams(temperature=1.0, frequency_penalty=1.0, **drawn)] * 2,
    }
    prompts = ["Once upon a time", "The cat", "One day, a boy named Tim went to"]
    settings = {"dtype": "float32", "kv_cache_memory": 2**24, "max_num_seqs": 4}
    sampled_by_graphs = set[str]()
    with LLM(device="cuda", **settings) as llm:
        for name, params in batches.items():
            recorder.sampled.clear()
            found, wanted = (
                [
                    output.outputs[0].token_ids
                    for output in engine.generate(prompts[: len(params)], params)
                ]
                for engine in (llm, storyteller)
            )
            assert found == wanted, name
            if len(recorder.sampled) == 6:
                sampled_by_graphs.add(name)
    assert sampled_by_graphs == {"greedy", "drawn"}


@pytest.mark.parametrize("eager", [False, True], ids=["captured", "eager"])
def test_steps_of_a_draft_model_are_captured(
    recorder: FakeRecorder, monkeypatch: pytest.MonkeyPatch, storyteller: LLM, *, eager: bool
) -> None:
    """Steps of one or two tokens a row are, prompts are not, and answers stay the same."""
    put_cpu_in_place_of_gpu(monkeypatch)
    # without predictions, the number of draft tokens does not depend on this machine
    monkeypatch.setattr(predictors, "measure_speeds", lambda device, dtype: None)
    recorders = list[FakeRecorder]()

    def make_recorder(device: torch.device) -> FakeRecorder:
        recorders.append(FakeRecorder())
        return recorders[-1]

    monkeypatch.setattr(gpu_start, "CudaRecorder", make_recorder)
    prompts = ["Once upon a time", "The cat", "One day, a boy named Tim went to"]
    params = [
        SamplingParams(temperature=0.0, max_tokens=24),
        SamplingParams(temperature=0.8, max_tokens=19, seed=3),
        SamplingParams(temperature=1.0, top_k=5, max_tokens=22, seed=4),
    ]
    expected = [output.outputs[0].token_ids for output in storyteller.generate(prompts, params)]
    settings = {
        "dtype": "float32",
        "kv_cache_memory": 2**24,
        "max_num_seqs": 3,
        "speculate": "draft:storyteller-draft",
        "eager": eager,
    }
    with LLM(device="cuda", **settings) as llm:
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, params)] == expected
        tokens_of_graphs = [1, 2, 3, 2, 4, 6]
        if eager:
            assert recorders == []
        else:
            own, drafts = recorders
            assert sorted(drafts.recorded) == sorted(tokens_of_graphs)
            assert len(drafts.replayed) > 20, "one for each draft token"
            assert set(drafts.replayed) >= {1, 2, 3}
            assert len(own.recorded) > len(drafts.recorded), "draft tokens are checked in fours too"


def test_graphs_of_a_draft_model_have_memory_and_may_be_refused(
    recorder: FakeRecorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Then the model's own graphs are there all the same."""
    decoder = small_decoder().requires_grad_(False)
    config = EngineConfig(
        max_num_seqs=3,
        max_num_batched_tokens=12,
        block_size=4,
        speculate="draft:storyteller-draft",
    )
    without, start = GpuStart(decoder, config, CPU), GpuStart(decoder, config, CPU)
    start.expect_draft_model(decoder)
    graphs = 6 * gpu_start.GRAPH_BYTES + gpu_start.CAPTURE_WORKSPACE
    assert start.measure(128, None) == without.measure(128, None) + graphs
    start.draft_model = DraftModel(decoder, num_blocks=4, block_size=4, run_layer=start.layers)
    refusal = RuntimeError("operation not permitted when stream is capturing")
    forward = start.draft_model.forward
    recorders = iter(
        [recorder, RefusingRecorder(refusal), FakeRecorder(), RefusingRecorder(MEMORY)]
    )
    monkeypatch.setattr(gpu_start, "CudaRecorder", lambda device: next(recorders))
    executor = executor_of(decoder, start)
    assert start.capture(executor.runner, 20, None).graphs == len(recorder.recorded) > 0
    assert start.draft_model.forward is forward
    assert "a draft model's steps run uncaptured, which is slower" in caplog.text
    assert greedy(executor, 3) == dense_greedy(decoder, PROMPT, 3)
    assert recorder.replayed[-2:] == [1, 1]
    with pytest.raises(
        RuntimeFailure, match=r"capturing 6 steps of the draft model .* leave --speculate out$"
    ):
        start.capture(executor_of(decoder, start).runner, 20, None)


class RefusingRecorder:
    """Records nothing."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def record(self, step: object) -> None:
        raise self._error


def test_compiled_code_is_kept_in_the_cache_folder(tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path), "TRITON_CACHE_DIR": "/of/the/user"}
    gpu_start.keep_compiled_code(environment)
    assert environment["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "nanoserve" / "inductor")
    assert environment["TRITON_CACHE_DIR"] == "/of/the/user"
    (tmp_path / "file").touch()
    nowhere = {"XDG_CACHE_HOME": str(tmp_path / "file")}
    gpu_start.keep_compiled_code(nowhere)
    assert set(nowhere) == {"XDG_CACHE_HOME"}


def test_pieces_are_compiled_before_the_first_step_that_needs_them(
    compiled: list[torch.fx.GraphModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, needed = small_decoder().requires_grad_(False), iter((STEP_MEMORY, STEP_MEMORY + 1))
    monkeypatch.setattr(
        gpu_start, "measured_memory", lambda device, step: (step(), next(needed))[1]
    )
    config = EngineConfig(
        policy="hybrid", max_num_seqs=2, max_num_batched_tokens=12, block_size=4, device="cuda"
    )
    start = GpuStart(decoder, config, CPU)
    start.measure(128, None)
    # a layer for many tokens, and both pieces for one token and for many
    assert len(compiled) == 5
    executor = executor_of(decoder, start)
    facts = start.capture(executor.runner, 20, None)
    assert facts.step_memory == STEP_MEMORY + 1, "the larger of what is needed"
    executor.runner.forward = ForwardPass(decoder, executor.runner.caches, start.layers.in_pieces)
    assert greedy(executor, 2) == dense_greedy(decoder, PROMPT, 2)
    assert len(compiled) == 5, "nothing is left to be compiled"


def test_steps_with_experts_that_wait_for_the_gpu_are_not_captured(recorder: FakeRecorder) -> None:
    config = EngineConfig(max_num_seqs=2, max_num_batched_tokens=12, block_size=4)
    moe = MoeConfig(4, 2, 16, normalize_weights=True, sparse_layers=frozenset({0}))
    for dtype, graphs in ((torch.float32, 0), (torch.bfloat16, 2)):
        model = replace(
            small_config(), num_layers=1, layers=LayerDifferences(sliding_windows=(0,)), moe=moe
        )
        decoder = Decoder(model).to(dtype).requires_grad_(False)
        start = GpuStart(decoder, config, CPU)  # which counts as a GPU of generation 9
        start.measure(128, None)
        assert start.capture(executor_of(decoder, start).runner, 20, None).graphs == graphs
    assert recorder.recorded == [2, 1]


@pytest.mark.parametrize(
    ("dtype", "speculate", "graphs"),
    [
        pytest.param(torch.bfloat16, None, 7, id="1, 2, 4, 8, 16, 24 and 32 rows"),
        pytest.param(torch.bfloat16, "ngram", 7 + 5 + 4 + 3, id="and 2, 4 or 8 tokens a row"),
        pytest.param(torch.float32, None, 0, id="rows in float32"),
    ],
)
def test_steps_with_packed_experts_are_captured_up_to_a_number_of_tokens(
    recorder: FakeRecorder, dtype: torch.dtype, speculate: str | None, graphs: int
) -> None:
    """Both of two experts take every token: up to 32 rows each are multiplied without waiting."""
    moe = MoeConfig(2, 2, 32, normalize_weights=True, sparse_layers=frozenset({0}))
    layers = LayerDifferences(sliding_windows=(0,))
    decoder = Decoder(replace(small_config(), num_layers=1, layers=layers, moe=moe)).to(dtype)
    form = PackedFormat(8, 32, scale=0, offset=0, zero=0)
    shapes = [
        PackedShape(f"layers.0.feed_forward.{name}", (Segment(0, rows, form, False),), 32, 2)
        for name, rows in (("gate_up", 64), ("down", 32))
    ]
    pack_layers(decoder.requires_grad_(False), shapes)
    config = EngineConfig(
        max_num_seqs=100, max_num_batched_tokens=128, block_size=4, speculate=speculate
    )
    start = GpuStart(decoder, config, CPU)
    start.measure(128, None)
    facts = start.capture(executor_of(decoder, start).runner, 20, None)
    assert facts.graphs == len(recorder.recorded) == graphs
    assert max(recorder.recorded, default=0) == (32 if graphs else 0)


def test_eager_compiles_and_captures_nothing(recorder: FakeRecorder) -> None:
    decoder = small_decoder()
    start = GpuStart(
        decoder,
        EngineConfig(eager=True, max_num_seqs=3, max_num_batched_tokens=12, block_size=4),
        CPU,
    )
    told = list[tuple[str, int, int]]()
    assert start.measure(128, lambda *now: told.append(now)) == STEP_MEMORY
    assert told == [("warming up", done, 3) for done in range(4)]
    executor = executor_of(decoder, start)
    facts = start.capture(executor.runner, 20, None)
    assert (
        not facts.compiled and facts.graphs == facts.graph_memory == 0 and recorder.recorded == []
    )
    assert not isinstance(executor.runner.forward, DecodeGraphs)
    assert greedy(executor, 2) == dense_greedy(decoder, PROMPT, 2)


class OutOfResources(Exception):
    """By the name of Triton's, which is no RuntimeError either."""


MEMORY = torch.OutOfMemoryError("CUDA out of memory")
BUILD = r"install gcc and Python's headers, or set CC to a C compiler \("
FAILURES = [
    (MEMORY, r"a step of 12 tokens .* lower --max-num-batched-tokens or --max-num-seqs$"),
    (RuntimeError("Failed to find C compiler. Please specify via CC environment variable"), BUILD),
    (CalledProcessError(1, ["gcc", "main.c"]), BUILD),
    (
        OutOfResources("out of resource: shared memory, Required: 240000, Hardware limit: 101376."),
        r"cpu is too small for a kernel: out of resource: .* --device cpu$",
    ),
]


class FailingDecoder(Decoder):
    """A small decoder whose steps raise an error."""

    def __init__(self, error: Exception) -> None:
        super().__init__(small_config())
        self._error = error

    def forward(self, *arguments: object, **settings: object) -> Tensor:
        raise self._error


@pytest.mark.parametrize(("error", "line"), FAILURES, ids=lambda value: type(value).__name__)
def test_a_first_step_that_fails_is_one_clear_line(
    recorder: FakeRecorder, error: Exception, line: str
) -> None:
    config = EngineConfig(eager=True, max_num_batched_tokens=12, block_size=4)
    with pytest.raises(RuntimeFailure, match=line) as told:
        GpuStart(FailingDecoder(error), config, CPU).measure(128, None)
    assert "\n" not in str(told.value)


def test_captures_that_do_not_fit_are_one_clear_line(recorder: FakeRecorder) -> None:
    decoder = FailingDecoder(MEMORY)
    executor = executor_of(decoder, GpuStart(decoder, EngineConfig(eager=True), CPU))
    start = GpuStart(decoder, EngineConfig(max_num_seqs=2, block_size=4), CPU)
    with pytest.raises(
        RuntimeFailure, match=r"capturing 2 decode steps .* lower --max-num-seqs or .* --eager$"
    ):
        start.capture(executor.runner, 20, None)


def test_what_cannot_be_captured_runs_plainly(
    recorder: FakeRecorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    decoder = small_decoder()
    start = GpuStart(decoder, EngineConfig(max_num_seqs=2, block_size=4), CPU)
    executor = executor_of(decoder, GpuStart(decoder, EngineConfig(eager=True), CPU))

    def refuse(step: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(recorder, "record", refuse)
    assert start.capture(executor.runner, 20, None).graphs == 0
    assert greedy(executor, 2) == dense_greedy(decoder, PROMPT, 2)
    assert (
        "decode steps run uncaptured" in caplog.text
        and "not permitted when stream is capturing" in caplog.text
    )


@pytest.mark.parametrize(
    "first", [ValueError("experts must wait"), torch.OutOfMemoryError("CUDA out of memory")]
)
def test_the_first_error_of_a_recording_is_told_and_not_how_it_ended(
    recorder: FakeRecorder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    first: Exception,
) -> None:
    """The end of `torch.cuda.graph` fails too, where the step in it has failed."""
    start = GpuStart(small_decoder(), EngineConfig(max_num_seqs=2, block_size=4), CPU)
    executor = executor_of(
        small_decoder(), GpuStart(small_decoder(), EngineConfig(eager=True), CPU)
    )

    def fail(step: object) -> None:
        try:
            raise first
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(recorder, "record", fail)
    if isinstance(first, torch.OutOfMemoryError):
        with pytest.raises(
            RuntimeFailure, match="out of memory on cpu: capturing 2 decode steps does not fit"
        ):
            start.capture(executor.runner, 20, None)
    else:
        assert start.capture(executor.runner, 20, None).graphs == 0
        assert "decode steps run uncaptured, which is slower: experts must wait" in caplog.text


def test_the_largest_step_is_as_large_as_a_step_may_be() -> None:
    decoder, seen = small_decoder(), list[tuple[int, ...]]()

    def run_layer(
        layer: DecoderLayer, hidden: Tensor, cos: Tensor, sin: Tensor, attention: AttentionFunction
    ) -> Tensor:
        assert isinstance(attention, PagedAttention)
        seen.append((len(hidden), *attention.batch.context_lengths.tolist()))
        output: Tensor = layer(hidden, cos, sin, attention)
        return output

    tokens = run_largest_step(decoder, run_layer, num_tokens=11, num_rows=4, block_size=4)
    assert seen == [(11, 8, 1, 1, 1)] * small_config().num_layers
    assert tokens is not None and len(tokens) == 11, (
        "prompt log probabilities may look at every position"
    )


def test_the_largest_step_samples_each_position_of_its_canvases(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows attend by spans, for which programs on a GPU have forms of their own."""
    canvases = replace(small_config(), canvas=CanvasConfig(length=4, mask_token=60))
    decoder, seen = Decoder(canvases), list[list[list[int]]]()
    monkeypatch.setattr(gpu_start, "rows_per_chunk", lambda vocab_size: 1)

    def run_layer(
        layer: DecoderLayer, hidden: Tensor, cos: Tensor, sin: Tensor, attention: AttentionFunction
    ) -> Tensor:
        assert isinstance(attention, PagedAttention) and attention.batch.spans is not None
        seen.append(attention.batch.spans.tolist())
        output: Tensor = layer(hidden, cos, sin, attention)
        return output

    tokens = run_largest_step(decoder, run_layer, num_tokens=11, num_rows=2, block_size=4)
    assert seen == [[[4, 0], [4, 0]]] * canvases.num_layers
    assert tokens is not None and len(tokens) == 8


@pytest.mark.parametrize("stages", [1, 2])
def test_every_shard_of_a_model_has_a_largest_step(stages: int) -> None:
    """A later stage begins with hidden states; only the first rank of the last stage samples."""
    shards = make_shards(small_config(), pipeline_parallel=stages, tensor_parallel=2)

    def run(rank: int, group: ThreadGroup) -> int | None:
        decoder = Decoder(small_config(), shard=shards[first + rank], group=group).eval()
        tokens = run_largest_step(
            decoder, DecoderLayer.__call__, num_tokens=11, num_rows=4, block_size=4
        )
        return None if tokens is None else len(tokens)

    for first in range(0, len(shards), 2):
        assert on_every_rank(run, 2) == ([11, None] if shards[first].is_last else [None, None])
