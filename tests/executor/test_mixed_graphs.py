"""Mixed steps that are padded to a graph's numbers of tokens and rows give what they give plainly."""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters

from nanoserve import LLM
from nanoserve.config.model_config import ModelConfig
from nanoserve.config.model_parts import LayerDifferences, MoeConfig
from nanoserve.engine.engine import Engine
from nanoserve.engine_config import EngineConfig
from nanoserve.executor.start import gpu_start
from nanoserve.executor.start.gpu_start import GpuStart
from nanoserve.executor.step.decode_graphs import (
    DecodeGraphs,
    StaticInputs,
    bucket_sizes,
    graph_sizes,
)
from nanoserve.executor.step.forward_pass import Caches, ForwardPass, StepInputs
from nanoserve.executor.step.mixed_graphs import (
    MixedGraphs,
    MixedInputs,
    mixed_sizes,
    most_tokens,
)
from nanoserve.models.attention import AttentionBatch
from nanoserve.models.decoder import Decoder
from nanoserve.request import Request, SamplingParams
from nanoserve.scheduler import make_policy
from nanoserve.scheduler.scheduler import Scheduler
from tests.executor.fake_graphs import (
    CPU,
    STEP_MEMORY,
    FakeRecorder,
    answer_calls_of_cuda,
    put_cpu_in_place_of_gpu,
)
from tests.executor.small_model import VOCAB_SIZE, local_executor, small_config, small_decoder
from tests.fakes.integrity import check_integrity
from triton_ops import reference_operators

BLOCK_SIZE, MOST_BLOCKS = 4, 12
SIZES = [(8, 2), (8, 4), (16, 3), (24, 8), (40, 8)]
"""Far smaller than those of an engine, which begin at 32 tokens."""

MODELS = {
    "plain": small_config(),
    "windows": small_config(sliding_window=6),
    "groups": replace(
        small_config(), num_layers=4, layers=LayerDifferences(sliding_windows=(9, 0, 9, 0))
    ),
    "experts": replace(
        small_config(),
        moe=MoeConfig(4, 2, 16, normalize_weights=True, sparse_layers=frozenset({0, 1})),
    ),
}


@pytest.mark.parametrize(
    ("largest", "max_num_seqs", "sizes"),
    [
        (0, 256, []),
        (31, 256, []),
        (32, 256, [(32, 4), (32, 16)]),
        (100, 256, [(32, 4), (32, 16), (64, 8), (64, 32), (100, 12), (100, 50)]),
        (100, 10, [(32, 4), (32, 10), (64, 8), (64, 10), (100, 10)]),
        (64, 1, [(32, 1), (64, 1)]),
    ],
)
def test_sizes_reach_up_to_what_may_run(
    largest: int, max_num_seqs: int, sizes: list[tuple[int, int]]
) -> None:
    assert mixed_sizes(largest, max_num_seqs) == sizes


def test_there_are_few_graphs_and_each_has_more_tokens_than_rows() -> None:
    """`paged_attention` on a GPU takes as many rows as tokens for single tokens alone."""
    for max_num_seqs in (1, 2, 3, 17, 256, 65536):
        sizes = mixed_sizes(1024, max_num_seqs)
        assert sizes == sorted(set(sizes)) and len(sizes) <= 12
        assert all(0 < rows < tokens and rows <= max_num_seqs for tokens, rows in sizes)


@pytest.mark.parametrize(
    ("hidden", "query", "kv", "inner", "tokens"),
    [
        # by generation 8, 9, 10 and 12, which counts as 8
        (1024, 2048, 1024, 3072, (256, 1024, 1024, 256)),  # Qwen3-0.6B: 15.7 million weights
        (2048, 2048, 512, 8192, (0, 256, 512, 0)),  # Llama-3.2-1B: 60.8 million
        (4096, 4096, 1024, 14336, (0, 0, 128, 0)),  # Llama-3.1-8B: 218.1 million
        (8, 8, 8, 8, (1024, 1024, 1024, 1024)),
    ],
)
def test_graphs_end_where_a_gpu_takes_longer_than_the_host(
    hidden: int, query: int, kv: int, inner: int, tokens: tuple[int, ...]
) -> None:
    weights = hidden * (query + 2 * kv) + query * hidden + 3 * inner * hidden
    assert tuple(most_tokens(weights, generation) for generation in (8, 9, 10, 12)) == tokens


# ---- padded steps equal plain ones ---------------------------------------------------------------


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Memory of torch.empty is NaN here, as that of attention's outputs, where a token of no row
    leaves it."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


NUM_BLOCKS = 8 * MOST_BLOCKS + 1


def random_caches(config: ModelConfig) -> Caches:
    """Random numbers, but NaN in block 0, which no row has."""
    generator = torch.Generator().manual_seed(5)
    shape = (NUM_BLOCKS, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    keys, values = (
        [torch.randn(shape, generator=generator) for _ in range(config.cache_groups.num_tensors)]
        for _ in range(2)
    )
    for cache in (*keys, *values):
        cache[0] = torch.nan
    return Caches(keys, values)


def step_of(rows: list[tuple[int, int]], *, groups: int, seed: int) -> StepInputs:
    """Rows of so many new tokens behind so many that are known, in blocks of their own."""
    generator = torch.Generator().manual_seed(seed)
    lengths, contexts = [new for new, _ in rows], [sum(row) for row in rows]
    width = -(-max(contexts) // BLOCK_SIZE)
    positions = torch.cat(
        [torch.arange(end - new, end) for new, end in zip(lengths, contexts, strict=True)]
    )
    row_of_token = torch.arange(len(rows)).repeat_interleave(torch.tensor(lengths))
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    batches = []
    for _ in range(groups):
        blocks = 1 + torch.randperm(NUM_BLOCKS - 1, generator=generator)
        tables = blocks[: len(rows) * width].view(len(rows), width)
        slots = tables[row_of_token, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        batches.append(AttentionBatch(tables.int(), starts, torch.tensor(contexts).int(), slots))
    ids = torch.randint(0, VOCAB_SIZE, (len(positions),), generator=generator)
    return StepInputs(ids, positions, batches[0], max(lengths), more=tuple(batches[1:]))


class Refused:
    """A ForwardFunction for steps that must not come."""

    def __call__(self, inputs: StepInputs) -> torch.Tensor:
        raise AssertionError("the step is not replayed")


def captured(
    decoder: Decoder, caches: Caches, others: Any, **sizes: Any
) -> tuple[MixedGraphs, FakeRecorder, MixedInputs]:
    static = MixedInputs(
        sizes.get("sizes", SIZES),
        most_blocks=MOST_BLOCKS,
        device=CPU,
        groups=len(decoder.config.cache_groups.windows),
    )
    recorder = FakeRecorder()
    graphs = MixedGraphs(ForwardPass(decoder, caches), static, others)
    graphs.capture(recorder)
    return graphs, recorder, static


ROWS = st.lists(
    st.tuples(st.one_of(st.just(1), st.integers(1, 30)), st.integers(0, 17)),
    min_size=1,
    max_size=8,
).filter(lambda rows: max(rows)[0] > 1 and sum(new for new, _ in rows) <= 40)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("name", MODELS)
@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)
@given(
    first=ROWS,
    second=ROWS,
    operators=st.sampled_from(["plain", "the CPU's"]),
    seed=st.integers(0, 2**31),
)
@example([(30, 17), *[(1, 8)] * 7], [(2, 0)], "plain", 0)
@example([(8, 0)], [(4, 4), (4, 0)], "the CPU's", 1)
@example([(13, 3), (1, 0), (1, 9), (1, 1)], [(2, 5), (1, 7)], "plain", 2)
def test_a_padded_mixed_step_equals_the_plain_one(
    name: str,
    first: list[tuple[int, int]],
    second: list[tuple[int, int]],
    operators: str,
    seed: int,
) -> None:
    """Hidden states and caches of two steps, one after the other: what the first leaves in the
    graphs' inputs is in the way of the second."""
    decoder = small_decoder(MODELS[name])
    groups = len(decoder.config.cache_groups.windows)
    caches, plain_caches = random_caches(decoder.config), random_caches(decoder.config)
    graphs, recorder, _ = captured(decoder, caches, Refused())
    plain = ForwardPass(decoder, plain_caches)
    implementation = reference_operators() if operators == "plain" else nullcontext()
    with torch.inference_mode(), implementation:
        for rows in (first, second):
            step = step_of(rows, groups=groups, seed=seed)
            found = graphs(step)
            assert not found.isnan().any()
            torch.testing.assert_close(found, plain(step))
            tokens = sum(new for new, _ in rows)
            expected = next(size for size, most in SIZES if size >= tokens and most >= len(rows))
            assert recorder.replayed[-1] == expected
    for ours, theirs in zip(
        (*caches.keys, *caches.values), (*plain_caches.keys, *plain_caches.values), strict=True
    ):
        torch.testing.assert_close(ours, theirs, equal_nan=True)


@torch.inference_mode()
def test_padding_has_no_slot_and_no_row() -> None:
    decoder = small_decoder()
    graphs, _, static = captured(decoder, random_caches(decoder.config), Refused())
    graphs(step_of([(5, 3), (4, 0), (1, 2), (9, 9)], groups=1, seed=0))
    graphs(step_of([(3, 3), (2, 0), (1, 9)], groups=1, seed=1))
    batch = static.first(8, 4).batch
    assert batch.query_starts.tolist() == [0, 3, 5, 6, 6]
    assert batch.context_lengths.tolist()[:3] == [6, 2, 10]
    assert batch.slot_mapping.tolist()[6:] == [-1, -1]
    assert (batch.slot_mapping[:6] >= BLOCK_SIZE).all()


def test_other_steps_run_as_before() -> None:
    """Single tokens, more tokens or rows or blocks than any graph has, and steps that tell how far
    they are in their layers."""
    decoder, seen = small_decoder(), list[StepInputs]()

    def others(inputs: StepInputs) -> torch.Tensor:
        seen.append(inputs)
        return torch.empty(0)

    caches = random_caches(decoder.config)
    graphs, recorder, _ = captured(decoder, caches, others)
    steps = [
        step_of([(1, 5), (1, 0)], groups=1, seed=0),
        step_of([(41, 0)], groups=1, seed=0),
        step_of([(2, 0)] * 9, groups=1, seed=0),
        step_of([(2, 4 * MOST_BLOCKS - 1)], groups=1, seed=0),
        replace(step_of([(2, 0)], groups=1, seed=0), computed=lambda layer: None),
    ]
    for step in steps:
        graphs(step)
    assert len(seen) == 5 and all(a is b for a, b in zip(seen, steps, strict=True))
    assert recorder.replayed == []


def test_capturing_records_the_largest_first_and_tells_how_far_it_is() -> None:
    told: list[tuple[str, int, int]] = []
    decoder, recorder = small_decoder(), FakeRecorder()
    static = MixedInputs([(8, 2), (16, 2)], most_blocks=1, device=CPU)
    graphs = MixedGraphs(ForwardPass(decoder, random_caches(decoder.config)), static, Refused())
    graphs.capture(recorder, lambda *now: told.append(now))
    assert recorder.recorded == [16, 8]
    assert told == [("capturing mixed steps", done, 2) for done in range(3)]


# ---- engines -------------------------------------------------------------------------------------


class Run:
    """An engine in a small pool, whose requests come, go and are aborted at set steps."""

    def __init__(self, decoder: Decoder, *, num_blocks: int, **settings: Any) -> None:
        async_scheduling = settings.get("async_scheduling", False)
        executor = local_executor(
            decoder, num_blocks=num_blocks, block_size=4, async_scheduling=async_scheduling
        )
        self.runner = executor.runner
        self.scheduler = Scheduler(
            make_policy("sarathi", settings.get("budget", 24)),
            num_blocks=num_blocks,
            block_size=4,
            max_model_len=48,
            async_scheduling=async_scheduling,
            windows=decoder.config.cache_groups.windows,
        )
        self.engine = Engine(self.scheduler, executor, vocab_size=VOCAB_SIZE)
        self.cached_tokens = self.preemptions = 0
        self.steps = list[tuple[int, int]]()
        """Tokens and rows of each."""

    def capture(self) -> FakeRecorder:
        """Have its steps replayed, as a GPU's are."""
        recorder, config = FakeRecorder(), self.runner.config
        groups, forward = len(config.cache_groups.windows), self.runner.forward
        sizes = graph_sizes(bucket_sizes(2), draft_tokens=False)
        decode = DecodeGraphs(
            forward, StaticInputs(sizes, most_blocks=MOST_BLOCKS, device=CPU, groups=groups)
        )
        static = MixedInputs(SIZES, most_blocks=MOST_BLOCKS, device=CPU, groups=groups)
        mixed = MixedGraphs(forward, static, decode)
        mixed.capture(recorder)
        decode.capture(recorder)
        self.runner.forward = mixed
        return recorder

    def tokens(
        self, requests: list[tuple[int, Request]], aborted: dict[str, int]
    ) -> dict[tuple[str, int], list[int]]:
        """Add each request at its step, and abort some when they have so many tokens. Returns the
        tokens of those that end."""
        forward = self.runner.forward

        def noted(inputs: StepInputs) -> torch.Tensor:
            self.steps.append((len(inputs.token_ids), len(inputs.batch.context_lengths)))
            return forward(inputs)

        self.runner.forward = noted
        found = dict[tuple[str, int], list[int]]()
        waiting, step = list(requests), 0
        while waiting or self.engine.has_work:
            for request in [request for at, request in waiting if at <= step]:
                self.engine.add(request)
            waiting = [(at, request) for at, request in waiting if at > step]
            for update in self.engine.step() if self.engine.has_work else ():
                assert update.sequence.error is None
                self.cached_tokens = max(self.cached_tokens, update.sequence.cached_tokens)
                self.preemptions = max(self.preemptions, update.sequence.preemptions)
                tokens = found.setdefault((update.request_id, update.index), [])
                tokens.extend(update.new_tokens)
                if len(tokens) >= aborted.get(update.request_id, 1000):
                    self.engine.stop(update.request_id)
            check_integrity(self.scheduler)
            step += 1
        self.engine.close()
        return {key: tokens for key, tokens in found.items() if key[0] not in aborted}


def requests() -> list[tuple[int, Request]]:
    """Long and short ones, with common beginnings, greedy and sampled, forked; at which step each
    comes."""
    story = tuple(1 + (number * number) % 59 for number in range(40))
    greedy = SamplingParams(temperature=0, max_tokens=8)
    sampled = SamplingParams(temperature=1.0, max_tokens=7, n=2, frequency_penalty=0.3)
    lengths, steps = (33, 5, 12, 21, 33, 2, 30, 9, 38), (0, 0, 1, 2, 5, 7, 8, 20, 40)
    made = []
    for number, (length, step) in enumerate(zip(lengths, steps, strict=True)):
        prompt = (*story[: length // 2], *story[-length + length // 2 :])
        params = sampled if number % 3 == 1 else greedy
        made.append((step, Request(str(number), prompt, params, seed=number)))
    return made


@pytest.mark.parametrize(
    ("name", "settings", "preempts"),
    [
        ("plain", {"num_blocks": 200}, False),
        ("plain", {"num_blocks": 14}, True),
        ("plain", {"num_blocks": 14, "async_scheduling": True, "budget": 13}, True),
        ("windows", {"num_blocks": 12, "budget": 40}, False),
        ("groups", {"num_blocks": 26, "async_scheduling": True}, False),
        ("experts", {"num_blocks": 14}, True),
    ],
)
def test_an_engine_that_replays_gives_the_tokens_of_one_that_does_not(
    name: str, settings: dict[str, Any], *, preempts: bool
) -> None:
    """Prompts in chunks beside single tokens, in pools too small for all, with prefix hits and
    aborts; each step is replayed by the smallest graph that it fits."""
    decoder = small_decoder(MODELS[name])
    aborted = {"3": 3, "6": 1}
    plain, replaying = Run(decoder, **settings), Run(decoder, **settings)
    expected = plain.tokens(requests(), aborted)
    recorder = replaying.capture()
    assert replaying.tokens(requests(), aborted) == expected
    assert {request for request, _ in expected} == {"0", "1", "2", "4", "5", "7", "8"}
    assert plain.cached_tokens == replaying.cached_tokens == 32
    assert (replaying.preemptions > 0) == preempts
    graphs = [graph_of(*step) for step in replaying.steps]
    assert recorder.replayed == [graph for graph in graphs if graph is not None]
    assert len({8, 16, 24, 40} & set(graphs)) >= 2 and {1, 2, None} <= set(graphs)


def graph_of(tokens: int, rows: int) -> int | None:
    """Tokens of the graph that a step is replayed by, None if it is not: decode steps have up to
    two rows."""
    if tokens == rows:
        return rows if rows <= 2 else None
    return next((size for size, most in SIZES if size >= tokens and most >= rows), None)


# ---- on a GPU, with the CPU in its place ---------------------------------------------------------


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRecorder]:
    yield answer_calls_of_cuda(monkeypatch)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("max_num_seqs", "tokens", "mixed", "decodes"),
    [
        (3, 70, [70, 64, 32], [3, 2, 1]),
        (40, 33, [33, 33, 32, 32], [40, 32, 24, 16, 8, 4, 2, 1]),
        (3, 31, [], [3, 2, 1]),
    ],
)
def test_a_start_captures_mixed_steps_and_counts_their_memory(
    recorder: FakeRecorder, max_num_seqs: int, tokens: int, mixed: list[int], decodes: list[int]
) -> None:
    """The kind with the most tokens is recorded first, and of each kind the largest."""
    decoder = small_decoder().requires_grad_(False)
    config = EngineConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=tokens, block_size=4)
    start, told = GpuStart(decoder, config, CPU), list[str]()
    reserved = start.measure(128, None)
    recorder.recorded.clear()
    compiled = counters["stats"]["unique_graphs"]
    executor = local_executor(decoder, num_blocks=8, block_size=4, layers=start.layers)
    facts = start.capture(executor.runner, 20, lambda stage, *_: told.append(stage))
    assert recorder.recorded == [size for kind in sorted((decodes, mixed))[::-1] for size in kind]
    assert compiled == counters["stats"]["unique_graphs"] > 0, "nothing was left to be compiled"
    assert (facts.graphs, facts.mixed_graphs) == (len(decodes), len(mixed))
    line = f"{len(decodes)} decode steps and {len(mixed)} mixed steps captured"
    assert (line in str(facts)) == ("capturing mixed steps" in told) == bool(mixed)
    graphs = len(decodes + mixed) * gpu_start.GRAPH_BYTES + gpu_start.CAPTURE_WORKSPACE
    graphs += sum(mixed) * 32 * 4  # hidden states in float32
    sampling = 4 * max_num_seqs * VOCAB_SIZE + 2 * len(decodes) * 2**20  # in float32
    share = min(1.0, max(decodes + mixed) / tokens)
    activations = math.ceil(STEP_MEMORY * share)
    assert reserved == STEP_MEMORY + activations + graphs + sampling


@pytest.mark.parametrize(
    "settings", [{"speculate": "ngram"}, {"tensor_parallel": 2}, {"eager": True}]
)
def test_other_engines_capture_no_mixed_steps(
    recorder: FakeRecorder, settings: dict[str, Any]
) -> None:
    """Draft tokens have graphs of their own; several workers capture none."""
    decoder = small_decoder().requires_grad_(False)
    config = EngineConfig(
        max_num_seqs=2, max_num_batched_tokens=64, block_size=4, device="cuda", **settings
    )
    start = GpuStart(decoder, config, CPU)
    start.measure(128, None)
    executor = local_executor(decoder, num_blocks=8, block_size=4, layers=start.layers)
    assert start.capture(executor.runner, 20, None).mixed_graphs == 0
    assert not isinstance(executor.runner.forward, MixedGraphs)


def test_an_engine_replays_mixed_steps_with_the_answers_of_the_cpu(
    recorder: FakeRecorder, monkeypatch: pytest.MonkeyPatch, storyteller: LLM
) -> None:
    """All that is done for a GPU: compiled layers, steps that overlap, samples of the steps."""
    put_cpu_in_place_of_gpu(monkeypatch)
    texts = ["Once upon a time", "The cat", "One day, a boy named Tim went to", "A red kite " * 9]
    prompts = [text * (1 + number % 2) for number, text in enumerate(texts * 2)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=4 + number, prompt_logprobs=1)
        if number % 2
        else SamplingParams(temperature=0.8, top_p=0.9, max_tokens=9 - number, seed=number)
        for number in range(8)
    ]
    expected = [output.outputs[0].token_ids for output in storyteller.generate(prompts, params)]
    settings = {"dtype": "float32", "kv_cache_memory": 2**24, "max_num_batched_tokens": 48}
    with LLM(device="cuda", max_num_seqs=6, **settings) as llm:
        assert llm.built.gpu is not None and llm.built.gpu.mixed_graphs == 3
        assert [output.outputs[0].token_ids for output in llm.generate(prompts, params)] == expected
    assert {32, 48} <= set(recorder.replayed)
