"""Measuring: what a benchmark counts, what it compares with, and how it is written down
(docs/benchmarks.md)."""
