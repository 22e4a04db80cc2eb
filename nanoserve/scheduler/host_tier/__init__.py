"""The host tier: KV in host memory, swaps between it and the device, and prompts that are parked
there."""
