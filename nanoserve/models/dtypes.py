"""The number format that a model is computed in."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nanoserve.errors import UsageError, shown
from nanoserve.utils.threads import processor_name_and_flags
from triton_ops.cpu import cpu_operators

DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
}

# Processor flags (x86 and Arm, as Linux names them) of instructions that multiply in bf16. Without
# them torch's own bf16 products are emulated and slower than those in float32.
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


def resolve_dtype(name: str, device: torch.device, stored: str = "float32") -> torch.dtype:
    """The dtype called `name`; "auto" is bf16 where that is fast and float32 elsewhere. Raises
    UsageError.

    `stored` is the format of the checkpoint. On a CPU without bf16 instructions, bf16 pays off if
    the checkpoint has 16 bits and nanoserve's operators are expected (half the bytes of float32 per
    token). fp16 is never chosen: it is as exact as bf16 in practice, and a hundred times slower in
    torch's products on a CPU.
    """
    if name == "auto":
        if device.type == "cuda" or _cpu_is_fast_in_bf16(stored):
            return torch.bfloat16
        return torch.float32
    if name not in DTYPES:
        raise UsageError(f"unknown dtype {shown(name)}; use auto, {', '.join(DTYPES)}")
    return DTYPES[name]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make parameters in this dtype within the block, but those that have one of their own."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(usual)


def format_name(dtype: torch.dtype) -> str:
    """The name as configurations write it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def _cpu_is_fast_in_bf16(stored: str) -> bool:
    _, flags = processor_name_and_flags()
    if not _BF16_FLAGS.isdisjoint(flags):
        return True
    return stored in ("bfloat16", "float16") and cpu_operators().expected
