"""Block accounting of the KV cache, without torch: who owns which block and what it holds."""
