"""The project's operators against what the machine can do at best and against stock torch, taking
turns in one run.

Every call reads memory that the caches have forgotten, as in a model. The shapes are those of
Qwen3-0.6B. Recurrent states have 16 heads of 128, and those of state spaces are as wide as models
of about a billion parameters have them.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from nanoserve.executor.cpu_attention.host_attention import HostAttentionThread
from nanoserve.lab.benchmarks.floors import Limits
from nanoserve.lab.benchmarks.gpu.attention import AttentionRow, decode_rows, make_batch
from nanoserve.lab.benchmarks.machine import ForeignLoad
from nanoserve.lab.benchmarks.roofline import timed
from nanoserve.lab.benchmarks.rounds import GIGA, Bracketed, Repeating, bracket, grouped, rotated
from nanoserve.models.attention import AttentionBatch
from nanoserve.models.dtypes import format_name
from nanoserve.models.hub import dummy_config
from triton_ops import (
    cache_write,
    causal_convolution,
    draw_tokens,
    gated_delta_rule,
    linear,
    pack,
    packed_linear,
    reference_operators,
    round_to_nearest,
    selective_scan,
    state_space_dual,
    token_logprobs,
)

SHAPE = "qwen3-0.6b"
OURS = "nanoserve"
# The routes of stock torch.
GATHERING, DENSE, LINEAR, SAMPLING = (
    "gather + SDPA",
    "SDPA",
    "F.linear {}",
    "softmax, sort, multinomial",
)
STOCK_ROUTES = (
    GATHERING,
    DENSE,
    LINEAR.format("bfloat16"),
    LINEAR.format("float16"),
    LINEAR.format("float32"),
    SAMPLING,
)
PLAIN = "plain torch"
IN_16_BITS = "linear operator"  # the route of packed products that reads the matrix in 16 bits
PACKED_BITS = (4, 8)
PACKED_GROUP = 32  # columns that share a scale, as --quantization rounds on a CPU
BLOCK_SIZE = 16
MOST_SAMPLED_ROWS = 16  # to sort more of them takes stock torch seconds
RECURRENT_HEADS = 16  # of keys, and of values
RECURRENT_HEAD_DIM = 128
RECURRENT_KERNEL = 4  # positions that a convolution sees
# Mamba-2 of 780M parameters, and Granite 4 Hybrid of 1B: heads, numbers of a key, and of a value
DUAL_HEADS, DUAL_STATE_SIZE, DUAL_HEAD_DIM = 48, 128, 64
SCAN_CHANNELS, SCAN_STATE_SIZE = 3072, 16  # Mamba and Jamba of the same width
# more rows than this are prompts, of which the output head sees the last position alone
HEAD_ROWS = 64
# equal inputs are made until they take this much: about twice the largest cache of today's servers
COLD_BYTES = 2**29
_TURNS = 5
_TURN_SECONDS = 0.01
_MOST_CALLS = 10
_MICROSECONDS = 1e6


class Route(NamedTuple):
    """One way to compute a case: what is called, and a context it needs around its calls."""

    call: Callable[[], object]
    context: Callable[[], AbstractContextManager[object]] = nullcontext


class OperatorCase(NamedTuple):
    """Work that several routes do; ours is the first."""

    name: str
    # what every route must read: each key, value and weight once, in its own number format
    num_bytes: int
    operations: int  # operations of the matrix products, two for each multiply-add
    routes: Mapping[str, Route]


class OperatorRound(Bracketed, frozen=True, kw_only=True):
    """One round of one case: the floor at the round's own bandwidth, and each route's median call,
    in microseconds."""

    num_bytes: int
    operations: int
    floor_us: float
    routes_us: dict[str, float]

    @property
    def has_floor(self) -> bool:
        """Whether no route was faster than the floor: one that is shows that the machine was
        measured too slow."""
        return self.floor_us <= min(self.routes_us.values())


def all_cases(
    cells: Iterable[tuple[int, int]],
    prompts: Sequence[int],
    rows: Sequence[int],
    dtype: torch.dtype,
) -> Iterator[OperatorCase]:
    """Attention of these batches and contexts, then of prompts of these lengths, the same with
    recurrent states, linear layers, packed layers too, and sampling. Each case has its memory while
    it is looked at."""
    for batch, context in cells:
        yield from attention_cases(batch, context, dtype)
    for length in prompts:
        yield prompt_case(length, dtype)
    for lengths in recurrent_steps(prompts, rows):
        yield from recurrent_cases(lengths, dtype)
        yield dual_case(lengths, dtype)
        yield scan_case(lengths, dtype)
    yield from linear_cases(rows, dtype)
    yield from packed_cases(rows, dtype)
    yield from sampling_cases(rows)


def attention_cases(batch: int, context: int, dtype: torch.dtype) -> Iterator[OperatorCase]:
    """Decode: one new token each of ``batch`` sequences over ``context`` tokens in shuffled blocks.
    Then the same over the host tier: handed to a thread with as many threads as torch has here, and
    waited for, beside the operator that this thread calls."""
    model = dummy_config(SHAPE)
    heads, kv_heads, size = model.num_heads, model.num_kv_heads, model.head_dim
    call = make_batch(
        decode_rows(batch, context), heads, kv_heads, size, block_size=BLOCK_SIZE, dtype=dtype
    )
    # as a layer's projection gives them
    fused = torch.randn(batch, heads + 2 * kv_heads, size).to(dtype)
    query, key, value = torch.split(fused, [heads, kv_heads, kv_heads], dim=1)
    slots = call.block_tables[:, -1].long() * BLOCK_SIZE + (context - 1) % BLOCK_SIZE
    cache_write(key, value, call.key_cache, call.value_cache, slots)
    keys, values = zip(*_copies(torch.stack((call.key_cache, call.value_cache))), strict=True)
    pools = zip(keys, values, strict=True)
    calls = cycle(
        [replace(call, query=query, key_cache=one, value_cache=other) for one, other in pools]
    )
    num_bytes = 2 * batch * context * kv_heads * size * dtype.itemsize

    def attend() -> Tensor:
        return next(calls).attend()

    def gather_and_attend() -> Tensor:
        """The obvious way: index the caches by the block tables, then torch's attention."""
        key, value = next(calls).gathered()
        attended = functional.scaled_dot_product_attention(
            query[:, :, None], key, value, enable_gqa=True
        )
        return attended.reshape(batch, -1)

    routes = {OURS: Route(attend), GATHERING: Route(gather_and_attend)}
    routes[PLAIN] = Route(attend, reference_operators)
    yield OperatorCase(f"attention {batch} x {context}", num_bytes, call.operations, routes)

    rows = AttentionBatch(call.block_tables, call.query_starts, call.context_lengths, slots)
    host = HostAttentionThread(
        model, keys, values, torch.device("cpu"), threads=torch.get_num_threads()
    )
    layers = cycle(range(len(keys)))

    def hand_over_and_wait() -> Tensor:
        task = host.attend(next(layers), query, key, value, rows)
        task.wait()
        return task.result()

    try:
        routes = {OURS: Route(hand_over_and_wait), "operator alone": Route(attend)}
        yield OperatorCase(
            f"host attention {batch} x {context}", num_bytes, call.operations, routes
        )
    finally:
        host.close()


def prompt_case(length: int, dtype: torch.dtype) -> OperatorCase:
    """Prefill: all tokens of one prompt, which its cache already has. Stock torch gets keys and
    values in one piece."""
    model = dummy_config(SHAPE)
    sizes = (model.num_heads, model.num_kv_heads, model.head_dim)
    call = make_batch([AttentionRow(length, length)], *sizes, block_size=BLOCK_SIZE, dtype=dtype)
    pools = _copies(torch.stack((call.key_cache, call.value_cache)))
    calls = cycle([replace(call, key_cache=keys, value_cache=values) for keys, values in pools])
    dense, query = cycle(_copies(torch.stack(call.gathered()))), call.query.transpose(0, 1)[None]

    def attend() -> Tensor:
        return next(calls).attend()

    def attend_densely() -> Tensor:
        key, value = next(dense)
        attended = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        return attended[0].transpose(0, 1).reshape(length, -1)

    routes = {OURS: Route(attend), DENSE: Route(attend_densely)}
    return OperatorCase(
        f"attention of a prompt of {length}", call.num_bytes, call.operations, routes
    )


def recurrent_steps(prompts: Sequence[int], rows: Sequence[int]) -> list[list[int]]:
    """Tokens of each sequence of a step: one token each of this many sequences, or a prompt."""
    return [[1] * count for count in sampled_rows(rows)] + [[length] for length in prompts]


def recurrent_cases(lengths: Sequence[int], dtype: torch.dtype) -> Iterator[OperatorCase]:
    """The short convolution and the gated delta rule of a layer over one segment of each sequence,
    which all have a state. The state is read and written once."""
    tokens, channels = sum(lengths), 3 * RECURRENT_HEADS * RECURRENT_HEAD_DIM
    work, segments = _recurrent_work(lengths), _segments(lengths)
    mixed = torch.randn(tokens, channels).to(dtype)
    out = torch.empty_like(mixed)
    weight = torch.randn(channels, RECURRENT_KERNEL).to(dtype)
    kept = torch.zeros(len(lengths), channels, RECURRENT_KERNEL - 1, dtype=dtype)
    windows = cycle(_copies(kept))

    def convolve() -> Tensor:
        causal_convolution(out, mixed, weight, None, next(windows), segments, silu=True)
        return out

    yield OperatorCase(
        f"convolution of {work}",
        num_bytes=2 * kept.nbytes + 2 * mixed.nbytes + weight.nbytes,
        operations=2 * tokens * channels * RECURRENT_KERNEL,
        routes={OURS: Route(convolve), PLAIN: Route(convolve, reference_operators)},
    )
    size, shape = RECURRENT_HEAD_DIM, (RECURRENT_HEADS, RECURRENT_HEAD_DIM)
    query, key, value = (torch.unflatten(part, 1, shape) for part in mixed.chunk(3, dim=1))
    decay, beta = -torch.rand(tokens, RECURRENT_HEADS), torch.rand(tokens, RECURRENT_HEADS)
    result = torch.empty(tokens, *shape, dtype=dtype)
    state = torch.zeros(len(lengths), *shape, size)
    states = cycle(_copies(state))

    def apply() -> Tensor:
        gated_delta_rule(result, query, key, value, decay, beta, next(states), segments)
        return result

    yield OperatorCase(
        f"gated delta rule of {work}",
        num_bytes=2 * state.nbytes + mixed.nbytes + result.nbytes,
        # three products of a position with the state, in either form at least
        operations=3 * 2 * tokens * RECURRENT_HEADS * size**2,
        routes={OURS: Route(apply), PLAIN: Route(apply, reference_operators)},
    )


def dual_case(lengths: Sequence[int], dtype: torch.dtype) -> OperatorCase:
    """The recurrence of Mamba-2 over one segment of each sequence, which all have a state."""
    tokens, heads, head_dim = sum(lengths), DUAL_HEADS, DUAL_HEAD_DIM
    segments = _segments(lengths)
    sizes = [heads * head_dim, DUAL_STATE_SIZE, DUAL_STATE_SIZE]
    # as a convolution leaves them
    mixed = torch.randn(tokens, sum(sizes)).to(dtype)
    value, key, query = torch.split(mixed, sizes, dim=1)
    value = torch.unflatten(value, 1, (heads, head_dim))
    time_step = functional.softplus(torch.randn(tokens, heads))
    decay, out = -time_step, torch.empty(tokens, heads, head_dim, dtype=dtype)
    matrix = torch.zeros(len(lengths), heads, DUAL_STATE_SIZE, head_dim)
    matrices = cycle(_copies(matrix))

    def apply() -> Tensor:
        of_one_group = (query[:, None], key[:, None], value, decay, time_step)
        state_space_dual(out, *of_one_group, next(matrices), segments)
        return out

    return OperatorCase(
        f"state-space duality of {_recurrent_work(lengths)}",
        num_bytes=2 * matrix.nbytes + mixed.nbytes + out.nbytes,
        # two products of a position with the state
        operations=2 * 2 * tokens * heads * DUAL_STATE_SIZE * head_dim,
        routes={OURS: Route(apply), PLAIN: Route(apply, reference_operators)},
    )


def scan_case(lengths: Sequence[int], dtype: torch.dtype) -> OperatorCase:
    """The recurrence of Mamba over one segment of each sequence, which all have a state. The rates
    are read, too."""
    tokens, channels, state_size = sum(lengths), SCAN_CHANNELS, SCAN_STATE_SIZE
    segments = _segments(lengths)
    value, time_step = torch.randn(2, tokens, channels)
    value, time_step = value.to(dtype), functional.softplus(time_step)
    query, key = torch.randn(2, tokens, state_size).to(dtype)
    out = torch.empty_like(value)
    rate = -torch.rand(channels, state_size)
    state = torch.zeros(len(lengths), channels, state_size)
    rates, states = cycle(_copies(rate)), cycle(_copies(state))

    def scan() -> Tensor:
        selective_scan(out, query, key, value, time_step, next(rates), next(states), segments)
        return out

    return OperatorCase(
        f"selective scan of {_recurrent_work(lengths)}",
        num_bytes=2 * state.nbytes + rate.nbytes + time_step.nbytes + 2 * out.nbytes,
        # a product with the factor, one with the key, one with the query
        operations=3 * 2 * tokens * channels * state_size,
        routes={OURS: Route(scan), PLAIN: Route(scan, reference_operators)},
    )


def _recurrent_work(lengths: Sequence[int]) -> str:
    tokens = sum(lengths)
    return f"{tokens} rows" if len(lengths) == tokens else f"a prompt of {tokens}"


def _segments(lengths: Sequence[int]) -> Tensor:
    """The table of a step with a segment of each length, whose sequences have a slot each."""
    table, begin = list[tuple[int, ...]](), 0
    for slot, length in enumerate(lengths):
        table.append((begin, begin + length, slot, slot, 0))
        begin += length
    return torch.tensor(table, dtype=torch.int32)


def linear_cases(rows: Sequence[int], dtype: torch.dtype) -> Iterator[OperatorCase]:
    """Each matrix of the model with every number of rows; one matrix's memory is taken at a
    time."""
    for (name, columns, depth), counts in linear_sizes(rows, dtype):
        weight = torch.randn(columns, depth)
        weights, wide = cycle(_copies(weight.to(dtype))), cycle(_copies(weight))
        for count in counts:
            given = torch.randn(count, depth)
            routes = {
                OURS: partial(_multiply, linear, given.to(dtype), weights),
                LINEAR.format(format_name(dtype)): partial(
                    _multiply, functional.linear, given.to(dtype), weights
                ),
                LINEAR.format("float32"): partial(_multiply, functional.linear, given, wide),
            }
            yield OperatorCase(
                f"{name} {columns} x {depth}, {count} rows",
                num_bytes=columns * depth * dtype.itemsize,
                operations=2 * count * columns * depth,
                routes={route: Route(call) for route, call in routes.items()},
            )


def packed_cases(rows: Sequence[int], dtype: torch.dtype) -> Iterator[OperatorCase]:
    """Products with weights of 4 and 8 bits, beside products with the same weights in 16 bits."""
    for (name, columns, depth), counts in packed_sizes(rows, dtype):
        for bits in PACKED_BITS:
            quantized = round_to_nearest(torch.randn(columns, depth), bits, PACKED_GROUP)
            packed, form = pack(quantized), quantized.format
            weights, unpacked = (
                cycle(_copies(packed)),
                cycle(_copies(quantized.dequantize().to(dtype))),
            )
            multiply = partial(packed_linear, bias=None, columns=columns, form=form)

            for count in counts:
                given = torch.randn(count, depth).to(dtype)
                routes = {
                    OURS: partial(_multiply, multiply, given, weights),
                    IN_16_BITS: partial(_multiply, linear, given, unpacked),
                    LINEAR.format(format_name(dtype)): partial(
                        _multiply, functional.linear, given, unpacked
                    ),
                }
                yield OperatorCase(
                    f"{name} {columns} x {depth} in int{bits}, {count} rows",
                    num_bytes=packed.nbytes,
                    operations=2 * count * columns * depth,
                    routes={route: Route(call) for route, call in routes.items()},
                )


def _multiply(
    multiply: Callable[[Tensor, Tensor], Tensor], rows: Tensor, weights: Iterator[Tensor]
) -> Tensor:
    return multiply(rows, next(weights))


def linear_sizes(
    rows: Sequence[int], dtype: torch.dtype
) -> list[tuple[tuple[str, int, int], list[int]]]:
    """Each matrix with the numbers of rows that it is measured with; 32-bit weights have no
    operator of our own."""
    if dtype == torch.float32:
        return []
    return [
        (one, [count for count in rows if one[0] != "head" or count <= HEAD_ROWS])
        for one in _matrices()
    ]


def packed_sizes(
    rows: Sequence[int], dtype: torch.dtype
) -> list[tuple[tuple[str, int, int], list[int]]]:
    """The feed-forward part's matrices, which are most of a layer. Each has a case for every one of
    `PACKED_BITS`."""
    return [
        (one, counts) for one, counts in linear_sizes(rows, dtype) if one[0] in ("gate_up", "down")
    ]


def _matrices() -> list[tuple[str, int, int]]:
    """(name, columns of the result, depth) of a layer's matrices, as the decoder fuses them, and of
    the head."""
    shape = dummy_config(SHAPE)
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return [
        ("gate_up", 2 * shape.intermediate_size, shape.hidden_size),
        ("down", shape.hidden_size, shape.intermediate_size),
        ("qkv", query + 2 * key, shape.hidden_size),
        ("output", shape.hidden_size, query),
        ("head", shape.vocab_size, shape.hidden_size),
    ]


class Sampler(NamedTuple):
    """Settings as requests have them. With `logprobs` no token is drawn; this number of likeliest
    tokens is named instead."""

    name: str
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    logprobs: int = 0

    def operator(self, count: int) -> Callable[[Tensor, Tensor], object]:
        """Make ready to call our operator with `count` rows of logits and their maxima."""
        rows = torch.arange(count)
        if self.logprobs:
            return lambda logits, maxima: token_logprobs(logits, rows, self.logprobs)
        keys, temperature = (
            torch.stack((rows, rows + 1), dim=1).int(),
            torch.full((count,), self.temperature),
        )
        top_k, top_p = (
            torch.full((count,), self.top_k),
            torch.full((count,), self.top_p, dtype=torch.float64),
        )
        settings = (rows, keys, temperature, top_k, top_p, torch.zeros_like(top_p))
        uses: dict[str, Any] = {
            "largest_top_k": self.top_k,
            "uses_top_p": self.top_p < 1,
            "uses_min_p": False,
        }
        return lambda logits, maxima: draw_tokens(logits, maxima, *settings, **uses)

    def sort(self, logits: Tensor, maxima: Tensor) -> object:
        """Do it in the usual way, with torch's random numbers."""
        if self.logprobs:
            return logits.log_softmax(1).topk(self.logprobs)
        if not self.top_k and self.top_p == 1:
            return torch.multinomial((logits / self.temperature).softmax(1), 1)
        values, tokens = logits.topk(self.top_k) if self.top_k else logits.sort(descending=True)
        probabilities = (values / self.temperature).softmax(1)
        better = probabilities.cumsum(1) - probabilities
        return tokens.gather(
            1, torch.multinomial(probabilities.masked_fill(better >= self.top_p, 0.0), 1)
        )


SAMPLERS = (
    Sampler("temperature 1"),
    Sampler("top-k 20, top-p 0.8", temperature=0.7, top_k=20, top_p=0.8),
    Sampler("top-p 0.95", temperature=0.8, top_p=0.95),
    Sampler("5 log probabilities", logprobs=5),
)


def sampled_rows(rows: Sequence[int]) -> list[int]:
    """The numbers of rows that sampling is measured with."""
    return [count for count in rows if count <= MOST_SAMPLED_ROWS]


def sampling_cases(rows: Sequence[int]) -> Iterator[OperatorCase]:
    """Each sampler over the model's vocabulary with every number of rows, beside what stock torch
    sorts."""
    vocab_size = dummy_config(SHAPE).vocab_size
    for count in sampled_rows(rows):
        logits = torch.randn(count, vocab_size) * 3
        inputs = cycle([(one, one.amax(1)) for one in _copies(logits)])
        for sampler in SAMPLERS:
            routes = {OURS: partial(_sample, sampler.operator(count), inputs)}
            routes[SAMPLING] = partial(_sample, sampler.sort, inputs)
            yield OperatorCase(
                f"sampling {count} x {vocab_size}, {sampler.name}",
                num_bytes=logits.nbytes,
                operations=0,
                routes={route: Route(call) for route, call in routes.items()},
            )


def _sample(
    sampler: Callable[[Tensor, Tensor], object], inputs: Iterator[tuple[Tensor, Tensor]]
) -> object:
    return sampler(*next(inputs))


def _copies(tensor: Tensor) -> list[Tensor]:
    """Copies of a tensor, too many for any cache to hold: by the time one is used again, it has to
    be read again."""
    count = max(2, math.ceil(COLD_BYTES / tensor.nbytes))
    return [tensor] + [tensor.clone() for _ in range(count - 1)]


def measure_case(
    case: OperatorCase,
    *,
    rounds: int,
    probe: Callable[[], float],
    foreign: ForeignLoad,
    peak: float,
    repeating: Repeating,
) -> Iterator[OperatorRound]:
    """Rounds of one case as they are done, until enough count or the time for ``repeating`` them is
    spent. ``probe`` reads the machine's bandwidth in bytes per second; ``peak`` is operations per
    second at best."""
    calls = {name: _calls_in_a_turn(route) for name, route in case.routes.items()}

    def one_round(number: int) -> OperatorRound:
        seconds = {name: list[float]() for name in calls}
        with bracket(case.name, number, probe) as fields, torch.inference_mode():
            foreign.read()
            for name in [name for turn in range(_TURNS) for name in rotated(calls, turn)]:
                route = case.routes[name]
                with route.context():
                    seconds[name] += [timed(route.call) for _ in range(calls[name])]
            fields["foreign_cores"] = foreign.read()
        bandwidth = GIGA * (fields["bandwidth_before"] + fields["bandwidth_after"]) / 2
        floor = Limits(bandwidth, peak).seconds(case.num_bytes, case.operations)
        return OperatorRound(
            **fields,
            num_bytes=case.num_bytes,
            operations=case.operations,
            floor_us=floor * _MICROSECONDS,
            routes_us={
                name: _MICROSECONDS * statistics.median(found) for name, found in seconds.items()
            },
        )

    return repeating.rounds(one_round, rounds)


def _calls_in_a_turn(route: Route) -> int:
    """Number of calls that take about `_TURN_SECONDS`; the route has run twice by then and is
    warm."""
    with torch.inference_mode(), route.context():
        route.call()
        return min(_MOST_CALLS, max(1, round(_TURN_SECONDS / timed(route.call))))


def summarize(rounds: Sequence[OperatorRound]) -> list[dict[str, Any]]:
    """For every case, bandwidth state and route: medians over its rounds, and how many times ours
    is faster. GB/s and GFLOP/s are those of the work that every route must do, whatever a route
    really reads and computes."""
    groups = grouped(rounds, lambda done: {(done.case,): done})
    return [
        {
            "case": case,
            "state": state,
            "route": route,
            "rounds": len(some),
            **_route_fields(some, route),
        }
        for (case, state), some in groups.items()
        for route in some[0].routes_us
    ]


def samples(rounds: Sequence[OperatorRound]) -> dict[str, dict[str, list[float]]]:
    """Our share of the floor in every counting round for ``bench diff``: it holds in any bandwidth
    state."""
    found: dict[str, dict[str, list[float]]] = {}
    for done in rounds:
        if done.counts and done.has_floor:
            found.setdefault(done.case, {"of_floor": []})["of_floor"].append(
                done.floor_us / done.routes_us[OURS]
            )
    return found


def _route_fields(rounds: Sequence[OperatorRound], route: str) -> dict[str, Any]:
    first, microseconds = rounds[0], statistics.median(one.routes_us[route] for one in rounds)
    shares = [one.floor_us / one.routes_us[route] for one in rounds if one.has_floor]
    slower = [one.routes_us[route] / one.routes_us[OURS] for one in rounds]
    fields: dict[str, Any] = {
        "us": microseconds,
        "gb_per_s": first.num_bytes / microseconds / (GIGA / _MICROSECONDS),
        "gflops": first.operations / microseconds / (GIGA / _MICROSECONDS),
        "of_floor": None,
        "ours_is_faster": None,
        "low": None,
        "high": None,
    }
    if shares:
        fields["of_floor"] = statistics.median(shares)
    if route != OURS:
        fields |= {
            "ours_is_faster": statistics.median(slower),
            "low": min(slower),
            "high": max(slower),
        }
    return fields
