"""Talk to OpenAI-compatible servers, ours and others: addresses, events, and a small blocking
client. No torch."""
