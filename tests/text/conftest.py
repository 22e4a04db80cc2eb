from collections.abc import Iterator
from pathlib import Path

import pytest

from nanoserve.text.tokenizer import Tokenizer, load_tokenizer
from tests.text.building import make_byte_level, make_metaspace, make_sentencepiece

MAKERS = {
    "byte-level": make_byte_level,
    "metaspace": make_metaspace,
    "sentencepiece": make_sentencepiece,
}


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model directory of every kind of tokenizer."""
    return {kind: make(tmp_path_factory.mktemp(kind)) for kind, make in MAKERS.items()}


@pytest.fixture(scope="session")
def tokenizers(directories: dict[str, Path]) -> Iterator[dict[str, Tokenizer]]:
    loaded = {kind: load_tokenizer(directory) for kind, directory in directories.items()}
    yield loaded
    for tokenizer in loaded.values():
        tokenizer.close()


@pytest.fixture(params=list(MAKERS))
def tokenizer(request: pytest.FixtureRequest, tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers[request.param]
