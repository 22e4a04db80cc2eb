"""Fixtures that the tests of grammars share: a vocabulary of each kind."""

from pathlib import Path

import pytest

import nanoserve
from tests.text.building import make_byte_level, make_metaspace, make_sentencepiece

BUNDLED = Path(nanoserve.__file__).parent / "assets" / "storyteller"


@pytest.fixture(scope="session")
def vocabularies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model directory for every kind of tokenizer."""
    makers = {
        "byte-level": make_byte_level,
        "metaspace": make_metaspace,
        "sentencepiece": make_sentencepiece,
    }
    made = {kind: make(tmp_path_factory.mktemp(kind)) for kind, make in makers.items()}
    return made | {"storyteller": BUNDLED}
