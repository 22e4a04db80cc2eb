"""The operators on NVIDIA GPUs: in Triton, and one by a product of torch that only GPUs have use
for.

`kernels/` holds the programs that run on the GPU and imports nothing but Triton, so that they can
be compiled where there is neither a GPU nor torch; the modules beside it choose grids and
configurations and launch them. All of it is imported when a GPU is first given work.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any


def on_first_call(module: str, name: str) -> Callable[..., Any]:
    """The function of that name in `triton_ops.gpu.<module>`, which is imported when it is first
    called."""
    found: list[Callable[..., Any]] = []

    def call(*arguments: object, **options: object) -> Any:
        if not found:
            found.append(getattr(import_module(f"triton_ops.gpu.{module}"), name))
        return found[0](*arguments, **options)

    return call
