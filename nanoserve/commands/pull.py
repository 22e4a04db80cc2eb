"""``nanoserve pull``: download a model."""

from nanoserve.commands.options import Options, argument
from nanoserve.commands.progress import show_progress
from nanoserve.commands.terminal import remark, visible
from nanoserve.models.hub import model_suggestions, resolve_model


class PullOptions(Options):
    model: str = argument(
        ...,
        "Name, such as qwen3:0.6b, or hub id: owner/name, owner/name:Q4_K_M, owner/name:file.gguf.",
        suggestions=model_suggestions,
    )


def run(options: PullOptions) -> None:
    """[bold]Examples[/bold]

      nanoserve pull qwen3:0.6b
      nanoserve pull unsloth/Qwen3-4B-GGUF:Q8_0
      HF_TOKEN=... nanoserve pull google/gemma-3-1b-it

    The model goes into the cache of the Hugging Face hub (HF_HOME), where other
    programs find it, too. If it is there, only what has changed is downloaded.
    Ctrl-C interrupts the download, and the same command goes on there.
    """
    with show_progress() as progress:
        found = resolve_model(options.model, refresh=True, progress=progress, announce=remark)
    print(f"{visible(found.name)} is on this machine: nanoserve run {visible(found.name)}")
