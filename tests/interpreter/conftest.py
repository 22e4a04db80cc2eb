"""Triton's kernels, run on the CPU by Triton's interpreter: `TRITON_INTERPRET=1 python -m pytest
tests/interpreter`.

Triton reads that switch when a kernel is decorated, and it holds for the whole process: so these
tests have a pytest invocation of their own, and `tests/conftest.py` leaves this folder out of every
other one.
"""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError(
        "these tests need Triton's interpreter: TRITON_INTERPRET=1 python -m pytest "
        "tests/interpreter"
    )

from tests.interpreter.fixes import repair_interpreter

repair_interpreter()
