"""The laboratory: benchmarks, papers, simulator and charts. The engine looks it up in two
places."""
