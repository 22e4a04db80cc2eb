"""Sizes of the named models against the sizes of their published files."""

import pytest

from nanoserve.config.published_shapes import published_shapes
from nanoserve.models.hub import find_named_model, named_models
from nanoserve.models.hub_files import parse_reference, quantization_of
from nanoserve.models.shapes import file_bytes, memory_bytes, named_shape

PUBLISHED = {
    # the size that the hub states for each file, in the header x-linked-size or on its page
    "qwen3:4b": (2_497_280_256, 0.003),
    "qwen3:8b": (5_027_783_488, 0.003),
    "qwen3:0.6b": (639_446_688, 0.01),
    "smollm2:1.7b": (1_055_609_824, 0.003),
    "smollm2:135m": (145e6, 0.02),
    "smollm3:3b": (4.97e9 + 1.18e9, 0.003),
    "glm4:9b": (6.17e9, 0.005),
    "lfm2:350m": (379e6, 0.01),
    "gpt-oss:20b": (4.79e9 + 4.80e9 + 4.17e9, 0.003),
    "qwen3:14b": (8.4 * 2**30, 0.006),
    "qwen3.5:0.8b": (774.2 * 2**20, 0.02),
}
"""Bytes, and how much of it is the vocabulary and other metadata, or rounded away."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_those_of_the_published_files(name: str) -> None:
    published, share = PUBLISHED[name]
    assert file_bytes(named_models()[name]) == pytest.approx(published, rel=share)


def test_memory_holds_weights_and_keys_and_values() -> None:
    """Qwen3-0.6B: 28 layers of 8 heads of 128 numbers of 16 bits, for keys and for values."""
    row = named_models()["qwen3:0.6b"]
    kv_bytes = 4096 * 28 * 2 * 8 * 128 * 2
    assert memory_bytes(row) == file_bytes(row) + kv_bytes + 512 * 2**20


@pytest.mark.parametrize("name", named_models())
def test_every_row_is_complete(name: str) -> None:
    row = named_models()[name]
    family, _, size = name.partition(":")
    assert family and size and name == name.lower()
    assert parse_reference(row.repository) is not None and row.shape in published_shapes()
    assert row.page.startswith(("https://huggingface.co/", "https://github.com/"))
    assert row.license
    assert find_named_model(name) is row
    assert find_named_model(family) in named_models().values()
    assert memory_bytes(row) > file_bytes(row) > 50e6
    if row.file is not None:
        assert row.file.endswith(".gguf") and quantization_of(row.file) in ("Q4_K_M", "Q8_0")
        assert named_shape(row).quantization is not None
