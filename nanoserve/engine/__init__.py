"""The loop and its dispatcher, what its answers become as text, and what puts an engine
together."""
