"""Shapes of published models (published_shapes.toml), whose entries name their source. No weights
are needed."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nanoserve.config.model_config import ModelConfig
from nanoserve.errors import UsageError, shown
from nanoserve.utils.files import read_json_object, read_toml, unreadable_as_model_error

SHIPPED_MODELS = Path(__file__).with_name("published_shapes.toml")


@cache
def published_shapes() -> Mapping[str, Mapping[str, Any]]:
    """Each model's config.json, as far as its shape goes."""

    def config(entry: Mapping[str, Any]) -> Mapping[str, Any]:
        kept = {key: value for key, value in entry.items() if key not in ("source", "null_keys")}
        return kept | dict.fromkeys(entry.get("null_keys", ()))

    return MappingProxyType(
        {name: config(entry) for name, entry in read_toml(SHIPPED_MODELS).items()}
    )


def load_shape(spec: str) -> ModelConfig:
    """The shape of a published model, of a config.json, or of a directory that holds one. No
    weights are needed. Raises UsageError for an unknown name, listing the known ones, and
    ModelError for a config.json that is wrong."""
    path = Path(spec)
    with unreadable_as_model_error():
        if spec.endswith(".json") and path.is_file():
            return ModelConfig.from_hf(read_json_object(path), source=str(path))
        if path.is_dir():
            return ModelConfig.from_directory(path)
    name = spec.removeprefix("dummy:").lower()
    shapes = published_shapes()
    if name not in shapes:
        raise UsageError(
            f"unknown model {shown(spec)}: no config.json, no directory with one, and none of "
            f"{', '.join(shapes)}"
        )
    return ModelConfig.from_hf(shapes[name], source=name)
