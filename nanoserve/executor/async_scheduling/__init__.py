"""Asynchronous scheduling: plans that are made before the tokens of the plan before them are
known."""
