"""Structured output: JSON schemas become grammars, which say which tokens may come next. No
torch."""

CANNOT_FOLLOW = "the JSON schema cannot be followed"
"""Beginning of the error of a sequence that fails by its schema; some schemas fail only after many
tokens."""
