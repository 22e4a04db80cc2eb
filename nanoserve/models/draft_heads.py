"""Networks that draft what a Decoder will say next from its own hidden states: EAGLE, EAGLE-3 and
Medusa.

They are read from safetensors and a config.json, in the formats that their authors publish. A
published head has a Llama's layer, whatever family its target is of. The target is whole: not a
stage, not a rank.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from nanoserve.config.checkpoint_names import CheckpointNames
from nanoserve.config.model_config import ModelConfig, is_eagle3
from nanoserve.errors import ModelError, shown
from nanoserve.models.attention import AttentionFunction
from nanoserve.models.decoder import Decoder, DecoderLayer, Linear, RMSNorm, VocabParallelEmbedding
from nanoserve.models.loading import check_finite, read_tensors
from nanoserve.models.tensor_parts import TensorPart
from nanoserve.models.weights import layer_parts
from nanoserve.utils.files import read_json_object

Head = TypeVar("Head", bound=nn.Module)
EMBEDDING = "embed_tokens.weight"


class EagleHead(Decoder):
    """EAGLE (arXiv 2401.15077): one layer that drafts the target's next feature, the hidden state
    before its lm_head, from its last one and the token that came of that.

    It is a decoder whose inputs are pairs: feature i and token i + 1 are at position i. Its hidden
    states are drafted features, which take the place of the target's for the next draft token.
    """

    feature_layers: tuple[int, ...] = ()
    """The target's layers, from 0, whose outputs side by side are its features; none: its final
    hidden states."""

    def __init__(self, config: ModelConfig, target: Decoder, *, biased: bool = False) -> None:
        """`config` describes the head's one layer. Its embedding and lm_head are the target's."""
        norms = replace(config.norms, before_attention=False)
        super().__init__(replace(config, norms=norms), initialize=False)
        self.rotary.to(target.device)
        self.embedding, self.lm_head = target.embedding, target.lm_head
        self.fc = Linear(2 * config.hidden_size, config.hidden_size, bias=biased)
        self.final_norm = cast(RMSNorm, nn.Identity())

    def parts(self) -> Iterator[TensorPart]:
        """The tensors of its checkpoint that it needs."""
        yield from _matrix("fc", self.fc)
        yield from layer_parts(self.config, CheckpointNames(layer_prefix="layers.{}."), 0)

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features [T, its hidden size times the number of feature layers, if any] ->
        [T, hidden_size]."""
        return features

    def pair(self, token_ids: Tensor, features: Tensor) -> Tensor:
        """Make the inputs at the positions of features [T, hidden_size], whose next tokens are
        token_ids, int64 [T]."""
        return torch.cat((self.embedding(token_ids), features), dim=-1)

    def _embed_tokens(self, pairs: Tensor) -> Tensor:
        hidden: Tensor = self.fc(pairs)
        return hidden


class Eagle3Head(EagleHead):
    """EAGLE-3 (arXiv 2503.01840): features of several layers in one, a layer whose attention takes
    pairs, and an lm_head of its own, perhaps over the most frequent tokens alone."""

    targets: Tensor
    """int64 [draft vocabulary], the target's token for each of the head's."""

    def __init__(
        self, config: ModelConfig, target: Decoder, feature_layers: tuple[int, ...], targets: Tensor
    ) -> None:
        super().__init__(config, target)
        self.feature_layers = feature_layers
        self.fc = Linear(
            len(feature_layers) * target.config.hidden_size, config.hidden_size, bias=False
        )
        self.layers[0] = PairLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.norms.eps)
        self.lm_head = Linear(config.hidden_size, len(targets), bias=False)
        self.register_buffer("targets", targets, persistent=False)

    def parts(self) -> Iterator[TensorPart]:
        hidden = self.config.hidden_size
        yield from _matrix("fc", self.fc)
        yield from _matrix("lm_head", self.lm_head)
        yield TensorPart("norm.weight", "norm.weight", (hidden,))
        norms = "layers.0.attention_norm"
        yield TensorPart(
            "midlayer.input_layernorm.weight", f"{norms}.embedding_norm.weight", (hidden,)
        )
        yield TensorPart("midlayer.hidden_norm.weight", f"{norms}.feature_norm.weight", (hidden,))
        for part in layer_parts(self.config, CheckpointNames(layer_prefix="midlayer."), 0):
            if part.parameter == "layers.0.qkv.weight":  # it reads pairs
                part = replace(part, shape=(part.shape[0], 2 * hidden))
            yield part

    def fuse(self, features: Tensor) -> Tensor:
        fused: Tensor = self.fc(features)
        return fused

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits like a decoder's; tokens outside of the head's vocabulary have -inf."""
        own: Tensor = self.lm_head(self.norm(hidden)).float()
        logits = own.new_full((len(own), self.config.vocab_size), -torch.inf)
        return logits.index_copy_(1, self.targets, own)

    def _embed_tokens(self, pairs: Tensor) -> Tensor:
        return pairs


class PairLayer(DecoderLayer):
    """The layer of EAGLE-3: attention over pairs of embedding and feature, added to the
    features."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, 0)
        self.attention_norm = cast(RMSNorm, PairNorm(config.hidden_size, config.norms.eps))
        self.qkv = Linear(
            2 * config.hidden_size, self.qkv.out_features, bias=config.attention.qkv_bias
        )

    def forward(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, attention: AttentionFunction
    ) -> Tensor:
        attended = self.attended(hidden, cos, sin, attention)
        _, features = hidden.chunk(2, dim=-1)
        return self.post_attention(attended, features)


class PairNorm(nn.Module):
    """RMSNorm of an embedding and of the feature beside it, each by itself."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.embedding_norm = RMSNorm(size, eps)
        self.feature_norm = RMSNorm(size, eps)

    def forward(self, pair: Tensor) -> Tensor:
        embedding, feature = pair.chunk(2, dim=-1)
        normed = self.embedding_norm(embedding), self.feature_norm(feature)
        return torch.cat(normed, dim=-1)


class MedusaHeads(nn.Module):
    """Medusa (arXiv 2401.10774): each head drafts one further token from the same hidden state, the
    first head the one behind that which the target itself draws from it."""

    feature_layers: tuple[int, ...] = ()

    def __init__(self, hidden_size: int, vocab_size: int, num_heads: int, num_layers: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList()
        for _ in range(num_heads):
            head = nn.Sequential()
            for _ in range(num_layers):
                head.append(ResidualBlock(hidden_size))
            head.append(Linear(hidden_size, vocab_size, bias=False))
            self.heads.append(head)

    def parts(self) -> Iterator[TensorPart]:
        """The tensors of its checkpoint."""
        for name, module in self.heads.named_modules():
            if isinstance(module, Linear):
                for part in _matrix(name, module):
                    yield replace(part, parameter=f"heads.{part.parameter}")

    def fuse(self, features: Tensor) -> Tensor:
        """The final hidden states themselves, as with an EAGLE head."""
        return features

    def forward(self, hidden: Tensor, count: int) -> Tensor:
        """The target's final hidden states [N, hidden_size] -> logits of the first `count` heads,
        or of all if there are fewer, float32 [heads, N, vocab_size]."""
        return torch.stack([head(hidden).float() for head in self.heads[:count]])


class ResidualBlock(nn.Module):
    """x + silu(W x + b)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = Linear(size, size)

    def forward(self, hidden: Tensor) -> Tensor:
        added: Tensor = functional.silu(self.linear(hidden))
        return hidden + added


def load_eagle(directory: Path, target: Decoder) -> EagleHead:
    """The EAGLE or EAGLE-3 head of a directory, in the target's dtype and on its device. Raises
    ModelError, one line that names the directory, if it is damaged, pickled, or made for a target
    of another width or vocabulary."""
    config = ModelConfig.from_directory(directory)
    sizes = target.model_config
    tensors = read_tensors(directory)
    is_third = is_eagle3(directory)
    if not is_third:
        tensors.pop(EMBEDDING, None)  # a copy of the target's
    _check_fit(directory, "vocab_size", config.vocab_size, sizes.vocab_size)
    if EMBEDDING not in tensors:
        _check_fit(directory, "hidden_size", config.hidden_size, sizes.hidden_size)
    if config.num_layers != 1 or config.moe is not None:
        raise ModelError(
            f"{directory}: only EAGLE heads of one dense layer are read; this has "
            f"{config.num_layers}"
        )
    if is_third:
        return _load_eagle3(directory, config, tensors, target)
    head = EagleHead(config, target, biased="fc.bias" in tensors)
    return _filled(head, head.parts(), tensors, directory, target)


def _load_eagle3(
    directory: Path, config: ModelConfig, tensors: dict[str, Tensor], target: Decoder
) -> Eagle3Head:
    sizes = target.model_config
    fields = read_json_object(directory / "config.json")
    tensors.pop("t2d", None)  # says of each of the target's tokens whether d2t leads to it
    vocabulary = _count(directory, fields, "draft_vocab_size", config.vocab_size)
    offsets = tensors.pop("d2t", torch.zeros(vocabulary, dtype=torch.int64))
    targets = torch.arange(len(offsets)) + offsets.long()
    is_token = torch.isin(targets, torch.arange(sizes.vocab_size))
    if targets.shape != (vocabulary,) or not bool(is_token.all()):
        raise ModelError(
            f"{directory}: d2t does not lead from {vocabulary} tokens to tokens of the target"
        )
    feature_layers = _feature_layers(directory, fields, sizes.num_layers)
    head = Eagle3Head(config, target, feature_layers, targets.to(target.device))
    parts = list(head.parts())
    if EMBEDDING in tensors:
        head.embedding = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        parts.append(
            TensorPart(EMBEDDING, "embedding.weight", (config.vocab_size, config.hidden_size))
        )
    return _filled(head, parts, tensors, directory, target)


def load_medusa(directory: Path, target: Decoder) -> MedusaHeads:
    """The Medusa heads of a directory; arguments and errors are those of `load_eagle`."""
    fields = read_json_object(directory / "config.json")
    sizes = target.model_config
    num_heads = _count(directory, fields, "medusa_num_heads", 1)
    num_layers = _count(directory, fields, "medusa_num_layers", 1)
    heads = MedusaHeads(sizes.hidden_size, sizes.vocab_size, num_heads, num_layers)
    return _filled(heads, heads.parts(), read_tensors(directory), directory, target)


def _feature_layers(directory: Path, fields: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The layers that config.json names, or an early, a middle and a late one, as the authors take
    them."""
    eagle_config = fields.get("eagle_config") or {}
    layers = eagle_config.get("eagle_aux_hidden_state_layer_ids")
    if not layers:
        layers = [1, num_layers // 2 - 1, num_layers - 4]
    if not isinstance(layers, list) or not all(layer in range(num_layers) for layer in layers):
        raise ModelError(
            f"{directory}: the head reads the layers {layers}, the target has {num_layers}"
        )
    return tuple(layers)


def _count(directory: Path, fields: Mapping[str, Any], key: str, default: int) -> int:
    value = fields.get(key, default)
    if not isinstance(value, int) or value < 1:
        path = directory / "config.json"
        raise ModelError(f"{path}: {key} must be an integer from 1 on, found {shown(value)}")
    return value


def _check_fit(directory: Path, key: str, found: int, wanted: int) -> None:
    if found != wanted:
        raise ModelError(
            f"{directory}: the head has {key} {found}, the model {wanted}; it was made for another "
            "model"
        )


def _matrix(name: str, linear: Linear) -> Iterator[TensorPart]:
    """The tensors of a matrix and its bias, if it has one."""
    for kind, values in linear.named_parameters():
        own_name = f"{name}.{kind}"
        yield TensorPart(own_name, own_name, tuple(values.shape))


def _filled(
    head: Head,
    parts: Iterable[TensorPart],
    tensors: dict[str, Tensor],
    directory: Path,
    target: Decoder,
) -> Head:
    """The head with the tensors of its checkpoint, of which none may be left, in the target's dtype
    and place."""
    head.requires_grad_(False).eval()
    filled: dict[str, nn.Parameter] = {}
    for part in parts:
        found = tensors.pop(part.name, None)
        if found is None:
            raise ModelError(f"{directory}: tensor {part.name} is missing from the checkpoint")
        if tuple(found.shape) != part.shape:
            shape, wanted = list(found.shape), list(part.shape)
            raise ModelError(f"{directory}: tensor {part.name} has shape {shape}, not {wanted}")
        filled[part.parameter] = head.get_parameter(part.parameter)
        region = part.region(filled[part.parameter])
        region.copy_(found)
        check_finite(region, part.name, directory)
    if tensors:
        raise ModelError(
            f"{directory}: tensor {next(iter(tensors))} does not belong to a head of this kind"
        )
    for parameter in filled.values():
        parameter.data = parameter.to(target.device, target.dtype)
    return head
