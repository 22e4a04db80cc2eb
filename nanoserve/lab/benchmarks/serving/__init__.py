"""Load for an OpenAI-compatible server: arrival times, requests, and metrics of the answers. No
torch."""
