"""How an operator becomes known to torch."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, cast

import torch

# Every device without an implementation of its own takes this one: a key of its own ("CPU") always
# goes first.
PLAIN = "CompositeExplicitAutograd"

_Library: Any = torch.library.Library  # torch leaves its methods untyped

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Operators:
    """The operators of one namespace of `torch.ops`, each with an implementation in plain torch."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        # torch forgets the registrations together with this object
        self._library = _Library(namespace, "FRAGMENT")
        self._plain: dict[str, Callable[..., Any]] = {}

    def define(
        self, *, writes: tuple[str, ...] = (), fake: Callable[..., Any] | None = None
    ) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
        """Make a function the plain implementation, for any device, of the operator that bears its
        name.

        The operator takes its place: calling it runs a device's own implementation, if there is
        one. The function's types become the operator's schema; leading underscores are no part of
        the name. `writes` names the arguments that it changes; `fake` says, for tracing, which
        shapes come back, and is left out where nothing does.
        """

        def defined(plain: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
            name = plain.__name__.lstrip("_")
            self._library.define(
                torch.library.infer_schema(plain, mutates_args=writes, op_name=name)
            )
            self._library.impl(name, plain, PLAIN)
            torch.library.register_fake(
                f"{self._namespace}::{name}", fake or _writes_only, lib=self._library
            )
            self._plain[name] = plain
            operator: Any = getattr(getattr(torch.ops, self._namespace), name)
            operator.__doc__ = plain.__doc__
            return cast(Callable[Arguments, Result], operator)

        return defined

    def implement(self, name: str, device: str, implementation: Callable[..., Any]) -> None:
        """Give an operator that is defined the implementation of one kind of device ("CUDA"): what
        it runs from now on.

        It takes the arguments of the plain one.
        """
        self._library.impl(name, implementation, device)

    @contextmanager
    def plain(self, device: str = "CPU") -> Iterator[None]:
        """Within it a kind of device runs the plain implementations, whatever it has of its own: to
        compare one with the other."""
        overriding = _Library(self._namespace, "IMPL", device)
        try:
            with warnings.catch_warnings():
                # as intended
                warnings.filterwarnings(
                    "ignore", "[\\s\\S]*Overriding a previously registered kernel"
                )
                for name, plain in self._plain.items():
                    # torch may refuse to take the place of a function in Python without being told
                    overriding.impl(name, plain, device, allow_override=True)
            yield
        finally:
            overriding._destroy()


def _writes_only(*arguments: object, **options: object) -> None:
    """Shapes do not change and nothing is returned, so tracing has nothing to compute."""


OPERATORS = Operators("nanoserve")
