"""``nanoserve models``: which models are on this machine."""

from nanoserve.commands.options import NoOptions
from nanoserve.commands.terminal import visible
from nanoserve.models.hub import known_models
from nanoserve.utils.sizes import format_size


def run(options: NoOptions) -> None:
    """The second column is what --model takes, and what the shell completes."""
    for name, size, place in known_models():
        print(f"{format_size(size):>10}  {visible(name)}  ({place})")
