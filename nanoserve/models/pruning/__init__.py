"""Structural pruning: a model becomes a smaller dense one without its least important parts, as in
Minitron (arXiv 2407.14679). `nanoserve prune` uses it, and nothing else in the engine does."""
