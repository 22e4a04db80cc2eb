"""What several test modules share."""

from collections.abc import Iterator

import pytest

from nanoserve import LLM


@pytest.fixture(scope="session")
def storyteller() -> Iterator[LLM]:
    """The bundled model, loaded once, in float32 and with a small cache."""
    with LLM(dtype="float32", kv_cache_memory=64 << 20, seed=7) as llm:
        yield llm
