"""Exact operation counts of a step, per operator and device: Appendix A of the Seesaw paper without
its shortcuts.

A multiply-add is two operations; weights, keys and values are read once; each operator reads and
writes activations once. Norms, rotary embedding, activation function, biases and residual additions
count as kernels only (Efficiency).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain
from math import inf
from operator import attrgetter
from typing import Literal, NamedTuple

import msgspec

from nanoserve.config.model_config import ModelConfig
from nanoserve.config.model_parts import LayerShape, MoeConfig, RecurrentConfig
from nanoserve.costs.weight_bits import NUMBERS, ROWS, Bits, matrix_bits
from nanoserve.errors import UsageError
from nanoserve.layout import ParallelLayout, stage_layers, tensor_degrees
from nanoserve.scheduler.work import Chunk, StepWork

# Bits that a stored number takes; four-bit weights come with a 16-bit scale for each group of 128.
STORED_BITS = {4: 4 + 16 / 128, 8: 8.0, 16: 16.0, 32: 32.0}
_SAMPLED_ROWS = 256
# in the largest step: eight float32 numbers, for the logit, its changes and the work of top-p
_BYTES_PER_LOGIT = 32

# Pipeline stages are divided by cost. That of a layer, of the embedding and of the head is the mean
# of its shares in the bytes of a decode step, bound by memory, and in the operations of a mixed
# step, of whose tokens one in four is sampled. So the head of Qwen2.5 0.5B, as dear as 5.9 layers
# in the one step and 2.2 in the other, counts as 4. Tensor parallelism divides everything alike and
# is left out.
_DECODES, _CONTEXT = 64, 512  # rows of both steps that decode, and the keys that each of them reads
_CHUNK = 3 * _DECODES  # tokens of a prompt in the mixed step, none of them its last
# costs are parts in a billion of the whole model: integers, so that equal stages are equal
_UNITS = 10**9

_SUMMED = frozenset({"output", "down", "experts"})
"""Matrices whose outputs are sums over the ranks."""

OperatorKind = Literal["matrix", "prefill attention", "decode attention", "recurrence", "look-up"]
SCAN_CHUNK = 64
"""Positions of a prompt that a scan over recurrent states computes together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Bits per number, each 4, 8, 16 or 32: the layers' matrices, keys and values, and everything
    else (activations, embedding, head). Bits of a quantized model's matrices follow from its
    formats (weight_bits.py). Raises UsageError for other numbers of bits."""

    weight_bits: int = 16
    kv_bits: int = 16
    other_bits: int = 16

    def __post_init__(self) -> None:
        for name in ("weight_bits", "kv_bits", "other_bits"):
            if getattr(self, name) not in STORED_BITS:
                raise UsageError(
                    f"{name} must be one of {', '.join(map(str, STORED_BITS))}, not "
                    f"{getattr(self, name)}"
                )

    @classmethod
    def of(cls, bits: int) -> "Precision":
        return cls(weight_bits=bits, kv_bits=bits, other_bits=bits)

    @property
    def weight_bytes(self) -> float:
        """Bytes of a weight and its share of the scales."""
        return STORED_BITS[self.weight_bits] / 8

    @property
    def kv_bytes(self) -> float:
        return self.kv_bits / 8

    @property
    def other_bytes(self) -> float:
        return self.other_bits / 8


class Operator(msgspec.Struct, frozen=True):
    """One operator of a step on one device, in several layers together."""

    name: str
    kind: OperatorKind
    flops: float
    weight_bytes: float
    kv_bytes: float
    activation_bytes: float
    state_bytes: float = 0.0  # of recurrent states, read and written

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes + self.activation_bytes + self.state_bytes

    @property
    def intensity(self) -> float:
        """Operations per byte (the lecture, definition 1)."""
        return self.flops / self.bytes if self.flops else 0.0


class Matrix(msgspec.Struct, frozen=True):
    """A matrix of one layer, or of all its experts, on one device."""

    name: str
    weights: int
    activations: int  # numbers read and written for one token
    bytes: float
    reached: float = 1.0  # the share of the experts that one token is sent to


class LayerKind(NamedTuple):
    """Layers of one kind cost the same."""

    window: int
    sparse: bool
    # of the layer's matrices, by name; empty if the model is not quantized
    bits: tuple[tuple[str, Bits], ...]
    shape: LayerShape | None  # None: the model's shape
    recurrent: bool  # whether it has a state in place of keys and values
    feeds_forward: bool  # whether it has a feed-forward part


def _layer_kind(model: ModelConfig, layer: int) -> LayerKind:
    return LayerKind(
        window=model.sliding_window(layer),
        sparse=model.is_sparse(layer),
        bits=tuple(matrix_bits(model, layer).items()),
        shape=model.layers.shapes[layer] if model.layers.shapes else None,
        recurrent=model.is_recurrent(layer),
        feeds_forward=model.has_feed_forward(layer),
    )


class ModelCounts:
    """Counts of what one device of a layout holds, reads and computes. Tensor parallelism beyond
    the number of KV heads replicates these heads. Every device reads the whole activations between
    operators. ``pipeline_split`` gives the layers of each stage; None divides them by cost. Raises
    UsageError if the layout does not suit the model."""

    def __init__(
        self,
        model: ModelConfig,
        layout: ParallelLayout | None = None,
        precision: Precision | None = None,
        pipeline_split: Sequence[int] | None = None,
    ) -> None:
        self.model, self.layout, self.precision = (
            model,
            layout or ParallelLayout(),
            precision or Precision(),
        )
        degree = self.layout.tensor_parallel
        if degree not in tensor_degrees(model):
            parts = f"{model.num_heads} query heads and {model.num_kv_heads} key-value heads"
            if model.recurrent is not None and model.recurrent.mixer.most_parts % degree:
                parts = f"{model.recurrent.mixer.most_parts} {model.recurrent.mixer.part_name}"
            raise UsageError(
                f"tensor parallelism of {degree} does not divide {parts}; use one of "
                f"{', '.join(map(str, tensor_degrees(model)))}"
            )
        self.heads = model.num_heads // degree
        self.kv_heads = max(1, model.num_kv_heads // degree)
        self.recurrent: RecurrentConfig | None = None
        """The device's part of a recurrent layer."""
        if model.recurrent is not None:
            self.recurrent = model.recurrent.part(range(model.num_layers), degree)
        self.windows = tuple(sorted({window for window in model.layers.sliding_windows if window}))
        stages = self.layout.pipeline_parallel
        layers = stage_layers(
            model, stages, pipeline_split, divide_layers, asked=f"{stages} pipeline stages"
        )
        self.stages = tuple(
            dict(Counter(_layer_kind(model, layer) for layer in stage)) for stage in layers
        )
        self.groups = model.groups or model.cut(tuple(stage.start for stage in layers))
        self._parts = [
            self.groups.of_layers(stage, model.layer_kv_numbers(degree)) for stage in layers
        ]
        self.vocabulary = -(-model.vocab_size // degree)
        # From the hidden state to the logits of this device's part of the vocabulary; only where a
        # token is sampled.
        bits, number_bytes = matrix_bits(model, None), self.precision.other_bytes
        # per-layer embeddings are looked up as well
        per_layer = model.num_layers * model.embedding.per_layer_size
        self._table, self.head = (
            self._matrix(name, columns, (self.vocabulary,), bits.get(name, NUMBERS), number_bytes)
            for name, columns in (
                ("embedding", model.hidden_size + per_layer),
                ("head", model.hidden_size),
            )
        )
        kinds = dict.fromkeys(chain.from_iterable(self.stages))
        self._sizes = {kind: self._attention_sizes(model.of_shape(kind.shape)) for kind in kinds}
        self._matrices = {kind: tuple(self._layer_matrices(kind)) for kind in kinds}

    def layers(self, stage: int) -> int:
        return sum(self.stages[stage].values())

    def outputs(self, stage: int) -> int:
        """Outputs of the stage's layers that ranks sum up: those of attention or a mixer, and those
        of the feed-forward part."""
        found = 0
        for kind, layers in self.stages[stage].items():
            names = [matrix.name for matrix in self._matrices[kind]]
            found += layers * len(_SUMMED.intersection(names))
        return found

    def operators(self, work: StepWork, stage: int) -> list[Operator]:
        """Everything that one device of the stage does for this work, communication aside."""
        operators = list[Operator]()
        if stage == 0 and work.tokens:
            operators.append(self.embedding(work.tokens))
        operators += self.products(work, stage)
        operators += self.attention(work, stage)
        return operators

    def products(self, work: StepWork, stage: int) -> Iterator[Operator]:
        """The matrix products of the stage's layers, and of the head in the last stage."""
        if not work.tokens:
            return
        for kind, layers in self.stages[stage].items():
            for matrix in self._matrices[kind]:
                yield self.product(matrix, work.tokens, layers)
        if stage == len(self.stages) - 1 and work.sampled:
            yield self.product(self.head, work.sampled)

    def product(self, matrix: Matrix, tokens: int, layers: int = 1) -> Operator:
        """The matrix applied to these tokens. Reading experts is the expectation if each token
        chooses evenly."""
        flops = 2.0 * matrix.weights * matrix.reached * tokens
        weight_bytes = matrix.bytes * (1 - (1 - matrix.reached) ** tokens)
        activation_bytes = matrix.activations * tokens * self.precision.other_bytes
        return Operator(
            matrix.name,
            "matrix",
            flops * layers,
            weight_bytes * layers,
            0.0,
            activation_bytes * layers,
        )

    def attention(self, work: StepWork, stage: int) -> list[Operator]:
        """Attention of a stage's layers, and the recurrence of those with a state. Prompts and
        decodes attend apart: they run in different kernels. The draft tokens of a row see about the
        keys of its first token, which are read once."""
        if len(work.windowed_decode_context) != len(self.windows):
            raise UsageError(
                f"sum the work up for this model's sliding windows {self.windows}: "
                "StepWork.of(windows=)"
            )
        found = list[Operator]()
        for kind, layers in self.stages[stage].items():
            window = kind.window
            if kind.recurrent:
                found += self._recurrence(work, layers)
                continue
            if work.chunks:
                keys = sum([chunk_keys(start, length, window) for start, length in work.chunks])
                pairs: float = sum(
                    [chunk_pairs(start, length, window) for start, length in work.chunks]
                )
                tokens = work.tokens - work.decodes - work.draft_tokens
                found.append(
                    self._attention("prefill attention", tokens, keys, pairs, kind, layers)
                )
            if work.decodes:
                keys = work.decode_context
                if window:
                    keys = work.windowed_decode_context[self.windows.index(window)]
                rows = work.decodes + work.draft_tokens
                pairs = keys * rows / work.decodes
                found.append(self._attention("decode attention", rows, keys, pairs, kind, layers))
        return found

    def embedding(self, tokens: int) -> Operator:
        """Each device holds a part of the vocabulary, and writes all rows."""
        rows = tokens * self._table.weights / self.vocabulary * self.precision.other_bytes
        read = tokens * self._table.bytes / self.vocabulary / self.layout.tensor_parallel
        return Operator("embedding", "look-up", 0.0, read, 0.0, rows)

    def stage_weight_bytes(self, stage: int) -> float:
        total = 0.0
        for kind, layers in self.stages[stage].items():
            total += layers * sum(matrix.bytes for matrix in self._matrices[kind])
        if stage == 0:
            total += self._table.bytes
        head_is_embedding = self.model.tie_word_embeddings and len(self.stages) == 1
        if stage == len(self.stages) - 1 and not head_is_embedding:
            total += self.head.bytes
        return total

    def kv_bytes_per_token(self, stage: int) -> float:
        """Bytes of a token in all layers, as long as no window has left it behind."""
        return self._parts[stage].token_numbers * self.precision.kv_bytes

    def block_bytes(self, block_size: int, stage: int) -> float:
        """Bytes of a block, which holds the keys and values of one cache group's layers. 0 for a
        stage without attention."""
        return block_size * self._parts[stage].block_numbers * self.precision.kv_bytes

    def state_bytes(self, stage: int) -> float:
        """Bytes of a sequence's recurrent states in the stage's layers, however long it is."""
        layers = sum(count for kind, count in self.stages[stage].items() if kind.recurrent)
        return layers * self._layer_state_bytes

    @property
    def all_state_bytes(self) -> float:
        """Bytes of a sequence's recurrent states on all devices together."""
        if self.model.recurrent is None:
            return 0.0
        layers = len(self.model.recurrent.recurrent_layers)
        return layers * self.model.recurrent.layer_bytes(self.precision.other_bytes)

    @property
    def _layer_state_bytes(self) -> float:
        if self.recurrent is None:
            return 0.0
        return self.recurrent.layer_bytes(self.precision.other_bytes)

    @property
    def layer_kv_bytes(self) -> float:
        """Bytes that a layer reads of a token; where layers differ, a layer of the usual shape."""
        return self._attention_sizes(self.model)[1]

    @property
    def layer_flops_per_pair(self) -> float:
        """A multiply-add for the score of a query and a key, and one for the value; of a layer of
        the usual shape."""
        return 2.0 * self._attention_sizes(self.model)[0]

    def _attention_sizes(self, model: ModelConfig) -> tuple[int, float]:
        """Numbers in a query of all heads and in a sum of values; bytes that a layer reads of a
        token."""
        kv_heads = max(1, model.num_kv_heads // self.layout.tensor_parallel)
        numbers = kv_heads * model.kv_numbers // model.num_kv_heads
        return self.heads * (model.head_dim + model.value_dim), numbers * self.precision.kv_bytes

    def step_bytes(self, tokens: int, stage: int) -> float:
        """Bytes that a step holds at once: the widest part of a layer, and on the last stage the
        logits."""
        widths = []
        for kind in self.stages[stage]:
            matrices = self._matrices[kind]
            attention_end = [matrix.name for matrix in matrices].index("output") + 1
            widths.append(sum(matrix.activations for matrix in matrices[:attention_end]))
            widths.append(sum(matrix.activations for matrix in matrices[attention_end:]))
        widest = self.model.hidden_size + max(widths)
        layer_bytes = tokens * widest * self.precision.other_bytes
        if stage < len(self.stages) - 1:
            return layer_bytes
        sampled = min(tokens, _SAMPLED_ROWS)
        return layer_bytes + sampled * self.model.vocab_size * _BYTES_PER_LOGIT

    def activation_bytes(self, tokens: int) -> float:
        """Bytes of hidden states, which all-reduces sum and stages send on."""
        return tokens * self.model.hidden_size * self.precision.other_bytes

    def _matrix(
        self, name: str, columns: int, rows: Sequence[int], bits: Bits, number_bytes: float
    ) -> Matrix:
        """A matrix of these blocks of rows; where bits are None, a weight takes `number_bytes`."""
        if len(bits) == 1:
            bits = bits * len(rows)
        stored = 0.0
        for count, weight_bits in zip(rows, bits, strict=True):
            if weight_bits is None:
                stored += columns * (count * number_bytes)
            else:
                padded = -(-count // ROWS) * ROWS
                stored += columns * (padded * weight_bits / 8)
        return Matrix(name, columns * sum(rows), columns + sum(rows), stored)

    def _layer_matrices(self, kind: LayerKind) -> Iterator[Matrix]:
        model, bits = self.model.of_shape(kind.shape), dict(kind.bits)

        def matrix(name: str, columns: int, *rows: int) -> Matrix:
            return self._matrix(
                name, columns, rows, bits.get(name, NUMBERS), self.precision.weight_bytes
            )

        if kind.recurrent and self.recurrent is not None:
            yield from self._recurrent_matrices(self.recurrent, bits, matrix)
        else:
            yield from self._attention_matrices(model, matrix)
        if kind.sparse and model.moe is not None:
            yield from self._expert_matrices(model, model.moe, bits, matrix)
        elif kind.feeds_forward:
            inner = model.inner_part(model.intermediate_size, self.layout.tensor_parallel)
            rows = _first_rows(inner, is_gated=model.feed_forward.is_gated)
            yield matrix("gate_up", model.hidden_size, *rows)
            yield matrix("down", inner, model.hidden_size)

    def _attention_matrices(
        self, model: ModelConfig, matrix: Callable[..., Matrix]
    ) -> Iterator[Matrix]:
        """The matrices of a layer up to the output of attention; ``matrix`` makes one."""
        degree, hidden = self.layout.tensor_parallel, model.hidden_size
        query, key = (
            self.heads * model.head_dim,
            max(1, model.num_kv_heads // degree) * model.head_dim,
        )
        if size := model.embedding.per_layer_size:
            # made of the embedded token, and of the hidden state
            yield matrix("per_layer_input", hidden, 2 * size)
            yield matrix("per_layer_input_up", size, hidden)
        if model.attention.mla is None:
            keys_and_values = [key] * (len(model.qkv_sizes) - 1)
            yield matrix("qkv", hidden, query, *keys_and_values)
            if model.attention.output_gate:
                yield matrix("output_gate", hidden, query)
        else:
            mla, query = model.attention.mla, model.attention.mla.query_size(self.heads)
            yield matrix("qkv", hidden, mla.q_lora_rank or query, model.head_dim)
            if mla.q_lora_rank:
                yield matrix("query_up", mla.q_lora_rank, query)
            # Its one half multiplies queries before attention, the other sums of latents after it.
            absorbed, size = (
                self.heads * model.head_dim + query,
                mla.kv_lora_rank * mla.expanded_size(self.heads),
            )
            yield Matrix("latent_up", size, 2 * absorbed, size * self.precision.weight_bytes)
        yield matrix("output", model.output_size // degree, hidden)

    def _recurrent_matrices(
        self,
        recurrent: RecurrentConfig,
        bits: Mapping[str, Bits],
        matrix: Callable[..., Matrix],
    ) -> Iterator[Matrix]:
        """The matrices of a recurrent layer up to its output; ``matrix`` makes one."""
        hidden, channels = self.model.hidden_size, recurrent.mixer.channels
        for name, columns, blocks, is_rounded, is_fused in recurrent.mixer.matrices(hidden):
            rows = blocks
            if is_fused and self.layout.tensor_parallel == 1:
                rows = (sum(blocks),)
            own_bits = bits.get(name, NUMBERS)
            number_bytes = self.precision.other_bytes
            if is_rounded:
                number_bytes = self.precision.weight_bytes
            yield self._matrix(name, columns, rows, own_bits, number_bytes)
        kernel = channels * recurrent.kernel_size
        kernel_bytes = kernel * self.precision.other_bytes
        yield Matrix("convolution", kernel, 2 * channels, kernel_bytes)
        yield matrix("output", recurrent.mixer.output_size, hidden)

    def _expert_matrices(
        self,
        model: ModelConfig,
        moe: MoeConfig,
        bits: dict[str, Bits],
        matrix: Callable[..., Matrix],
    ) -> Iterator[Matrix]:
        """The matrices of a sparse layer's feed-forward part; all its experts count as one
        matrix."""
        degree, hidden = self.layout.tensor_parallel, model.hidden_size
        if moe.shared_size:
            shared = model.inner_part(moe.shared_size, degree)
            rows = _first_rows(shared, is_gated=moe.is_gated)
            yield matrix("shared_gate_up", hidden, *rows)
            yield matrix("shared_down", shared, hidden)
        if moe.gates_shared:
            number_bytes = self.precision.other_bytes
            yield self._matrix("shared_gate", hidden, (1,), NUMBERS, number_bytes)
        experts, chosen = moe.num_experts, moe.experts_per_token
        inner = model.inner_part(moe.intermediate_size, degree)
        first_rows = _first_rows(inner, is_gated=moe.is_gated)
        router_bits = bits.get("router", NUMBERS)
        yield self._matrix("router", hidden, (experts,), router_bits, self.precision.other_bytes)
        gate_up, down = bits.get("expert_gate_up", NUMBERS), bits.get("expert_down", NUMBERS)
        if inner % ROWS or len(set(gate_up)) > 1 or None in gate_up or None in down:
            # experts of several formats, or cut between rows that are packed together, stay numbers
            bits.clear()
        expert_bytes = (
            matrix("expert_gate_up", hidden, *first_rows).bytes
            + matrix("expert_down", inner, hidden).bytes
        )
        products = 1 + len(first_rows)
        yield Matrix(
            "experts",
            weights=experts * products * hidden * inner,
            activations=chosen * (2 * hidden + products * inner),
            bytes=experts * expert_bytes,
            reached=chosen / experts,
        )

    def _recurrence(self, work: StepWork, layers: int) -> Iterator[Operator]:
        """Everything that recurrent layers do with states: each row reads its own and writes it,
        but a prompt begins without one."""
        if self.recurrent is None or not work.tokens:
            return
        beginning = sum(start == 0 for start, _ in work.chunks)
        moves = 2 * work.rows - beginning
        mixer = self.recurrent.mixer
        pairs = sum([scan_pairs(start, length) for start, length in work.chunks])
        flops = mixer.scan_flops(work.tokens, pairs)
        activations = work.tokens * mixer.scan_numbers
        yield Operator(
            "state",
            "recurrence",
            flops * layers,
            0.0,
            0.0,
            activations * self.precision.other_bytes * layers,
            moves * self._layer_state_bytes * layers,
        )

    def _attention(
        self, name: OperatorKind, tokens: int, keys: int, pairs: float, kind: LayerKind, layers: int
    ) -> Operator:
        # A query is read, and a sum of values is written.
        both, kv_bytes = self._sizes[kind]
        activation_bytes = tokens * both * self.precision.other_bytes * layers
        return Operator(
            "attention",
            name,
            2.0 * both * pairs * layers,
            0.0,
            keys * kv_bytes * layers,
            activation_bytes,
        )


def _first_rows(inner: int, *, is_gated: bool) -> tuple[int, ...]:
    """Rows of the blocks of a feed-forward part's first matrix."""
    if is_gated:
        return inner, inner
    return (inner,)


def scan_pairs(start: int, length: int) -> int:
    """Pairs of positions that the scan of a chunk multiplies, within pieces that end at multiples
    of SCAN_CHUNK. Of n positions, n (n - 1) / 2 pairs are of corrections, which depend on earlier
    ones, and n (n + 1) / 2 of outputs: n^2 together."""
    first = min(length, -start % SCAN_CHUNK)
    pieces, last = divmod(length - first, SCAN_CHUNK)
    return first**2 + pieces * SCAN_CHUNK**2 + last**2


def chunk_keys(start: int, length: int, window: int = 0) -> int:
    """Keys that a chunk reads at least: every one that any of its positions sees, once. A window of
    0 sees all."""
    if not window:
        return start + length
    return min(start, window - 1) + length


def chunk_pairs(start: int, length: int, window: int = 0) -> int:
    """Pairs of query and key of a causal chunk: position p sees p + 1 keys, or the window if that
    is less. For a whole prompt of n tokens without a window that is n (n + 1) / 2, half of the
    square that Seesaw's Appendix A prints: a prompt's attention takes 2 b hq s^2 d operations and
    not 4."""
    if not window:
        return length * start + length * (length + 1) // 2
    growing = max(0, min(length, window - 1 - start))  # positions that see less than a whole window
    return growing * start + growing * (growing + 1) // 2 + (length - growing) * window


@lru_cache(maxsize=1024)
def divide_layers(model: ModelConfig, stages: int) -> tuple[int, ...]:
    """The number of layers of each stage. The embedding belongs to the first stage, the head to the
    last."""
    if stages == 1:  # the counts of a layer are those of such a model
        return (model.num_layers,)
    decode, mixed = _shares(model, [], "bytes"), _shares(model, [(0, _CHUNK)], "flops")
    costs = []
    for decode_share, mixed_share in zip(decode, mixed, strict=True):
        costs.append(round(_UNITS * (decode_share + mixed_share) / 2))
    layers = costs[1:-1]
    layers[0] += costs[0]  # the embedding
    layers[-1] += costs[-1]  # the head
    return divide(layers, stages)


def divide(costs: Sequence[int], stages: int) -> tuple[int, ...]:
    """Cut a row of costs into `stages` pieces, none empty; returns the number of entries of each
    piece. The dearest piece is as cheap as can be. Among such divisions the most even is taken
    (least sum of squares, so that keys and values are spread well too); among equally even
    divisions, the one with the smaller first pieces. O(stages * len(costs)^2)."""
    sums = list(accumulate(costs, initial=0))
    limit = _least_dearest(sums, stages)
    # By position: the sum of squares and the pieces of the best division that ends there and has no
    # dearer piece.
    best: list[tuple[float, tuple[int, ...]]] = [(0, ())] + [(inf, ())] * len(costs)
    for _ in range(stages):
        longer: list[tuple[float, tuple[int, ...]]] = []
        for end in range(len(sums)):
            found: tuple[float, tuple[int, ...]] = (inf, ())
            for cut in range(end):
                piece = sums[end] - sums[cut]
                if piece <= limit:
                    squares, pieces = best[cut]
                    found = min(found, (squares + piece**2, (*pieces, end - cut)))
            longer.append(found)
        best = longer
    return best[-1][1]


def _least_dearest(sums: Sequence[int], stages: int) -> float:
    """The least cost that the dearest of `stages` pieces can have, from the sums of costs up to
    each position."""
    # by position: the least if the pieces so far end there
    dearest = [0.0] + [inf] * (len(sums) - 1)
    for _ in range(stages):
        longer = []
        for end in range(len(sums)):
            possible = [max(dearest[cut], sums[end] - sums[cut]) for cut in range(end)]
            longer.append(min(possible, default=inf))
        dearest = longer
    return dearest[-1]


def _shares(
    model: ModelConfig, chunks: list[Chunk], measure: Literal["bytes", "flops"]
) -> list[float]:
    """The costs of the embedding, each layer and the head in a step with these chunks, as shares of
    the whole."""
    cost: Callable[[Operator], float] = attrgetter(measure)
    layers = range(model.num_layers)  # each a stage
    counts = ModelCounts(
        model, ParallelLayout(pipeline_parallel=len(layers)), pipeline_split=[1] * len(layers)
    )
    work = StepWork.of([_CONTEXT] * _DECODES, chunks, sampled=0, windows=counts.windows)
    parts = [cost(counts.embedding(work.tokens))]
    for layer in layers:
        products = sum(map(cost, counts.products(work, layer)))
        parts.append(products + sum(map(cost, counts.attention(work, layer))))
    parts.append(cost(counts.product(counts.head, _DECODES)))
    whole = sum(parts)
    return [part / whole for part in parts]
