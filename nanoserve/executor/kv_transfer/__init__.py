"""KV blocks on their way between device and host memory."""
