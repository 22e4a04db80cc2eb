"""Constants of the program that rotates heads and writes them into the cache: equal on every
generation of GPUs, for memory bounds its speed."""

from triton_ops.gpu.configurations import power_of_two

NUM_WARPS = 4
# of queries, or of keys, and as many of values
ELEMENTS_PER_PROGRAM = 1024


def rotary_constants(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    block_size: int,
    *,
    norm_adds_one: bool,
    interleaved: bool,
) -> dict[str, int]:
    """Return the constants that `rotate_into_slots` is compiled with."""
    dims = power_of_two(head_dim)
    num_pairs = rotary_dim // 2
    step, gap = (2, 1) if interleaved else (1, num_pairs)
    return {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "NUM_PAIRS": num_pairs,
        "PAIR_STEP": step,
        "PAIR_GAP": gap,
        "HEADS": min(max(1, ELEMENTS_PER_PROGRAM // dims), power_of_two(num_heads)),
        "DIMS": dims,
        "PAIRS": power_of_two(num_pairs),
        "REST": power_of_two(max(1, head_dim - rotary_dim)),
        "ADDS_ONE": norm_adds_one,
    }


def num_groups(num_heads: int, num_kv_heads: int, heads: int) -> int:
    """Return the number of programs of a token, each of which has so many heads."""
    return -(-num_heads // heads) + -(-num_kv_heads // heads)
