"""Load for an OpenAI-compatible server: when requests come, what they ask, what is told of the answers. No torch."""
