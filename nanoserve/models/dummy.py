"""Models with random weights of a real shape: as fast and as large as the real ones, and meaningless."""

import hashlib
import math

import torch
from torch import Tensor

from nanoserve.config import ModelConfig
from nanoserve.models.decoder import INITIAL_STANDARD_DEVIATION, Decoder
from nanoserve.models.dtypes import resolve_dtype
from nanoserve.models.loading import empty_decoder
from nanoserve.models.shapes import dummy_config
from nanoserve.models.shards import Shard, TensorParallelGroup
from nanoserve.models.weights import TensorPart, shard_parts, tensor_parts

DUMMY_SEED = 1
"""Names the weights of dummy models, also where they are kept: another one whenever they are drawn in another way."""

# A uniform distribution of this half-width has the standard deviation of a fresh decoder; it is drawn much faster than
# a normal one, which matters for billions of weights.
_HALF_WIDTH = INITIAL_STANDARD_DEVIATION * math.sqrt(3.0)


def make_dummy_model(
    spec: str,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    *,
    shard: Shard | None = None,
    group: TensorParallelGroup | None = None,
) -> tuple[Decoder, ModelConfig]:
    """A decoder with random weights, ready for inference, and the whole model's config.

    On a device the weights are always the same ones; a shard has the slices of the whole model's. `spec` is a name in
    SHAPES or the path of a config.json; the rest as in `load_model`. Raises ModelError.
    """
    config, device = dummy_config(spec), torch.device(device)
    decoder = empty_decoder(config, resolve_dtype(dtype, device, config.dtype), device, shard=shard, group=group)
    parameters, generator = dict(decoder.named_parameters()), torch.Generator(device)
    for part in shard_parts(tensor_parts(config), config, decoder.shard):
        _draw(part, part.region(parameters[part.parameter]), generator)
    return decoder, config


def _draw(part: TensorPart, region: Tensor, generator: torch.Generator) -> None:
    """Fill a region with its part of a tensor, which is drawn whole: every tensor has random numbers of its own."""
    if len(part.shape) == 1:
        region.fill_(0.0 if part.name.endswith(".bias") else 1.0)  # what is no bias is a norm
        return
    digest = hashlib.blake2s(f"{DUMMY_SEED} {part.name}".encode(), digest_size=4).digest()
    generator.manual_seed(int.from_bytes(digest, "little"))
    if region.shape == part.shape:
        region.uniform_(-_HALF_WIDTH, _HALF_WIDTH, generator=generator)
    else:
        region.copy_(region.new_empty(part.shape).uniform_(-_HALF_WIDTH, _HALF_WIDTH, generator=generator)[part.source])
