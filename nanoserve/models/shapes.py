"""Models with random weights of a published shape: `dummy:NAME` or `dummy:path/to/config.json`. No torch here."""

from pathlib import Path
from typing import Any

from nanoserve.config import ModelConfig
from nanoserve.costs.tables import published_shapes
from nanoserve.errors import ModelError
from nanoserve.processes.files import read_json_object

DUMMY_PREFIX = "dummy:"
SHAPES = published_shapes()


def dummy_shape(spec: str) -> dict[str, Any]:
    """The config.json of a name in SHAPES, or of a path; a leading "dummy:" is accepted.

    Raises ModelError, naming the known shapes, if it is neither.
    """
    name = spec.removeprefix(DUMMY_PREFIX)
    if name.endswith(".json"):
        path = Path(name)
        if not path.is_file():
            raise ModelError(f"{path}: no such file; dummy: takes a config.json or a name")
        return read_json_object(path)
    if name.lower() not in SHAPES:
        raise ModelError(f"unknown shape {name!r}; use a path to a config.json or one of: {', '.join(SHAPES)}")
    return dict(SHAPES[name.lower()])


def dummy_config(spec: str) -> ModelConfig:
    """The model of `dummy_shape`; raises as it does."""
    name = spec.removeprefix(DUMMY_PREFIX)
    source = name if name.endswith(".json") else f"{DUMMY_PREFIX}{name}"
    return ModelConfig.from_hf(dummy_shape(spec), source=source)
