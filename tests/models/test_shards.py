"""A model in shards computes what the whole model computes, from the same checkpoint."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from nanoserve.config.mixers import GatedDeltaNetConfig, Mamba2Config, ShortConvolutionConfig
from nanoserve.config.model_config import ModelConfig
from nanoserve.config.model_parts import LayerDifferences, RecurrentConfig
from nanoserve.engine_config import EngineConfig
from nanoserve.errors import ModelError, UsageError
from nanoserve.executor.compile.aot_build import layer_kind
from nanoserve.layout import ParallelLayout
from nanoserve.models.decoder import Decoder
from nanoserve.models.loading import load_model
from nanoserve.models.shards import Shard, make_shards, shard_config, shards_of_layouts, whole_model
from nanoserve.models.weights import shard_parts, tensor_parts
from tests.models.test_decoder import paged, random_tokens
from tests.models.thread_ranks import ThreadGroup, on_every_rank
from tests.oracle.checkpoints import (
    FAMILIES,
    centre_of,
    families,
    make_checkpoint,
    rename_glm_as_chatglm,
)

LENGTHS = [1, 30, 4, 13]
# Sizes that no degree divides: all are padded.
UNEVEN = {"vocab_size": 157, "intermediate_size": 93, "moe_intermediate_size": 39}


def write_checkpoint(family: str, directory: Path, **sizes: int | None) -> ModelConfig:
    """A checkpoint whose every weight leaves its mark, in the names and shapes of its family."""
    hf = FAMILIES[family]().to_dict() | sizes
    config = ModelConfig.from_hf(hf)
    generator = torch.Generator().manual_seed(0)
    recurrent = config.recurrent
    has_delta_net = recurrent is not None and isinstance(recurrent.mixer, GatedDeltaNetConfig)
    tensors = {
        part.name: torch.randn(part.shape, generator=generator) * 0.15
        + centre_of(part.name, has_delta_net=has_delta_net)
        for part in tensor_parts(config)
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(hf))
    return config


def whole_logits(directory: Path, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    decoder, config = load_model(directory, "fp32")
    with torch.inference_mode():
        hidden = decoder(tokens, positions, paged(config, LENGTHS))
        return hidden, decoder.compute_logits(hidden)


def sharded_logits(
    directory: Path, shards: list[Shard], tokens: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Hidden states and logits of the first rank of the last stage. Each stage takes those of the
    stage before."""
    degree, inputs = shards[0].degree, tokens

    def run(rank: int, group: ThreadGroup) -> tuple[Tensor, Tensor | None]:
        shard = stage[rank]
        decoder, _ = load_model(directory, "fp32", shard=shard, group=group)
        hidden = decoder(inputs, positions, paged(decoder.config, LENGTHS))
        return hidden, decoder.compute_logits(hidden) if shard.is_last else None

    for first in range(0, len(shards), degree):
        stage = shards[first : first + degree]
        ranks = on_every_rank(run, degree)
        assert all(torch.equal(hidden, ranks[0][0]) for hidden, _ in ranks)
        inputs = ranks[0][0]
    hidden, logits = ranks[0]
    assert logits is not None
    assert all(other is not None and other.shape == (0, logits.shape[1]) for _, other in ranks[1:])
    return hidden, logits


def ragged_batch(config: ModelConfig) -> tuple[Tensor, Tensor]:
    return random_tokens(config, sum(LENGTHS)), torch.cat(
        [torch.arange(length) for length in LENGTHS]
    )


@pytest.mark.parametrize(
    "family", [one for one in families("ministral3", "glm4_moe_lite") if one != "gemma4_text"]
)
def test_a_chain_of_stages_is_the_whole_model(family: str, tmp_path: Path) -> None:
    config = write_checkpoint(family, tmp_path)
    batch = ragged_batch(config)
    shards = make_shards(config, pipeline_parallel=3, tensor_parallel=1)
    for found, expected in zip(
        sharded_logits(tmp_path, shards, *batch), whole_logits(tmp_path, *batch), strict=True
    ):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(("degree", "uneven"), [(2, UNEVEN), (4, {})], ids=["2, padded", "4, even"])
@pytest.mark.parametrize("family", families("olmo3", "deepseek_v2"))
def test_ranks_together_compute_what_one_does(
    family: str, degree: int, uneven: dict[str, int], tmp_path: Path
) -> None:
    if family.startswith("mamba"):  # its inner size is not padded
        uneven = {"vocab_size": 157}
    config = write_checkpoint(family, tmp_path, **uneven)
    batch = ragged_batch(config)
    shards = make_shards(config, pipeline_parallel=1, tensor_parallel=degree)
    assert shard_config(config, shards[1]).num_kv_heads == max(1, config.num_kv_heads // degree)
    _, found = sharded_logits(tmp_path, shards, *batch)
    _, expected = whole_logits(tmp_path, *batch)
    assert found.shape == expected.shape
    # Rounding weighs more in scores that are not scaled, and in outputs of heads that are normed.
    tolerance = 1e-5
    if config.attention.scale == 1.0 or config.recurrent is not None:
        tolerance = 3e-5
    torch.testing.assert_close(
        found / expected.std(), expected / expected.std(), atol=tolerance, rtol=0
    )


# of four ranks one has padding alone
@pytest.mark.parametrize(("degree", "vocab_size"), [(1, 7), (2, 7), (4, 5)])
def test_ranks_together_find_the_largest_logit_and_of_equal_ones_the_lowest_token(
    degree: int, vocab_size: int
) -> None:
    config = replace(
        ModelConfig.from_hf(FAMILIES["llama"]().to_dict()),
        vocab_size=vocab_size,
        num_heads=4,
        num_kv_heads=4,
    )
    generator = torch.Generator().manual_seed(0)
    # Whole numbers, whose products are exact: those of equal rows are equal wherever the rows are.
    hidden = torch.randint(-4, 5, (200, config.hidden_size), generator=generator).float()
    # Few different rows, so that most maxima are in several places, and some of all are below the
    # padding's 0.
    head = torch.randint(-4, 5, (2, config.hidden_size), generator=generator)[
        torch.arange(vocab_size) % 2
    ].float()
    hidden[0] = torch.nan
    logits = torch.stack([hidden @ row for row in head], dim=1)

    def run(rank: int, group: ThreadGroup) -> tuple[Tensor, Tensor]:
        decoder = Decoder(config, initialize=False, shard=shards[rank], group=group)
        rows = decoder.lm_head.out_features
        part = head[rank * rows : (rank + 1) * rows]
        decoder.lm_head.weight.copy_(functional.pad(part, (0, 0, 0, rows - len(part))))
        return decoder.greediest(hidden)

    shards = make_shards(config, pipeline_parallel=1, tensor_parallel=degree)
    (maxima, tokens), *others = on_every_rank(run, degree)
    assert all(len(column) == 0 for other in others for column in other)
    assert maxima[0].isnan() and tokens[0] == 0
    torch.testing.assert_close(maxima, logits.amax(dim=1), equal_nan=True)
    assert (logits.amax(dim=1) < 0).any()
    assert tokens[1:].tolist() == [int(row[1] > row[0]) for row in logits[1:]]


@pytest.mark.parametrize("family", ["llama-tied-biased", "glm4", "qwen3_moe"])
def test_stages_of_several_ranks(family: str, tmp_path: Path) -> None:
    config = write_checkpoint(family, tmp_path)
    batch = ragged_batch(config)
    shards = make_shards(config, pipeline_parallel=2, tensor_parallel=2, pipeline_split=(1, 2))
    assert [(shard.stage, shard.rank, shard.layers) for shard in shards] == [
        *((0, rank, range(1)) for rank in range(2)),
        *((1, rank, range(1, 3)) for rank in range(2)),
    ]
    _, found = sharded_logits(tmp_path, shards, *batch)
    _, expected = whole_logits(tmp_path, *batch)
    torch.testing.assert_close(found / expected.std(), expected / expected.std(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["llama-tied-biased", "chatglm", "mixtral"])
def test_checkpoints_of_hugging_face(family: str, tmp_path: Path) -> None:
    make_checkpoint("glm" if family == "chatglm" else family, tmp_path, shard_size="60KB")
    if family == "chatglm":
        make_checkpoint("glm", tmp_path)
        source, tmp_path = tmp_path, tmp_path / "chatglm"
        rename_glm_as_chatglm(source, tmp_path)
    config = ModelConfig.from_directory(tmp_path)
    batch = ragged_batch(config)
    _, found = sharded_logits(
        tmp_path, make_shards(config, pipeline_parallel=2, tensor_parallel=2), *batch
    )
    _, expected = whole_logits(tmp_path, *batch)
    torch.testing.assert_close(found / expected.std(), expected / expected.std(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize(
    "family",
    [
        "llama-tied-biased",
        "glm",
        "qwen3_moe",
        "lfm2-biased",
        "lfm2_moe",
        "qwen3_next-biased",
        "qwen3_5_moe_text",
        "mamba",
        "mamba2",
        "mamba2-single-group",
    ],
)
def test_every_number_of_a_checkpoint_is_read_where_it_belongs(family: str, degree: int) -> None:
    uneven = {name: size for name, size in UNEVEN.items() if degree > 1}
    if family.startswith("mamba"):
        uneven.pop("intermediate_size", None)
    config = ModelConfig.from_hf(FAMILIES[family]().to_dict() | uneven)
    shards = make_shards(config, pipeline_parallel=2, tensor_parallel=degree)
    readers = {
        part.name: torch.zeros(part.shape, dtype=torch.int32) for part in tensor_parts(config)
    }
    for shard in shards:
        with torch.device("meta"):
            decoder = Decoder(config, initialize=False, shard=shard, group=ThreadGroup.alone())
        parameters = dict(decoder.named_parameters())
        filled: Counter[str] = Counter()
        for part in shard_parts(tensor_parts(config), config, shard):
            readers[part.name][part.source] += 1
            region = part.region(parameters[part.parameter])
            assert region.shape == readers[part.name][part.source].shape
            assert region.numel() == part.size
            filled[part.parameter] += part.size
        if degree == 1:
            assert filled == {name: parameter.numel() for name, parameter in parameters.items()}
    for part in tensor_parts(config):
        times = readers[part.name]
        if "norm" in part.name or part.name.endswith(
            (".gate.weight", "_gate.weight", ".expert_bias")
        ):
            expected = degree
        elif ".k_proj." in part.name or ".v_proj." in part.name:
            expected = max(1, degree // config.num_kv_heads)
        else:
            expected = 1 + (part.parameter == "embedding.weight" and config.tie_word_embeddings)
        if part.name.endswith("mixer.norm.weight"):
            expected = 1  # a norm over heads, which are divided
        if family == "mamba2-single-group" and part.name.endswith((".in_proj.weight", ".bias")):
            # keys and queries behind gates and values are on all ranks
            times[240:266] -= degree - 1
        if family == "mamba2-single-group" and part.name.endswith(".conv1d.weight"):
            times[120:] -= degree - 1
        assert (times == expected).all(), part.name


def test_ranks_have_whole_key_heads_of_linear_attention() -> None:
    config = ModelConfig.from_hf(
        FAMILIES["qwen3_5_text"]().to_dict()
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 8}
    )
    parts = [
        shard_config(config, shard).recurrent
        for shard in make_shards(config, pipeline_parallel=2, tensor_parallel=2)
    ]
    # layers 0 to 2 and 4 of five are linear, and pairs of ranks have the same layers
    assert [sorted(part.recurrent_layers) for part in parts if part] == [[0, 1, 2]] * 2 + [[1]] * 2
    mixers = {part.mixer for part in parts if part}
    assert mixers == {GatedDeltaNetConfig(1, 4, 8, 12)}
    with pytest.raises(
        UsageError,
        match=r"^--tp 4 does not divide 2 key heads of linear attention; choose 1 or 2$",
    ):
        make_shards(config, pipeline_parallel=1, tensor_parallel=4)


def test_ranks_have_whole_groups_of_states_or_heads_of_the_only_one() -> None:
    several = ModelConfig.from_hf(FAMILIES["mamba2"]().to_dict())
    single = ModelConfig.from_hf(FAMILIES["mamba2-single-group"]().to_dict())
    channels = ModelConfig.from_hf(FAMILIES["mamba"]().to_dict())
    parts = []
    for config, degree in ((several, 4), (single, 8)):
        shard = make_shards(config, pipeline_parallel=1, tensor_parallel=degree)[1]
        own = shard_config(config, shard).recurrent
        assert own is not None and isinstance(own.mixer, Mamba2Config)
        parts.append((own.mixer.num_heads, own.mixer.num_groups, own.mixer.ranks_of_group))
    assert parts == [(3, 1, 1), (1, 1, 8)]
    for config, degree, line in (
        (several, 3, "--tp 3 does not divide 4 groups of heads of a state; choose 1, 2 or 4"),
        (single, 3, "--tp 3 does not divide 8 heads of a state; choose 1, 2, 4 or 8"),
        (channels, 5, "--tp 5 does not divide 144 channels of a state; choose 1, 2, 3, 4, 6, 8, 9"),
    ):
        with pytest.raises(UsageError, match=f"^{line}"):
            make_shards(config, pipeline_parallel=1, tensor_parallel=degree)


def test_a_shard_reads_only_its_own(tmp_path: Path) -> None:
    config = write_checkpoint("llama", tmp_path)
    read: list[int] = []
    load_model(tmp_path, "fp32", progress=lambda done, total: read.append(total))
    whole = read.pop()
    for pipeline_parallel, tensor_parallel in (3, 1), (1, 2):
        totals = []
        for shard in make_shards(
            config, pipeline_parallel=pipeline_parallel, tensor_parallel=tensor_parallel
        ):
            group = ThreadGroup.alone()
            load_model(
                tmp_path,
                "fp32",
                progress=lambda done, total: read.append(total),
                shard=shard,
                group=group,
            )
            totals.append(read[-1])
        norms = 4 * config.hidden_size * (2 * config.num_layers + 1)
        assert sum(totals) == whole + (tensor_parallel - 1) * norms


@pytest.mark.parametrize("degree", [1, 2])
def test_a_checkpoint_read_in_pieces_is_the_same(
    degree: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_checkpoint("glm", tmp_path)
    shard = make_shards(config, pipeline_parallel=2, tensor_parallel=degree)[-1]
    at_once, _ = load_model(tmp_path, "fp32", shard=shard, group=ThreadGroup.alone())
    monkeypatch.setattr("nanoserve.models.loading._MAPPED_BYTES", 1000)
    in_pieces, _ = load_model(tmp_path, "fp32", shard=shard, group=ThreadGroup.alone())
    assert all(map(torch.equal, at_once.parameters(), in_pieces.parameters()))


def test_a_shard_checks_the_whole_checkpoint(tmp_path: Path) -> None:
    config = write_checkpoint("llama", tmp_path)
    first, last = make_shards(replace(config, num_layers=4), pipeline_parallel=2, tensor_parallel=1)
    (tmp_path / "config.json").write_text(
        json.dumps(FAMILIES["llama"]().to_dict() | {"num_hidden_layers": 4})
    )
    for shard in first, last:
        with pytest.raises(
            ModelError, match=r"tensor model\.layers\.3\.\S+ is missing from the checkpoint"
        ):
            load_model(tmp_path, "fp32", shard=shard)


def test_stages_have_what_belongs_to_them() -> None:
    config = ModelConfig.from_hf(FAMILIES["qwen3_moe"]().to_dict())
    stages = [
        Decoder(config, shard=shard)
        for shard in make_shards(config, pipeline_parallel=3, tensor_parallel=1)
    ]
    outside = [
        {name.split(".")[0] for name, _ in stage.named_parameters()} - {"layers"}
        for stage in stages
    ]
    assert outside == [{"embedding"}, set(), {"final_norm", "lm_head"}]
    assert [layer.index for stage in stages for layer in stage.layers] == [0, 0, 0]
    assert [stage.config.is_sparse(0) for stage in stages] == [
        config.is_sparse(index) for index in range(3)
    ]
    assert all(stage.model_config == config for stage in stages)
    assert {(stage.dtype, stage.device) for stage in stages} == {
        (torch.float32, torch.device("cpu"))
    }


def test_layers_that_share_keys_and_values_are_in_one_stage() -> None:
    config = replace(
        ModelConfig.from_hf(FAMILIES["llama"]().to_dict()),
        layers=LayerDifferences(kv_sources=(0, 1, 1)),
    )
    with pytest.raises(
        UsageError, match="--pp 3: layers that share keys and values must be in one stage"
    ):
        make_shards(config, pipeline_parallel=3, tensor_parallel=1)
    last = make_shards(config, pipeline_parallel=2, tensor_parallel=1, pipeline_split=(1, 2))[1]
    groups = shard_config(config, last).cache_groups
    assert (groups.places, groups.num_tensors) == (((0, 0), (0, 0)), 1)


def test_a_stage_whose_layers_share_keys_and_values_is_a_part_of_the_model(tmp_path: Path) -> None:
    config = write_checkpoint("gemma4_text", tmp_path, hidden_size_per_layer_input=0)
    shards = make_shards(config, pipeline_parallel=2, tensor_parallel=2, pipeline_split=(1, 5))
    batch = ragged_batch(config)
    _, found = sharded_logits(tmp_path, shards, *batch)
    _, expected = whole_logits(tmp_path, *batch)
    torch.testing.assert_close(found / expected.std(), expected / expected.std(), atol=1e-5, rtol=0)
    told = write_checkpoint("gemma4_text", tmp_path)
    with pytest.raises(
        UsageError, match="--pp 2: all layers of this gemma4_text read the tokens, so they are one"
    ):
        make_shards(told, pipeline_parallel=2, tensor_parallel=1)


@pytest.mark.parametrize(
    ("sources", "problem"),
    [
        ((0, 2, 2), "has none before it"),
        ((0, 3, 2), "has none before it"),
        ((0, 1, 0), "has another window"),
    ],
)
def test_a_layer_shares_the_keys_and_values_of_an_earlier_one_of_its_kind(
    sources: tuple[int, ...], problem: str
) -> None:
    config = ModelConfig.from_hf(FAMILIES["llama"]().to_dict())
    with pytest.raises(ModelError, match=problem):
        replace(config, layers=LayerDifferences(sliding_windows=(4, 0, 0), kv_sources=sources))


def test_a_rank_without_a_group_is_refused() -> None:
    config = ModelConfig.from_hf(FAMILIES["llama"]().to_dict())
    with pytest.raises(ValueError, match="group"):
        Decoder(config, shard=Shard(range(3), rank=1, degree=2))


@pytest.mark.parametrize("family", FAMILIES)
def test_one_shard_is_the_model(family: str) -> None:
    config = ModelConfig.from_hf(FAMILIES[family]().to_dict())
    assert shard_config(config, whole_model(config)) == config
    (only,) = make_shards(config, pipeline_parallel=1, tensor_parallel=1)
    assert only == whole_model(config)
    assert list(shard_parts(tensor_parts(config), config, only)) == list(tensor_parts(config))


@pytest.mark.parametrize("family", ["mistral", "qwen2-window", "qwen3_moe"])
def test_layers_of_all_stages_share_their_compiled_library(family: str) -> None:
    config = ModelConfig.from_hf(FAMILIES[family]().to_dict())
    kinds = [layer_kind("layer", config, index) for index in range(config.num_layers)]
    for shard in make_shards(config, pipeline_parallel=2, tensor_parallel=1):
        own = shard_config(config, shard)
        assert [layer_kind("layer", own, index) for index in range(own.num_layers)] == [
            kinds[index] for index in shard.layers
        ]


def test_windows_of_a_stage_are_its_own() -> None:
    config = ModelConfig.from_hf(FAMILIES["qwen2-window"]().to_dict())
    last = make_shards(config, pipeline_parallel=2, tensor_parallel=1, pipeline_split=(2, 1))[-1]
    assert config.layers.sliding_windows == (0, 20, 20)
    assert shard_config(config, last).layers.sliding_windows == (20,)


@pytest.mark.parametrize(
    ("layout", "line"),
    [
        ({"pipeline_parallel": 8}, "--pp 8: the model has 3 layers, so there are at most 3 stages"),
        ({"pipeline_parallel": 0}, "--pp must be at least 1, not 0"),
        ({"tensor_parallel": 0}, "--tp must be at least 1, not 0"),
        ({"tensor_parallel": 3}, "--tp 3 does not divide 8 attention heads; choose 1, 2, 4 or 8"),
        ({"tensor_parallel": 16}, "--tp 16 does not divide 8 attention heads; choose 1, 2, 4 or 8"),
        (
            {"pipeline_parallel": 2, "pipeline_split": (1, 3)},
            "--pp-split 1,3 adds up to 4 layers, but the model has 3",
        ),
        (
            {"pipeline_parallel": 2, "pipeline_split": (3, 0)},
            "--pp-split 3,0: every stage needs at least one layer",
        ),
        (
            {"pipeline_parallel": 2, "pipeline_split": (3,)},
            "--pp-split 3 names 1 stages, but --pp is 2",
        ),
    ],
)
def test_what_cannot_be_divided_says_what_can(layout: dict[str, int], line: str) -> None:
    config = replace(
        ModelConfig.from_hf(FAMILIES["llama"]().to_dict()), num_heads=8, num_kv_heads=2
    )
    with pytest.raises(UsageError) as caught:
        make_shards(config, **{"pipeline_parallel": 1, "tensor_parallel": 1, **layout})
    assert str(caught.value) == line


def test_key_value_heads_may_not_be_divided_unevenly() -> None:
    config = replace(
        ModelConfig.from_hf(FAMILIES["llama"]().to_dict()), num_heads=12, num_kv_heads=2
    )
    with pytest.raises(
        UsageError,
        match=r"^--tp 3 does not divide 2 key-value heads evenly; choose 1, 2, 4, 6 or 12$",
    ):
        make_shards(config, pipeline_parallel=1, tensor_parallel=3)


def test_channels_of_a_convolution_are_divided_evenly() -> None:
    config = ModelConfig.from_hf(
        FAMILIES["lfm2"]().to_dict() | {"hidden_size": 70, "head_dim": 16, "num_key_value_heads": 4}
    )
    assert [
        shard_config(config, shard).recurrent
        for shard in make_shards(config, pipeline_parallel=1, tensor_parallel=2)
    ] == [RecurrentConfig(frozenset({0, 1, 3}), ShortConvolutionConfig(35), kernel_size=3)] * 2
    with pytest.raises(
        UsageError, match="--tp 4 does not divide 70 channels of a convolution; choose 1 or 2"
    ):
        make_shards(config, pipeline_parallel=1, tensor_parallel=4)


def test_each_of_two_layouts_has_its_shards() -> None:
    config = ModelConfig.from_hf(FAMILIES["llama"]().to_dict() | {"num_hidden_layers": 4})
    engine = EngineConfig(
        pipeline_parallel=2,
        tensor_parallel=2,
        decode_layout=ParallelLayout(tensor_parallel=1, pipeline_parallel=4),
    )

    first, second = shards_of_layouts(config, engine)

    assert first == make_shards(config, pipeline_parallel=2, tensor_parallel=2)
    assert second == make_shards(config, pipeline_parallel=4, tensor_parallel=1)


@pytest.mark.parametrize(
    ("prefill", "decode", "line"),
    [
        (
            "P8",
            "T8",
            "--prefill-parallel P8: the model has 3 layers, so there are at most 3 stages",
        ),
        ("T8", "P8", "--decode-parallel P8: the model has 3 layers, so there are at most 3 stages"),
        (
            "P3",
            "T3",
            "--decode-parallel T3: a tensor degree of 3 does not divide 8 attention heads; choose "
            "1, 2, 4 or 8",
        ),
    ],
)
def test_of_two_layouts_the_one_that_does_not_divide_is_named(
    prefill: str, decode: str, line: str
) -> None:
    config = replace(
        ModelConfig.from_hf(FAMILIES["llama"]().to_dict()), num_heads=8, num_kv_heads=2
    )
    first = ParallelLayout.parse(prefill)
    engine = EngineConfig(
        pipeline_parallel=first.pipeline_parallel,
        tensor_parallel=first.tensor_parallel,
        decode_layout=ParallelLayout.parse(decode),
    )
    with pytest.raises(UsageError) as caught:
        shards_of_layouts(config, engine)
    assert str(caught.value) == line
