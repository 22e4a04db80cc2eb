"""Models with random weights of a real shape: as fast and as large as the real ones, and meaningless."""

import math

import torch
from torch import nn

from nanoserve.config import ModelConfig
from nanoserve.models.decoder import INITIAL_STANDARD_DEVIATION, Decoder, RMSNorm
from nanoserve.models.dtypes import resolve_dtype
from nanoserve.models.loading import empty_decoder
from nanoserve.models.shapes import dummy_config

DUMMY_SEED = 0

# A uniform distribution of this half-width has the standard deviation of a fresh decoder; it is drawn much faster than
# a normal one, which matters for billions of weights.
_HALF_WIDTH = INITIAL_STANDARD_DEVIATION * math.sqrt(3.0)


def make_dummy_model(spec: str, dtype: str = "auto", device: str | torch.device = "cpu") -> tuple[Decoder, ModelConfig]:
    """A decoder with random weights, always the same ones on a device, ready for inference.

    `spec` is a name in SHAPES or the path of a config.json; `dtype` as in `load_model`. Raises ModelError.
    """
    config, device = dummy_config(spec), torch.device(device)
    decoder = empty_decoder(config, resolve_dtype(dtype, device, config.dtype), device)
    generator = torch.Generator(device).manual_seed(DUMMY_SEED)
    for module in decoder.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, RMSNorm):
                nn.init.ones_(parameter)
            elif name == "bias":
                nn.init.zeros_(parameter)
            else:
                parameter.uniform_(-_HALF_WIDTH, _HALF_WIDTH, generator=generator)
    return decoder, config
