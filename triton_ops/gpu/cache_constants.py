"""Constants of the programs that move keys and values: equal on every generation of GPUs, for they
only load and store, as many bytes a thread at once as any GPU can.
"""

from triton_ops.gpu.configurations import power_of_two

NUM_WARPS = 4
# of a block, and as many of its values: more would spill from the registers
ELEMENTS_PER_TILE = 8192
# of keys, and as many of values: 16 bytes a load for each of 128 threads, in 16-bit types
ELEMENTS_PER_PROGRAM = 1024


def write_constants(
    num_kv_heads: int, block_size: int, head_dim: int, *, has_values: bool = True
) -> dict[str, int]:
    """Return the constants that `write_slots` is compiled with."""
    dims = power_of_two(head_dim)
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "BLOCK_SIZE": block_size,
        "HEAD_DIM": head_dim,
        "HEADS": min(max(1, ELEMENTS_PER_PROGRAM // dims), power_of_two(num_kv_heads)),
        "DIMS": dims,
        "HAS_VALUES": has_values,
    }


def move_constants(block_size: int, head_dim: int, *, into_cache: bool) -> dict[str, int]:
    """Return the constants that `move_blocks` is compiled with."""
    dims = power_of_two(head_dim)
    return {
        "BLOCK_SIZE": block_size,
        "HEAD_DIM": head_dim,
        "SLOTS": min(power_of_two(block_size), ELEMENTS_PER_TILE // dims),
        "DIMS": dims,
        "INTO_CACHE": into_cache,
    }
