"""GGUF's block types against the gguf library, bit for bit."""

import gguf
import numpy as np
import pytest
import torch

from nanoserve.config.quantization import BLOCK_TYPES
from nanoserve.models.gguf_blocks import decode_blocks

QUANTIZED = [found for found in BLOCK_TYPES.values() if found.size > 1]
HALVES = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "MXFP4": (),
}
"""Places of numbers of 16 bits, which random bytes could make infinite."""


@pytest.mark.parametrize("block_type", QUANTIZED, ids=lambda found: found.name)
def test_any_bytes_are_dequantized_as_gguf_does(block_type) -> None:
    generator = np.random.default_rng(5)
    blocks = generator.integers(0, 256, (96, block_type.num_bytes), dtype=np.uint8)
    for place in HALVES.get(block_type.name, (0,)):
        scales = (generator.standard_normal((96, 1)) * 0.02).astype(np.float16)
        blocks[:, place : place + 2] = scales.view(np.uint8)
    if block_type.name == "MXFP4":
        blocks[:, 0] = np.arange(96) + 80  # all but 255, which is NaN
    stored = blocks.reshape(12, -1)
    wanted = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[block_type.name])
    found = decode_blocks(torch.from_numpy(stored), block_type).dequantize()
    assert torch.equal(found, torch.from_numpy(wanted))
