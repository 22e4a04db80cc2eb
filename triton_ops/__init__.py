"""The operators that a compiler cannot derive: attention over a paged cache, writes into it, copies of its blocks, the
product of a few rows with 16-bit weights, and experts that each get as many tokens as the router says.

Each is registered with torch as `nanoserve::<name>` (`torch.ops.nanoserve`): such an operator costs a few microseconds
a call and torch.compile treats it as opaque on every device. Each has an implementation in plain torch; the CPU's own,
in C++, are built on first use (`triton_ops.cpu`).
"""

from triton_ops.attention import paged_attention
from triton_ops.cache import cache_write, copy_blocks
from triton_ops.experts import sparse_experts
from triton_ops.linear import linear, project
from triton_ops.registration import OPERATORS

plain_operators = OPERATORS.plain

__all__ = ["cache_write", "copy_blocks", "linear", "paged_attention", "plain_operators", "project", "sparse_experts"]
