"""Which number format a model is computed in."""

from pathlib import Path

import torch

from nanoserve.errors import UsageError

DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
}

# Processor flags (x86 and Arm, as Linux names them) of instructions that multiply in bf16. Without them bf16 is
# emulated and slower than float32.
_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype called `name`; "auto" is bf16 where the device computes in it and float32 elsewhere.

    Raises UsageError for an unknown name.
    """
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" or _cpu_computes_bf16() else torch.float32
    if name not in DTYPES:
        raise UsageError(f"unknown dtype {name!r}; use auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def _cpu_computes_bf16() -> bool:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return not _BF16_FLAGS.isdisjoint(flags.split())
