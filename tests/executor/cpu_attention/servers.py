"""Servers that are asked so much that the CPU attends for some."""

from collections.abc import Sequence
from typing import Any

from tests.server.starting import Server, running, wait_until
from tests.server.test_faults import LONG, Reader, whole_text

HYBRID = ("--policy", "overlap", "--host-kv-memory", "32MiB")
_ROOMY = ("--dtype", "float32", "--eager", "--max-model-len", "320")
MODEL = (*_ROOMY, "--kv-cache-memory", "2560KiB")
"""Room for the longest request on the device, or for two of these."""
PROMPTS = (
    "Once upon a time",
    "The dog",
    "A little girl",
    "One day",
    "Tom and Sam",
    "The sun",
    "Mia had",
    "In a wood",
)
BODIES: list[dict[str, Any]] = [LONG | {"prompt": prompt, "max_tokens": 150} for prompt in PROMPTS]


def whole_texts() -> list[str]:
    """Answers where the device has room for all."""
    with running(*_ROOMY) as server:
        return [whole_text(server, body) for body in BODIES]


def busy(server: Server) -> list[Reader]:
    """Streams, of which some have their KV in host memory."""
    readers = [Reader(server, body) for body in BODIES]
    wait_until(lambda: server.metric("nanoserve:num_sequences_on_host") > 0)
    return readers


def texts(readers: Sequence[Reader]) -> list[str]:
    """Texts of streams when they have ended."""
    for reader in readers:
        reader.join()
    return [reader.text for reader in readers]
