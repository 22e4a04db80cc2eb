"""How one model is spread over devices: tensor, pipeline and data parallel degrees."""

import re
from dataclasses import dataclass

from nanoserve.errors import UsageError, shown

_PART = re.compile("([DTP])([0-9]{1,4})")
_DEGREES = {"D": "data_parallel", "T": "tensor_parallel", "P": "pipeline_parallel"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """Devices = tensor x pipeline x data; ranks are numbered with the tensor degree fastest, then the pipeline. Raises
    UsageError for a degree below 1."""

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1

    def __post_init__(self) -> None:
        for name in _DEGREES.values():
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")

    @classmethod
    def parse(cls, name: str) -> "ParallelLayout":
        """A layout as the papers write it: P4, T2P2, D2T4; each letter once, in any order. Raises UsageError for other
        names."""
        parts = _PART.findall(name.upper())
        degrees = {_DEGREES[letter]: int(degree) for letter, degree in parts}
        if not parts or "".join(f"{letter}{degree}" for letter, degree in parts) != name.upper():
            raise UsageError(f"{shown(name)} is no layout such as P4 (pipeline), T4 (tensor) or T2P2")
        if len(degrees) < len(parts):
            raise UsageError(f"the layout {shown(name)} names a degree twice")
        return cls(**degrees)

    @property
    def devices(self) -> int:
        """Devices of all degrees together."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel

    @property
    def name(self) -> str:
        """As the papers write it: D2T2P4; degrees of 1 are left out, "T1" if all are."""
        degrees = {letter: getattr(self, degree) for letter, degree in _DEGREES.items()}
        return "".join(f"{letter}{degree}" for letter, degree in degrees.items() if degree > 1) or "T1"
