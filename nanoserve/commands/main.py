"""The command ``nanoserve``: which sub-commands there are, and one way in for all of them."""

import io
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, NoReturn

import typer

from nanoserve import __version__
from nanoserve.commands.chat import chat
from nanoserve.commands.failures import EXIT_OK, guarded
from nanoserve.commands.generate import generate
from nanoserve.commands.options import with_options

HELP = """A compact LLM inference engine.

[bold]Examples[/bold]

  nanoserve chat                                  talk with the bundled storyteller
  nanoserve chat "a story about a fox"            one answer
  nanoserve generate "Once upon a time" -n 60     raw completion
  nanoserve generate --file prompts.jsonl --output out.jsonl

Every flag can also be set by the environment variable named beside it.
"""


def run() -> NoReturn:
    """Entry point of the console script."""
    sys.exit(main())


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse ``arguments`` (default: the process's), do what they say, return the exit code."""
    _replace_closed_streams()
    words = list(sys.argv[1:] if arguments is None else arguments)
    return guarded(partial(_parse_and_act, words))


def _parse_and_act(words: list[str]) -> int:
    command = typer.main.get_command(_application())
    parsed: Any = command.main(args=words, prog_name="nanoserve", standalone_mode=False)
    if callable(parsed):
        parsed = parsed()
    return parsed if isinstance(parsed, int) else EXIT_OK  # --help and --version end in the parser


def _application() -> typer.Typer:
    application = typer.Typer(
        name="nanoserve",
        help=HELP,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
    )
    application.callback(invoke_without_command=True)(_top_level)
    application.command()(with_options(chat))
    application.command()(with_options(generate))
    return application


def _top_level(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", "-V", help="Show the version and exit.", is_eager=True)] = False,  # noqa: FBT002
) -> None:
    if version:
        print(f"nanoserve {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit


def _replace_closed_streams() -> None:
    """A shell's ``>&-`` leaves None where a stream should be; and no character of an answer may fail to print."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
