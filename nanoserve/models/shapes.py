"""Shapes and sizes of models, without their weights. No torch here."""

from pathlib import Path

from nanoserve.config.model_config import ModelConfig
from nanoserve.config.published_shapes import load_shape
from nanoserve.models.gguf_directory import gguf_config
from nanoserve.models.hub import SMOLLM2, is_gguf, packaged_smollm2
from nanoserve.utils.files import unreadable_as_model_error


@unreadable_as_model_error()
def find_shape(spec: str, quantization: str | None) -> ModelConfig:
    """The shape of a model as `load_shape` knows it, or of a .gguf file, or `smollm2`, with its
    quantization or that of `--quantization`. No weights are needed. Raises UsageError and
    ModelError in one line."""
    path = Path(spec).expanduser()
    packaged = packaged_smollm2()
    if spec == SMOLLM2 and packaged is not None and not path.exists():
        path = packaged
    if is_gguf(path):
        return gguf_config(path).rounded(quantization)
    return load_shape(spec).rounded(quantization)
