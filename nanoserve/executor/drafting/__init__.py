"""Drafters of speculative decoding: they draft tokens on the device once a step's answers are
known."""
