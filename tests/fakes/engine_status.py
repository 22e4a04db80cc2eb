"""The status of an engine that has nothing and has done nothing: a test says what is different."""

from nanoserve.engine import EngineStatus

NOTHING = EngineStatus(
    layouts=(0,),
    changing=(False,),
    running=0,
    on_host=0,
    waiting=0,
    free_blocks=0,
    total_blocks=0,
    free_host_blocks=0,
    total_host_blocks=0,
    prompt_tokens=0,
    output_tokens=0,
    preemptions=0,
    steps=0,
    transitions=0,
    losses=0,
    host_losses=0,
)
