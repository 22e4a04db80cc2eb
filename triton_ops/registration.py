"""How an operator becomes known to torch."""

from collections.abc import Callable

import torch

# Registrations live as long as this object; torch forgets them with it.
LIBRARY = torch.library.Library("nanoserve", "FRAGMENT")  # type: ignore[no-untyped-call]

# The plain implementations are tensor operations and run on either device.
DEVICES = ("CPU", "CUDA")


def register(schema: str, implementation: Callable[..., None]) -> None:
    """Register an operator that only writes into its arguments: `schema` marks those with (a!), (b!)..."""
    name = schema.partition("(")[0]
    LIBRARY.define(schema)  # type: ignore[no-untyped-call]
    for device in DEVICES:
        LIBRARY.impl(name, implementation, device)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"nanoserve::{name}", _writes_only, lib=LIBRARY)


def _writes_only(*arguments: object) -> None:
    """Shapes do not change and nothing is returned, so tracing has nothing to compute."""
