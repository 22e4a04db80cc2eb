"""Declarations of options: each is one field of a dataclass, from which typer's parameter is made.

The options of a command are one class, put together from groups: ``class ChatOptions(ServerOptions,
EngineOptions)``. Parsing only prepares: it yields a callable that does the work, so that no frame
of the parser, with its own ideas of errors and exits, lies below the running command.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, dataclass_transform, get_type_hints

import typer

from nanoserve.errors import shown

Action = Callable[[], int | None]
HARDWARE_PANEL = "Hardware"


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Options:
    """A group of options, or all options of a command; subclasses are frozen dataclasses."""

    panel: ClassVar[str]  # where help lists the fields that a class declares
    # whether each of these is also read from an environment variable: NANOSERVE_NAME
    has_variables: ClassVar[bool]

    def __init_subclass__(cls, *, panel: str = "Work", has_variables: bool = False) -> None:
        cls.panel, cls.has_variables = panel, has_variables
        dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self) -> None:
        for declared in fields(self):  # type: ignore[arg-type]  # see __init_subclass__
            parse, value = declared.metadata.get("parse"), getattr(self, declared.name)
            if parse is not None and isinstance(value, str):
                object.__setattr__(self, declared.name, parse(value, flag_of(declared.name)))

    @classmethod
    def variables(cls, name: str) -> list[str]:
        """The environment variables of a field that names none itself."""
        if not cls.has_variables:
            return []
        return [f"NANOSERVE_{name.upper()}"]


class NoOptions(Options):
    """All options of a command that has none."""


def option(
    default: Any,
    help: str,
    short: str | None = None,
    *,
    metavar: str = "N",
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Sequence[str] = (),
    suggestions: Sequence[str] | Callable[[], Iterable[str]] = (),
    panel: str | None = None,
    variables: Sequence[str] | None = None,
    parse: Callable[[str, str], Any] | None = None,
) -> Any:
    """A field that is an option, whose long flag is named after the field; a bool is a switch.

    Help shows ``metavar`` for the value and the ``minimum``, but not the ``maximum``, which leaves
    too little room for other columns. The shell completes ``suggestions``, but other values are
    taken too. By default its group decides on ``panel`` and environment ``variables``. ``parse``
    makes the field's value of a text, also of ``default``, and of the flag.
    """

    def check(value: Any) -> Any:
        if value is not None and choices and value not in choices:
            raise typer.BadParameter(f"{shown(value)} is not one of {', '.join(choices)}")
        if value is not None and maximum is not None and value > maximum:
            raise typer.BadParameter(f"{value} is more than {maximum}")
        return value

    def complete(incomplete: str) -> list[str]:
        words: Iterable[str] = choices
        if callable(suggestions):
            words = suggestions()
        elif not choices:
            words = suggestions
        return [word for word in words if word.startswith(incomplete)]

    if choices:
        help = f"{help} One of {', '.join(choices)}."
        metavar = "NAME"
    callback = autocompletion = None
    # older typers fail at the callback of a list that is not given
    if choices or maximum is not None:
        callback = check
    if choices or suggestions:
        autocompletion = complete
    settings = {
        "parse": parse,
        "short": short,
        "help": help,
        "metavar": metavar,
        "min": minimum,
        "callback": callback,
        "autocompletion": autocompletion,
        "rich_help_panel": panel,
        "envvar": variables,
    }
    return field(default=default, metadata=settings)


file_option = partial(option, None, metavar="FILE")


def argument(
    default: Any,
    help: str,
    metavar: str | None = None,
    suggestions: Callable[[], Iterable[str]] | None = None,
) -> Any:
    """A field that is a word of its own, without a flag; the default ``...`` makes it required. The
    shell completes ``suggestions``, but other values are taken too."""
    metadata: dict[str, Any] = {"help": help, "metavar": metavar, "show_default": False}
    if suggestions is not None:

        def complete(incomplete: str) -> list[str]:
            return [word for word in suggestions() if word.startswith(incomplete)]

        metadata["autocompletion"] = complete
    if default is ...:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)


def flag_of(name: str) -> str:
    return "--" + name.rstrip("_").replace("_", "-")  # "continue_": Python has the word for itself


def prepared(run: Callable[..., int | None]) -> Callable[..., Action]:
    """A command's ``run(options)`` as typer takes it: with a parameter for each field, and an
    Action as its result."""
    group = inspect.signature(run, eval_str=True).parameters["options"].annotation
    hints = get_type_hints(group)
    parameters = {}
    for declared in _in_order(group):
        parameters[declared.name] = _parameter(group, declared, hints[declared.name])

    def prepare(**values: Any) -> Action:
        options = group(**{name: values[name] for name in parameters})
        return partial(run, options)

    # inspect honours the attribute, though the type of functions does not name it.
    prepare.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    prepare.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    return prepare


def _in_order(group: type[Options]) -> list[Field[Any]]:
    """The fields as help lists them: first the fields that the command declares itself, then its
    groups, left to right."""
    places: dict[str, int] = {}
    for base in group.__bases__:
        if is_dataclass(base):
            for declared in fields(base):
                places.setdefault(declared.name, len(places))
    for name in inspect.get_annotations(group):
        places[name] = -1
    return sorted(fields(group), key=lambda declared: places.get(declared.name, -1))  # type: ignore[arg-type]


def _parameter(group: type[Options], declared: Field[Any], hint: Any) -> inspect.Parameter:
    settings = dict(declared.metadata)
    if "short" not in settings:
        typed: Any = typer.Argument(**settings)
    else:
        if settings.pop("parse") is not None:
            hint = str | None
        typed = _option(group, declared.name, hint, settings)
    default = declared.default
    if default is MISSING:
        default = ...
    return _keyword(declared.name, default=default, annotation=Annotated[hint, typed])


def _option(group: type[Options], name: str, hint: Any, settings: dict[str, Any]) -> Any:
    """The option of a field, whose panel and variables the class that declares it first may
    decide."""
    first: type[Options] = [
        each for each in group.__mro__ if name in inspect.get_annotations(each)
    ][-1]
    variables = settings["envvar"]
    if variables is None:
        variables = first.variables(name)
    settings["envvar"] = None
    if variables:
        settings["envvar"] = list(variables)
    if settings["rich_help_panel"] is None:
        settings["rich_help_panel"] = first.panel
    if hint is bool:
        settings["metavar"] = ""
    flags = [flag_of(name)]
    short = settings.pop("short")
    if short is not None:
        flags.append(short)
    return typer.Option(*flags, **settings)


_keyword = partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
