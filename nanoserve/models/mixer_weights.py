"""The tensors of mixers in a checkpoint, and how ranks divide them; a part of
`nanoserve.models.weights`."""

from collections.abc import Iterator

from nanoserve.config.checkpoint_names import LayerNames
from nanoserve.config.mixers import (
    GatedDeltaNetConfig,
    Mamba2Config,
    MambaConfig,
    ShortConvolutionConfig,
)
from nanoserve.config.model_config import ModelConfig
from nanoserve.config.model_parts import RecurrentConfig
from nanoserve.models.shards import Shard
from nanoserve.models.tensor_parts import (
    DividedRows,
    TensorPart,
    divide_evenly,
    interleaved_parts,
    row_parts,
)


def mixer_parts(
    config: ModelConfig, recurrent: RecurrentConfig, layer: LayerNames, prefix: str, target: str
) -> Iterator[TensorPart]:
    """The tensors of a layer that has a state in place of keys and values."""
    mixer, bias, hidden = recurrent.mixer, recurrent.bias, config.hidden_size
    own = target + "mixer."
    kernel = prefix + layer.mixer_kernel
    kernel_shape = (mixer.channels, 1, recurrent.kernel_size)
    if isinstance(mixer, GatedDeltaNetConfig):
        yield from _delta_net_inputs(mixer, layer, prefix, own, hidden)
    else:
        inputs = [prefix + name for name in layer.mixer_inputs]
        rows = sum(mixer.matrices(hidden)[0].rows)
        yield from row_parts(inputs, own + "inputs", (rows,), hidden, bias=bias)
    yield TensorPart(f"{kernel}.weight", own + "kernel", kernel_shape)
    if recurrent.kernel_bias:
        yield TensorPart(f"{kernel}.bias", own + "kernel_bias", (mixer.channels,))
    if isinstance(mixer, GatedDeltaNetConfig):
        yield from _head_parts(layer, prefix, own, mixer.num_value_heads, mixer.value_head_dim)
    elif isinstance(mixer, Mamba2Config):
        yield from _head_parts(layer, prefix, own, mixer.num_heads, mixer.inner_size)
        yield TensorPart(prefix + layer.mixer_skip, own + "skip", (mixer.num_heads,))
    elif isinstance(mixer, MambaConfig):
        yield from _selection_parts(mixer, layer, prefix, own)
    output = [prefix + layer.mixer_output]
    yield from row_parts(output, target + "output", (hidden,), mixer.output_size, bias=bias)


def _head_parts(
    layer: LayerNames, prefix: str, own: str, num_heads: int, norm_size: int
) -> Iterator[TensorPart]:
    """Decays and steps of the heads of a state, and the norm of their outputs."""
    yield TensorPart(prefix + layer.mixer_decay, own + "log_decay", (num_heads,))
    yield TensorPart(prefix + layer.mixer_step_bias, own + "step_bias", (num_heads,))
    yield TensorPart(f"{prefix}{layer.mixer_norm}.weight", own + "norm.weight", (norm_size,))


def _selection_parts(
    mixer: MambaConfig, layer: LayerNames, prefix: str, own: str
) -> Iterator[TensorPart]:
    """The tensors of a selective scan."""
    channels, rank = mixer.channels, mixer.time_step_rank
    selection = (sum(mixer.selection_sizes), channels)
    time_step = prefix + layer.mixer_time_step
    yield TensorPart(f"{prefix}{layer.mixer_selection}.weight", own + "selection.weight", selection)
    yield TensorPart(f"{time_step}.weight", own + "time_step.weight", (channels, rank))
    yield TensorPart(f"{time_step}.bias", own + "step_bias", (channels,))
    yield TensorPart(prefix + layer.mixer_decay, own + "log_decay", mixer.matrix_shape)
    yield TensorPart(prefix + layer.mixer_skip, own + "skip", (channels,))
    if mixer.has_norms:
        sizes = zip(layer.mixer_selection_norms, mixer.selection_sizes, strict=True)
        for place, (name, size) in enumerate(sizes):
            yield TensorPart(f"{prefix}{name}.weight", f"{own}norms.{place}.weight", (size,))


def _delta_net_inputs(
    heads: GatedDeltaNetConfig, layer: LayerNames, prefix: str, mixer: str, hidden: int
) -> Iterator[TensorPart]:
    """The matrices that Gated DeltaNet multiplies hidden states with."""
    inputs = [prefix + name for name in layer.mixer_inputs]
    rates = [prefix + name for name in layer.mixer_rates]
    num_heads = heads.num_value_heads
    shared = num_heads // heads.num_key_heads
    key, value = heads.key_head_dim, shared * heads.value_head_dim
    if len(inputs) > 1:
        sizes = (heads.channels, heads.value_size)
        yield from row_parts(inputs, mixer + "inputs", sizes, hidden, bias=False)
    else:
        yield from interleaved_parts(
            inputs[0],
            [mixer + "inputs"] * 4,
            [key, key, value, value],
            heads.num_key_heads,
            hidden,
            first_rows=[0, heads.key_size, 2 * heads.key_size, heads.channels],
        )
    if len(rates) > 1:
        yield from row_parts(rates, mixer + "rates", (num_heads, num_heads), hidden, bias=False)
    else:
        yield from interleaved_parts(
            rates[0],
            [mixer + "rates"] * 2,
            [shared, shared],
            heads.num_key_heads,
            hidden,
            first_rows=[0, num_heads],
        )


def mixer_blocks(matrix: str, recurrent: RecurrentConfig, shard: Shard) -> tuple[DividedRows, ...]:
    """The blocks that divide a matrix of a recurrent layer; empty if it is not divided."""
    mixer = recurrent.mixer
    if matrix == "output":
        return (divide_evenly(mixer.output_size, shard),)
    if isinstance(mixer, GatedDeltaNetConfig):
        blocks = _delta_net_blocks(mixer, shard)
    elif isinstance(mixer, Mamba2Config):
        blocks = _mamba2_blocks(mixer, shard)
    else:
        channels = divide_evenly(mixer.channels, shard)
        num_inputs = 3 if isinstance(mixer, ShortConvolutionConfig) else 2
        divided = ("kernel", "kernel_bias", "selection", "time_step", "log_decay", "step_bias")
        blocks = dict.fromkeys((*divided, "skip"), (channels,))
        blocks["inputs"] = (channels,) * num_inputs
    return blocks.get(matrix, ())


def _delta_net_blocks(
    heads: GatedDeltaNetConfig, shard: Shard
) -> dict[str, tuple[DividedRows, ...]]:
    """Value heads are divided with the key head that they share."""
    key = divide_evenly(heads.key_size, shard)
    value = divide_evenly(heads.value_size, shard)
    by_head = divide_evenly(heads.num_value_heads, shard)
    return {
        "inputs": (key, key, value, value),
        "kernel": (key, key, value),
        "rates": (by_head, by_head),
        "log_decay": (by_head,),
        "step_bias": (by_head,),
    }


def _mamba2_blocks(heads: Mamba2Config, shard: Shard) -> dict[str, tuple[DividedRows, ...]]:
    """Heads are divided with the group that they share; a single group is whole on every rank."""
    value = divide_evenly(heads.inner_size, shard)
    by_head = divide_evenly(heads.num_heads, shard)
    if heads.num_groups == 1:
        group = DividedRows(heads.state_size, range(heads.state_size), heads.state_size)
    else:
        group = divide_evenly(heads.group_size, shard)
    return {
        "inputs": (value, value, group, group, by_head),
        "kernel": (value, group, group),
        "kernel_bias": (value, group, group),
        "log_decay": (by_head,),
        "step_bias": (by_head,),
        "skip": (by_head,),
        "norm": (value,),
    }
