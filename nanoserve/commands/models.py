"""``nanoserve models``: which models are on this machine, and which can be had by name."""

from nanoserve.commands.options import NoOptions
from nanoserve.commands.terminal import visible
from nanoserve.models.hub import best_named_model, known_models, named_models
from nanoserve.utils.sizes import available_host_memory, format_size


def run(options: NoOptions) -> None:
    """The second column of the first list is what --model takes, and what the shell completes. Of
    the models that can be downloaded, the second list says how much memory each takes, with a
    conversation of 4,096 tokens.
    """
    found = set()
    for name, size, place in known_models():
        print(f"{format_size(size):>10}  {visible(name)}  ({place})")
        found.add(name)
    memory = available_host_memory()
    print(f"\nnanoserve run NAME downloads one of these; {format_size(memory)} of memory are free:")
    best = best_named_model(memory)
    print(f"{'download':>10}  {'memory':>10}  {'name':<14}  license")
    for row in sorted(named_models().values(), key=lambda row: row.memory_bytes):
        if row.name in found:
            continue
        note = ""
        if row.memory_bytes > memory:
            note = "too large for this machine"
        elif row is best:
            note = "fits best"
        sizes = f"{format_size(row.file_bytes):>10}  {format_size(row.memory_bytes):>10}"
        print(f"{sizes}  {row.name:<14}  {row.license:<10}  {note}".rstrip())
