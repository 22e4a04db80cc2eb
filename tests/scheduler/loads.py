"""Loads that tests vary to show a policy one situation."""

from nanoserve.scheduler.load import Load

IDLE = Load(
    previous=None,
    waiting_tokens=0,
    first_waiting_tokens=0,
    running_decodes=0,
    ready_decodes=0,
    ready_prefills=0,
    context_tokens=0,
    free_blocks=100,
    total_blocks=100,
    block_size=16,
    free_slots=256,
)
"""Nothing waits or runs; all of 100 blocks are free, and there is no host memory."""
