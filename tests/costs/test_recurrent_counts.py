"""Counts of layers with a recurrent state: by hand on models that fit on a page, against the tensors
that hold the states, and against transformers' Qwen3-Next."""

from collections import Counter
from dataclasses import replace

import msgspec
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, JambaConfig, Qwen3NextConfig

from nanoserve.config.model_config import ModelConfig
from nanoserve.config.model_parts import AttentionConfig, EmbeddingConfig, LogitConfig
from nanoserve.config.published_shapes import load_shape, published_shapes
from nanoserve.costs.analysis import BLOCK_SIZE, Analysis
from nanoserve.costs.counts import SCAN_CHUNK, ModelCounts, Operator, Precision, scan_pairs
from nanoserve.costs.hardware import Efficiency, Machine, load_machine
from nanoserve.costs.step_costs import DoesNotFit, StepCosts
from nanoserve.errors import UsageError
from nanoserve.lab.benchmarks.floors import ModelCost
from nanoserve.layout import ParallelLayout
from nanoserve.models.decoder import Decoder
from nanoserve.models.mixer import make_states
from nanoserve.scheduler.recurrent_state.recurrent_state import CHUNK as SNAPSHOT_CHUNK
from nanoserve.scheduler.work import StepWork
from tests.costs.conftest import qwen3_next, tiny_convolutions, tiny_delta_net, tiny_mamba
from tests.oracle.checkpoints import FAMILIES
from triton_ops.recurrent import CHUNK

# Two decode rows that read 3 and 5 keys, and positions 2, 3, 4 of a prompt: five tokens.
WORK = StepWork.of([3, 5], [(2, 3)], sampled=2)
STATE = 40 * 3 * 2 + 4 * 4 * 6 * 4
"""Bytes of the state in a layer of tiny_delta_net: three inputs of 40 channels in 16 bits, and four
heads of 4 x 6 in float32."""
IDEAL = Efficiency.ideal()


def in_recurrent_layers(model: ModelConfig, work: StepWork) -> dict[str, Operator]:
    """Operators of the first two layers by name, which are alike, up to the output."""
    operators = ModelCounts(model).operators(work, 0)
    first = next(index for index, one in enumerate(operators) if one.name == "inputs")
    after = first + 1 + [one.name for one in operators[first:]].index("output")
    found = {one.name: one for one in operators[first:after]}
    return found | {one.name: one for one in operators if one.name == "state"}


def test_a_step_of_gated_delta_nets_by_hand() -> None:
    found = in_recurrent_layers(tiny_delta_net(), WORK)
    rows = 8 + 8 + 24 + 24  # queries, keys, values and gates
    # name: (operations, bytes of weights, of activations), both layers, 2 bytes a number
    expected = {
        "inputs": (2 * 2 * 5 * 8 * rows, 2 * 2 * 8 * rows, 2 * 2 * 5 * (8 + rows)),
        # a decay and a rate for each of four heads
        "rates": (2 * 2 * 5 * 8 * 8, 2 * 2 * 8 * 8, 2 * 2 * 5 * (8 + 8)),
        "convolution": (2 * 2 * 5 * 40 * 4, 2 * 2 * 40 * 4, 2 * 2 * 5 * (40 + 40)),
        "output": (2 * 2 * 5 * 24 * 8, 2 * 2 * 24 * 8, 2 * 2 * 5 * (24 + 8)),
        # a head's matrix has 24 numbers: three products for each token, and for the 3 x 3 pairs of
        # the chunk products of 4 and of 6 numbers
        "state": (2 * 4 * (6 * 24 * 5 + 2 * (4 + 6) * 9), 0, 2 * 2 * 5 * (40 + 24)),
    }
    assert {
        name: (one.flops, one.weight_bytes, one.activation_bytes) for name, one in found.items()
    } == expected
    # three rows read a state and write it, in two layers
    assert found["state"].state_bytes == 2 * 3 * 2 * STATE
    assert found["state"].bytes == 2 * 3 * 2 * STATE + 2 * 2 * 5 * (40 + 24)
    assert all(one.kv_bytes == 0 for one in found.values())


def test_a_step_of_mamba_by_hand() -> None:
    found = in_recurrent_layers(tiny_mamba("mamba"), WORK)
    expected = {
        # 16 values and 16 gates
        "inputs": (2 * 2 * 5 * 8 * 32, 2 * 2 * 8 * 32, 2 * 2 * 5 * (8 + 32)),
        # of 16 values, two numbers of a step, three of a key and three of a query
        "selection": (2 * 2 * 5 * 16 * 8, 2 * 2 * 16 * 8, 2 * 2 * 5 * (16 + 8)),
        "time_step": (2 * 2 * 5 * 2 * 16, 2 * 2 * 2 * 16, 2 * 2 * 5 * (2 + 16)),
        "convolution": (2 * 2 * 5 * 16 * 4, 2 * 2 * 16 * 4, 2 * 2 * 5 * (16 + 16)),
        "output": (2 * 2 * 5 * 16 * 8, 2 * 2 * 16 * 8, 2 * 2 * 5 * (16 + 8)),
        # values, steps and outputs; a key and a query
        "state": (2 * 7 * 16 * 3 * 5, 0, 2 * 2 * 5 * (3 * 16 + 2 * 3)),
    }
    assert {
        name: (one.flops, one.weight_bytes, one.activation_bytes) for name, one in found.items()
    } == expected
    # three inputs of 16 channels in 16 bits, and 16 x 3 numbers in 32
    assert found["state"].state_bytes == 2 * 3 * 2 * (3 * 16 * 2 + 16 * 3 * 4)


def test_a_step_of_mamba2_by_hand() -> None:
    found = in_recurrent_layers(tiny_mamba("mamba2"), WORK)
    channels = 16 + 2 * 2 * 3  # values, and keys and queries of two groups
    rows = 16 + channels + 4  # gates, those, and a step of each head
    expected = {
        "inputs": (2 * 2 * 5 * 8 * rows, 2 * 2 * 8 * rows, 2 * 2 * 5 * (8 + rows)),
        "convolution": (
            2 * 2 * 5 * channels * 4,
            2 * 2 * channels * 4,
            2 * 2 * 5 * (channels + channels),
        ),
        "output": (2 * 2 * 5 * 16 * 8, 2 * 2 * 16 * 8, 2 * 2 * 5 * (16 + 8)),
        # a head's matrix has 12 numbers: two products for each token, and for the 3 x 3 pairs of
        # the chunk products of 3 and of 4 numbers
        "state": (2 * 4 * (4 * 12 * 5 + 2 * (3 + 4) * 9), 0, 2 * 2 * 5 * (channels + 16)),
    }
    assert {
        name: (one.flops, one.weight_bytes, one.activation_bytes) for name, one in found.items()
    } == expected
    assert found["state"].state_bytes == 2 * 3 * 2 * (3 * channels * 2 + 4 * 3 * 4 * 4)


def test_states_of_a_model_without_attention_get_all_that_weights_leave(machine: Machine) -> None:
    memory = StepCosts(tiny_mamba("mamba2"), machine, efficiency=IDEAL).memory
    weights = 2 * (2 * (8 * 48 + 28 * 4 + 16 * 8) + 2 * 8 * 32)
    assert memory.kv_bytes(0) == 10_000 - weights
    state = 2 * (3 * 28 * 2 + 4 * 3 * 4 * 4)
    assert memory.states(100) == memory.sequences(7, 4) == (10_000 - weights) // state
    # blocks hold nothing: as many as the longest sequence has
    assert memory.kv_blocks(16) == memory.host_kv_blocks(0, 16) == 2**20 // 16
    with pytest.raises(DoesNotFit, match="the states of 40 sequences leave no room"):
        memory.kv_blocks(16, states=40)


def test_ranks_sum_up_one_output_of_a_layer_without_a_feed_forward_part() -> None:
    layout, machine = ParallelLayout(tensor_parallel=2), load_machine("h200")
    # one behind the embedding
    assert StepCosts(tiny_mamba("mamba2"), machine, layout).all_reduces(0) == 1 + 2
    assert StepCosts(tiny_delta_net(), machine, layout).all_reduces(0) == 1 + 3 * 2
    with pytest.raises(UsageError, match="of 3 does not divide 2 groups of heads of a state; use"):
        ModelCounts(tiny_mamba("mamba2"), ParallelLayout(tensor_parallel=3))


def test_a_step_of_short_convolutions_by_hand() -> None:
    found = in_recurrent_layers(tiny_convolutions(), WORK)
    expected = {
        "inputs": (2 * 2 * 5 * 8 * 24, 2 * 2 * 8 * 24),
        "convolution": (2 * 2 * 5 * 8 * 3, 2 * 2 * 8 * 3),
        "output": (2 * 2 * 5 * 8 * 8, 2 * 2 * 8 * 8),
        "state": (0, 0),
    }
    assert {name: (one.flops, one.weight_bytes) for name, one in found.items()} == expected
    assert found["state"].bytes == 2 * 3 * 2 * (8 * 2 * 2)  # two inputs of 8 channels


def test_attention_is_counted_in_the_layers_that_attend() -> None:
    found = ModelCounts(tiny_delta_net()).attention(WORK, 0)
    attended = {one.kind: one for one in found if one.name == "attention"}
    assert attended["decode attention"].kv_bytes == 2 * 2 * 4 * 2 * 8  # 8 keys in one layer
    assert attended["prefill attention"].kv_bytes == 2 * 2 * 4 * 2 * 5
    assert ModelCounts(tiny_delta_net()).kv_bytes_per_token(0) == 2 * 2 * 4 * 2


def test_a_prompt_begins_without_a_state() -> None:
    found = in_recurrent_layers(tiny_delta_net(), StepWork.of([], [(0, 3)]))
    assert found["state"].state_bytes == 2 * STATE


@pytest.mark.parametrize("start", [0, 1, 63, 64, 100])
@pytest.mark.parametrize("length", [1, 2, 64, 65, 200])
def test_pairs_of_a_scan_by_counting(start: int, length: int) -> None:
    """A correction depends on earlier positions of its piece, an output also on its own."""
    assert SCAN_CHUNK == CHUNK == SNAPSHOT_CHUNK
    pieces: dict[int, int] = {}
    for position in range(start, start + length):
        pieces[position // 64] = pieces.get(position // 64, 0) + 1
    expected = sum(sum(range(count)) + sum(range(1, count + 1)) for count in pieces.values())
    assert scan_pairs(start, length) == expected


@pytest.mark.parametrize("model", [tiny_delta_net(), tiny_convolutions(), qwen3_next()])
@pytest.mark.parametrize(("bits", "dtype"), [(16, torch.bfloat16), (32, torch.float32)])
def test_states_take_the_bytes_of_their_tensors(
    model: ModelConfig, bits: int, dtype: torch.dtype
) -> None:
    states = make_states(model, 2, dtype)
    layer = states.convolution.nbytes
    if states.matrix is not None:
        layer += states.matrix.nbytes
    assert model.recurrent is not None
    layers = len(model.recurrent.recurrent_layers)
    counts = ModelCounts(model, None, Precision.of(bits))
    assert 2 * counts.state_bytes(0) == layers * layer
    assert counts.state_bytes(0) == model.state_bytes(bits // 8) == counts.all_state_bytes


def test_weights_are_those_of_the_decoder() -> None:
    matrices = [one for one in Decoder(tiny_convolutions()).parameters() if one.dim() == 2]
    expected = 2 * sum(one.numel() for one in matrices)
    assert ModelCounts(tiny_convolutions()).stage_weight_bytes(0) == expected


def test_qwen3_next_has_the_weights_of_transformers_model() -> None:
    """Four layers are a twelfth of the model."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen3NextConfig(num_hidden_layers=4))
    sizes = [one.numel() for one in model.parameters() if one.dim() > 1]
    around = 2 * 151936 * 2048
    layers = 12 * (sum(sizes) - around)
    assert ModelCounts(qwen3_next()).stage_weight_bytes(0) / 2 == layers + around


def test_jamba_has_the_weights_of_transformers_model() -> None:
    """Eight layers are a quarter of the model. Decays do not count, which nothing is multiplied
    with."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(JambaConfig(num_hidden_layers=8))
    sizes = []
    for name, one in model.named_parameters():
        if one.dim() > 1 and not name.endswith("A_log"):
            sizes.append(one.numel())
    around = 2 * 65536 * 4096
    layers = 4 * (sum(sizes) - around)
    assert ModelCounts(load_shape("jamba-v0.1")).stage_weight_bytes(0) / 2 == layers + around


def test_granite_has_the_weights_of_transformers_model() -> None:
    with torch.device("meta"):
        shape = {**published_shapes()["granite-4.0-h-350m"]}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape))
    counts = ModelCounts(load_shape("granite-4.0-h-350m"))
    matrices = {name: one.numel() for name, one in model.named_parameters() if one.dim() > 1}
    assert counts.stage_weight_bytes(0) == 2 * sum(matrices.values())
    # four layers of attention with 4 key heads of 64; 48 heads of 32 x 128, and 3 inputs of the
    # convolution over 48 * 32 + 2 * 128 channels
    assert counts.kv_bytes_per_token(0) == 4 * 2 * 4 * 64 * 2
    assert counts.state_bytes(0) == 28 * (48 * 32 * 128 * 4 + 3 * (48 * 32 + 2 * 128) * 2)


def test_multipliers_cost_nothing() -> None:
    plain = load_shape("granite-4.0-h-350m")
    without = replace(
        plain,
        residual_multiplier=1.0,
        embedding=EmbeddingConfig(),
        logits=LogitConfig(),
        attention=AttentionConfig(),
    )
    assert without != plain
    assert ModelCounts(plain).operators(WORK, 0) == ModelCounts(without).operators(WORK, 0)


def test_experts_of_granite_are_beside_a_shared_part() -> None:
    """All that a token reaches beside attention or a mixer, by hand: 6 experts of 40 of which it is
    sent to 3, and a shared part of 24, each with three matrices, and the router."""
    model = ModelConfig.from_hf(FAMILIES["granitemoehybrid"]().to_dict())
    found = Counter[str]()
    for one in ModelCounts(model).operators(StepWork.of([3]), 0):
        found[one.name] += int(one.flops)
    hidden, layers = model.hidden_size, model.num_layers
    assert found["experts"] == layers * 2 * 3 * hidden * 40 * 3
    assert found["shared_gate_up"] + found["shared_down"] == layers * 2 * 3 * hidden * 24
    assert found["router"] == layers * 2 * hidden * 6


def test_qwen3_nexts_state_is_worth_3144_of_its_tokens() -> None:
    counts = ModelCounts(qwen3_next())
    assert counts.state_bytes(0) / 2**20 == 73.6875
    assert counts.kv_bytes_per_token(0) == 12 * 2 * 2 * 256 * 2
    assert counts.state_bytes(0) == 3144 * counts.kv_bytes_per_token(0)


def test_tensor_parallelism_divides_states_by_heads() -> None:
    half = ParallelLayout(tensor_parallel=2)
    for model in (tiny_delta_net(), tiny_convolutions()):
        whole, part = ModelCounts(model), ModelCounts(model, half)
        assert part.state_bytes(0) == whole.state_bytes(0) / 2 == whole.all_state_bytes / 2
        assert part.all_state_bytes == whole.all_state_bytes


def test_stages_without_attention_hold_states_alone(machine: Machine) -> None:
    layout = ParallelLayout(pipeline_parallel=3)
    costs = StepCosts(tiny_delta_net(), machine, layout, efficiency=IDEAL)
    counts = costs.counts
    assert [counts.state_bytes(stage) for stage in range(3)] == [STATE, STATE, 0]
    assert [counts.block_bytes(4, stage) for stage in range(3)] == [0, 0, 4 * 2 * 2 * 4 * 2]
    assert costs.memory.kv_blocks(4) == costs.memory.kv_bytes(2) // counts.block_bytes(4, 2)
    # The first stage has the embedding, and room for its weights and states only.
    assert costs.memory.sequences(1, 4) == min(
        costs.memory.kv_bytes(0) // STATE, costs.memory.kv_bytes(2) // counts.block_bytes(4, 2)
    )


def test_states_and_blocks_share_what_weights_leave(machine: Machine) -> None:
    device = msgspec.structs.replace(machine.device, memory_bytes=12_000.0)
    costs = StepCosts(tiny_delta_net(), replace(machine, device=device), efficiency=IDEAL)
    recurrent, attending = 576 + 160 + 192, 192 + 64
    left = 12_000 - 2 * (2 * recurrent + attending + 3 * 384 + 2 * 256)
    block = 4 * 2 * 2 * 4 * 2
    memory = costs.memory
    assert memory.kv_blocks(4) == left // block
    assert memory.kv_blocks(4, states=1) == (left - 2 * STATE) // block
    assert memory.sequences(3, 4) == left // (3 * block + 2 * STATE)
    assert memory.share(2, 3, 4) == 2 * (3 * block + 2 * STATE) / left
    assert memory.states(1) == 1
    assert memory.states(100) == left // 2 // (2 * STATE)
    with pytest.raises(DoesNotFit, match="the states of 4 sequences leave no room"):
        memory.kv_blocks(4, states=4)
    with pytest.raises(DoesNotFit, match="the model does not fit"):
        StepCosts(qwen3_next(), load_machine("t4")).memory.kv_blocks(16, states=1)


def test_half_of_what_weights_leave_is_for_states() -> None:
    """9.3 GiB beside the weights of Qwen3-Next are 129 states."""
    counts = ModelCounts(qwen3_next())
    machine = load_machine("h200")
    memory_bytes = counts.stage_weight_bytes(0) + 9.3 * 2**30
    device = msgspec.structs.replace(machine.device, memory_bytes=memory_bytes)
    memory = StepCosts(qwen3_next(), replace(machine, device=device), efficiency=IDEAL).memory
    assert [memory.states(most) for most in (1000, 20)] == [64, 20]
    left = 9.3 * 2**30 - 64 * counts.state_bytes(0)
    assert memory.kv_blocks(16, states=64) == left // (16 * 24576)


@pytest.mark.parametrize("tokens", [160, 16_000])
def test_how_many_sequences_of_qwen3_next_fit_by_hand(tokens: int) -> None:
    """Half of its layers are in each stage: 18 states of 2 MiB and 48 KiB, and keys and values of 6
    layers."""
    layout = ParallelLayout(pipeline_parallel=2)
    costs = StepCosts(qwen3_next(), load_machine("h200"), layout, pipeline_split=[24, 24])
    analysis = Analysis(costs, tokens - 16, 16)
    room = min(costs.memory.kv_bytes(stage) for stage in range(2))
    each = 18 * (2 * 2**20 + 48 * 2**10) + tokens * 6 * 2 * 2 * 256 * 2
    assert analysis.blocks_per_sequence == tokens // BLOCK_SIZE
    assert analysis.largest_batch == room // each
    assert analysis.batch_row(3).kv_share == 3 * each / room


def test_a_decode_moves_its_state_whatever_its_context() -> None:
    """A step of Qwen3-Next with one sequence moves 147 MiB of state, at any length."""
    costs = StepCosts(qwen3_next(), load_machine("h200"))
    for context in (1, 100_000):
        found = costs.counts.operators(costs.work([context]), 0)
        assert sum(one.state_bytes for one in found) == 2 * 73.6875 * 2**20
    rows = Analysis(
        StepCosts(qwen3_next(), load_machine("h200"), ParallelLayout(pipeline_parallel=2)),
        1000,
        200,
    ).operator_rows("any", costs.work([1000] * 64))
    expected = {"inputs", "convolution", "state", "attention", "shared_gate"}
    assert expected <= {row.operator for row in rows}


def test_rounded_matrices_take_fewer_bytes_and_states_the_same() -> None:
    """Four bits and a 16-bit scale for 32 weights: the inputs' 8,192 + 4,096 rows and the output, in
    36 layers. Rates and convolutions stay as they are."""
    plain, rounded = (
        in_recurrent_layers(model, StepWork.of([1]))
        for model in (qwen3_next(), qwen3_next().rounded("int4"))
    )
    assert rounded["inputs"].weight_bytes == 36 * 2048 * (8192 + 4096) * 4.5 / 8
    assert rounded["output"].weight_bytes == 36 * 4096 * 2048 * 4.5 / 8
    for name in ("rates", "convolution", "state"):
        assert rounded[name] == plain[name]
    assert plain["rates"].weight_bytes == 36 * 2048 * 64 * 2
    counts = ModelCounts(qwen3_next().rounded("int4"))
    others = Counter[str]()
    for one in counts.products(StepWork.of([1]), 0):
        others[one.name] += int(one.weight_bytes)
    assert others["output_gate"] == 12 * 2048 * 4096 * 4.5 / 8
    assert others["shared_gate_up"] == 48 * 2048 * 1024 * 4.5 / 8
    assert others["shared_down"] == 48 * 512 * 2048 * 4.5 / 8
    assert others["shared_gate"] == 48 * 2048 * 2


def test_the_floor_of_a_step_has_its_states() -> None:
    """A decode of tiny_delta_net reads all matrices but the embedding, 4 keys and values of a
    layer, and both states, which it also writes."""
    model, counts = tiny_delta_net(), ModelCounts(tiny_delta_net())
    floor = ModelCost(model, 2).step_bytes(StepWork.of([4]))
    weights = counts.stage_weight_bytes(0) - 2 * 8 * 32 + 2 * 8
    assert floor == weights + 4 * 2 * 2 * 4 * 2 + 2 * 2 * STATE
