"""Every form in which the GPU's programs are compiled by default, to compile them ahead of time
without a GPU."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from triton_ops.gpu import (
    cache_constants,
    fused_linear_constants,
    packed_constants,
    recurrent_constants,
    rotary_constants,
    sampling_constants,
    state_space_constants,
)
from triton_ops.gpu.configurations import (
    ATTENTION,
    BLOCK_SIZES,
    HEAD_DIMS,
    OLDEST_WITH_DEPENDENT_LAUNCHES,
    VALUE_DIMS,
    DecodeConfiguration,
    PrefillConfiguration,
    ProgramShape,
    decode_constants,
    prefill_constants,
    program_shape,
)

BLOCK_SIZE = 16
GROUP = 4
"""Query heads per key-value head; all that are taken fit in the same tile of a single token."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One form of a program: the arguments of `triton.compiler.ASTSource`, by the names of the
    program's parameters.

    `types` holds Triton's name for the type of every parameter that is no constant. Those in
    `divisible` are multiples of 16 (pointers: in bytes), as a launch would find out. `module` is a
    file in `triton_ops/gpu/kernels`.
    """

    module: str
    program: str
    label: str
    types: Mapping[str, str]
    divisible: frozenset[str]
    constants: Mapping[str, int | None]
    num_warps: int
    num_stages: int


NUM_KV_HEADS = 8
LARGEST_BLOCK = max(BLOCK_SIZES)  # a program moves a block: this one needs the most registers
_CACHE_STRIDES = {"key_cache": "block head slot", "value_cache": "block head slot"}

_STRIDES = (
    "out_stride",
    "query_token_stride",
    "query_head_stride",
    "block_stride",
    "kv_head_stride",
    "token_stride",
)
_METADATA = {
    "block_tables": "*i32",
    "query_starts": "*i32",
    "context_lengths": "*i32",
    "sinks": "*fp32",
}
_NUMBERS = {
    "scale": "fp32",
    "soft_cap": "fp32",
    "sliding_window": "i32",
    "table_stride": "i32",
    **dict.fromkeys(_STRIDES, "i32"),
}
_PARTIAL = {"split_results": "*fp32", "split_weights": "*fp32", "arrivals": "*i32"}
_WHOLE, _SLIDING = {"slides": False}, {"slides": True}
_CAUSAL = {"spans": None}


def _with_spans(causal: Variant) -> Variant:
    """The form of a program whose queries see to the end of a span."""
    constants = {name: value for name, value in causal.constants.items() if name not in _CAUSAL}
    return replace(
        causal,
        label=f"{causal.label}, spans",
        types={**causal.types, "spans": "*i32"},
        constants=constants,
    )


def launched_on(generation: int, variant: Variant) -> Variant:
    """The form of a program that waits for the grid before it (`kernels/dependent.py`), or is never
    launched before that has ended."""
    dependent = generation >= OLDEST_WITH_DEPENDENT_LAUNCHES
    return replace(variant, constants={**variant.constants, "DEPENDENT": dependent})


def _names(features: dict[str, bool]) -> list[str]:
    return [name for name, is_on in features.items() if is_on]


def attention_variants(generation: int) -> Iterator[Variant]:
    """Paged attention in the configurations of one generation: 8, 9 or 10 of the table."""
    for (line, width, head_dim), configuration in ATTENTION.items():
        if line == generation:
            value_dim = VALUE_DIMS.get(head_dim, head_dim)
            shape = program_shape(
                head_dim=head_dim,
                value_dim=value_dim,
                block_size=BLOCK_SIZE,
                heads_per_kv_head=GROUP,
            )
            dtype = "fp32" if width == 4 else "bf16"
            name = f"{dtype} head_dim {head_dim}"
            for variant in _decode_variants(configuration.decode, shape, dtype, name):
                yield launched_on(generation, variant)
            yield from _prefill_variants(configuration.prefill, shape, dtype, name)


def _decode_variants(
    configuration: DecodeConfiguration, shape: ProgramShape, dtype: str, name: str
) -> Iterator[Variant]:
    names = ("num_rows", "num_groups", "num_helpers", "keys_per_program", "most_splits")
    counts = dict.fromkeys(names, "i32")
    for features in _features(dtype):
        constants = decode_constants(configuration, shape, **features)
        variant = Variant(
            module="decode_attention",
            program="decode_attention",
            label=", ".join([name, *_names(features)]),
            types={**_tensors(dtype), **_PARTIAL, **_METADATA, **_NUMBERS, **counts},
            divisible=frozenset({*_tensors(dtype), *_PARTIAL, *_STRIDES}),
            constants={**constants, **_CAUSAL},
            num_warps=configuration.num_warps,
            num_stages=configuration.num_stages,
        )
        yield variant
        # Spans of single tokens move the window, and nothing else. Triton 3.6.0 spills up to 48
        # bytes of three such forms in float32, which no model needs.
        if features == _SLIDING and dtype != "fp32":
            yield _with_spans(variant)


def _prefill_variants(
    configuration: PrefillConfiguration, shape: ProgramShape, dtype: str, name: str
) -> Iterator[Variant]:
    counts = {"num_rows": "i32", "num_groups": "i32"}
    for features in _features(dtype):
        constants = prefill_constants(configuration, shape, **features)
        variant = Variant(
            module="attention",
            program="prefill_attention",
            label=", ".join([name, *_names(features)]),
            types={**_tensors(dtype), **_METADATA, **_NUMBERS, **counts},
            divisible=frozenset({*_tensors(dtype), *_STRIDES}),
            constants={**constants, **_CAUSAL},
            num_warps=configuration.num_warps,
            num_stages=configuration.num_stages,
        )
        yield variant
        if features == _SLIDING or (features == _WHOLE and dtype != "fp32"):
            yield _with_spans(variant)


def _features(dtype: str) -> tuple[dict[str, bool], ...]:
    """float32 serves to check the others, and compiles slowly."""
    if dtype == "fp32":
        return _WHOLE, _SLIDING
    return _WHOLE, _SLIDING, {"slides": True, "capped": True, "has_sinks": True}


def _tensors(dtype: str) -> dict[str, str]:
    return dict.fromkeys(("out", "query", "key_cache", "value_cache"), f"*{dtype}")


def cache_variants() -> Iterator[Variant]:
    """Writes into the cache and moves of its blocks, which are the same for every generation."""
    for dtype, head_dim in product(("bf16", "fp32"), HEAD_DIMS):
        label = f"{dtype} head_dim {head_dim}"
        yield _moving_variant(
            "write_slots",
            label,
            dict.fromkeys(("key", "value", "key_cache", "value_cache"), f"*{dtype}")
            | {"slot_mapping": "*i64"},
            {"key": "token head", "value": "token head", **_CACHE_STRIDES},
            cache_constants.write_constants(NUM_KV_HEADS, LARGEST_BLOCK, head_dim),
        )
        for direction in ("gathers", "scatters"):
            yield _moving_variant(
                "move_blocks",
                f"{label}, {direction}",
                dict.fromkeys(("key_cache", "value_cache", "staged"), f"*{dtype}")
                | {"blocks": "*i64"},
                {"staged": "kind block head slot", **_CACHE_STRIDES},
                cache_constants.move_constants(
                    LARGEST_BLOCK, head_dim, into_cache=direction == "scatters"
                ),
            )


_SAMPLED = {"arrivals": "*i32", "vocab_size": "i32", "blocks": "i32"}
_DRAWN = {"maxima": "*fp32", "rows": "*i64", "temperature": "*fp32"}
_FOUND = {"maxima": "*fp32", "tokens": "*i64", "finite": "*u8", "bests": "*i64"}


def sampling_variants() -> Iterator[Variant]:
    """Programs that sample, which are the same for every generation: for a vocabulary of a multiple
    of 16, and for any. Logits have 16 bits where all rows are greedy or drawn by temperature
    alone."""
    bits, least = sampling_constants.DIGIT_BITS, {"least": "*fp32"}
    drawing = {**_DRAWN, "tokens": "*i64", "bests": "*i64", "keys": "*i32", "min_p": "*fp64"}
    narrowing = {**_DRAWN, **least, "top_p": "*fp64"}
    narrowing |= dict.fromkeys(("prefixes", "needed", "histograms"), "*i64")
    for is_even in (True, False):
        for dtype in ("fp32", "bf16", "fp16"):
            logits, label = {"logits": f"*{dtype}"}, "" if dtype == "fp32" else f", {dtype}"
            yield _sampling_variant(
                "find_likeliest", f"logits{label}", _FOUND | logits, {}, is_even=is_even
            )
            yield _sampling_variant(
                "draw_likely", f"all{label}", drawing | logits, {"least": None}, is_even=is_even
            )
        exact = {"logits": "*fp32"}
        yield _sampling_variant(
            "draw_likely", "top_p", drawing | least | exact, {}, is_even=is_even
        )
        for shift, low in sampling_constants.PASSES:
            digit = {"SHIFT": shift, "DIGIT_BITS": bits, "LOW": low}
            label = f"shift {shift}" + ", low" * low
            yield _sampling_variant(
                "narrow_top_p", label, narrowing | exact, digit, is_even=is_even
            )


def _sampling_variant(
    program: str,
    label: str,
    tensors: dict[str, str],
    constants: dict[str, int] | dict[str, None],
    *,
    is_even: bool,
) -> Variant:
    types = {**tensors, **_SAMPLED, "stride": "i32"}
    divisible = [name for name, each in types.items() if each.startswith("*")]
    warps = sampling_constants.NUM_WARPS
    if program == "narrow_top_p":
        warps = sampling_constants.NARROWING_WARPS
    return Variant(
        module="sampling",
        program=program,
        label=label + ", any vocabulary" * (not is_even),
        types=types,
        divisible=frozenset(divisible + ["vocab_size", "stride"] * is_even),
        constants={**constants, "BLOCK": sampling_constants.BLOCK},
        num_warps=warps,
        num_stages=3,
    )


def _moving_variant(
    program: str,
    label: str,
    pointers: dict[str, str],
    strides: dict[str, str],
    constants: dict[str, int],
) -> Variant:
    """`pointers`: tensors, then the list of indices. `strides`: a tensor's dimensions but for the
    last, which is contiguous: a launch makes a stride of 1 a constant."""
    *tensors, indices = pointers
    numbers = [
        f"{tensor}_stride_{dimension}"
        for tensor, names in strides.items()
        for dimension in names.split()
    ]
    return Variant(
        module="cache",
        program=program,
        label=label,
        types={**pointers, **dict.fromkeys(numbers, "i32")},
        divisible=frozenset([*tensors, *numbers]),
        constants={
            **constants,
            f"{indices}_stride": 1,
            **{f"{tensor}_stride_dim": 1 for tensor in strides},
        },
        num_warps=cache_constants.NUM_WARPS,
        num_stages=1,
    )


NUM_HEADS = GROUP * NUM_KV_HEADS
LARGEST_ROTATED = 256
_ROTARY_STRIDES = (
    *("query_stride_token", "query_stride_head", "projected_stride", "cos_stride", "sin_stride"),
    *("key_cache_stride_block", "key_cache_stride_head", "key_cache_stride_slot"),
    *("value_cache_stride_block", "value_cache_stride_head", "value_cache_stride_slot"),
)
_NORMS: dict[str, dict[str, bool]] = {
    "no norms": {"norm_adds_one": False},
    "norms": {"norm_adds_one": False},
    "norms less 1": {"norm_adds_one": True},
}


def rotary_variants(generation: int) -> Iterator[Variant]:
    """Rotation with the write into the cache, for one generation: whole heads with each kind of
    norm, and half of the dimensions, by neighbours too."""
    head_dims = [head_dim for head_dim in HEAD_DIMS if head_dim <= LARGEST_ROTATED]
    for dtype, head_dim in product(("bf16", "fp32"), head_dims):
        forms = [(head_dim, norm, False) for norm in _NORMS]
        forms += [(head_dim // 2, "no norms", True), (head_dim // 2, "norms", False)]
        for rotary_dim, norm, interleaved in forms:
            constants = rotary_constants.rotary_constants(
                NUM_HEADS,
                NUM_KV_HEADS,
                head_dim,
                rotary_dim,
                LARGEST_BLOCK,
                interleaved=interleaved,
                **_NORMS[norm],
            )
            label = f"{dtype} head_dim {head_dim}, {rotary_dim} turn, {norm}"
            variant = _rotary_variant(dtype, label + ", neighbours" * interleaved, constants, norm)
            yield launched_on(generation, variant)


def _rotary_variant(dtype: str, label: str, constants: dict[str, int], norm: str) -> Variant:
    tensors = ["query", "projected", "cos", "sin", "key_cache", "value_cache"]
    weights = ["query_norm", "key_norm"]
    fixed: dict[str, int | None] = {**constants, "slot_mapping_stride": 1}
    if norm == "no norms":
        fixed |= dict.fromkeys(weights)
    else:
        tensors += weights
    return Variant(
        module="rotary",
        program="rotate_into_slots",
        label=label,
        types={
            **dict.fromkeys(tensors, f"*{dtype}"),
            "slot_mapping": "*i64",
            "eps": "fp32",
            **dict.fromkeys(_ROTARY_STRIDES, "i32"),
        },
        divisible=frozenset([*tensors, *_ROTARY_STRIDES]),
        constants=fixed,
        num_warps=rotary_constants.NUM_WARPS,
        num_stages=1,
    )


_FORMATS = {
    "int4": (4, 128, 0, 0, 8),
    "int4 with zeros": (4, 64, 1, 1, 0),
    "int8": (8, 128, 0, 0, 0),
    "int8 with zeros": (8, 32, 2, 1, 0),
    "Q4_1": (4, 32, 0, 2, 0),
    "Q5_0": (5, 32, 0, 0, 16),
    "Q4_K": (4, 32, 3, 3, 0),
    "Q5_K": (5, 32, 3, 3, 0),
    "Q6_K": (6, 16, 3, 0, 32),
}
"""Numbers of PackedFormats: codes of every width, in groups of every length, with scales and
offsets of every kind. Q2_K, which is Q6_K with minimums, is not among them: Triton 3.6.0 spills 12
bytes of its product of 32 rows on sm_100. All of its other forms fit, and all fit by 3.7.1."""
_SIZES = ("num_outputs", "num_columns", "num_rows", "row_stride", "block_quads", "steps_per_part")
_COUNTS = ("num_elements", "num_outputs", "num_parts")


def _packed_program(*, unpacks: bool, rows: int) -> str:
    if unpacks:
        return "unpack_matrix"
    if rows > 1:
        return "multiply_packed"
    return "multiply_row"


def packed_variants() -> Iterator[Variant]:
    """Products with packed matrices, the same for every generation. Products of few rows are in
    parts."""
    tiles = (packed_constants.ONE_ROW, *packed_constants.TILES, packed_constants.UNPACKING)
    for dtype, (name, form), tile in product(("bf16", "fp16"), _FORMATS.items(), tiles):
        unpacks = tile == packed_constants.UNPACKING
        is_whole = unpacks or tile == packed_constants.TILES[-1]
        types = {
            "out": f"*{dtype if is_whole else 'fp32'}",
            "words": "*i32",
            "halves": "*fp16",
            "numbers": "*u8",
        }
        types |= {"scales": f"*{packed_constants.SCALE_NAMES[form[2]]}"}
        types |= {} if unpacks else {"rows": f"*{dtype}", "bias": f"*{dtype}"}
        sizes = ("num_outputs", "num_columns", "block_quads") if unpacks else _SIZES
        constants = packed_constants.packed_constants(form, tile) | (
            {} if unpacks else {"HAS_BIAS": is_whole}
        )
        yield Variant(
            module="packed",
            program=_packed_program(unpacks=unpacks, rows=tile.rows),
            label=f"{name}, {dtype}" + (f", {tile.rows} rows" if tile.rows > 1 else ""),
            types={**types, **dict.fromkeys(sizes, "i32")},
            divisible=frozenset(
                {*types, "num_outputs", "num_columns", "row_stride", "block_quads"}
                & {*types, *sizes}
            ),
            constants=constants,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    yield Variant(
        module="packed",
        program="add_up_parts",
        label="bf16",
        types={"out": "*bf16", "parts": "*fp32", "bias": "*bf16", **dict.fromkeys(_COUNTS, "i32")},
        divisible=frozenset({"out", "parts", "bias", "num_elements", "num_outputs"}),
        constants={"ELEMENTS": packed_constants.ELEMENTS_PER_PROGRAM, "HAS_BIAS": True},
        num_warps=packed_constants.REDUCTION_WARPS,
        num_stages=1,
    )


_EXPERT_SIZES = ("num_outputs", "num_columns", "row_stride", "expert_quads", "block_quads")


def packed_experts_variants() -> Iterator[Variant]:
    """Products with packed matrices of experts, the same for every generation: of all columns, and
    of one format in parts, without a bias. There each pair has a row, as in `down`."""
    tiles = (packed_constants.ONE_ROW, *packed_constants.EXPERT_TILES)
    for dtype, (name, form), tile in product(("bf16", "fp16"), _FORMATS.items(), tiles):
        label = f"{name}, {dtype}" + (f", {tile.rows} rows" if tile.rows > 1 else "")
        yield _packed_experts_variant(label, dtype, form, tile, in_parts=False)
        if name == "int4" and dtype == "bf16":
            yield _packed_experts_variant(f"{label}, in parts", dtype, form, tile, in_parts=True)


def _packed_experts_variant(
    label: str,
    dtype: str,
    form: tuple[int, ...],
    tile: packed_constants.Tile,
    *,
    in_parts: bool,
) -> Variant:
    tensors = {
        "out": "*fp32" if in_parts else f"*{dtype}",
        "rows": f"*{dtype}",
        "bias": "*fp32" if in_parts else f"*{dtype}",
        "experts": "*i64",
        "words": "*i32",
        "scales": f"*{packed_constants.SCALE_NAMES[form[2]]}",
        "halves": "*fp16",
        "numbers": "*u8",
    }
    counts = ["steps_per_part"]
    constants = packed_constants.packed_constants(form, tile) | {"HAS_BIAS": not in_parts}
    if tile.rows > 1:
        tensors |= {"firsts": "*i32", "ends": "*i32"}
        counts.append("num_rows")
    elif in_parts:
        counts.append("num_pairs")
        constants["pairs_per_row"] = 1  # which a launch makes a constant
    else:
        counts += ["num_pairs", "pairs_per_row"]
    return Variant(
        module="packed_experts",
        program="multiply_pairs" if tile.rows == 1 else "multiply_groups",
        label=label,
        types={**tensors, **dict.fromkeys((*_EXPERT_SIZES, *counts), "i32")},
        divisible=frozenset({*tensors, *_EXPERT_SIZES}),
        constants=constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


_PRODUCTS = {
    "1024 columns, norm, bias": (1024, "", ("norm", "bias")),
    "2560 columns, norm, GELU": (2560, "gelu", ("norm",)),
    "4096 columns, norm, SiLU": (4096, "silu", ("norm",)),
    "14336 columns, residual": (14336, "", ("residual",)),
    "28672 columns, bias, residual": (28672, "", ("bias", "residual")),
}
"""Columns and surroundings of products, as small and large models have them."""
_PRODUCT_SIZES = ("num_outputs", "row_stride")


def fused_linear_variants(generation: int) -> Iterator[Variant]:
    """Products of few rows with what stands around them, for one generation: 8, 9 or 10."""
    for dtype, (name, (columns, activation, around)) in product(
        ("bf16", "fp32"), _PRODUCTS.items()
    ):
        tensors = ["out", "rows", "weight", *around]
        absent = [name for name in ("bias", "norm", "residual") if name not in around]
        adds_one = activation == "gelu"
        variant = Variant(
            module="fused_linear",
            program="multiply_each_row",
            label=f"{dtype} {name}",
            types={
                **dict.fromkeys(tensors, f"*{dtype}"),
                **dict.fromkeys(_PRODUCT_SIZES, "i32"),
                "eps": "fp32",
            },
            divisible=frozenset({*tensors, *_PRODUCT_SIZES}),
            constants={
                **fused_linear_constants.product_constants(
                    columns, activation, norm_adds_one=adds_one
                ),
                **dict.fromkeys(absent),
            },
            num_warps=fused_linear_constants.NUM_WARPS,
            num_stages=1,
        )
        yield launched_on(generation, variant)


_DELTA_HEAD_DIMS = (64, 128, 256)
_SHARED = 2  # value heads that share a key head
_CONVOLUTIONS = ((4, {"has_bias": False, "silu": True}), (3, {"has_bias": True, "silu": False}))


def recurrent_variants(generation: int) -> Iterator[Variant]:
    """Programs of layers with a recurrent state, for one generation: 8, 9 or 10."""
    for dtype, (size, features), single in product(("bf16", "fp32"), _CONVOLUTIONS, (True, False)):
        label = [f"{dtype} kernel_size {size}", *["single tokens"] * single, *_names(features)]
        yield _recurrent_variant(
            "convolve",
            ", ".join(label),
            dict.fromkeys(("out", "inputs", "weight", "bias", "states"), f"*{dtype}"),
            ("num_channels", "out_stride", "inputs_stride", "slot_stride"),
            recurrent_constants.convolution_constants(size, single_tokens=single, **features),
            recurrent_constants.CONVOLUTION,
        )
    for dtype, head_dim in product(("bf16", "fp32"), _DELTA_HEAD_DIMS):
        yield from _delta_rule_variants(generation, dtype, head_dim)


def _delta_rule_variants(generation: int, dtype: str, head_dim: int) -> Iterator[Variant]:
    shape, label = (_SHARED, head_dim, head_dim), f"{dtype} head_dim {head_dim}"
    heads = dict.fromkeys(("out", "query", "key", "value"), f"*{dtype}")
    numbers = dict.fromkeys(("decay", "beta", "states"), "*fp32")
    tensors = {"prepared": f"*{dtype}", **heads, **numbers}
    stepped = _without(tensors, "prepared")
    for only_single in (False, True):
        yield _recurrent_variant(
            "step_delta_rule",
            label + ", only single tokens" * only_single,
            stepped,
            _strides(stepped),
            recurrent_constants.step_constants(*shape, only_single=only_single),
            recurrent_constants.STEP,
        )
    if dtype != "fp32" and head_dim <= recurrent_constants.LARGEST_SCANNED_KEY_DIM:
        prepared = _without(tensors, "out", "value", "states")
        yield _recurrent_variant(
            "prepare_chunks",
            label,
            prepared,
            _strides(prepared),
            recurrent_constants.preparation_constants(_SHARED, head_dim),
            recurrent_constants.PREPARATION,
        )
        scanned = _without(tensors, "beta")
        yield _recurrent_variant(
            "scan_delta_rule",
            label,
            scanned,
            _strides(scanned),
            recurrent_constants.scan_constants(*shape),
            recurrent_constants.scan_launch(generation),
        )


def _without(tensors: dict[str, str], *names: str) -> dict[str, str]:
    return {name: type_ for name, type_ in tensors.items() if name not in names}


def _strides(tensors: dict[str, str]) -> tuple[str, ...]:
    """The strides by token, and that of `states` by slot."""
    return tuple("slot_stride" if name == "states" else f"{name}_stride" for name in tensors)


def _recurrent_variant(
    program: str,
    label: str,
    tensors: dict[str, str],
    numbers: tuple[str, ...],
    constants: dict[str, int],
    launch: recurrent_constants.Launch,
    module: str = "recurrent",
) -> Variant:
    """`tensors`: all but the table of segments; `numbers`: all but how many segments there are."""
    return Variant(
        module=module,
        program=program,
        label=label,
        types={
            **tensors,
            "segments": "*i32",
            "num_segments": "i32",
            **dict.fromkeys(numbers, "i32"),
        },
        divisible=frozenset([*tensors, *numbers]),
        constants=constants,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )


_DUAL_SHAPES = ((80, 128, 64), (16, 128, 80), (48, 128, 32), (24, 256, 64))
"""Heads of a group, numbers of a query and of a value: of Mamba-2 and Granite 4, of Nemotron-H, of
a small Granite 4, and of Falcon-H1."""
_SELECTIVE_STATE_SIZE = 16


def state_space_variants(generation: int) -> Iterator[Variant]:
    """Programs of state-space layers, for one generation: 8, 9 or 10. float16 has forms of its own
    where matrices are multiplied."""
    for dtype, shape in product(("bf16", "fp16", "fp32"), _DUAL_SHAPES):
        yield from _dual_variants(generation, dtype, shape)
    for dtype, single in product(("bf16", "fp32"), (True, False)):
        heads = dict.fromkeys(("out", "query", "key", "value"), f"*{dtype}")
        tensors = {**heads, **dict.fromkeys(("time_step", "rates", "states"), "*fp32")}
        yield _recurrent_variant(
            "scan_selectively",
            f"{dtype} state_size {_SELECTIVE_STATE_SIZE}" + ", single tokens" * single,
            tensors,
            ("num_channels", *_strides(_without(tensors, "rates"))),
            state_space_constants.selective_constants(_SELECTIVE_STATE_SIZE, single_tokens=single),
            state_space_constants.SELECTIVE,
            module="state_space",
        )


def _dual_variants(generation: int, dtype: str, shape: tuple[int, int, int]) -> Iterator[Variant]:
    _, state_size, head_dim = shape
    label = f"{dtype} state_size {state_size}, head_dim {head_dim}"
    heads = dict.fromkeys(("out", "query", "key", "value"), f"*{dtype}")
    numbers = dict.fromkeys(("decay", "time_step", "local", "states"), "*fp32")
    tensors = {**heads, **numbers}
    if dtype != "fp16":
        stepped = _without(tensors, "local")
        for only_single in (False, True):
            yield _recurrent_variant(
                "step_dual",
                label + ", only single tokens" * only_single,
                stepped,
                _strides(stepped),
                state_space_constants.dual_step_constants(*shape, only_single=only_single),
                state_space_constants.DUAL_STEP,
                module="state_space",
            )
    if dtype != "fp32":
        attended = _without(tensors, "out", "states")
        for program, given, constants, launch in (
            (
                "attend_in_chunks",
                attended,
                state_space_constants.dual_attention_constants(*shape),
                state_space_constants.DUAL_ATTENTION,
            ),
            (
                "scan_dual",
                tensors,
                state_space_constants.dual_scan_constants(*shape),
                state_space_constants.dual_scan_launch(generation, state_size),
            ),
        ):
            yield _recurrent_variant(
                program, label, given, _strides(given), constants, launch, module="state_space"
            )
