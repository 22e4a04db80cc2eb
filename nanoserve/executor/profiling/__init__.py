"""Timing what steps consist of, on the engine's own device: for ``nanoserve profile``, and at an engine's start."""
