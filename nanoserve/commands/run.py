"""``nanoserve run``: a chat with a model by its name."""

from nanoserve.commands import chat
from nanoserve.commands.chat import ChatOptions, TalkOptions
from nanoserve.commands.engine_options import SamplingOptions, ServerOptions, WorkersOptions
from nanoserve.commands.options import argument
from nanoserve.models.hub import model_suggestions


class RunOptions(TalkOptions, ServerOptions, WorkersOptions, SamplingOptions):
    model: str | None = argument(
        ...,
        "Name, such as qwen3 or qwen3:0.6b; nanoserve models lists them. Or whatever --model of "
        "other commands takes.",
        suggestions=model_suggestions,
    )


def run(options: RunOptions) -> None:
    """[bold]Examples[/bold]

      nanoserve run qwen3:0.6b                           a conversation
      nanoserve run smollm2 "What is gravity?"           one answer
      nanoserve run unsloth/Qwen3-4B-GGUF:Q4_K_M         any repository of the hub
      nanoserve run ./Qwen3-0.6B --temperature 0.7       a directory

    What is not on this machine is downloaded from the Hugging Face hub, or from
    the mirror that HF_ENDPOINT names; Ctrl-C interrupts it, and the same command
    goes on there. HF_TOKEN is the token for models whose terms must be accepted.
    """
    chat.run(ChatOptions(**vars(options)))
