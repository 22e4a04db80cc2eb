"""What the operators on NVIDIA GPUs are made for. No torch, no Triton: asked before a model is loaded."""

OLDEST_CAPABILITY = (8, 0)
"""Compute capability: Ampere, the first generation with bf16 products and asynchronous copies to shared memory."""

DTYPES = ("bfloat16", "float16", "float32")
HEAD_DIMS = range(16, 257)
"""A matrix unit's tile is 16 deep; beyond 256 a tile of keys and one of values do not fit into shared memory."""
BLOCK_SIZES = (16, 32, 64)
"""Tokens per KV block: a tile of keys is made of whole blocks."""


def attention_problem(*, dtype: str, head_dim: int, block_size: int) -> str | None:
    """Why paged attention cannot run with these, and what to change; None if it can."""
    if dtype not in DTYPES:
        return f"attention on a GPU cannot run in {dtype}; choose --dtype {', '.join(DTYPES[:-1])} or {DTYPES[-1]}"
    if head_dim not in HEAD_DIMS:
        return (
            f"attention on a GPU takes heads of {HEAD_DIMS.start} to {HEAD_DIMS.stop - 1} numbers, but this model's"
            f" have {head_dim}; run it with --device cpu"
        )
    if block_size not in BLOCK_SIZES:
        sizes = ", ".join(map(str, BLOCK_SIZES[:-1]))
        return f"--block-size {block_size} does not run on a GPU; choose {sizes} or {BLOCK_SIZES[-1]}"
    return None
