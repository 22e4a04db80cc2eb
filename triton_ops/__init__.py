"""The operators that a compiler cannot derive: attention over a paged cache, writes into it (alone,
or with the rotation before them), copies of its blocks, the product of a few rows with 16-bit
weights, experts that each get as many tokens as the router says, and sampling.

Each is registered with torch as `nanoserve::<name>` (`torch.ops.nanoserve`): such an operator costs
a few microseconds a call and torch.compile treats it as opaque on every device. Each has an
implementation in plain torch; the CPU's own, in C++, are built on first use (`triton_ops.cpu`), and
NVIDIA GPUs have theirs (`triton_ops.gpu`).
"""

from triton_ops.attention import dense_attention, paged_attention
from triton_ops.cache import cache_write, copy_blocks, gather_blocks, scatter_blocks
from triton_ops.experts import sparse_experts, sparse_packed_experts
from triton_ops.fused_linear import fused_linear
from triton_ops.gpu import on_first_call
from triton_ops.linear import add_linear, linear, project
from triton_ops.packed import (
    GroupQuantized,
    PackedFormat,
    pack,
    packed_linear,
    packed_rows,
    round_to_nearest,
    unpack,
)
from triton_ops.recurrent import causal_convolution, gated_delta_rule
from triton_ops.registration import OPERATORS
from triton_ops.rotary import rotate_and_write
from triton_ops.sampling import (
    allow_tokens,
    draw_tokens,
    likeliest_tokens,
    token_logprobs,
)
from triton_ops.state_space import selective_scan, state_space_dual

reference_operators = OPERATORS.plain

OPERATORS.implement("paged_attention", "CUDA", on_first_call("attention", "paged_attention"))
OPERATORS.implement("cache_write", "CUDA", on_first_call("cache", "cache_write"))
OPERATORS.implement("rotate_and_write", "CUDA", on_first_call("rotary", "rotate_and_write"))
OPERATORS.implement("copy_blocks", "CUDA", on_first_call("cache", "copy_blocks"))
OPERATORS.implement("gather_blocks", "CUDA", on_first_call("cache", "gather_blocks"))
OPERATORS.implement("scatter_blocks", "CUDA", on_first_call("cache", "scatter_blocks"))
OPERATORS.implement("fused_linear", "CUDA", on_first_call("fused_linear", "fused_linear"))
OPERATORS.implement("add_linear", "CUDA", on_first_call("linear", "add_linear"))
OPERATORS.implement("packed_linear", "CUDA", on_first_call("packed", "packed_linear"))
OPERATORS.implement("sparse_experts", "CUDA", on_first_call("experts", "sparse_experts"))
OPERATORS.implement(
    "sparse_packed_experts", "CUDA", on_first_call("packed_experts", "sparse_packed_experts")
)
OPERATORS.implement("causal_convolution", "CUDA", on_first_call("recurrent", "causal_convolution"))
OPERATORS.implement("gated_delta_rule", "CUDA", on_first_call("recurrent", "gated_delta_rule"))
OPERATORS.implement("state_space_dual", "CUDA", on_first_call("state_space", "state_space_dual"))
OPERATORS.implement("selective_scan", "CUDA", on_first_call("state_space", "selective_scan"))
OPERATORS.implement("likeliest_tokens", "CUDA", on_first_call("sampling", "likeliest_tokens"))
OPERATORS.implement("draw_tokens", "CUDA", on_first_call("sampling", "draw_tokens"))

__all__ = [
    "GroupQuantized",
    "PackedFormat",
    "add_linear",
    "allow_tokens",
    "cache_write",
    "causal_convolution",
    "copy_blocks",
    "dense_attention",
    "draw_tokens",
    "fused_linear",
    "gated_delta_rule",
    "gather_blocks",
    "likeliest_tokens",
    "linear",
    "pack",
    "packed_linear",
    "packed_rows",
    "paged_attention",
    "project",
    "reference_operators",
    "rotate_and_write",
    "round_to_nearest",
    "scatter_blocks",
    "selective_scan",
    "sparse_experts",
    "sparse_packed_experts",
    "state_space_dual",
    "token_logprobs",
    "unpack",
]
