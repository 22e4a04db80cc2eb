"""Reading the file of a trace."""

from typing import Any


def tracks_of(events: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The bars of each track by its name."""
    names = {
        event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            found[names[event["tid"]]].append(event)
    return found
