"""``nanoserve bench``: which benchmarks there are."""

from typing import Any, cast

import typer
from typer.core import TyperGroup

from nanoserve.commands.options import with_options

HELP = """Measure: alone, beside other engines, before and after a change.

[bold]Examples[/bold]

  nanoserve bench latency --batch-sizes 1,4,16 --json latency.json
  nanoserve bench throughput --preset cpu -m dummy:qwen3-0.6b
  nanoserve bench serve --url http://127.0.0.1:8000 --request-rate 1,2,4
  nanoserve bench pipeline --pp 2 --request-rate 2
  nanoserve bench reshard --prefill-parallel p2 --decode-parallel t2
  nanoserve bench hybrid --threads 1 --host-threads 1
  nanoserve bench compare -m dummy:qwen3-0.6b --rounds 5
  nanoserve bench gpu --out results
  nanoserve bench paper gllm --plot figures
  nanoserve bench diff before.json after.json --threshold 0.05

What each figure means is written in docs/benchmarks.md.
"""


class BenchCommands(TyperGroup):
    """The benchmarks, imported when one of them is asked for: the help of ``nanoserve`` names none of them."""

    def list_commands(self, ctx: Any) -> list[str]:
        self._load()
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        self._load()
        return super().get_command(ctx, cmd_name)

    def _load(self) -> None:
        if not self.commands:
            self.commands = _all_commands()


def bench_commands() -> typer.Typer:
    """The sub-commands as typer knows them."""
    return typer.Typer(name="bench", cls=BenchCommands, help=HELP, rich_markup_mode="rich", no_args_is_help=True)


def _all_commands() -> Any:
    """By name."""
    from nanoserve.commands.bench_compare import compare
    from nanoserve.commands.bench_diff import diff
    from nanoserve.commands.bench_gpu import gpu
    from nanoserve.commands.bench_hybrid import hybrid
    from nanoserve.commands.bench_latency import latency
    from nanoserve.commands.bench_operators import operators
    from nanoserve.commands.bench_paper import paper
    from nanoserve.commands.bench_pipeline import pipeline
    from nanoserve.commands.bench_quality import quality
    from nanoserve.commands.bench_reshard import reshard
    from nanoserve.commands.bench_scheduler import scheduler
    from nanoserve.commands.bench_serve import serve
    from nanoserve.commands.bench_startup import startup
    from nanoserve.commands.bench_throughput import throughput

    typed = typer.Typer()
    for command in (
        latency,
        throughput,
        serve,
        pipeline,
        reshard,
        hybrid,
        compare,
        operators,
        gpu,
        startup,
        scheduler,
        quality,
        paper,
        diff,
    ):
        typed.command()(with_options(command))
    return cast(TyperGroup, typer.main.get_command(typed)).commands
