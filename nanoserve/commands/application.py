"""Which sub-commands there are."""

from typing import Annotated

import typer

from nanoserve import __version__
from nanoserve.commands.analyze import analyze
from nanoserve.commands.bench import bench_commands
from nanoserve.commands.chat import chat
from nanoserve.commands.generate import generate
from nanoserve.commands.options import with_options
from nanoserve.commands.plan import plan
from nanoserve.commands.policies import policies
from nanoserve.commands.profile import profile
from nanoserve.commands.serve import serve
from nanoserve.commands.simulate import simulate

HELP = """A compact LLM inference engine.

[bold]Examples[/bold]

  nanoserve chat                                  talk with the bundled model
  nanoserve chat "a story about a fox"            one answer
  nanoserve generate "Once upon a time" -n 60     raw completion
  nanoserve generate --file prompts.jsonl --output out.jsonl
  nanoserve serve --port 8000                     an OpenAI-compatible server
  nanoserve bench compare -m dummy:qwen3-0.6b     beside other engines
  nanoserve analyze -m qwen3-8b --hardware h100   where the time goes
  nanoserve profile --json here.json              the same on this machine
  nanoserve simulate --policy sarathi,throttling  policies on any hardware
  nanoserve plan --model qwen3-32b --hardware l4 --gpus 8   parallel layouts

A flag can also be set by the environment variable that its help names.
"""


def application() -> typer.Typer:
    """The commands as typer knows them; parsing yields an Action (see options.with_options)."""
    typed = typer.Typer(
        name="nanoserve",
        help=HELP,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
    )
    typed.callback(invoke_without_command=True)(_top_level)
    typed.command()(with_options(chat))
    typed.command()(with_options(generate))
    typed.command()(with_options(serve))
    typed.command()(with_options(analyze))
    typed.command()(with_options(profile))
    typed.command()(with_options(policies))
    typed.command()(with_options(simulate))
    typed.command()(with_options(plan))
    typed.add_typer(bench_commands())
    return typed


def _top_level(
    context: typer.Context,
    *,
    version: Annotated[bool, typer.Option("--version", "-V", help="Show the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        print(f"nanoserve {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit
