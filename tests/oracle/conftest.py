"""One checkpoint per family and session."""

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tests.oracle.checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, PreTrainedModel]]:
    """checkpoint(family) -> its directory and the Hugging Face model it was written from."""
    made: dict[str, tuple[Path, PreTrainedModel]] = {}

    def get(family: str) -> tuple[Path, PreTrainedModel]:
        if family not in made:
            directory = tmp_path_factory.mktemp(family)
            made[family] = directory, make_checkpoint(family, directory)
        return made[family]

    return get
