"""Pruned checkpoints, beside transformers' models whose parts are zeroed, taken out or sliced by hand."""

import errno
import json
import os
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from nanoserve.config.model_config import ModelConfig
from nanoserve.errors import RuntimeFailure, UsageError
from nanoserve.models.attention import DenseCausalAttention
from nanoserve.models.gguf_directory import gguf_directory
from nanoserve.models.loading import INDEX_NAME, load_model, read_tensors
from nanoserve.models.pruning.importance import Importance, measure_importance
from nanoserve.models.pruning.trimming import (
    KeptUnits,
    Sizes,
    check_prunable,
    check_sizes,
    choose,
    prune_checkpoint,
    trim_checkpoint,
)
from nanoserve.models.quantizing import Recipe, quantize_checkpoint
from tests.oracle.checkpoints import FAMILIES, VOCAB_SIZE, families, make_checkpoint
from tests.oracle.gguf_files import write_gguf

Checkpoint = Callable[[str], tuple[Path, Any]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """checkpoint(family) -> its directory and transformers' model."""

    @cache
    def make(family: str) -> tuple[Path, Any]:
        directory = tmp_path_factory.mktemp("source")
        model = make_checkpoint(family, directory)
        return directory, model.eval()

    return make


def texts(count: int, length: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator) for _ in range(count)]


def no_progress(done: int, total: int) -> None:
    pass


def drawn(config: ModelConfig, seed: int = 0) -> Importance:
    """An importance for each part, drawn at random."""
    generator = torch.Generator().manual_seed(seed)

    def scores(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator)

    layers = config.num_layers
    return Importance(
        scores(layers).index_fill(0, torch.tensor([1]), -1.0),  # so that the rest is renumbered
        scores(config.hidden_size),
        scores(layers, config.num_kv_heads),
        scores(layers, config.intermediate_size),
    )


def trim(source: Path, output: Path, **sizes: int) -> KeptUnits:
    """Trim to these sizes, by an importance drawn at random."""
    config = ModelConfig.from_directory(source)
    output.mkdir()
    kept = choose(drawn(config), Sizes(**sizes), config)
    trim_checkpoint(source, output, kept)
    return kept


@torch.inference_mode()
def assert_same_logits(output: Path, oracle: Any) -> None:
    """Logits of the written checkpoint, in transformers and in nanoserve, beside those of another
    model."""
    written: Any = transformers.AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    decoder, config = load_model(output, "float32")
    for text in texts(2, 40, 2):
        wanted = oracle(text[None], use_cache=False).logits[0]
        hidden = decoder(text, torch.arange(40), DenseCausalAttention(config, 1, 40))
        for logits in (written(text[None]).logits[0], decoder.compute_logits(hidden)):
            torch.testing.assert_close(
                logits, wanted, atol=5e-4 * float(wanted.abs().max()), rtol=0
            )


def oracle_of(source: Path) -> Any:
    """transformers' model of a directory, which a test may change."""
    return transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()


REFUSED = {
    "latent": ("deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
    "experts": ("mixtral", "qwen3_moe", "gpt_oss", "lfm2_moe", "granitemoe", "jamba", "qwen3_next"),
    "recurrent": ("lfm2", "qwen3_5", "mamba", "nemotron_h", "granitemoehybrid"),
    "shapes": ("gemma4_text",),
}
PROVEN = [
    name
    for name in FAMILIES
    if not name.startswith(tuple(prefix for kind in REFUSED.values() for prefix in kind))
]
"""Each is compared with transformers below, heads apart where a norm spans them."""
SOME = [
    family
    for family in families()
    if (family if isinstance(family, str) else family.values[0]) in PROVEN
]


@pytest.mark.parametrize("family", SOME)
def test_a_model_without_units_computes_what_one_with_these_units_zeroed_does(
    family: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    source, _ = checkpoint(family)
    spans_heads = family == "olmo3"
    sizes = {"intermediate_size": 56} if spans_heads else {"intermediate_size": 56, "num_heads": 2}
    config = ModelConfig.from_directory(source)
    kept = trim(source, tmp_path / "output", **sizes)
    oracle = oracle_of(source)
    per_group = config.head_dim * config.group_size
    for layer, groups, neurons in zip(oracle.model.layers, kept.groups, kept.neurons, strict=True):
        left = [group for group in range(config.num_kv_heads) if group not in groups.tolist()]
        assert len(neurons) == 56
        with torch.no_grad():
            for group in left:
                first = group * per_group
                layer.self_attn.o_proj.weight[:, first : first + per_group] = 0
            is_left = torch.ones(96, dtype=torch.bool)
            is_left[neurons] = False
            layer.mlp.down_proj.weight[:, is_left] = 0
    assert_same_logits(tmp_path / "output", oracle)
    written = ModelConfig.from_directory(tmp_path / "output")
    heads = config.num_heads if spans_heads else 2
    assert (written.intermediate_size, written.num_heads) == (56, heads)
    assert (written.group_size, written.head_dim) == (config.group_size, config.head_dim)


@pytest.mark.parametrize("family", SOME)
def test_a_model_without_layers_is_one_whose_layers_were_taken_out(
    family: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    source, _ = checkpoint(family)
    if family in ("qwen2-window", "cohere2-biased"):
        # transformers lists their kinds of layers when it writes the config
        assert json.loads((source / "config.json").read_text())["layer_types"]
    kept = trim(source, tmp_path / "output", num_layers=2)
    assert kept.layers == (0, 2)
    oracle = oracle_of(source)
    oracle.model.layers = nn.ModuleList(oracle.model.layers[layer] for layer in kept.layers)
    oracle.config.num_hidden_layers = 2
    if getattr(oracle.config, "layer_types", None):
        oracle.config.layer_types = [oracle.config.layer_types[layer] for layer in kept.layers]
    assert_same_logits(tmp_path / "output", oracle)


@pytest.mark.parametrize("family", ["llama-tied-biased", "mistral-no-window"])
def test_a_narrower_model_has_every_tensor_sliced(
    family: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """No other size of these models is 64, so every dimension of 64 is that of hidden states."""
    source, original = checkpoint(family)
    kept = trim(source, tmp_path / "output", hidden_size=40)
    assert len(kept.hidden) == 40
    settings = json.loads((source / "config.json").read_text()) | {"hidden_size": 40}
    oracle: Any = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**settings)
    )
    sliced = {}
    for name, tensor in original.state_dict().items():
        for dimension, size in enumerate(tensor.shape):
            if size == 64:
                tensor = tensor.index_select(dimension, kept.hidden)
        sliced[name] = tensor
    oracle.load_state_dict(sliced)
    assert_same_logits(tmp_path / "output", oracle.float().eval())


@pytest.mark.parametrize("family", SOME)
def test_keeping_everything_is_the_identity(
    family: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    source, _ = checkpoint(family)
    trim(source, tmp_path / "output")
    before, after = read_tensors(source), read_tensors(tmp_path / "output")
    assert before.keys() - after.keys() <= {"lm_head.weight"}  # a copy of a tied matrix
    for name, tensor in after.items():
        assert tensor.dtype == before[name].dtype
        assert torch.equal(tensor, before[name]), name
    assert ModelConfig.from_directory(tmp_path / "output") == ModelConfig.from_directory(source)


@pytest.mark.parametrize("family", ["llama", "glm4"])
def test_importance_is_that_of_activations_in_transformers(
    family: str, checkpoint: Checkpoint
) -> None:
    """Mean absolute values over the tokens of a sample, then the L2 norm over samples: of a head's
    output, of what down_proj reads, of what attention and feed-forward part read; and the cosines
    of hidden states before and after a layer."""
    source, model = checkpoint(family)
    decoder, _ = load_model(source, "float32")
    samples = [*texts(2, 30, 3), *texts(1, 12, 4)]
    found = measure_importance(decoder, samples, no_progress)
    read: dict[str, list[Tensor]] = {}

    def listen(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _, inputs: read.setdefault(name, []).append(inputs[0][0].double())

    hooks, cosines = [], []
    for index, layer in enumerate(model.model.layers):
        for name, module in (
            ("heads", layer.self_attn.o_proj),
            ("neurons", layer.mlp.down_proj),
            ("attention", layer.self_attn.q_proj),
            (
                "feed_forward",
                layer.mlp.gate_up_proj if family == "glm4" else layer.mlp.gate_proj,
            ),
        ):
            hooks.append(module.register_forward_pre_hook(listen(f"{index} {name}")))
    with torch.inference_mode():
        for sample in samples:
            states = model(sample[None], output_hidden_states=True).hidden_states
            cosines.append(
                [
                    torch.cosine_similarity(before[0].double(), after[0].double(), dim=-1)
                    for before, after in pairwise(states)
                ]
            )
    for hook in hooks:
        hook.remove()

    def score(name: str, of: Callable[[Tensor], Tensor] = torch.abs) -> Tensor:
        return torch.stack([of(one).mean(0) for one in read[name]]).norm(dim=0)

    def norms(attended: Tensor) -> Tensor:
        return attended.unflatten(-1, (4, 16)).norm(dim=-1)

    hidden = torch.zeros(64, dtype=torch.float64)
    for index in range(3):
        torch.testing.assert_close(
            found.neurons[index], score(f"{index} neurons"), rtol=1e-4, atol=1e-6
        )
        heads = score(f"{index} heads", norms)
        wanted = torch.stack((heads[0] + heads[1], heads[2] + heads[3]))
        torch.testing.assert_close(found.groups[index], wanted, rtol=1e-4, atol=1e-6)
        hidden += score(f"{index} attention") + score(f"{index} feed_forward")
    torch.testing.assert_close(found.hidden, hidden, rtol=1e-4, atol=1e-6)
    for index in range(2):  # the last hidden states of transformers are those after the final norm
        mean = torch.cat([sample[index] for sample in cosines]).mean()
        torch.testing.assert_close(found.layers[index], 1 - mean, rtol=1e-4, atol=1e-6)


@given(
    scores=st.lists(st.floats(0, 1), min_size=8, max_size=8),
    size=st.integers(1, 8),
)
def test_the_parts_that_stay_are_the_most_important_ones_in_order(
    scores: list[float], size: int
) -> None:
    config = ModelConfig.from_hf(FAMILIES["llama"]().to_dict() | {"intermediate_size": 8})
    importance = drawn(config)
    importance.neurons[1] = torch.tensor(scores)
    neurons = choose(importance, Sizes(intermediate_size=size), config).neurons[1].tolist()
    left = [place for place in range(8) if place not in neurons]
    assert len(neurons) == size and neurons == sorted(neurons)
    for place in left:
        assert all(
            importance.neurons[1][stays] >= importance.neurons[1][place] for stays in neurons
        )


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("qwen3_moe", "qwen3_moe has a mixture of experts, which is not pruned"),
        ("gpt_oss", "gpt_oss has a mixture of experts"),
        ("deepseek_v3", "deepseek_v3 has a mixture of experts"),
        ("lfm2", "lfm2 has layers with a recurrent state"),
        ("mamba2", "mamba2 has layers with a recurrent state"),
        ("gemma4_text", "gemma4_text has layers of different shapes"),
    ],
)
def test_other_models_are_refused_by_name(family: str, reason: str) -> None:
    config = ModelConfig.from_hf(FAMILIES[family]().to_dict())
    with pytest.raises(UsageError, match=reason):
        check_prunable(Path("model"), config)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_not_refused_is_compared_with_transformers(family: str) -> None:
    config = ModelConfig.from_hf(FAMILIES[family]().to_dict())
    if family in PROVEN:
        check_prunable(Path("model"), config)
    else:
        with pytest.raises(UsageError):
            check_prunable(Path("model"), config)


def test_quantized_models_are_refused_by_name(checkpoint: Checkpoint, tmp_path: Path) -> None:
    source, _ = checkpoint("llama")
    quantize_checkpoint(source, tmp_path / "w8", Recipe("rtn", 8, -1), [], [], no_progress)
    gguf = tmp_path / "model.gguf"
    write_gguf(oracle_of(source), gguf, "Q8_0")
    for directory, says in (
        (tmp_path / "w8", r"w8 is quantized \(compressed-tensors\) and cannot be pruned"),
        (gguf_directory(gguf), "a GGUF file cannot be pruned"),
    ):
        with pytest.raises(UsageError, match=says):
            prune_checkpoint(directory, tmp_path / "no", Sizes(num_layers=2), [], [], no_progress)
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("family", "sizes", "says"),
    [
        ("llama", {}, "nothing is to be pruned: give --hidden-size or --ffn-size or --layers or"),
        ("llama", {"num_layers": 4}, "--layers 4: the model has 3; give 1 to 3"),
        ("llama", {"intermediate_size": 0}, "--ffn-size 0: the model has 96; give 1 to 96"),
        ("llama", {"num_heads": 3}, "2 query heads share a key-value head and leave together"),
        ("llama", {"hidden_size": 42}, "4 heads do not divide a hidden size of 42, and"),
        ("olmo3", {"num_heads": 2}, "a norm of olmo3 spans all heads"),
        ("gemma2", {"hidden_size": 32}, "gemma2 multiplies embeddings by the root of the hidden"),
    ],
)
def test_sizes_that_do_not_suit(family: str, sizes: dict[str, int], says: str) -> None:
    config = ModelConfig.from_hf(FAMILIES[family]().to_dict())
    with pytest.raises(UsageError, match=says):
        check_sizes(Sizes(**sizes), config)


def test_layers_whose_kind_follows_from_their_number_do_not_leave(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Without layer_types, every second layer of Gemma 2 is full, by its number."""
    source, _ = checkpoint("gemma2")
    config = json.loads((source / "config.json").read_text())
    del config["layer_types"]
    unlisted = tmp_path / "unlisted"
    unlisted.mkdir()
    (unlisted / "config.json").write_text(json.dumps(config))
    (unlisted / "model.safetensors").symlink_to(source / "model.safetensors")
    with pytest.raises(UsageError, match="of gemma2 follow from their numbers here"):
        kept = choose(
            drawn(ModelConfig.from_directory(unlisted)),
            Sizes(),
            ModelConfig.from_directory(unlisted),
        )
        output = tmp_path / "output"
        output.mkdir()
        trim_checkpoint(unlisted, output, KeptUnits((1, 2), kept.hidden, kept.groups, kept.neurons))


def test_a_run_that_fails_leaves_nothing(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, _ = checkpoint("llama")
    output, sizes = tmp_path / "deep" / "output", Sizes(num_layers=2)

    def interrupt(done: int, total: int) -> None:
        assert output.exists()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prune_checkpoint(source, output, sizes, texts(1, 9, 1), texts(1, 9, 2), interrupt)
    assert not output.exists()
    fsync, calls = os.fsync, iter(range(100))

    def fill_up(descriptor: int) -> None:
        if next(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    output.mkdir()
    with monkeypatch.context() as patched, pytest.raises(RuntimeFailure, match="No space left"):
        patched.setattr(os, "fsync", fill_up)
        prune_checkpoint(source, output, sizes, texts(1, 9, 1), texts(1, 9, 2), no_progress)
    assert list(output.iterdir()) == []  # it was there before
    (source / "tokenizer.json").write_text("{}")
    found = prune_checkpoint(source, output, sizes, texts(2, 9, 1), texts(1, 9, 2), no_progress)
    names = {path.name for path in output.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", INDEX_NAME} <= names
    assert len(found.layers) == 2
    with pytest.raises(UsageError, match="exists and is not empty; choose another --output"):
        prune_checkpoint(source, output, sizes, texts(1, 9, 1), texts(1, 9, 2), no_progress)


def test_perplexities_are_those_of_the_models_before_and_after(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    source, model = checkpoint("llama")
    (held_out,) = texts(1, 40, 5)
    found = prune_checkpoint(
        source,
        tmp_path / "output",
        Sizes(intermediate_size=56),
        texts(2, 40, 1),
        [held_out],
        no_progress,
    )
    for oracle, measured in (
        (model, found.perplexity_before),
        (oracle_of(tmp_path / "output"), found.perplexity_after),
    ):
        with torch.inference_mode():
            logits = oracle(held_out[None]).logits[0, :-1].double()
        loss = nn.functional.cross_entropy(logits, held_out[1:])
        assert measured == pytest.approx(float(loss.exp()), rel=1e-3)
