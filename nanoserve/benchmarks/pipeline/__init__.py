"""Scheduling policies side by side on real worker processes: gLLM's system, measured."""
