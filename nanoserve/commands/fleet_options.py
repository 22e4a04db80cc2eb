"""How many engines ``nanoserve simulate`` runs, and what stands in front of them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from nanoserve.commands.options import option

if TYPE_CHECKING:
    from nanoserve.benchmarks.report import Report

FLEET_PANEL = "Fleet"


def _fleet_option(name: str, help: str, metavar: str = "N", **settings: Any) -> Any:
    return option(name, panel=FLEET_PANEL, help=help, metavar=metavar, envvar=None, **settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """Whole engines, each on all of the hardware that is named, and the router before them."""

    replicas: Annotated[int, _fleet_option("--replicas", "Engines, each with its own devices.")] = 1
    router: Annotated[
        str,
        _fleet_option("--router", "Who gets a request: round-robin, or least-tokens (the least outstanding).", "NAME"),
    ] = "round-robin"

    def check(self) -> None:
        """Before anything runs.

        Raises:
            UsageError: for an impossible fleet.
        """
        from nanoserve.simulator.fleet import check_replicas, make_router

        check_replicas(self.replicas)
        make_router(self.router)


def show_spread(report: "Report") -> None:
    """A table of what the replicas did: the least, the mean and the most."""
    from nanoserve.benchmarks.tables import Column, print_table
    from nanoserve.measures.metrics import Distribution

    columns = [
        Column("policy", "policy"),
        *(
            Column(heading, name, justify="right")
            for heading, name in (
                ("requests", "requests"),
                ("output tokens", "output_tokens"),
                ("TTFT ms", "ttft_ms"),
                ("TPOT ms", "tpot_ms"),
                ("bubbles", "bubble_share"),
                ("KV mean", "kv_occupancy"),
                ("until s", "seconds"),
            )
        ),
    ]
    rows = []
    for row in report.rows:
        spread: dict[str, str | None] = {"policy": row["policy"]}
        for column in columns[1:]:
            found = Distribution.of(replica[column.path] for replica in row["replicas"])
            spread[column.path] = None if found is None else _three(found.min, found.mean, found.max)
        rows.append(spread)
    print_table("least / mean / most of the replicas", columns, rows)


def _three(*values: float) -> str:
    pattern = ".2f" if max(values) < 10 else ",.0f"
    return " / ".join(format(value, pattern) for value in values)
