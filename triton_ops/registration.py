"""How an operator becomes known to torch."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

NAMESPACE = "nanoserve"

# Registrations live as long as this object; torch forgets them with it.
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]

# Every device without an implementation of its own takes this one: a key of its own ("CPU") always goes first.
PLAIN = "CompositeExplicitAutograd"

_PLAIN_IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {}


def register(schema: str, plain: Callable[..., Any], fake: Callable[..., Any] | None = None) -> None:
    """Register an operator with its implementation in plain torch, which runs on any device.

    `schema` marks what is written with (a!), (b!)...; `fake` says which shapes come back, for tracing. It is left out
    where nothing comes back.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema)  # type: ignore[no-untyped-call]
    LIBRARY.impl(name, plain, PLAIN)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake or _writes_only, lib=LIBRARY)
    _PLAIN_IMPLEMENTATIONS[name] = plain


def _writes_only(*arguments: object) -> None:
    """Shapes do not change and nothing is returned, so tracing has nothing to compute."""


@contextmanager
def plain_operators() -> Iterator[None]:
    """Within it the CPU runs the plain implementations, whatever has been built: to compare one with the other."""
    overriding = torch.library.Library(NAMESPACE, "IMPL", "CPU")  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "[\\s\\S]*Overriding a previously registered kernel")  # as intended
            for name, plain in _PLAIN_IMPLEMENTATIONS.items():
                overriding.impl(name, plain, "CPU")  # type: ignore[no-untyped-call]
        yield
    finally:
        overriding._destroy()  # type: ignore[no-untyped-call]
