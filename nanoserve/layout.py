"""Layouts of one model over devices: tensor, pipeline and data parallel degrees, and the layers of
each stage."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from nanoserve.config.model_config import ModelConfig
from nanoserve.errors import UsageError, shown

_PART = re.compile("([DTP])([0-9]{1,4})")
_DEGREES = {"D": "data_parallel", "T": "tensor_parallel", "P": "pipeline_parallel"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """Devices = tensor x pipeline x data; ranks are numbered with the tensor degree fastest, then
    the pipeline. Raises UsageError for a degree below 1."""

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1

    def __post_init__(self) -> None:
        for name in _DEGREES.values():
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")

    @classmethod
    def parse(cls, name: str) -> "ParallelLayout":
        """Parse a layout as the papers write it: P4, T2P2, D2T4; each letter once, in any order.
        Raises UsageError for other names."""
        parts = _PART.findall(name.upper())
        degrees = {_DEGREES[letter]: int(degree) for letter, degree in parts}
        if not parts or "".join(f"{letter}{degree}" for letter, degree in parts) != name.upper():
            raise UsageError(
                f"{shown(name)} is no layout such as P4 (pipeline), T4 (tensor) or T2P2"
            )
        if len(degrees) < len(parts):
            raise UsageError(f"the layout {shown(name)} names a degree twice")
        return cls(**degrees)

    @property
    def devices(self) -> int:
        """Devices of all degrees together."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel

    @property
    def name(self) -> str:
        """The layout's name in the papers: D2T2P4. Degrees of 1 are left out; "T1" if all are 1."""
        parts = []
        for letter, name in _DEGREES.items():
            degree = getattr(self, name)
            if degree > 1:
                parts.append(f"{letter}{degree}")
        if not parts:
            return "T1"
        return "".join(parts)


def tensor_degrees(model: ModelConfig) -> list[int]:
    """Tensor parallel degrees that divide the heads, of layers with a state too."""
    kv_heads = {shape.num_kv_heads for shape in model.layers.shapes}
    if not kv_heads:
        kv_heads.add(model.num_kv_heads)
    degrees = []
    for degree in range(1, model.num_heads + 1):
        # Ranks have equal numbers of key-value heads, or equal numbers of ranks share each.
        divides_kv_heads = all(max(degree, heads) % min(degree, heads) == 0 for heads in kv_heads)
        divides_states = model.recurrent is None or model.recurrent.mixer.most_parts % degree == 0
        if model.num_heads % degree == 0 and divides_kv_heads and divides_states:
            degrees.append(degree)
    return degrees


def stage_layers(
    model: ModelConfig,
    pipeline_parallel: int,
    pipeline_split: Sequence[int] | None,
    divide: Callable[[ModelConfig, int], Sequence[int]],
    *,
    asked: str | None = None,
) -> tuple[range, ...]:
    """The layers of each stage, by `pipeline_split` or by `divide`. `asked` stands for --pp in
    errors. Raises UsageError if the stages cannot be filled, or the split is not one of this
    model's layers."""
    if pipeline_parallel < 1:
        raise UsageError(f"--pp must be at least 1, not {pipeline_parallel}")
    if pipeline_parallel > model.num_layers:
        option = asked or f"--pp {pipeline_parallel}"
        raise UsageError(
            f"{option}: the model has {model.num_layers} layers, so there are at most "
            f"{model.num_layers} stages"
        )
    sizes = divide(model, pipeline_parallel) if pipeline_split is None else pipeline_split
    option = f"--pp-split {','.join(map(str, sizes))}"
    if len(sizes) != pipeline_parallel:
        raise UsageError(f"{option} names {len(sizes)} stages, but --pp is {pipeline_parallel}")
    if min(sizes) < 1:
        raise UsageError(f"{option}: every stage needs at least one layer")
    if sum(sizes) != model.num_layers:
        raise UsageError(
            f"{option} adds up to {sum(sizes)} layers, but the model has {model.num_layers}"
        )
    return tuple(range(first, after) for first, after in pairwise(accumulate(sizes, initial=0)))
