"""Tests of `nanoserve bench gpu`, none of which needs a GPU."""
