"""One checkpoint per family and session."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from tests.models import test_gguf, test_quantized_tensors
from tests.oracle.checkpoints import make_checkpoint


def _write_packed(
    family: str, method: str, settings: dict[str, Any], directory: Path
) -> tuple[PreTrainedModel, Path]:
    return test_quantized_tensors.write_random(family, directory, method, **settings), directory


QUANTIZED = {
    f"{family} in {block_type}": partial(test_gguf.make_model, family, block_type)
    for family, block_type in test_gguf.CASES
} | {
    " ".join([family, "in", method, *map(str, settings.items())]): partial(
        _write_packed, family, method, settings
    )
    for family, method, settings in test_quantized_tensors.CASES
}
"""Every quantized format, and every family in some of them: what writes it to a directory."""


@pytest.fixture(scope="session")
def checkpoint(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], tuple[Path, PreTrainedModel]]:
    """checkpoint(family) -> its directory and the Hugging Face model it was written from; the name
    of a quantized one is in QUANTIZED, and that model has the values of its integers."""
    made: dict[str, tuple[Path, PreTrainedModel]] = {}

    def get(family: str) -> tuple[Path, PreTrainedModel]:
        if family not in made:
            directory = tmp_path_factory.mktemp("checkpoint")
            if family in QUANTIZED:
                model, directory = QUANTIZED[family](directory)
            else:
                model = make_checkpoint(family, directory)
            made[family] = directory, model
        return made[family]

    return get
