"""``nanoserve policies``: which scheduling policies there are."""

from nanoserve.commands.failures import EXIT_OK


def policies() -> int:
    """List the scheduling policies that --policy takes: where each comes from, what it is good for, its parameters.

    The token budget that each also has is --max-num-batched-tokens.
    """
    from nanoserve.benchmarks.tables import Column, print_table
    from nanoserve.scheduler import POLICIES

    rows = [
        {
            "name": name,
            "paper": entry.paper,
            "use_when": entry.use_when,
            "parameters": ", ".join(f"{key}={value}" for key, value in entry.defaults.items()) or None,
        }
        for name, entry in POLICIES.items()
    ]
    columns = [
        Column("policy", "name"),
        Column("paper", "paper", justify="left"),
        Column("use it for", "use_when", justify="left"),
        Column("parameters", "parameters", justify="left"),
    ]
    print_table("scheduling policies", columns, rows)
    return EXIT_OK
