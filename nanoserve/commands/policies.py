"""``nanoserve policies``: which scheduling policies there are."""

from nanoserve.commands.options import NoOptions
from nanoserve.commands.tables import columns, print_table
from nanoserve.scheduler import POLICIES

_COLUMNS = columns(
    ("", ("policy", "name")), ("<", "paper", ("use it for", "use_when"), "parameters")
)


def run(options: NoOptions) -> None:
    """These are the names that --policy takes, beside FILE.py:CLASS. The token budget of each is
    --max-num-batched-tokens. Each also has order=first-come (shortest-first, priority, fair-share)
    and aging=1000."""
    rows = []
    for name, entry in POLICIES.items():
        parameters = ", ".join(f"{key}={value}" for key, value in entry.defaults.items()) or None
        rows.append(
            {
                "name": name,
                "paper": entry.paper,
                "use_when": entry.use_when,
                "parameters": parameters,
            }
        )
    print_table("scheduling policies", _COLUMNS, rows)
