"""Structured output: JSON schemas become grammars, which say which tokens may come next. No torch."""

CANNOT_FOLLOW = "the JSON schema cannot be followed"
"""Where the error of a sequence begins, if it is that of its schema: some fail only after many tokens."""
