"""The operators that a compiler cannot derive: attention over a paged cache, writes into it, copies of its blocks.

Each is registered with torch as `nanoserve::<name>` (`torch.ops.nanoserve`), with a mutable schema and its outputs
passed in: such an operator costs a few microseconds a call and torch.compile treats it as opaque on every device.
"""

from triton_ops.attention import paged_attention
from triton_ops.cache import cache_write, copy_blocks

__all__ = ["cache_write", "copy_blocks", "paged_attention"]
