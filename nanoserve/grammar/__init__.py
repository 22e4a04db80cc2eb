"""Structured output: JSON schemas become grammars, which say which tokens may come next. No torch."""
