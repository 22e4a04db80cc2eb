"""Decode steps that are padded to a bucket and replayed give what they give plainly; all others do
run plainly."""

import pytest
import torch

from nanoserve.executor.drafting.features import FeatureCache, FeaturePass
from nanoserve.executor.step.decode_graphs import (
    DecodeGraphs,
    StaticInputs,
    bucket_sizes,
    fill,
    graph_sizes,
)
from nanoserve.executor.step.forward_pass import Caches, ForwardPass, StepInputs
from nanoserve.models.attention import AttentionBatch
from nanoserve.models.decoder import Decoder, DecoderLayer
from tests.executor.fake_graphs import FakeRecorder
from tests.executor.small_model import VOCAB_SIZE, small_config, small_decoder

BLOCK_SIZE, NUM_BLOCKS, MOST_BLOCKS = 4, 40, 3
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (4, (1, 2, 4)),
        (8, (1, 2, 4, 8)),
        (30, (1, 2, 4, 8, 16, 24, 30)),
        (256, (1, 2, 4, *range(8, 257, 8))),
        (300, (1, 2, 4, *range(8, 257, 8), 300)),
        (400, (1, 2, 4, *range(8, 257, 8), 320, 384, 400)),
        (10_000, (1, 2, 4, *range(8, 257, 8), *range(320, 1025, 64))),
    ],
)
def test_buckets_reach_up_to_what_may_run(max_num_seqs: int, sizes: tuple[int, ...]) -> None:
    assert bucket_sizes(max_num_seqs) == sizes


def random_caches(decoder: Decoder) -> Caches:
    config, generator = decoder.config, torch.Generator().manual_seed(5)
    shape = (NUM_BLOCKS, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    keys, values = (
        [torch.randn(shape, generator=generator) for _ in range(config.num_layers)]
        for _ in range(2)
    )
    return Caches(keys, values)


def feature_cache(decoder: Decoder) -> FeatureCache:
    """Cache of the outputs of the first and the last layer."""
    return FeatureCache(
        2 * decoder.config.hidden_size,
        layers=(0, decoder.config.num_layers - 1),
        fuse=torch.nn.Identity(),
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        dtype=torch.float32,
        device=CPU,
    )


def decode_step(rows: int, seed: int, *, most_blocks: int = MOST_BLOCKS) -> StepInputs:
    """Rows of random contexts; each has blocks of its own, from block 1 on."""
    generator = torch.Generator().manual_seed(seed)
    contexts = torch.randint(1, most_blocks * BLOCK_SIZE + 1, (rows,), generator=generator)
    width = int(contexts.max() - 1) // BLOCK_SIZE + 1
    order = 1 + torch.randperm(NUM_BLOCKS - 1, generator=generator)
    tables = order[: rows * width].view(rows, width)
    last = contexts - 1
    return StepInputs(
        token_ids=torch.randint(0, VOCAB_SIZE, (rows,), generator=generator),
        positions=last,
        batch=AttentionBatch(
            block_tables=tables.int(),
            query_starts=torch.arange(rows + 1, dtype=torch.int32),
            context_lengths=contexts.int(),
            slot_mapping=tables[torch.arange(rows), last // BLOCK_SIZE] * BLOCK_SIZE
            + last % BLOCK_SIZE,
        ),
        longest=1,
    )


def poison(inputs: StepInputs) -> None:
    """Fill the inputs as if an earlier step had used all rows: its slots, contexts and blocks are in the way."""
    inputs.token_ids.fill_(7)
    inputs.positions.fill_(3)
    inputs.batch.slot_mapping.copy_(torch.arange(len(inputs.token_ids)) + BLOCK_SIZE)
    inputs.batch.context_lengths.fill_(MOST_BLOCKS * BLOCK_SIZE)
    inputs.batch.block_tables.fill_(NUM_BLOCKS - 1)


def test_a_padded_decode_step_equals_the_plain_one() -> None:
    decoder = small_decoder(small_config(sliding_window=6))
    caches, plain_caches = random_caches(decoder), random_caches(decoder)
    for cache in (*caches.keys, *caches.values, *plain_caches.keys, *plain_caches.values):
        cache[0] = torch.nan  # what padding reads is nobody's business
    buckets, recorder = bucket_sizes(11), FakeRecorder()
    static = StaticInputs(
        graph_sizes(buckets, draft_tokens=False), most_blocks=MOST_BLOCKS, device=CPU
    )
    features, plain_features = feature_cache(decoder), feature_cache(decoder)
    graphs = DecodeGraphs(FeaturePass(decoder, caches, DecoderLayer.__call__, features), static)
    graphs.capture(recorder)
    assert recorder.recorded == [11, 8, 4, 2, 1], "the largest first"
    plain = FeaturePass(decoder, plain_caches, DecoderLayer.__call__, plain_features)
    with torch.inference_mode():
        for rows in [*range(1, 12), 3, 1, 11, 2]:
            poison(static.first(buckets[-1]))
            step = decode_step(rows, seed=rows)
            torch.testing.assert_close(graphs(step), plain(step))
            bucket = recorder.replayed[-1]
            assert bucket == min(size for size in buckets if size >= rows)
            kept = features.read(step.batch.slot_mapping)
            assert (kept != 0).any(1).all()
            torch.testing.assert_close(kept, plain_features.read(step.batch.slot_mapping))
    slots = torch.arange(NUM_BLOCKS * BLOCK_SIZE)
    torch.testing.assert_close(features.read(slots), plain_features.read(slots))
    for ours, theirs in zip(
        (*caches.keys, *caches.values), (*plain_caches.keys, *plain_caches.values), strict=True
    ):
        torch.testing.assert_close(ours, theirs, equal_nan=True)


@torch.inference_mode()
def test_padding_is_ignored_whatever_it_computes() -> None:
    static = StaticInputs([(4, 1)], most_blocks=MOST_BLOCKS, device=CPU)
    bucket = static.first(4)
    poison(bucket)
    fill(bucket, decode_step(3, seed=1))
    assert bucket.batch.slot_mapping.tolist()[3:] == [-1]
    assert bucket.batch.context_lengths.tolist()[3:] == [1]
    assert bucket.batch.query_starts.tolist() == [0, 1, 2, 3, 4]
    assert (
        0 <= int(bucket.batch.block_tables[3, 0]) < NUM_BLOCKS
        and 0 <= int(bucket.token_ids[3]) < VOCAB_SIZE
    )


def test_all_other_steps_run_plainly() -> None:
    """More tokens than rows, more rows than the largest bucket, more blocks than a sequence was to
    have."""
    decoder = small_decoder()
    caches, recorder = random_caches(decoder), FakeRecorder()
    forward = ForwardPass(decoder, caches)
    graphs = DecodeGraphs(
        forward, StaticInputs([(1, 1), (2, 1)], most_blocks=MOST_BLOCKS, device=CPU)
    )
    graphs.capture(recorder)
    prompt = StepInputs(
        token_ids=torch.arange(6),
        positions=torch.tensor([0, 1, 2, 3, 4, 5]),
        batch=AttentionBatch(
            block_tables=torch.tensor([[1, 2]], dtype=torch.int32),
            query_starts=torch.tensor([0, 6], dtype=torch.int32),
            context_lengths=torch.tensor([6], dtype=torch.int32),
            slot_mapping=torch.arange(4, 10),
        ),
        longest=6,
    )
    with torch.inference_mode():
        long = next(
            step
            for seed in range(100)
            if (step := decode_step(2, seed, most_blocks=MOST_BLOCKS + 1)).batch.block_tables.shape[
                1
            ]
            > MOST_BLOCKS
        )
        for step in (prompt, decode_step(3, seed=0), long):
            torch.testing.assert_close(graphs(step), forward(step))
    assert recorder.replayed == []


def test_capturing_tells_how_far_it_is() -> None:
    told: list[tuple[str, int, int]] = []
    decoder = small_decoder()
    static = StaticInputs([(1, 1), (2, 1)], most_blocks=1, device=CPU)
    graphs = DecodeGraphs(ForwardPass(decoder, random_caches(decoder)), static)
    graphs.capture(FakeRecorder(), lambda *now: told.append(now))
    assert told == [("capturing decode steps", done, 2) for done in range(3)]


def test_rows_with_draft_tokens_are_padded_behind() -> None:
    """Rows of 1 to 8 tokens, a prompt's first ones among them, equal the plain step, and write
    nothing else."""
    decoder = small_decoder(small_config(sliding_window=6))
    caches, plain_caches = random_caches(decoder), random_caches(decoder)
    recorder, sizes = FakeRecorder(), graph_sizes(bucket_sizes(3), draft_tokens=True)
    assert sizes == [
        (1, 1),
        (2, 1),
        (3, 1),
        *((rows, width) for width in (2, 4, 8) for rows in (1, 2, 3)),
    ]
    graphs = DecodeGraphs(
        ForwardPass(decoder, caches), StaticInputs(sizes, most_blocks=MOST_BLOCKS, device=CPU)
    )
    graphs.capture(recorder)
    plain = ForwardPass(decoder, plain_caches)
    with torch.inference_mode():
        for lengths, contexts, replayed in [
            ((2,), (9,), 2),
            ((1, 3), (4, 12), 8),
            ((8, 1, 5), (12, 1, 7), 24),
            ((2, 2, 2), (2, 5, 8), 6),
            ((1, 1, 4), (1, 1, 4), 12),
        ]:
            step = drafting_step(lengths, contexts)
            torch.testing.assert_close(graphs(step), plain(step))
            assert recorder.replayed[-1] == replayed
    for ours, theirs in zip(
        (*caches.keys, *caches.values), (*plain_caches.keys, *plain_caches.values), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def drafting_step(lengths: tuple[int, ...], contexts: tuple[int, ...]) -> StepInputs:
    """Rows that end so many tokens at these contexts, in blocks of their own."""
    rows = range(len(lengths))
    tables = [[1 + MOST_BLOCKS * row + block for block in range(MOST_BLOCKS)] for row in rows]
    where = [
        (row, position)
        for row in rows
        for position in range(contexts[row] - lengths[row], contexts[row])
    ]
    slots = [
        tables[row][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for row, position in where
    ]
    starts = [sum(lengths[:row]) for row in range(len(lengths) + 1)]
    return StepInputs(
        token_ids=torch.tensor([(7 * row + position) % VOCAB_SIZE for row, position in where]),
        positions=torch.tensor([position for _, position in where]),
        batch=AttentionBatch(
            block_tables=torch.tensor(tables, dtype=torch.int32),
            query_starts=torch.tensor(starts, dtype=torch.int32),
            context_lengths=torch.tensor(contexts, dtype=torch.int32),
            slot_mapping=torch.tensor(slots),
        ),
        longest=max(lengths),
    )
